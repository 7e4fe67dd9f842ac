"""The rates of a pipeline, measured from a run's events: what `simulation` predicts from.

    events ──measure──► MeasuredRun ──fit──► Rates ──simulate──► tokens per second

A worker reports its work a few times a second (`events.Activity`). Each report is a row of a linear
model of busy time, which is fitted by non-negative least squares:

    engine     seconds = a · steps + b · tokens sampled + c · prompt tokens prefilled
    trainer    seconds = a · micro-batches + b · tokens + c · updates
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from easyrl import events
from easyrl.config import Config

MAX_ROWS = 10_000
"""The newest are fitted."""
Row = list[float]


class Group(NamedTuple):
    """A group that was generated."""

    lengths: Sequence[int]  # [G], in tokens
    scoring_seconds: float  # from its last token to its rewards
    is_accepted: bool  # no other prompt replaced it
    is_trained: bool  # it has a gradient


class Iteration(NamedTuple):
    seconds: float
    num_tokens: int  # completion tokens trained
    broadcast: float  # seconds from one device to another
    overhead: float  # before the engines' work, from rewards to training, and at the end


@dataclass(slots=True)
class MeasuredRun:
    config: Config
    devices: Mapping[str, str]  # by worker, as in `events.RunStarted`
    engine_rows: list[Row] = field(default_factory=list)  # with the seconds last
    train_rows: list[Row] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)

    def count(self, role: str) -> int:
        """Count the workers of a role: `rollout` or `train`."""
        return sum(worker.startswith(role) for worker in self.devices)


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of everything that an iteration consists of."""

    engine: Sequence[float]  # of a step, a token, the prefill of a group's prompt
    trainer: Sequence[float]  # of a micro-batch, a token, an update
    broadcast: float  # of all weights from one device to another
    overhead: float
    prompt_tokens: float  # that a trained group adds to its completions


def measure(events_of_run: Iterable[events.Event]) -> MeasuredRun:
    """Measure every iteration of a run but a command's first, which warms up."""
    run, started = MeasuredRun(Config(), {}), 0.0
    received: list[events.FromWorker] = []  # in this iteration
    is_warm = is_going_on = False
    for event in events_of_run:
        match event:
            case events.RunStarted():
                run.config, run.devices, is_warm = event.config, event.devices, False
            case events.IterationStarted(time):
                started, received, is_going_on = time, [], True
            case events.FromWorker() if is_going_on:
                received.append(event)
            case events.EvaluationStarted():
                is_going_on = False
            case events.IterationFinished():
                if is_warm:
                    _add(run, started, received, event.metrics)
                is_warm, is_going_on, received = True, False, []
    return run


def _add(
    run: MeasuredRun, started: float, received: Sequence[events.FromWorker], metrics: Any
) -> None:
    """Add an iteration, unless reports are lost (`observe.trace` shortens files)."""
    rows: dict[str, list[Row]] = defaultdict(list)  # by worker
    groups: dict[str, list[Group]] = defaultdict(list)  # by worker
    spans: dict[str, list[events.Span]] = {"rollout": [], "train": []}
    scored = math.inf  # the first group that is trained
    for each in received:
        match each.event:
            case events.Activity() as report:
                if busy := [span for span in report.spans if span.kind in events.WORKING]:
                    counts = report.num_steps, report.num_tokens, report.num_prompt_tokens
                    rows[each.worker].append([*counts, sum(s.ended - s.started for s in busy)])
                    spans[each.worker.partition("-")[0]] += busy
            case events.GroupScored() as group:
                is_unequal = not group.is_skipped and len({*group.rewards}) > 1
                has_gradient = is_unequal or run.config.algorithm.trains_zero_advantages
                flags = not group.is_rejected, has_gradient and not group.is_rejected
                scored = min(scored, each.time) if flags[1] else scored
                lengths = list(group.completion_lengths)
                groups[each.worker].append(Group(lengths, group.scoring_seconds, *flags))
    if not groups or not all(spans.values()):
        return
    for worker, of_worker in rows.items():
        if worker.startswith("train"):
            of_worker[-1][2] = run.config.train.updates_per_iteration  # the end of an iteration
            run.train_rows += of_worker
        else:
            num_rows = run.config.rollout.num_generations * metrics["perf/max_concurrent_groups"]
            run.engine_rows += _with_steps(of_worker, groups[worker], num_rows)
        run.groups += groups[worker]
    seconds, weights_seconds = (metrics[f"perf/{x}_seconds"] for x in ("iteration", "weights"))
    generated, trained = (min(s.started for s in of_role) for of_role in spans.values())
    latencies = (
        generated - started - weights_seconds,
        trained - scored,
        started + seconds - max(span.ended for span in spans["train"]),
    )
    num_tokens = round(metrics["perf/tokens_per_second"] * seconds)
    num_engines = len({each.worker for each in received if each.worker.startswith("rollout")})
    broadcast = weights_seconds / num_broadcasts(num_engines, run.count("train"))
    overhead = sum(max(0.0, latency) for latency in latencies)
    run.iterations.append(Iteration(seconds, num_tokens, broadcast, overhead))


def _with_steps(rows: list[Row], groups: Sequence[Group], num_rows: int) -> list[Row]:
    """Return the rows of an engine. vLLM does not report its steps: then one row, with as many as
    its completions take, one after another in the rows of an engine."""
    if any(num_steps for num_steps, *_ in rows):
        return rows
    ends = [0] * num_rows
    for length in (length for group in groups for length in group.lengths):
        heapreplace(ends, ends[0] + length)
    return [[float(max(ends)), *np.sum(rows, axis=0).tolist()[1:]]]


def fit(run: MeasuredRun, rng: np.random.Generator | None = None) -> Rates:
    """Fit the rates of a run; with `rng`, to rows that are drawn with replacement."""
    step, token, prompt_token = _fit(run.engine_rows, rng)
    micro_batch, trained_token, update = _fit(run.train_rows, rng)
    broadcast = fmean(each.broadcast for each in run.iterations)
    communication = communication_seconds(broadcast, run.count("train"))
    prompt = prompt_token * sum(row[2] for row in run.engine_rows) / len(run.groups)
    trained = [sum(group.lengths) for group in run.groups if group.is_trained]
    prompt_tokens = sum(row[1] for row in run.train_rows) - sum(trained)
    return Rates(
        engine=(step, token, prompt),
        trainer=(micro_batch - communication, trained_token, update),
        broadcast=broadcast,
        overhead=median(each.overhead for each in run.iterations),
        prompt_tokens=prompt_tokens / max(1, len(trained)),
    )


def num_broadcasts(num_engines: int, num_trainers: int) -> float:
    """How many times as long as from one device to another a broadcast takes: R train ranks gather
    (R - 1) / R of the weights, then in each round every device that has them sends them on."""
    return 1 - 1 / num_trainers + math.ceil(math.log2(1 + num_engines))


def communication_seconds(broadcast: float, num_trainers: int) -> float:
    """Assumed time in which R train ranks communicate in each micro-batch: FSDP gathers the weights
    twice and sums the gradient once."""
    return 3 * broadcast * (1 - 1 / num_trainers)


def _fit(rows: Sequence[Row], rng: np.random.Generator | None) -> list[float]:
    """Return non-negative coefficients of the columns before the last, which also give its sum."""
    from scipy.optimize import nnls

    drawn = np.array(rows[-MAX_ROWS:])
    if rng is not None:
        drawn = drawn[rng.integers(len(drawn), size=len(drawn))]
    columns, seconds = drawn[:, :-1], drawn[:, -1]
    scale = np.maximum(columns.max(axis=0), 1e-12)
    found = nnls(columns / scale, seconds, maxiter=1000)[0] / scale
    predicted = float((columns @ found).sum())
    return [float(x) for x in found * (seconds.sum() / predicted if predicted else 0.0)]
