"""The command line: parse, build the config, call.

Modules heavier than Typer are imported inside the commands, so that `--help` is fast.
"""

import os
import platform
from typing import Annotated

import typer

from easyrl import __version__, devices
from easyrl.cli import common, tools
from easyrl.cli.bench import bench
from easyrl.cli.eval import evaluate
from easyrl.cli.grpo import grpo
from easyrl.processes import allow_long_integers

app = typer.Typer(
    name="easyrl",
    help="Strictly on-policy reinforcement learning of language models, at asynchronous speed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
PANELS = {
    "Train and evaluate": (grpo, evaluate, tools.export),
    "Look at runs": (tools.watch, tools.samples, tools.report),
    "Control a live run": (tools.status, tools.scale, tools.stop),
    "Plan and check": (tools.print_config, tools.doctor, tools.plan, bench),
}
NAMES = {evaluate: "eval", tools.print_config: "config"}
for panel, functions in PANELS.items():
    for each in functions:
        kind = common.CommandWithSettings if each in (grpo, evaluate) else None
        app.command(NAMES.get(each), cls=kind, rich_help_panel=panel)(each)
agent = typer.Typer(help="Tools for agents (docs/agents.md).", no_args_is_help=True)
agent.command(cls=common.CommandWithSettings)(tools.serve)
app.add_typer(agent, name="agent", rich_help_panel="Plan and check")


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from easyrl.engines.vllm.platforms import package_version, vllm_version

    versions = {
        "Python": platform.python_version(),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
        "vllm": vllm_version(),
    }
    typer.echo(f"easyrl {__version__}")
    for name, version in versions.items():
        typer.echo(f"{name} {version or 'not installed'}")
    found = []
    for kind in devices.VISIBLE_DEVICES:
        number = devices.num_device_nodes(kind)
        if number:
            found.append(f"{number} {kind}")
    typer.echo(f"accelerators: {', '.join(found) or 'none'}")
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    common.shows_tracebacks = debug


def main() -> None:
    os.environ.update(devices.NO_AUTOLOAD | dict(os.environ))
    # A closed standard stream (`2>&-`) is opened: the next file would get its number, and receive
    # what this process and the workers print.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    allow_long_integers()  # of rows and samples
    app(prog_name="easyrl")
