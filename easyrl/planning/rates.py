"""The rates of a pipeline, measured from a run's events: what `simulation` predicts from.

    events ──measure──► MeasuredIteration, … ──fit──► Rates ──simulate──► tokens per second

A worker reports its work a few times a second (`events.Activity`). Each report is a row of a linear
model of busy time, which is fitted by non-negative least squares:

    engine     seconds = a · steps + b · tokens sampled + c · prompt tokens prefilled
    trainer    seconds = a · micro-batches + b · tokens + c · updates
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from easyrl import events
from easyrl.config import Config

Row = list[float]


class Group(NamedTuple):
    """A group that was generated."""

    lengths: Sequence[int]  # [G], in tokens
    scoring_seconds: float  # from its last token to its rewards
    is_accepted: bool  # no other prompt replaced it
    is_trained: bool  # it has a gradient


class MeasuredIteration(NamedTuple):
    num_tokens: int  # completion tokens trained
    seconds: float
    broadcast: float | None  # seconds from one device to another; None: there was none
    overhead: float  # seconds before the first and after the last work
    engine_rows: list[Row]  # of the model above, with the seconds last
    train_rows: list[Row]
    groups: list[Group]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    config: Config
    devices: Mapping[str, str]  # by worker, as in `events.RunStarted`
    iterations: deque[MeasuredIteration]

    def count(self, role: str) -> int:  # `rollout` or `train`
        return sum(worker.startswith(role) for worker in self.devices)


class Rates(NamedTuple):
    """Seconds of everything that an iteration consists of."""

    engine: Sequence[float]  # of a step, a token, the prefill of a group's prompt
    trainer: Sequence[float]  # of a micro-batch, a token, an update
    broadcast: float  # of all weights from one device to another
    overhead: float
    prompt_tokens: float  # that a trained group adds to its completions
    num_trainers: int  # of the run that was measured


def measure(recorded: Iterable[events.Event]) -> MeasuredRun:
    """Measure every iteration of a run but a command's first, which warms up."""
    run = MeasuredRun(Config(), {}, deque(maxlen=100))
    received: list[events.FromWorker] = []  # in this iteration
    is_warm = is_going_on = False
    for event in recorded:
        match event:
            case events.RunStarted():
                if event.devices != run.devices:  # other splits have other rates
                    run.iterations.clear()
                run = replace(run, config=event.config, devices=event.devices)
                is_warm = False
            case events.IterationStarted():
                received, is_going_on = [], True
            case events.FromWorker() if is_going_on:
                received.append(event)
            case events.EvaluationStarted():
                is_going_on = False
            case events.IterationFinished(metrics=metrics):
                if is_warm and (measured := _measured(run, received, metrics)):
                    run.iterations.append(measured)
                is_warm, is_going_on, received = True, False, []
    return run


def _measured(
    run: MeasuredRun, received: Sequence[events.FromWorker], metrics: Any
) -> MeasuredIteration | None:
    """None if reports are lost (`observe.trace` shortens files)."""
    rows: dict[str, list[Row]] = defaultdict(list)  # by worker
    groups: dict[str, list[Group]] = defaultdict(list)  # by worker
    spans: list[events.Span] = []
    for worker, report in ((each.worker, each.event) for each in received):
        match report:
            case events.Activity():
                if busy := [span for span in report.spans if span.kind in events.WORKING]:
                    counts = report.num_steps, report.num_tokens, report.num_prompt_tokens
                    rows[worker].append([*counts, sum(s.ended - s.started for s in busy)])
                    spans += busy
            case events.GroupScored():
                is_unequal = not report.is_skipped and len({*report.rewards}) > 1
                has_gradient = is_unequal or run.config.algorithm.trains_zero_advantages
                flags = not report.is_rejected, has_gradient and not report.is_rejected
                lengths = [*report.completion_lengths]
                groups[worker].append(Group(lengths, report.scoring_seconds, *flags))
    fitted: dict[str, list[Row]] = {"rollout": [], "train": []}
    for worker, of_worker in rows.items():
        if worker.startswith("train"):
            of_worker[-1][2] = run.config.train.updates_per_iteration  # the end of an iteration
            fitted["train"] += of_worker
        elif any(num_steps for num_steps, *_ in of_worker):
            fitted["rollout"] += of_worker
        else:  # vLLM does not report its steps: take those of its completions, in rows to fill
            ends = [0] * run.config.rollout.num_generations * metrics["perf/max_concurrent_groups"]
            for length in (length for group in groups[worker] for length in group.lengths):
                heapreplace(ends, ends[0] + length)
            fitted["rollout"].append([max(ends), *np.sum(of_worker, axis=0).tolist()[1:]])
    if not groups or not all(fitted.values()):
        return None
    seconds, weights_seconds = (metrics[f"perf/{x}_seconds"] for x in ("iteration", "weights"))
    worked = max(span.ended for span in spans) - min(span.started for span in spans)
    num = num_broadcasts(run.count("rollout"), run.count("train"))
    was_sent = any(isinstance(each.event, events.WeightsExchanged) for each in received)
    return MeasuredIteration(
        num_tokens=round(metrics["perf/tokens_per_second"] * seconds),
        seconds=seconds,
        broadcast=weights_seconds / num if was_sent else None,
        overhead=max(0.0, seconds - weights_seconds - worked),
        engine_rows=fitted["rollout"],
        train_rows=fitted["train"],
        groups=[group for of_worker in groups.values() for group in of_worker],
    )


def fit(iterations: Sequence[MeasuredIteration], num_trainers: int) -> Rates:
    groups = [group for each in iterations for group in each.groups]
    engine_rows = np.array([row for each in iterations for row in each.engine_rows])
    train_rows = np.array([row for each in iterations for row in each.train_rows])
    step, token, prompt_token = _fit(engine_rows)
    broadcasts = [each.broadcast for each in iterations if each.broadcast is not None]
    trained = [sum(group.lengths) for group in groups if group.is_trained]
    return Rates(
        engine=(step, token, prompt_token * float(engine_rows[:, 2].sum()) / len(groups)),
        trainer=_fit(train_rows),
        broadcast=fmean(broadcasts or [0.0]),
        overhead=median(each.overhead for each in iterations),
        prompt_tokens=float(train_rows[:, 1].sum() - sum(trained)) / max(1, len(trained)),
        num_trainers=num_trainers,
    )


def num_broadcasts(num_engines: int, num_trainers: int) -> float:
    """How many times as long as from one device to another a broadcast takes: R train ranks gather
    (R - 1) / R of the weights, then in each round every device that has them sends them on."""
    return 1 - 1 / num_trainers + num_engines.bit_length()


def _fit(rows: np.ndarray) -> list[float]:
    """Return non-negative coefficients of the columns before the last, which also give its sum."""
    from scipy.optimize import nnls

    columns, seconds = rows[:, :-1], rows[:, -1]
    scale = np.maximum(columns.max(axis=0), 1e-12)
    found = nnls(columns / scale, seconds, maxiter=1000)[0] / scale
    predicted = float((columns @ found).sum())
    return [float(x) for x in found * (seconds.sum() / predicted if predicted else 0.0)]
