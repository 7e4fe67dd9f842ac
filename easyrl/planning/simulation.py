"""Predict the throughput of every split of devices from the rates that a run's events give.

    events ──measure──► MeasuredIteration, … ──fit──► Rates ──simulate──► tokens per second

A worker reports its work a few times a second (`events.Activity`). Each report is a row of a linear
model of busy time, which is fitted by non-negative least squares:

    engine     seconds = a · steps + b · tokens sampled + c · prompt tokens prefilled
    trainer    seconds = a · micro-batches + b · tokens + c · updates

The simulation follows the real parts: who gets a prompt (`runtime.ledger`), which rows an engine
fills (`engines.embedded`), when a micro-batch starts and what it contains (`workers.batches`). Not
simulated: rounds of replacements (rejected groups are generated, all in one round), uneven shares
of trainers, waits for a full ring, the order of deterministic runs, the controller.
"""

import json
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush, heapreplace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter
from scipy.optimize import nnls

from easyrl import events
from easyrl.config import Config, ConfigError
from easyrl.config.devices import device_options
from easyrl.observe.run_files import RunFiles
from easyrl.runtime.placement import max_concurrent_groups, max_open_groups
from easyrl.workers.batches import MIN_FILL

MAX_SPLITS = 24
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
    columns, seconds = rows[:, :-1], rows[:, -1]
    scale = np.maximum(columns.max(axis=0), 1e-12)
    found = nnls(columns / scale, seconds, maxiter=1000)[0] / scale
    predicted = float((columns @ found).sum())
    return [float(x) for x in found * (seconds.sum() / predicted if predicted else 0.0)]


# -- simulation -----------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """A simulated iteration."""

    seconds: float
    num_tokens: int  # completion tokens of accepted groups
    infer_busy: float  # share of the time, mean of the engines
    train_busy: float


def simulate(
    rates: Rates, groups: Sequence[Group], config: Config, num_engines: int, num_trainers: int
) -> Outcome:
    """Simulate an iteration that generates and trains these groups."""
    weights = rates.broadcast * num_broadcasts(num_engines, num_trainers)
    arrivals, infer_busy = _generate(rates, groups, config, num_engines)
    trained, train_busy = _train(rates, groups, config, num_trainers, arrivals)
    seconds = weights + max(trained, *arrivals) + rates.overhead
    num_tokens = sum(sum(group.lengths) for group in groups if group.is_accepted)
    return Outcome(seconds, num_tokens, infer_busy / num_engines / seconds, train_busy / seconds)


@dataclass(slots=True)
class _Engine:
    clock: float = 0.0
    step: float = 0.0  # decode steps done at that time
    rows: list[tuple[float, int]] = field(default_factory=list)  # heap: last step, group
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # group, length
    newest: int = -1  # group whose prompt has been prefilled
    version: int = 0  # of its next event: older ones are void


def _generate(
    rates: Rates, groups: Sequence[Group], config: Config, num_engines: int
) -> tuple[list[float], float]:
    """Return when each group is in the ring, and the sum of the engines' busy seconds."""
    step, token, prompt = rates.engine
    in_flight = max_concurrent_groups(config, num_engines)
    num_rows = in_flight * config.rollout.num_generations
    at_once = len(groups) if num_engines == 1 else max_open_groups(in_flight) * num_engines
    queue, engines = deque(range(len(groups))), [_Engine() for _ in range(num_engines)]
    num_left = [len(group.lengths) for group in groups]
    arrivals, busy = [0.0] * len(groups), 0.0
    # Time and engine; the version if its next completion ends, -1 if a prompt is answered.
    heap = [(0.0, number % num_engines, -1) for number in range(min(at_once, len(groups)))]
    while heap:
        now, number, version = heappop(heap)
        engine = engines[number]
        if version == -1 and queue:
            new = queue.popleft()
            engine.waiting += [(new, length) for length in groups[new].lengths]
            if len(engine.rows) == num_rows:
                continue
            if engine.rows and now > engine.clock:
                engine.step += (now - engine.clock) / (step + token * len(engine.rows))
        elif version == engine.version:
            engine.step = engine.rows[0][0]
        else:
            continue
        busy += max(0.0, now - engine.clock) if engine.rows else 0.0
        engine.clock = max(engine.clock, now)
        while version >= 0 and engine.rows and engine.rows[0][0] <= engine.step:
            _, group = heappop(engine.rows)
            num_left[group] -= 1
            if not num_left[group]:
                arrivals[group] = now + groups[group].scoring_seconds
                heappush(heap, (arrivals[group], number, -1))
        while engine.waiting and len(engine.rows) < num_rows:
            group, length = engine.waiting.popleft()
            if group != engine.newest:  # its prompt's step samples the first tokens
                seconds = prompt + token * len(groups[group].lengths)
                seconds += step if engine.newest < 0 else 0.0
                engine.newest, engine.clock, busy = group, engine.clock + seconds, busy + seconds
            heappush(engine.rows, (engine.step + length - 1, group))
        engine.version += 1
        if engine.rows:
            left = (engine.rows[0][0] - engine.step) * (step + token * len(engine.rows))
            heappush(heap, (engine.clock + left, number, engine.version))
    return arrivals, busy


def _train(
    rates: Rates, groups: Sequence[Group], config: Config, num_trainers: int, arrivals: list[float]
) -> tuple[float, float]:
    """Return when the last update is done, and the busy seconds of a trainer."""
    micro_batch, token, update = rates.trainer
    # Assumed of more trainers: FSDP gathers the weights twice and sums the gradient once.
    micro_batch += 3 * rates.broadcast * max(0.0, 1 / rates.num_trainers - 1 / num_trainers)
    budget = config.max_tokens_per_micro_batch * num_trainers
    time, busy = max(arrivals) if config.runtime.schedule == "sync" else 0.0, 0.0
    accepted = [number for number, group in enumerate(groups) if group.is_accepted]
    for of_update in np.array_split(accepted, config.train.updates_per_iteration):
        left = deque(sorted(of_update, key=arrivals.__getitem__))
        rollouts: list[float] = []  # tokens
        while left or rollouts:
            while left and (num_tokens := sum(rollouts)) < budget:
                if arrivals[left[0]] > time and rollouts and num_tokens >= MIN_FILL * budget:
                    break
                number = left.popleft()
                time = max(time, arrivals[number])
                if groups[number].is_trained:
                    lengths = groups[number].lengths
                    rollouts += [length + rates.prompt_tokens / len(lengths) for length in lengths]
            if rollouts:
                taken = max(1, bisect_right([*accumulate(rollouts)], budget))
                share = max(sum(rollouts[:taken]) / num_trainers, *rollouts[:taken])  # the largest
                seconds = micro_batch + token * share
                time, busy = time + seconds, busy + seconds
                rollouts = rollouts[taken:]
        time, busy = time + update / num_trainers, busy + update / num_trainers
    return time, busy


# -- splits of devices ----------------------------------------------------------------------------


class Split(NamedTuple):
    """The prediction for a number of engines and trainers."""

    engines: int
    trainers: int
    tokens_per_second: float
    tokens_per_second_low: float  # of 5 % of the simulated iterations
    tokens_per_second_high: float
    infer_idle: float  # share of the time
    train_idle: float


def predict_splits(run: MeasuredRun, config: Config, num_devices: int) -> list[Split]:
    """Predict the splits of so many devices; of many, every second, third, .... All have the same
    draws of rates and lengths. Raises ConfigError if there is no split."""
    size, train = config.rollout.tensor_parallel_size, config.train
    most = train.prompts_per_iteration // train.updates_per_iteration
    pairs = [
        ((num_devices - num_trainers) // size, num_trainers)
        for num_trainers in range(min(most, num_devices - size), 0, -1)
        if (num_devices - num_trainers) % size == 0
    ]
    if not pairs:
        raise ConfigError(
            f"--devices: expected devices for engines of {size} (rollout.tensor_parallel_size) and "
            f"1 to {most} trainers (prompts per update), got {num_devices}"
        )
    pairs = pairs[:: -(-len(pairs) // MAX_SPLITS)]
    per_draw = train.prompts_per_iteration * config.rollout.num_generations * len(pairs)
    rng, count = np.random.default_rng(0), max(6, min(50, 400_000 // per_draw))  # a few seconds
    draws = []
    num = len(run.iterations)
    for _ in range(count):  # iterations drawn with replacement, and one's groups drawn of theirs
        iterations = [run.iterations[number] for number in rng.integers(num, size=num)]
        groups = [group for each in iterations for group in each.groups]
        share = max(1, sum(group.is_accepted for group in groups)) / len(groups)
        numbers = rng.integers(len(groups), size=round(train.prompts_per_iteration / share))
        draws.append((fit(iterations, run.count("train")), [groups[n] for n in numbers]))
    splits = []
    for pair in pairs:
        outcomes = [simulate(*drawn, config, *pair) for drawn in draws]
        low, high = np.percentile([each.num_tokens / each.seconds for each in outcomes], (5, 95))
        infer, trainer = np.mean([(each.infer_busy, each.train_busy) for each in outcomes], axis=0)
        figures = map(float, (mean_speed(outcomes), low, high, 1 - infer, 1 - trainer))
        splits.append(Split(*pair, *figures))
    return splits


def mean_speed(iterations: Sequence[Outcome | MeasuredIteration]) -> float:
    """Return the tokens per second of iterations, one after another."""
    return sum(each.num_tokens for each in iterations) / sum(each.seconds for each in iterations)


def read_rates(path: Path) -> MeasuredRun:
    """Read a run's folder or a file of `bench loop`. Raises ConfigError if it has no rates."""
    if path.is_dir():
        run = measure(RunFiles(path).read())
    else:
        try:
            [row] = json.loads(path.read_text())["results"]
            run = TypeAdapter(MeasuredRun).validate_python(row["rates"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).partition("\n")[0]  # pydantic's has many lines
            raise ConfigError(
                f"'{path}': expected a run's folder, or a file of `easyrl bench loop --json` with "
                f"one model (--model), got another one: {reason}"
            ) from None
    if not run.iterations:
        raise ConfigError(f"'{path}': expected two finished iterations (the first one warms up)")
    return run


def to_text(run: MeasuredRun, splits: Sequence[Split]) -> str:
    """The rates and a table of the splits."""
    rates, speed = fit(run.iterations, run.count("train")), mean_speed(run.iterations)
    names = "step", "token", "prompt", "micro-batch", "trained token", "update", "broadcast"
    of_each = zip(names, (*rates.engine, *rates.trainer, rates.broadcast), strict=True)
    lines = [
        f"measured with {run.count('rollout')}+{run.count('train')} workers: {speed:,.0f} tokens/s",
        "in ms: " + ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in of_each),
        "engines trainers  tokens/s       5 %      95 %  idle: engines trainers",
    ]
    is_shared = run.devices["rollout-0"] == run.devices["train-0"]
    if is_shared and run.config.devices.threads is None:
        lines.insert(1, "workers shared cores or a device: on their own they are faster")
    row = "{:7}{:9}{:10,.0f}{:10,.0f}{:10,.0f}{:15.0%}{:9.0%}"
    return "\n".join([*lines, *(row.format(*split) for split in splits)])


def flags_of(run: MeasuredRun, split: Split) -> str:
    """Return the options for the split, with devices of the kind that was measured."""
    num_infer = split.engines * run.config.rollout.tensor_parallel_size
    train = range(num_infer, num_infer + split.trainers)
    return device_options(next(iter(run.devices.values())), range(num_infer), train)
