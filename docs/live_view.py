"""Draw the pictures of the live view in this folder: `python docs/live_view.py RUN [ITERATION]`.

They show the run in the middle of the iteration, the last one but one if none is given.
"""

import os
import sys
from pathlib import Path

from rich.console import Console

from easyrl import events
from easyrl.observe.run_files import RunFiles
from easyrl.observe.state import RunState
from easyrl.observe.view import render

SIZES = {"live-view.svg": (120, 40), "live-view-80x24.svg": (80, 24)}


def main(run: Path, iteration: int | None) -> None:
    """Fold the run's events up to half of the iteration's groups, and export the picture."""
    files, state = RunFiles(run), RunState()
    iteration = iteration or files.config.train.iterations - 1
    for event in files.read():
        state.apply(event)
        is_there = isinstance(event, events.FromWorker) and state.num_done == iteration - 1
        if is_there and 2 * state.num_groups >= files.config.train.prompts_per_iteration:
            break
    for name, (width, height) in SIZES.items():
        with Path(os.devnull).open("w") as nowhere:
            console = Console(
                record=True, width=width, height=height, file=nowhere, highlight=False
            )
            console.print(render(state, state.newest, width, height), height=height)
            console.save_svg(str(Path(__file__).with_name(name)), title="easyrl grpo")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
