"""Draw docs/live-view.svg from a run folder: `python docs/live_view.py RUN [ITERATION]`.

The picture shows the run in the middle of the iteration, the last one but one if none is given.
"""

import os
import sys
from pathlib import Path

from rich.console import Console

from easyrl import events
from easyrl.observe.trace import RunFiles
from easyrl.observe.view import ViewState, render

WIDTH, HEIGHT = 100, 26


def main(run: Path, iteration: int | None) -> None:
    """Fold the run's events up to half of the iteration's groups, and export the picture."""
    files, state = RunFiles(run), ViewState()
    iteration = iteration or files.config.train.iterations - 1
    for event in files.read():
        state.apply(event)
        is_there = isinstance(event, events.FromWorker) and state.num_done == iteration - 1
        if is_there and 2 * state.num_groups >= files.config.train.prompts_per_iteration:
            break
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, height=HEIGHT, file=nowhere)
        console.print(render(state, state.newest, WIDTH, HEIGHT), height=HEIGHT)
        console.save_svg(str(Path(__file__).with_name("live-view.svg")), title="easyrl grpo")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
