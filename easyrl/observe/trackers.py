"""Trackers: the numbers of `metrics.jsonl`, sent to TensorBoard, W&B or trackio.

    controller ──event──► Trackers ──queue──► thread ──► TensorBoard, W&B, …

The step is the iteration. A tracker that raises or hangs is disabled with a warning and never
stops the run. To add a tracker, write a function that starts it and returns how it logs and ends,
and name it in TRACKERS and in `OutputConfig.log_to` (config/runtime.py).
"""

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from easyrl import events
from easyrl.events import Event, Note

PROJECT = "easyrl"
END_SECONDS = 10.0  # longest wait for trackers to send the rest when the run ends
Values = dict[str, float]
Tracker = tuple[Callable[..., Any], Callable[[int], Any]]  # log(values, step=…), finish(exit_code)


def tensorboard(run: events.RunStarted, config: Mapping[str, Any]) -> Tracker:
    """Write event files to the run folder: `tensorboard --logdir runs`."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(run.folder))

    def log(values: Values, step: int) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        writer.flush()

    if done := run.num_iterations:  # TensorBoard drops what earlier files have from this step on
        resumed = SessionLog(status=SessionLog.START)
        writer.add_event(Event(wall_time=time.time(), step=done + 1, session_log=resumed))
    return log, lambda exit_code: writer.close()


def wandb(run: events.RunStarted, config: Mapping[str, Any]) -> Tracker:
    """Log to W&B. WANDB_MODE=offline keeps the files in RUN/wandb for `wandb sync`."""
    import wandb

    id_file = run.folder / "logs" / "wandb.id"  # so that a resumed run is the same run there
    tracked = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.folder.name,
        id=id_file.read_text() if id_file.exists() else None,
        resume="allow",  # steps that W&B has already stay as they are
        dir=str(run.folder),
        config=dict(config),
        settings=wandb.Settings(console="off", silent=True),
    )
    id_file.write_text(tracked.id)
    return tracked.log, lambda exit_code: tracked.finish(exit_code=exit_code)


def trackio(run: events.RunStarted, config: Mapping[str, Any]) -> Tracker:
    """Log to trackio, which writes where TRACKIO_DIR and TRACKIO_SPACE_ID say."""
    import trackio

    resume = "allow" if run.num_iterations else "never"
    tracked = trackio.init(
        project=PROJECT, name=run.folder.name, config=dict(config), embed=False, resume=resume
    )
    return tracked.log, lambda exit_code: tracked.finish()


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


class Trackers:
    """An observer that feeds the trackers of `output.log_to` from a thread."""

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._queue: queue.SimpleQueue[tuple[Values | None, int]] = queue.SimpleQueue()
        """(values, step); at the end (None, exit code)"""
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._num_iterations = 0

    def __call__(self, event: Event) -> Note | None:
        match event:
            case events.RunStarted(spec=spec, settings=settings):
                self._num_iterations = event.num_iterations
                for name in spec.trackers:
                    try:
                        self._trackers[name] = TRACKERS[name](event, settings)
                    except (Exception, SystemExit) as failure:
                        self._disable(name, repr(failure))
                self._thread.start()
            case events.Evaluated(accuracy=accuracy, standard_error=error):
                # Others are part of their iteration's metrics, and steps must not decrease.
                if event.num_iterations == self._num_iterations:
                    values = {"eval/accuracy": accuracy, "eval/standard_error": error}
                    self._log(self._num_iterations, values)
            case events.IterationFinished(_, metrics):
                self._num_iterations = metrics["iteration"]
                self._log(self._num_iterations, metrics)
            case events.RunEnded(exit_code) if self._trackers:
                self._queue.put((None, exit_code))
                self._thread.join(END_SECONDS)
                if self._thread.is_alive():
                    for late in list(self._trackers):
                        self._disable(late, f"not everything was sent in {END_SECONDS:g} s")
        failures = [self._failures.get() for _ in range(self._failures.qsize())]
        text = f"warning: tracker disabled ({'; '.join(failures)}); metrics.jsonl has all metrics"
        return Note(text) if failures else None

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: float(v) for name, v in values.items() if isinstance(v, (int, float))}
        if finite := {name: value for name, value in numbers.items() if math.isfinite(value)}:
            self._queue.put((finite, step))

    def _send(self) -> None:
        values: Values | None = {}
        while values is not None:
            values, number = self._queue.get()
            for name, (log, finish) in list(self._trackers.items()):
                try:
                    if values is None:
                        finish(number)
                    else:
                        log(values, step=number)
                except (Exception, SystemExit) as error:
                    self._disable(name, repr(error))

    def _disable(self, name: str, why: str) -> None:
        self._trackers.pop(name, None)
        self._failures.put(f"{name}: {why.strip().splitlines()[0]}")
