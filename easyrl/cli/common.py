"""Options that commands share, loading the config, and errors as exit codes."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from easyrl.config import Config

FAILED, USER_ERROR = 1, 2
"""Exit codes; 2 is for errors that the user can fix, Typer's usage errors included."""

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE.yaml", help="Config file; see `config`.")
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Any setting; these win over all else."),
]
InferDevices = Annotated[
    str | None, typer.Option(help="Devices that generate: 0-3, 0,2,5, cpu or cpu:2.")
]
TrainDevices = Annotated[str | None, typer.Option(help="Devices that train.")]
NoLive = Annotated[bool, typer.Option("--no-live", help="Plain lines instead of the live view.")]


def load(file: Path | None, flags: Mapping[str, Any], words: list[str] | None) -> Config:
    from easyrl.config import load_config

    return load_config(file, flags, words or ())


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a ValueError, which the user can fix, without a traceback. Of any other error print the
    cause and the file with its traceback."""
    try:
        yield
    except ValueError as error:
        _print_error(str(error))
        raise typer.Exit(USER_ERROR) from None
    except BrokenPipeError:
        raise  # the reader of the output is gone: see `main`
    except Exception as error:
        with tempfile.NamedTemporaryFile(
            "w", prefix="easyrl-", suffix=".log", delete=False
        ) as file:
            traceback.print_exception(error, file=file)
        cause = traceback.format_exception_only(error)[-1].strip()
        _print_error(f"{cause}\n(unexpected; the full traceback is in {file.name})")
        raise typer.Exit(FAILED) from None


def _print_error(message: str) -> None:
    try:
        typer.echo("easyrl: " + message.replace("\n", "\n        "), err=True)
    except OSError:  # nobody reads it; there is still the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
