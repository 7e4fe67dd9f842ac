"""End the programs that reward functions have started, as by `subprocess.run`, and not waited for.

A reward process that is killed, since a call took too long or the run ends, leaves such programs.
They are found by an environment variable, which they inherit from it.
"""

import os
from collections.abc import Collection
from pathlib import Path

from easyrl.processes import children_of, kill_with_descendants

VARIABLE = "EASYRL_REWARD_PROCESS"
"""Has the mark of a pool and the number of one of its reward processes."""


def mark_programs(pool_mark: str) -> None:
    """Let the programs be found that this reward process will start."""
    os.environ[VARIABLE] = f"{pool_mark} {os.getpid()}"


def end_programs(pool_mark: str, but_of: Collection[int] = ()) -> None:
    """End the programs of a pool, but for those of some reward processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        mark, _, process = _value_in(folder).partition(" ")
        if mark == pool_mark and int(process) not in but_of:
            kill_with_descendants([int(folder.name)])


def end_programs_of_lost_processes(pool_mark: str) -> None:
    """End the programs of those of a pool's reward processes that have ended. The pool belongs to
    this process."""
    end_programs(pool_mark, but_of=children_of(os.getpid()))


def _value_in(folder: Path) -> str:
    """Return the value of VARIABLE in a process, by its folder in /proc; "" where it has none."""
    try:
        variables = (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return ""
    for variable in variables:
        name, _, value = variable.partition(b"=")
        if name == VARIABLE.encode():
            return value.decode(errors="replace")
    return ""
