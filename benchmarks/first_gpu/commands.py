"""Run a command with a time limit, and end it with all processes that it has started."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from easyrl.agents.leftovers import adopt_orphans, end_all
from easyrl.processes import die_with_parent

GRACE_SECONDS = 10.0
"""Time that a command has to end by itself after SIGTERM, which stops a run after its last complete
iteration."""
ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    exit_code: int | None  # None: it was ended at its limit
    seconds: float
    output: str  # standard output and standard error


def run_command(command: Sequence[str], seconds: float, log: Path) -> Ended:
    """Run a command in the repository's folder. It has `seconds`, GRACE_SECONDS of which are for
    its end if it does not finish. What it prints goes to `log`. All processes that this process has
    started or adopted meanwhile have ended afterwards."""
    adopt_orphans()
    started = time.monotonic()
    exit_code = None
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            # Safe: this process has one thread.
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509
        )
        try:
            exit_code = process.wait(max(1.0, seconds - GRACE_SECONDS))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            _wait(process, GRACE_SECONDS)
        finally:  # also after Ctrl-C
            end_all(kept=())
            process.poll()
    output = log.read_text(errors="replace")
    return Ended(exit_code, time.monotonic() - started, output)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
