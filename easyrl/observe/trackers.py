"""Trackers: the numbers of `metrics.jsonl`, sent to TensorBoard, W&B or trackio.

    controller ──event──► Trackers ──queue──► thread ──► TensorBoard, W&B, …

The step is the iteration. A tracker that raises or hangs is disabled with a warning and never
stops the run. To add a tracker, write a function that starts it and returns how it logs and ends,
and name it in TRACKERS and in `OutputConfig.log_to` (config/runtime.py).
"""

import io
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from easyrl import events
from easyrl.events import Event, Note
from easyrl.formatting import shorten
from easyrl.observe.text import shown

PROJECT = "easyrl"
END_SECONDS = 10.0  # longest wait for trackers to send the rest when the run ends
PICTURES = "pictures"  # name of the pictures of an iteration's prompts
MAX_PICTURES = 8  # of an iteration
MAX_CAPTION = 200  # characters of a completion
Values = dict[str, float]


class Tracker(NamedTuple):
    """A tracker that has started."""

    log: Callable[..., Any]  # log(values, step=iteration)
    finish: Callable[[int], Any]  # finish(exit_code)
    log_pictures: Callable[..., Any]  # log_pictures(pictures, step=iteration)


class ShownPicture(NamedTuple):
    """A picture of a prompt, with what the model has written about it."""

    data: bytes  # a small JPEG file
    caption: str

    def open(self) -> Any:
        """Return the image of PIL."""
        from PIL import Image

        return Image.open(io.BytesIO(self.data))


class End(NamedTuple):
    """The end of the values that trackers get."""

    exit_code: int


class Step(NamedTuple):
    """The values of an iteration."""

    values: Values
    iteration: int
    pictures: Sequence[ShownPicture] = ()


def tensorboard(run: events.RunStarted, config: Mapping[str, Any]) -> Tracker:
    """Write event files to the run folder: `tensorboard --logdir runs`."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(run.folder))

    def log(values: Values, step: int) -> None:
        summary = Summary()
        for name, value in values.items():
            summary.value.add(tag=name, simple_value=value)
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        writer.flush()

    def log_pictures(pictures: Sequence[ShownPicture], step: int) -> None:
        summary = Summary()
        for number, picture in enumerate(pictures):
            width, height = picture.open().size
            image = Summary.Image(
                height=height, width=width, colorspace=3, encoded_image_string=picture.data
            )
            summary.value.add(tag=f"{PICTURES}/{number}", image=image)
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    if run.num_iterations:  # TensorBoard drops what earlier files have from this step on
        writer.add_event(
            Event(
                wall_time=time.time(),
                step=run.num_iterations + 1,
                session_log=SessionLog(status=SessionLog.START),
            )
        )
    return Tracker(log, lambda exit_code: writer.close(), log_pictures)


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

    def log_pictures(pictures: Sequence[ShownPicture], step: int) -> None:
        images = [wandb.Image(picture.open(), caption=picture.caption) for picture in pictures]
        tracked.log({PICTURES: images}, step=step)

    return Tracker(tracked.log, lambda exit_code: tracked.finish(exit_code=exit_code), log_pictures)


def trackio(run: events.RunStarted, config: Mapping[str, Any]) -> Tracker:
    """Log to trackio, which writes where TRACKIO_DIR and TRACKIO_SPACE_ID say."""
    import trackio

    resume = "allow" if run.num_iterations else "never"
    tracked = trackio.init(
        project=PROJECT, name=run.folder.name, config=dict(config), embed=False, resume=resume
    )

    def log_pictures(pictures: Sequence[ShownPicture], step: int) -> None:
        images = {}
        for number, picture in enumerate(pictures):
            image = trackio.Image(picture.open(), caption=picture.caption)
            images[f"{PICTURES}/{number}"] = image
        tracked.log(images, step=step)

    return Tracker(tracked.log, lambda exit_code: tracked.finish(), log_pictures)


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


class Trackers:
    """An observer that feeds the trackers of `output.log_to` from a thread."""

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._queue: queue.SimpleQueue[Step | End] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._num_iterations = 0  # finished so far
        self._pictures: list[ShownPicture] = []  # of the iteration under way

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
            case events.FromWorker(_, _, events.GroupScored() as group) if self._trackers:
                self._show(group)
            case events.Evaluated(accuracy=accuracy, standard_error=error):
                # Others are part of their iteration's metrics, and steps must not decrease.
                if event.num_iterations == self._num_iterations:
                    values = {"eval/accuracy": accuracy, "eval/standard_error": error}
                    self._log(self._num_iterations, values)
            case events.IterationFinished(_, metrics):
                self._num_iterations = metrics["iteration"]
                self._log(self._num_iterations, metrics)
            case events.RunEnded(exit_code) if self._trackers:
                self._queue.put(End(exit_code))
                self._thread.join(END_SECONDS)
                if self._thread.is_alive():
                    for late in list(self._trackers):
                        self._disable(late, f"not everything was sent in {END_SECONDS:g} s")
        return self._note_of_failures()

    def _note_of_failures(self) -> Note | None:
        failures = []
        while not self._failures.empty():
            failures.append(self._failures.get())
        if not failures:
            return None
        reasons = "; ".join(failures)
        return Note(f"warning: tracker disabled ({reasons}); metrics.jsonl has all metrics")

    def _show(self, group: events.GroupScored) -> None:
        """Keep the pictures of a group for its iteration, a few of them."""
        pictures = group.pictures or ()  # None in an event that was read from a trace
        for data in pictures:
            if len(self._pictures) < MAX_PICTURES and group.samples:
                sample = group.samples[0]
                reward = shown(sample.reward, ".3g")
                caption = f"reward {reward}: {shorten(sample.completion, MAX_CAPTION)}"
                self._pictures.append(ShownPicture(data, caption))

    def _log(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Queue the finite numbers among the values, and the pictures of the iteration."""
        numbers = {}
        for name, value in values.items():
            is_number = isinstance(value, (int, float))
            if is_number and math.isfinite(value):
                numbers[name] = float(value)
        if numbers:
            self._queue.put(Step(numbers, iteration, self._pictures))
            self._pictures = []

    def _send(self) -> None:
        """Send what is queued to all trackers, until the end: the thread's target."""
        while True:
            queued = self._queue.get()
            for name, tracker in list(self._trackers.items()):
                try:
                    if isinstance(queued, End):
                        tracker.finish(queued.exit_code)
                    else:
                        if queued.pictures:
                            tracker.log_pictures(queued.pictures, step=queued.iteration)
                        tracker.log(queued.values, step=queued.iteration)
                except (Exception, SystemExit) as error:
                    self._disable(name, repr(error))
            if isinstance(queued, End):
                return

    def _disable(self, name: str, why: str) -> None:
        self._trackers.pop(name, None)
        self._failures.put(f"{name}: {why.strip().splitlines()[0]}")
