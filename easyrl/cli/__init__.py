"""The command line: parse, build the config, call.

Modules heavier than Typer are imported inside the commands, so that `--help` is fast.
"""

import os
from typing import Annotated

import typer

from easyrl import __version__
from easyrl.cli import tools
from easyrl.cli.agent import serve
from easyrl.cli.bench import bench
from easyrl.cli.common import Commands, CommandWithSettings
from easyrl.cli.eval import evaluate
from easyrl.cli.grpo import grpo
from easyrl.devices import NO_AUTOLOAD

app = typer.Typer(
    name="easyrl",
    cls=Commands,
    help="Strictly on-policy reinforcement learning of language models, at asynchronous speed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"easyrl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


app.command(cls=CommandWithSettings)(grpo)
app.command("eval", cls=CommandWithSettings)(evaluate)
app.command()(tools.samples)
app.command()(tools.watch)
app.command()(tools.report)
app.command()(tools.plot)
app.command()(tools.status)
app.command()(tools.scale)
app.command()(tools.stop)
app.command()(tools.doctor)
app.command()(tools.export)
app.command("config")(tools.print_config)
app.command()(tools.plan)
app.command()(bench)
agent = typer.Typer(help="Tools for agents (docs/agents.md).", no_args_is_help=True)
agent.command(cls=CommandWithSettings)(serve)
app.add_typer(agent, name="agent")


def main() -> None:
    """The console script."""
    for name, value in NO_AUTOLOAD.items():
        os.environ.setdefault(name, value)
    # A closed standard stream (`2>&-`) is opened: the next file would get its number, and receive
    # what this process and the workers print.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    try:
        app(prog_name="easyrl")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # `| head` has read enough
            raise SystemExit(0) from None
        raise
