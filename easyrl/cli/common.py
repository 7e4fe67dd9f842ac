"""Options that commands share, and errors as exit codes."""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

FAILED, USER_ERROR = 1, 2
"""Exit codes; 2 is for errors that the user can fix, Typer's usage errors included."""

ConfigFile = Annotated[
    Path | None, Option("--config", metavar="FILE.yaml", help="Config file; see `config`.")
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Any setting; these win over all else."),
]
Reward = Annotated[
    list[str] | None,
    Option(help="exact_match, file.py:function or package.module:function; repeatable."),
]
InferDevices = Annotated[
    str | None, Option(help="Devices that generate: 0-3, 0,2,5, cpu or cpu:2.")
]
TrainDevices = Annotated[str | None, Option(help="Devices that train.")]
Seed = Annotated[int | None, Option(help="Same seed, same data and sampling.")]
NoLive = Annotated[bool, Option("--no-live", help="Plain lines instead of the live view.")]


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Exit with what the function returns. Print a ValueError, which the user can fix, without a
    traceback; of any other error print the cause, and the file with its traceback."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            code = function(*arguments, **options) or 0
        except ValueError as error:
            code = USER_ERROR
            _print_error(str(error))
        except (BrokenPipeError, typer.Exit):
            raise  # a broken pipe is handled in `main`
        except Exception as error:
            code = FAILED
            with tempfile.NamedTemporaryFile(
                "w", prefix="easyrl-", suffix=".log", delete=False
            ) as file:
                traceback.print_exception(error, file=file)
            cause = traceback.format_exception_only(error)[-1].strip()
            _print_error(f"{cause}\n(unexpected; the full traceback is in {file.name})")
        raise typer.Exit(code)

    return run


def _print_error(message: str) -> None:
    try:
        typer.echo("easyrl: " + message.replace("\n", "\n        "), err=True)
    except OSError:  # nobody reads it; there is still the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
