"""The interface of a callback of `easyrl.train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from easyrl.api.calls import Run

Answer = Literal["stop"] | None
"""The result of a callback. "stop" ends the run with a checkpoint, as `easyrl stop` does."""
Status = Literal["finished", "stopped", "failed"]
Metrics = dict[str, Any]


class Callback:
    """Watch a run, and end it: `easyrl.train(callbacks=[Mine()])`.

    Define the methods that you need; any object with some of them will do. They are called in the
    program's own process, between two iterations, and the run waits for them. A method that
    returns "stop" ends the run as `easyrl stop` does: it can be resumed, and `easyrl.train` returns
    it. One that raises an exception, or returns something else than None, ends it with an error.
    Either way the checkpoint of the last complete iteration is written.
    """

    def on_start(self, run: Run) -> Answer:
        """Before the workers start. `run.metrics` has the iterations of a resumed run."""

    def on_iteration(self, run: Run, metrics: Metrics) -> Answer:
        """After each iteration, with its line of metrics.jsonl."""

    def on_evaluation(self, run: Run, metrics: Metrics) -> Answer:
        """After each evaluation on held-out problems, before `on_iteration`. `metrics`:
        `iteration` (0: before the first), `eval/accuracy`, `eval/standard_error`, `eval/reward`,
        `eval/problems`."""

    def on_checkpoint(self, run: Run, path: str) -> Answer:
        """After the first iteration that ends once a checkpoint is on the disk."""

    def on_end(self, run: Run, status: Status) -> Answer:
        """After the run, when its workers have ended. What it returns changes nothing."""
