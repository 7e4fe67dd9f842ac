"""Options and errors that the commands share."""

import errno
import functools
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand

from easyrl.formatting import ConfigError, printable

shows_tracebacks = False  # the option --debug
USER_ERROR = 2  # exit code of errors that the user can fix, Typer's usage errors included
FILE_ERRORS = {errno.EACCES: USER_ERROR, errno.EROFS: USER_ERROR, errno.ENOSPC: 1, errno.EDQUOT: 1}
"""Exit codes of errors of the disk, by `OSError.errno`."""

ConfigFile = Annotated[
    Path | None, Option("--config", metavar="FILE.yaml", help="YAML file, as `config` prints it.")
]
Model = Annotated[
    str | None, Option(help="`tiny`, a folder, a hub id, a run, a checkpoint or an adapter.")
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Any setting; these win over all else."),
]
Reward = Annotated[
    list[str] | None,
    Option(help="Built-in (docs/rewards.md), file.py:function or module:function; repeatable."),
]
Environment = Annotated[
    str | None,
    Option(help="What the model acts in (docs/environments.md): guess, file.py:Class."),
]
Agent = Annotated[
    str | None,
    Option(help="Program that calls the model (docs/agents.md): file.py:function, or a command."),
]
InferDevices = Annotated[
    str | None, Option(help="Devices that generate: 0-3, 0,2,5, cpu:2, ray:8 or ray:cpu:2.")
]
TrainDevices = Annotated[str | None, Option(help="Devices that train.")]
RayAddress = Annotated[
    str | None, Option(metavar="HOST:PORT", help="The Ray cluster, for devices like ray:8.")
]
Seed = Annotated[int | None, Option(help="Same seed, same data and sampling.")]
Force = Annotated[bool, Option("--force", help="Replace what is there.")]
NoLive = Annotated[bool, Option("--no-live", help="Plain lines instead of the live view.")]


class CommandWithSettings(TyperCommand):
    """A command that names the setting, as a word, where an option does not exist."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        try:
            return super().parse_args(context, arguments)
        except Exception as error:
            option = getattr(error, "option_name", None)  # of Click's NoSuchOption
            if option:
                _add_hint(error, option)
            raise


def _add_hint(error: Any, option: str) -> None:
    """Add to Click's message which setting the unknown option may mean."""
    from easyrl.config import key_hint

    name = option.lstrip("-").replace("-", "_")
    hint = key_hint(name, "=VALUE")
    error.message += f" ({hint})"
    if hint.startswith("in EasyRL") or f".{name}=" in hint:
        error.possibilities = []  # the setting is certain: do not list options that look alike


def echo(text: str, **options: Any) -> None:
    """Print text of any origin."""
    typer.echo(printable(text, keep="\n\t"), **options)


def check_new(option: str, file: Path | None, *, force: bool) -> None:
    """Raise ConfigError if the file cannot be written, or exists, unless `force`."""
    if file is not None:
        is_taken = file.is_dir() or (file.is_file() and not force)
        changed = file if file.exists() else file.absolute().parent
        is_writable = os.access(changed, os.W_OK)
        if is_taken or not is_writable:
            raise ConfigError(f"{option}: expected a new file (or --force) to write, got '{file}'")


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Make a command of a function that returns its exit code.

    Mistakes of the user and errors of the disk are printed as one message. Any other exception is a
    bug, and shows its traceback.
    """

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            code = function(*arguments, **options)
        except ConfigError as error:
            if shows_tracebacks:
                echo(traceback.format_exc(), err=True)
            echo("easyrl: " + str(error).replace("\n", "\n        "), err=True)
            code = USER_ERROR
        except OSError as error:
            if shows_tracebacks or error.errno not in FILE_ERRORS:
                raise
            echo(f"easyrl: {error}", err=True)
            code = FILE_ERRORS[error.errno]
        except KeyboardInterrupt as stop:
            code = 128 + getattr(stop, "signum", signal.SIGINT)  # of `supervisor.Interrupted`
        raise typer.Exit(code or 0)

    return run
