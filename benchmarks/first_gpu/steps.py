"""What is run, in the order in which a reader of the README asks."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.first_gpu import readers
from benchmarks.first_gpu.needs import REASONING_GYM, TESTS, TRL, missing_of
from benchmarks.first_gpu.results import Figures

PARTS = {
    1: "a model learns",
    2: "both schedules, and whether engine and trainer agree",
    3: "speed beside what is expected",
    4: "against TRL",
    5: "the other GPU tests",
}
PART_SECONDS = {1: 240.0, 2: 180.0, 3: 180.0, 4: 180.0, 5: float("inf")}
"""Time limits. Time that a part leaves is for the last one."""
WHOLE_RUNS = "share_a_gpu or offloading or same_bits or devices_for_each_role"
"""The tests of tests/test_gpu.py that take longest (pytest's `-k`)."""


class Setup(NamedTuple):
    """What the steps depend on."""

    folder: Path  # of the runs, logs and JSON files
    device: str  # "0", or "cpu"
    smollm2: Path | None  # the folder of SmolLM2-135M-Instruct
    is_rehearsal: bool  # tiny sizes


@dataclass(frozen=True)
class Step:
    part: int
    name: str
    seconds: float
    """Time limit, if no other step of the part leaves time."""
    command: list[str]
    read: Callable[[str], Figures]
    """Returns the figures. The argument is what the command has printed."""
    missing: str = ""
    """What the step needs and this machine lacks."""


def all_steps(setup: Setup) -> list[Step]:
    """Return the steps by part. In a rehearsal, on a machine that may be busy, most have more time,
    and those that have only one size are ended after ENDED_SECONDS."""
    steps = [
        *_learning(setup),
        *_schedules(setup),
        *_speed(setup),
        *_against_trl(setup),
        *_tests(setup),
    ]
    if not setup.is_rehearsal:
        return steps
    rehearsed = []
    for step in steps:
        seconds = ENDED_SECONDS if step.name in ONE_SIZE else PATIENT_SECONDS
        rehearsed.append(replace(step, seconds=seconds))
    return rehearsed


def part_seconds(part: int, setup: Setup) -> float:
    """Return the time limit of a part. A rehearsal has none."""
    return float("inf") if setup.is_rehearsal else PART_SECONDS[part]


SMALL_RUN = (
    *("train.prompts_per_iteration=2", "rollout.num_generations=4", "data.num_held_out=4"),
    *("rollout.max_completion_length=100", "eval.max_completion_length=100"),
    *("train.iterations=1", "train.eval_every=1", "model.dtype=float32"),
)
"""Settings of a rehearsal's runs. Some of the answers, which are so long, are right. In
bfloat16 CPUs are slow."""
ONE_SIZE = ("self-test", "bench engine", "bench attention")
"""Steps that a rehearsal ends after ENDED_SECONDS."""
ENDED_SECONDS = 25.0
PATIENT_SECONDS = 600.0
"""Time limit of a rehearsal's other steps."""


def _models(setup: Setup) -> Iterator[tuple[str, list[str], str]]:
    """Yield the name of each model to train, the options of its run, and what it lacks."""
    yield "demo", [], ""
    yield "tiny-hybrid", ["--model", "tiny-hybrid"], ""
    lacks = "--smollm2 FOLDER was not given" if setup.smollm2 is None else ""
    options = ["--config", "configs/smollm2.yaml", "--model", str(setup.smollm2)]
    yield "SmolLM2-135M", options, lacks or missing_of(REASONING_GYM)


def _learning(setup: Setup) -> Iterator[Step]:
    """Held-out problems are evaluated on the way, so that a run that is ended has a curve."""
    seconds = {"demo": 80.0, "tiny-hybrid": 60.0, "SmolLM2-135M": 240.0}
    words = [
        *_devices(setup),
        *("model.dtype=bfloat16", "train.eval_every=15", "train.keep_checkpoints=0"),
    ]
    if setup.is_rehearsal:
        words += SMALL_RUN
    for name, options, missing in _models(setup):
        run = setup.folder / f"learn-{name}"
        yield Step(
            part=1,
            name=f"{name} learns",
            seconds=seconds[name],
            command=_grpo(run, *options, *words),
            read=partial(readers.read_learning, run),
            missing=missing,
        )


def _schedules(setup: Setup) -> Iterator[Step]:
    words = [
        *_devices(setup),
        *("model.dtype=bfloat16", "runtime.deterministic=true", "train.keep_checkpoints=0"),
        *("train.lr_scheduler_type=constant", "train.warmup_iterations=0"),
    ]
    if setup.is_rehearsal:
        words += SMALL_RUN
    num_iterations = 2 if setup.is_rehearsal else 4
    words += [f"train.iterations={num_iterations}", "data.num_held_out=0", "train.eval_every=0"]
    for name, options, missing in _models(setup):
        runs = {each: setup.folder / f"{each}-{name}" for each in ("sync", "periodic")}
        for schedule, run in runs.items():
            other = runs["sync"] if schedule == "periodic" else None
            yield Step(
                part=2,
                name=f"{name}, {schedule}",
                seconds=40.0,
                command=_grpo(run, "--schedule", schedule, *options, *words),
                read=partial(readers.read_schedule, run, other),
                missing=missing,
            )
    yield Step(
        part=2,
        name="self-test",
        seconds=180.0,
        command=[*_easyrl("doctor"), "--test"],
        read=readers.read_self_test,
    )


def _speed(setup: Setup) -> Iterator[Step]:
    weights = setup.folder / "weights.json"
    size = ["--model", "small"] if setup.is_rehearsal else []
    yield Step(
        part=3,
        name="weight update",
        seconds=50.0,
        command=_bench("weights", weights, *_devices(setup), *size, "--dtype", "bfloat16"),
        read=partial(readers.read_suite, weights),
    )
    models = ["small"] if setup.is_rehearsal else ["0.6B", "1.7B"]
    words: list[str] = []
    if setup.is_rehearsal:
        words = ["rollout.max_completion_length=8", "rollout.num_generations=2"]
        words += ["train.prompts_per_iteration=2"]
    files = []
    for model in models:
        file = setup.folder / f"loop-{model}.json"
        files.append(file)
        options = ["--model", model, "--iterations", "1", *words]
        yield Step(
            part=3,
            name=f"bench loop, {model}",
            seconds=90.0,
            command=_bench("loop", file, *_devices(setup), *options),
            read=partial(readers.read_suite, file),
        )
    yield _expected(part=3, name="bench loop, expected", files=files)


def _expected(part: int, name: str, files: list[Path]) -> Step:
    program = [sys.executable, "-m", "benchmarks.performance_model"]
    return Step(
        part=part,
        name=name,
        seconds=30.0,
        command=[*program, *map(str, files)],
        read=readers.read_lines,
    )


def _against_trl(setup: Setup) -> Iterator[Step]:
    rows = ["smollm2", "tiny_long"]
    for row in rows:
        missing = missing_of(TRL)
        options = [*_devices(setup), "--rows", row, "--rounds", "1"]
        if row == "smollm2":
            if setup.smollm2 is None:
                missing = "--smollm2 FOLDER was not given"
            options += ["--model", str(setup.smollm2)]
        if setup.is_rehearsal:
            options += ["--iterations", "1"]
        file = setup.folder / f"peer-{row}.json"
        yield Step(
            part=4,
            name=f"bench peer, {row}",
            seconds=110.0,
            command=_bench("peer", file, *options),
            read=partial(readers.read_suite, file),
            missing=missing,
        )


def _tests(setup: Setup) -> Iterator[Step]:
    seconds = 300.0
    of_bench = ENDED_SECONDS if setup.is_rehearsal else 120.0
    missing = missing_of(TESTS)
    yield Step(5, "whole runs", seconds, _pytest(WHOLE_RUNS), readers.read_tests, missing)
    files = []
    for suite in ("engine", "attention"):
        file = setup.folder / f"{suite}.json"
        files.append(file)
        command = _bench(suite, file)
        yield Step(5, f"bench {suite}", of_bench, command, partial(readers.read_suite, file))
    yield _expected(part=5, name="bench engine, expected", files=files)
    rest = _pytest(f"not ({WHOLE_RUNS})")
    yield Step(5, "kernels and parts", seconds, rest, readers.read_tests, missing)


def _devices(setup: Setup) -> list[str]:
    """Return the options with which one device generates and trains."""
    return ["--infer-devices", setup.device, "--train-devices", setup.device]


def _easyrl(command: str) -> list[str]:
    return [sys.executable, "-m", "easyrl", command]


def _grpo(run: Path, *options: str) -> list[str]:
    return [*_easyrl("grpo"), "--output", str(run), "--no-live", *options]


def _bench(suite: str, file: Path, *options: str) -> list[str]:
    return [*_easyrl("bench"), suite, "--json", str(file), "--force", *options]


def _pytest(selected: str) -> list[str]:
    options = ["-n", "4", "-v", "-p", "no:cacheprovider", "-m", "gpu", "-k", selected]
    return [sys.executable, "-m", "pytest", "tests/test_gpu.py", *options]
