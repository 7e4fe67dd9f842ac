"""`easyrl watch`, `easyrl export` and `easyrl doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from easyrl.cli.common import NoLive, user_errors


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    no_live: NoLive = False,
) -> None:
    """Watch a run, or see one that has ended, from its folder alone."""
    from easyrl.observe.watch import watch

    with user_errors():
        exit_code = watch(folder, live=not no_live)
    raise typer.Exit(exit_code)


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run: its newest one.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
) -> None:
    """Write a checkpoint as a model that transformers and vLLM load."""
    with user_errors():
        from easyrl.model.export import export_checkpoint

        typer.echo(export_checkpoint(checkpoint, folder))


def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print the facts and lines as JSON.")
    ] = False,
) -> None:
    """Check what EasyRL can use on this machine, and how to fix the rest."""
    from easyrl.doctor import run_doctor

    with user_errors():
        exit_code = run_doctor(as_json=json)
    raise typer.Exit(exit_code)
