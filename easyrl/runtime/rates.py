"""The rates of a pipeline, measured from a run's events: what `simulation` predicts from.

    events ──Recorder──► MeasuredIteration, … ──fit──► Rates ──simulate──► tokens per second

A worker reports its work a few times a second (`events.Activity`). Each report is a row of a linear
model of busy time, which is fitted by non-negative least squares:

    engine     seconds = a · steps + b · tokens sampled + c · prompt tokens prefilled
    trainer    seconds = (a + d · (R - 1) / R) · micro-batches + b · tokens + c · updates

`d` is the communication between R train ranks (FSDP gathers each layer's weights twice and sums its
gradient once). Only runs with several ranks measure it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heapreplace
from statistics import fmean
from typing import Any, NamedTuple, Self

import numpy as np

from easyrl import events
from easyrl.config import Config, change_config
from easyrl.events import Event
from easyrl.runtime.placement import max_concurrent_groups

MAX_ITERATIONS = 100
"""The newest iterations are kept."""
MAX_ROWS = 50
"""Rows of a worker in an iteration: neighbours of a long iteration are added up."""
Row = list[float]


class Group(NamedTuple):
    """A group that was generated."""

    lengths: Sequence[int]  # [G], in tokens
    scoring_seconds: float  # from its last token to its rewards
    is_accepted: bool  # no other prompt replaced it
    is_trained: bool  # it has a gradient


@dataclass(frozen=True, slots=True)
class MeasuredIteration:
    """One iteration. Rows are those of the module's docstring, with the seconds last."""

    num_engines: int
    num_trainers: int
    num_tokens: int  # completion tokens trained
    seconds: float
    weights_seconds: float
    overhead_seconds: float  # before the engines' work, from rewards to training, and at the end
    controller_seconds: float  # processor time
    num_messages: int  # to the controller
    engine_rows: list[Row]
    train_rows: list[Row]
    groups: list[Group]
    max_concurrent_groups: int  # of an engine

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields | {"groups": [Group(*group) for group in fields["groups"]]})

    @property
    def num_workers(self) -> int:
        return self.num_engines + self.num_trainers


def with_measured_groups(config: Config, iterations: Sequence[MeasuredIteration]) -> Config:
    """Return the config with the newest iteration's number of groups in flight, if this is not what
    its workers would have by themselves: they lent cores, or came later."""
    number = iterations[-1].max_concurrent_groups
    default = max_concurrent_groups(config, iterations[-1].num_engines)
    if config.rollout.max_concurrent_groups is not None or number == default:
        return config
    return change_config(config, {"rollout.max_concurrent_groups": number})


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of everything that an iteration consists of, and the groups that were seen."""

    engine: Sequence[float]  # of a step, a token, the prefill of a group's prompt
    trainer: Sequence[float]  # of a micro-batch, a token, an update
    communication: float  # of a micro-batch, between very many train ranks
    broadcast: float  # of all weights from one device to another
    overhead: float
    message: float  # of the controller
    messages_per_second: float  # of one worker
    prompt_tokens: float  # that a trained group adds to its completions
    groups: Sequence[Group]


class Recorder:
    """An observer that measures every iteration of a run but a command's first, which warms up."""

    def __init__(self) -> None:
        self.config = Config()
        self.iterations: deque[MeasuredIteration] = deque(maxlen=MAX_ITERATIONS)
        self._is_warm = False
        self._now: _Iteration | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case events.RunStarted(config=config, devices=devices):
                if config.output.dir != self.config.output.dir:  # another run, not a resumed one
                    self.iterations.clear()
                self.config = _with_devices(config, devices)
                self._is_warm, self._now = False, None
            case events.IterationStarted(time):
                self._now = _Iteration(self.config, time)
            case events.FromWorker(worker, time, reported) if self._now is not None:
                self._now.add(worker, time, reported)
            case events.EvaluationStarted() if self._now is not None:
                self._now.is_over = True
            case events.IterationFinished(metrics=metrics) if self._now is not None:
                if self._is_warm and (measured := self._now.measured(metrics)) is not None:
                    self.iterations.append(measured)
                self._is_warm, self._now = True, None

    def to_json(self) -> dict[str, Any]:
        """Return what Config and `MeasuredIteration.from_json` read."""
        iterations = [asdict(iteration) for iteration in self.iterations]
        return {"config": self.config.model_dump(mode="json"), "iterations": iterations}


def _with_devices(config: Config, devices: Mapping[str, str]) -> Config:
    """Return the config with the devices that were chosen for null."""
    chosen = {}
    for role, key in (("rollout", "infer"), ("train", "train")):
        names = [name for worker, name in devices.items() if worker.startswith(role)]
        numbers = ",".join(re.split("[/:]", name)[-1] for name in names)  # or "cpu"
        chosen[f"devices.{key}"] = getattr(config.devices, key) or numbers
    return change_config(config, chosen)


def _group(event: events.GroupScored, config: Config) -> Group:
    has_gradient = config.algorithm.trains_zero_advantages
    has_gradient |= not event.is_skipped and len({*event.rewards}) > 1
    is_accepted = not event.is_rejected
    lengths = list(event.completion_lengths)
    return Group(lengths, event.scoring_seconds, is_accepted, has_gradient and is_accepted)


@dataclass(slots=True)
class _Iteration:
    """An iteration that is going on."""

    config: Config
    started: float
    is_over: bool = False  # an evaluation has begun
    workers: set[str] = field(default_factory=set)  # also those without work
    rows: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))  # by worker
    lengths: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by worker
    spans: dict[str, list[events.Span]] = field(default_factory=lambda: defaultdict(list))
    groups: list[Group] = field(default_factory=list)
    scored: float = math.inf  # the first group that is trained
    num_messages: int = 0

    def add(self, worker: str, time: float, event: events.WorkerEvent) -> None:
        self.num_messages += not self.is_over
        self.workers.add(worker)
        match event:
            case events.Activity(spans) if not self.is_over:
                if busy := [span for span in spans if span.kind in events.WORKING]:
                    self.spans[worker.partition("-")[0]] += busy
                    counts = event.num_steps, event.num_tokens, event.num_prompt_tokens
                    self.rows[worker].append([*counts, sum(s.ended - s.started for s in busy)])
            case events.GroupScored():
                group = _group(event, self.config)
                self.lengths[worker] += group.lengths
                self.groups.append(group)
                self.scored = min(self.scored, time) if group.is_trained else self.scored

    def measured(self, metrics: Any) -> MeasuredIteration | None:
        """None if reports are lost (`observe.trace` shortens files), or of an older version."""
        is_whole = self.groups and self.spans["rollout"] and self.spans["train"]
        in_flight = metrics.get("perf/max_concurrent_groups")
        if not is_whole or in_flight is None:
            return None
        trainers = [rows for worker, rows in self.rows.items() if worker.startswith("train")]
        engines = [self._engine_rows(w, in_flight) for w in self.rows if w.startswith("rollout")]
        num_engines, num_trainers = (
            sum(worker.startswith(role) for worker in self.workers) for role in ("rollout", "train")
        )
        for rows in trainers:
            for row in rows:
                row[2:3] = [0.0, row[0] * (1 - 1 / num_trainers)]
            rows[-1][2] = self.config.train.updates_per_iteration  # the end of an iteration
        seconds, weights_seconds = (metrics[f"perf/{x}_seconds"] for x in ("iteration", "weights"))
        generated, trained = (min(s.started for s in self.spans[x]) for x in ("rollout", "train"))
        latencies = (
            generated - self.started - weights_seconds,
            trained - self.scored,
            self.started + seconds - max(span.ended for span in self.spans["train"]),
        )
        return MeasuredIteration(
            num_engines=num_engines,
            num_trainers=num_trainers,
            num_tokens=round(metrics["perf/tokens_per_second"] * seconds),
            seconds=seconds,
            weights_seconds=weights_seconds,
            overhead_seconds=sum(max(0.0, latency) for latency in latencies),
            controller_seconds=metrics["perf/controller_seconds"],
            num_messages=self.num_messages,
            engine_rows=[row for rows in engines for row in _added_up(rows)],
            train_rows=[row for rows in trainers for row in _added_up(rows)],
            groups=self.groups,
            max_concurrent_groups=in_flight,
        )

    def _engine_rows(self, worker: str, in_flight: int) -> list[Row]:
        """Rows of an engine. vLLM does not report its steps: then one row, with as many as its
        completions take, one after another in the rows of an engine."""
        rows = self.rows[worker]
        if any(num_steps for num_steps, *_ in rows):
            return rows
        ends = [0] * (self.config.rollout.num_generations * in_flight)
        for length in self.lengths[worker]:
            heapreplace(ends, ends[0] + length)
        _, *others = np.sum(rows, axis=0).tolist()
        return [[float(max(ends)), *others]]


def _added_up(rows: list[Row]) -> list[Row]:
    """Return at most MAX_ROWS rows, sums of neighbours."""
    size = -(-len(rows) // MAX_ROWS)
    starts = range(0, len(rows), size)
    return [np.sum(rows[start : start + size], axis=0).tolist() for start in starts]


def fit(iterations: Sequence[MeasuredIteration]) -> Rates:
    """Fit the rates of iterations, which may be those of several runs."""
    groups = [group for each in iterations for group in each.groups]
    engine_rows = np.array([row for each in iterations for row in each.engine_rows])
    train_rows = np.array([row for each in iterations for row in each.train_rows])
    step, token, prompt_token = _fit(engine_rows)
    micro_batch, trained_token, update, communication = _fit(train_rows)
    trained = [sum(group.lengths) for group in groups if group.is_trained]
    message = fmean([each.controller_seconds / each.num_messages for each in iterations])
    broadcasts = []
    for each in iterations:
        gather = communication / 3 * (1 - 1 / each.num_trainers)
        seconds = each.weights_seconds - gather - 2 * message * each.num_workers
        broadcasts.append(max(0.0, seconds) / num_rounds(each.num_engines))
    broadcast = fmean(broadcasts)
    if not train_rows[:, 3].any():  # not measured
        communication = 3.0 * broadcast
    return Rates(
        engine=(step, token, prompt_token * float(engine_rows[:, 2].sum()) / len(groups)),
        trainer=(micro_batch, trained_token, update),
        communication=communication,
        broadcast=broadcast,
        overhead=float(np.median([each.overhead_seconds for each in iterations])),
        message=message,
        messages_per_second=fmean(
            [
                max(0, each.num_messages - len(each.groups)) / each.seconds / each.num_workers
                for each in iterations
            ]
        ),
        prompt_tokens=float(train_rows[:, 1].sum() - sum(trained)) / max(1, len(trained)),
        groups=groups,
    )


def num_rounds(num_engines: int) -> int:
    """Rounds of a broadcast from the trainer in which each that has the weights sends them on."""
    return math.ceil(math.log2(1 + num_engines))


def _fit(rows: np.ndarray) -> list[float]:
    """Return non-negative coefficients of the columns before the last, which also give its sum."""
    from scipy.optimize import nnls

    columns, seconds = rows[:, :-1], rows[:, -1]
    scale = np.maximum(columns.max(axis=0), 1e-12)
    found = nnls(columns / scale, seconds, maxiter=1000)[0] / scale
    predicted = float((columns @ found).sum())
    return [float(x) for x in found * (seconds.sum() / predicted if predicted else 0.0)]
