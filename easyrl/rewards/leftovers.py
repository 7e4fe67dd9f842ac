"""End the programs that reward functions have started, as by `subprocess.run`, and not waited for.

A reward process that is killed, since a call took too long or the run ends, leaves such programs.
They are found by an environment variable, which they inherit from it.
"""

import os
from pathlib import Path

from easyrl.processes import children_of, kill_with_descendants

PROCESS_NAME = "easyrl-reward"
VARIABLE = "EASYRL_REWARD_PROCESS"
"""Names two processes by their numbers: the one whose pool it is, and the reward process."""


def mark_programs() -> None:
    """Let the programs be found that this reward process will start."""
    os.environ[VARIABLE] = f"{os.getppid()} {os.getpid()}"


def end_programs() -> None:
    """End the programs of this process's reward processes."""
    for process in children_of(os.getpid()):
        if name_of(process) == PROCESS_NAME:
            kill_with_descendants(children_of(process))


def end_programs_of_lost_processes() -> None:
    """End the programs of those reward processes of this process that have ended."""
    own = os.getpid()
    living = children_of(own)
    for folder in Path("/proc").glob("[0-9]*"):
        pool_process, reward_process = _marks_of(folder)
        if pool_process == own and reward_process not in living:
            kill_with_descendants([int(folder.name)])


def name_of(process: int) -> str:
    """Return what `set_name` has named a process; empty if there is none."""
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def _marks_of(folder: Path) -> tuple[int, int]:
    """Return what VARIABLE says of a process, by its folder in /proc; zeros where it has none."""
    try:
        variables = (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return 0, 0
    for variable in variables:
        name, _, value = variable.partition(b"=")
        numbers = value.split()
        if name == VARIABLE.encode() and len(numbers) == 2:
            return int(numbers[0]), int(numbers[1])
    return 0, 0
