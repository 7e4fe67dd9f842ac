"""`easyrl status`, `easyrl scale` and `easyrl stop`: ask a live run."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from easyrl.cli.common import command, echo

LiveRun = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a live run.")]


@command
def status(
    folder: LiveRun,
    as_json: Annotated[bool, Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the workers of a live run, and which side waits for the other."""
    from easyrl.observe.lines import status_table
    from easyrl.observe.text import say_rich
    from easyrl.runtime.control import request

    reply = request(folder, {"command": "status"})
    if as_json:
        echo(json.dumps(reply, indent=2))
    else:
        say_rich(status_table(reply))


@command
def scale(
    folder: LiveRun,
    infer_devices: Annotated[
        str, Option(help="Devices that shall generate from now on: 0-5, 0,2,5, cpu:2 or ray:8.")
    ],
) -> None:
    """Add and remove rollout workers of a live run."""
    from easyrl.runtime.control import request

    echo(request(folder, {"command": "scale", "infer_devices": infer_devices})["message"])


@command
def stop(folder: LiveRun) -> None:
    """Stop a live run after its last complete iteration, with a checkpoint to resume from."""
    from easyrl.runtime.control import request
    from easyrl.runtime.run_folder import is_locked, resume_hint

    echo(request(folder, {"command": "stop"})["message"])
    while is_locked(folder):
        time.sleep(0.1)
    is_finished = (folder / "summary.json").is_file()  # meanwhile
    echo(f"{folder} has {'finished' if is_finished else f'stopped{resume_hint(folder)}'}")
