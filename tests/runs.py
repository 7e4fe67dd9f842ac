"""Start `easyrl grpo`, and read what it leaves."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from typer.testing import CliRunner, Result

from easyrl import events
from easyrl.formatting import EXTRAS
from easyrl.observe.run_files import RunFiles
from own_processes import WAIT_SECONDS, end, popen

SMALL = (
    "train.prompts_per_iteration=4",
    "rollout.num_generations=4",
    "rollout.max_completion_length=24",
    "data.max_prompt_length=32",
    "data.num_held_out=8",
)
"""Settings of a run that takes a second or two once its workers are up."""
AGENTS = Path(__file__).with_name("agent_programs.py")
HARDER = ("algorithm.beta=0.05", "train.updates_per_iteration=2", "algorithm.loss_type=dapo")
ALL_SAMPLES = "output.samples=null"
GUESS = (
    *("--model", "tiny-guess", "--dataset", "guess", "--no-live", "data.max_prompt_length=16"),
    *("rollout.max_completion_length=80", "data.num_held_out=0", "train.prompts_per_iteration=6"),
    *("rollout.num_generations=4", "train.learning_rate=0.01"),
)
"""Settings of a run that plays a game; without `--environment` or `--agent`."""
OPTIONAL = {*EXTRAS.values(), "scipy", "pandas", "pyarrow", "psutil"} - {"httpx2"}
"""Libraries that no run needs. httpx2 comes with huggingface_hub 2."""


def customized(folder: Path, program: str) -> dict[str, str]:
    """The environment of Python processes that run this program first."""
    (folder / "sitecustomize.py").write_text(program)
    return {"PYTHONPATH": f"{folder}:{Path(__file__).parent.parent}"}


def without_optional_libraries(folder: Path) -> dict[str, str]:
    return customized(folder, f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))")


class Finished(NamedTuple):
    """A finished run, shared by tests: do not change its folder."""

    folder: Path
    out: str


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "easyrl", "grpo", *arguments]


def start(*arguments: str, altered: bool = False, **environment: str) -> subprocess.Popen[str]:
    """Start a run, which ends with the test. `altered`: start `altered_run.py`, which the
    environment tells what to change."""
    script = Path(__file__).with_name("altered_run.py")
    words = [sys.executable, str(script), *arguments] if altered else command(*arguments)
    return start_process(words, environment)


def start_process(
    words: list[str], environment: Mapping[str, str], folder: Path | None = None
) -> subprocess.Popen[str]:
    return popen(
        words,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def finish(
    *arguments: str, timeout: float = WAIT_SECONDS, altered: bool = False, **environment: str
) -> tuple[int, str, str]:
    """Run to the end; return exit code, standard output and standard error."""
    process = start(*arguments, altered=altered, **environment)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end(process)
    return process.returncode, out, err


def succeed(*arguments: str, **how: Any) -> str:
    """`finish` without an error; return standard output."""
    code, out, err = finish(*arguments, **how)
    assert (code, err) == (0, ""), err
    return out


def finish_after(
    line: str,
    act: Callable[[subprocess.Popen[str]], object],
    *arguments: str,
    timeout: float = WAIT_SECONDS,
    **environment: str,
) -> tuple[int, str, str]:
    """`finish`, with `act(process)` called once the run has printed `line`."""
    process = start(*arguments, **environment)
    try:
        wait_for_line(process, line, timeout)
        act(process)
        out, err = process.communicate(timeout=timeout)
    finally:
        end(process)
    return process.returncode, out, err


def easyrl(*words: object) -> Result:
    """Call the command in this process."""
    from easyrl.cli import app

    return CliRunner().invoke(app, [str(word) for word in words])


def write_rows(file: Path, rows: Iterable[object]) -> str:
    """Write rows as lines of JSON; return the file's name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def inserted_by_guess(sample: Mapping[str, Any]) -> int:
    """Count the tokens of the game's answers: between an end token and the end of the line."""
    return sum(map(len, re.findall(r"<eos>([^\n]*\n)", sample["raw"][1])))


def num_characters(text: str) -> int:
    """Count the tokens of a text of the tiny models."""
    return len(text.replace("<eos>", "."))


def assert_tokens_are_counted(
    folder: Path,
    inserted_in: Callable[[Mapping[str, Any]], int] = inserted_by_guess,
    num_tokens: Callable[[str], int] = num_characters,
    num_devices: int = 2,
) -> None:
    """Compare the token counts of a run without lost workers that has kept all samples with its
    texts and with its engines' own counts. `inserted_in`: of a sample, known from its texts;
    `num_tokens`: of a text; `num_devices`: workers on the CPU count as one each."""
    samples, metrics = lines_of(folder / "samples.jsonl"), lines_of(folder / "metrics.jsonl")
    num_generated, num_read, totals = 0, 0, Counter[str]()
    for line in metrics:
        own = [each for each in samples if each["iteration"] == line["iteration"]]
        inserted = [inserted_in(sample) for sample in own]
        sampled = [
            num_tokens(sample["raw"][1]) - number
            for sample, number in zip(own, inserted, strict=True)
        ]
        assert [sample["inserted_tokens"] for sample in own] == inserted
        assert [sample["length"] for sample in own] == sampled
        assert line["completions/mean_length"] == pytest.approx(sum(sampled) / len(sampled))
        assert line["completions/min_length"] == min(sampled)
        assert line["completions/max_length"] == max(sampled)
        mean_inserted = line["completions/mean_inserted_length"]
        assert mean_inserted == pytest.approx(sum(inserted) / len(inserted))
        rate = sum(sampled) / line["perf/iteration_seconds"]
        assert line["perf/tokens_per_second"] == pytest.approx(rate)
        num_generated += sum(sampled)
        num_read += sum(num_tokens(sample["raw"][0]) for sample in own)
        totals["completion_tokens"] += sum(sampled)  # no group was rejected
        totals["inserted_tokens"] += sum(inserted)
        totals["trainer_tokens"] = totals["completion_tokens"] + totals["inserted_tokens"]
        assert {name: line[f"num_{name}"] for name in totals} == totals
        assert line["num_generated_tokens"] == num_generated
        assert line["num_tokens"] == num_read + num_generated
    assert totals["inserted_tokens"] > 0
    summary = summary_of(folder)
    assert {name: summary[name] for name in totals} == totals
    assert summary["generated_tokens"] == num_generated == num_sampled_by_engines(folder)
    seconds = sum(line["perf/iteration_seconds"] for line in metrics)
    per_device = num_generated / seconds / num_devices
    assert summary["tokens_per_second_per_device"] == pytest.approx(per_device)


def num_sampled_by_engines(folder: Path) -> int:
    """Sum what the rollout workers of a run have reported that their engines sampled."""
    return sum(
        event.event.num_tokens
        for event in RunFiles(folder).read()
        if isinstance(event, events.FromWorker)
        and isinstance(event.event, events.Activity)
        and event.worker.startswith("rollout")
    )


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_timing(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def bits_of(folder: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the results that must be equal in two runs, also if one of them lost workers."""
    names = "weights_sha256", "accuracy_before", "accuracy_after", "groups_trained", "iterations"
    names += "completion_tokens", "trainer_tokens", "generated_tokens"
    names += "policy_version", "rewards"
    summary, samples = summary_of(folder), folder / "samples.jsonl"
    metrics = [without_timing(line) for line in lines_of(folder / "metrics.jsonl")]
    kept = lines_of(samples) if samples.exists() else []
    # Groups are written as they finish. The samples of a group keep their order.
    kept.sort(key=lambda line: (line["iteration"], line["prompt_index"]))
    return [summary[name] for name in names], metrics, kept


def both_schedules(folder: Path, *words: str, delays: str = "0.02", **how: Any) -> Path:
    """Compare a run of each schedule in deterministic mode, the periodic one with random delays in
    engine, rewards, ring and trainer: they end in the same bits. Return the folder of that one."""
    for schedule, seconds in (("sync", "0"), ("periodic", delays)):
        own = "--output", str(folder / schedule), "--schedule", schedule, "--no-live"
        how["EASYRL_RANDOM_DELAYS"] = seconds
        succeed(*words, *own, "runtime.deterministic=true", **how)
    assert bits_of(folder / "sync") == bits_of(folder / "periodic")
    return folder / "periodic"


def assert_on_policy(folder: Path, most: float = 1e-4) -> dict[str, Any]:
    """Return the summary of the run. `most`: nats between engine and trainer."""
    summary = summary_of(folder)
    assert summary["groups_off_policy"] == 0
    assert summary["sampling_logp_difference_max"] < most
    return summary


def wait_for_line(process: subprocess.Popen[str], text: str, timeout: float = WAIT_SECONDS) -> None:
    """Wait until the program prints a line with `text`. If it prints nothing at all, the limit of
    the test ends the wait."""
    assert process.stdout is not None
    deadline = time.monotonic() + timeout
    for line in process.stdout:
        if text in line:
            return
        assert time.monotonic() < deadline, f"no line with '{text}' in time"
    raise AssertionError(f"the run ended before a line with '{text}'")


def wait_until(
    is_so: Callable[[], Any],
    process: subprocess.Popen[str] | None = None,
    seconds: float = WAIT_SECONDS,
) -> Any:
    """Wait until `is_so()` is true, and return its value. `process` must not end meanwhile."""
    deadline = time.monotonic() + seconds
    while not (value := is_so()):
        assert time.monotonic() < deadline, "not in time"
        assert process is None or process.poll() is None, "the process has ended"
        time.sleep(0.01)
    return value


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def workers(pid: int) -> dict[str, psutil.Process]:
    """The rollout and train workers of a run that have started, by name."""
    names = dict[int, str]()
    parents = dict[int, int]()
    found = dict[str, psutil.Process]()
    processes = {process.pid: process for process in descendants(pid)}
    for number, process in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            parents[number] = process.ppid()
            names[number] = process.name()
    for number, name in names.items():
        # A process that a worker has just forked still has its name.
        is_fork = names.get(parents[number]) == name
        if name.startswith(("rollout-", "train-")) and not is_fork:
            found[name] = processes[number]
    return found


def kill_worker(process: subprocess.Popen[str], name: str = "rollout-0") -> None:
    workers(process.pid)[name].kill()


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped. (Other runs have files there, too.) A
    semaphore is mapped under another name, so inodes are compared."""
    used = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            used |= {line.split()[4] for line in lines if "/dev/shm/" in line}
    return {Path(file.path) for file in os.scandir("/dev/shm") if str(file.inode()) in used}


def wait_until_gone(
    processes: list[psutil.Process], seconds: float = WAIT_SECONDS
) -> list[psutil.Process]:
    """Return those still running after `seconds`. A zombie, whose parent may be dead, is gone."""
    deadline = time.monotonic() + seconds
    while left := [each for each in processes if _runs(each)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return []


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
