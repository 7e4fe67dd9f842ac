"""Trackers: the numbers of `metrics.jsonl`, sent to TensorBoard, W&B, trackio or MLflow.

    controller ──event──► Trackers ──queue──► thread ──► TensorBoard, W&B, …

The step is the iteration. A tracker that raises or hangs is disabled with a warning and never
stops the run. To add a tracker, write a class with `log` and `finish`, and name it in TRACKERS and
in `output.log_to`. Its `run.num_iterations` is above 0 if the run is resumed.
"""

from __future__ import annotations

import importlib.util
import math
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from easyrl import events
from easyrl.config import Config
from easyrl.events import Event, Note

PROJECT = "easyrl"
END_SECONDS = 10.0
"""Longest wait for trackers to send the rest when the run ends."""
MAX_QUEUED = 1000
Values = Mapping[str, float]


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir runs`."""

    def __init__(self, run: events.RunStarted, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(run.folder))
        if run.num_iterations:  # TensorBoard drops what earlier files have from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=run.num_iterations, session_log=start)

    def log(self, step: int, values: Values) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=v) for name, v in values.items()]
        self._add(step=step, summary=self._summary(value=scalars))

    def finish(self, exit_code: int) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), **fields))
        self._writer.flush()


class WeightsAndBiases:
    """WANDB_MODE=offline keeps the files in RUN/wandb for `wandb sync`."""

    def __init__(self, run: events.RunStarted, config: Mapping[str, Any]) -> None:
        import wandb

        id_file = run.folder / "logs" / "wandb.id"  # so that a resumed run is the same run there
        self._run: Any = wandb.init(
            project=PROJECT,
            name=run.folder.name,
            id=id_file.read_text() if id_file.exists() else None,
            resume="allow",  # steps that W&B has already stay as they are
            dir=str(run.folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        id_file.write_text(self._run.id)

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class Trackio:
    """TRACKIO_DIR and TRACKIO_SPACE_ID set where it writes."""

    def __init__(self, run: events.RunStarted, config: Mapping[str, Any]) -> None:
        import trackio

        resume = "allow" if run.num_iterations else "never"
        self._run: Any = trackio.init(
            project=PROJECT, name=run.folder.name, config=dict(config), embed=False, resume=resume
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, exit_code: int) -> None:
        self._run.finish()


class MLflow:
    """MLFLOW_TRACKING_URI sets where it writes."""

    def __init__(self, run: events.RunStarted, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        experiment = self._client.get_experiment_by_name(PROJECT)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        )
        id_file = run.folder / "logs" / "mlflow.id"
        if not id_file.exists():
            created = self._client.create_run(experiment_id, run_name=run.folder.name)
            id_file.write_text(created.info.run_id)
            self._client.log_dict(created.info.run_id, dict(config), "config.yaml")
        self._id = id_file.read_text()

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def finish(self, exit_code: int) -> None:
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


TRACKERS: Mapping[str, Any] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}


class Trackers:
    """An observer that feeds the trackers of `output.log_to` from a thread."""

    def __init__(self, config: Config) -> None:
        """Raises ValueError if one is not installed."""
        for name in config.output.log_to:
            if importlib.util.find_spec(name) is None:
                raise ValueError(
                    f"output.log_to: '{name}' is not installed; install it with "
                    f"pip install 'easyrl[{name}]', or remove it from output.log_to"
                )
        self._trackers: dict[str, Any] = {}
        self._queue: queue.Queue[tuple[str, int, Values]] = queue.Queue(MAX_QUEUED)
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._num_iterations = 0

    def __call__(self, event: Event) -> Note | None:
        match event:
            case events.RunStarted(config=config):
                self._num_iterations = event.num_iterations
                for kind in config.output.log_to:
                    try:
                        tracker = TRACKERS[kind](event, config.model_dump(mode="json"))
                        self._trackers[kind] = tracker
                    except (Exception, SystemExit) as failure:
                        self._disable(kind, repr(failure))
                self._thread.start()
            case events.Evaluated(accuracy=accuracy, standard_error=error):
                # Others are part of their iteration's metrics, and steps must not decrease.
                if event.num_iterations in (None, self._num_iterations):
                    values = {"eval/accuracy": accuracy, "eval/standard_error": error}
                    self._log(self._num_iterations, values)
            case events.IterationFinished(_, metrics):
                self._num_iterations = metrics["iteration"] + 1
                of_eval = {name: v for name, v in metrics.items() if name.startswith("eval/")}
                own = {name: v for name, v in metrics.items() if name not in of_eval}
                self._log(self._num_iterations - 1, own)
                self._log(self._num_iterations, of_eval)
            case events.RunEnded(exit_code) if self._trackers:
                self._put("finish", exit_code, {})
                self._thread.join(END_SECONDS)
                for name in list(self._trackers) if self._thread.is_alive() else ():
                    self._disable(name, f"not everything was sent in {END_SECONDS:g} s")
        failures = [self._failures.get() for _ in range(self._failures.qsize())]
        text = f"warning: tracker disabled ({'; '.join(failures)}); metrics.jsonl has all metrics"
        return Note(text) if failures else None

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: v for name, v in values.items() if isinstance(v, (int, float))}
        finite = {name: float(v) for name, v in numbers.items() if math.isfinite(v)}
        if finite and self._trackers:
            self._put("log", step, finite)

    def _put(self, method: str, number: int, values: Values) -> None:
        try:
            self._queue.put_nowait((method, number, values))
        except queue.Full:
            for name in list(self._trackers):
                self._disable(name, f"{MAX_QUEUED} messages behind")

    def _send(self) -> None:
        method = ""
        while method != "finish":
            method, number, values = self._queue.get()
            for name, tracker in list(self._trackers.items()):
                try:
                    tracker.log(number, values) if method == "log" else tracker.finish(number)
                except (Exception, SystemExit) as error:
                    self._disable(name, repr(error))

    def _disable(self, name: str, why: str) -> None:
        self._trackers.pop(name, None)
        self._failures.put(f"{name}: {why.strip().splitlines()[0]}")
