"""`easyrl watch`, `easyrl export` and `easyrl doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from easyrl.cli.common import NoLive, command


@command
def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    no_live: NoLive = False,
) -> int:
    """Watch a run, or see one that has ended, from its folder alone."""
    from easyrl.observe.watch import watch

    return watch(folder, live=not no_live)


@command
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run: its newest one.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
) -> None:
    """Write a checkpoint as a model that transformers and vLLM load."""
    from easyrl.model.export import export_checkpoint

    typer.echo(export_checkpoint(checkpoint, folder))


@command
def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print the facts and lines as JSON.")
    ] = False,
) -> int:
    """Check what EasyRL can use on this machine, and how to fix the rest."""
    from easyrl.doctor import run_doctor

    return run_doctor(as_json=json)
