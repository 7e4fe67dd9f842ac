"""Kill or stop random processes of small runs at random moments, and check what is left.

    python tests/chaos.py --trials 100 --seed 1            # exit code 1 if any trial failed
    python tests/chaos.py --trials 100 --seed 1 --only 17  # one of them

Each trial is one `easyrl grpo` on the CPU with two rollout workers, and one SIGKILL, or SIGSTOP and
later SIGCONT. Its victim, action and moment follow from the seed and its number: a quarter of the
moments are spread over the start of the workers, the others over the rest of the life of an
undisturbed run, which is measured first. A run that loses a process of MUST_FINISH has to finish;
any other has to be resumable, and is resumed. All end with the weights of an undisturbed run. Runs
whose victim is an environment or the controller play a game.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil

from easyrl.environments import host
from easyrl.processes import REWARD_PROCESS
from runs import SMALL, command, lines_of, shared_memory, summary_of

ITERATIONS, PROMPTS, GENERATIONS = 12, 4, 4
STALL_SECONDS, TIMEOUT_SECONDS = 25.0, 20.0
SETTINGS = (
    *SMALL,
    *("--infer-devices", "cpu:2", "--iterations", str(ITERATIONS), "--no-live"),
    *("train.eval_every=3", "train.save_every=3", "rollout.max_completion_length=48"),
    *("runtime.deterministic=true", "train.learning_rate=1e-3"),
    *(f"runtime.stall_seconds={STALL_SECONDS}", f"runtime.timeout_seconds={TIMEOUT_SECONDS}"),
)
GAME = (
    *("--model", "tiny-guess", "--dataset", "guess", "--environment", "guess"),
    "rollout.max_completion_length=80",
)
DELAYS = {"EASYRL_RANDOM_DELAYS": "0.04"}
"""Other timings in each trial, and iterations that take long beside the start of the workers."""

VICTIMS = {"rollout": 4, "reward": 2, "train": 2, "controller": 2, "environment": 2}
VICTIMS["fork server"] = 1
"""Kinds of processes, and how often each is chosen."""
STARTUP = 0.25
MUST_FINISH = ("rollout", "reward", "environment")
PHASES = ("startup", "weights", "generate/train", "checkpoint", "evaluation", "saving")
LEAVING_SECONDS = 10.0
"""After the end of a run, or of its controller, all other processes are gone."""


@dataclass(frozen=True)
class Plan:
    victim: str
    number: int  # among the processes of this kind
    moment: float  # less than STARTUP: within the start; 1: the end
    stop_seconds: float  # 0: SIGKILL

    @classmethod
    def of_trial(cls, seed, trial):
        draw = random.Random(f"{seed}/{trial}")
        (victim,) = draw.choices(list(VICTIMS), list(VICTIMS.values()))
        number, moment, stop_seconds = draw.randrange(12), draw.random(), 0.0
        if draw.random() < 0.4:
            stop_seconds = draw.uniform(0.5, 4.0)
            if draw.random() < 0.25 and victim not in ("reward", "environment"):  # have time limits
                stop_seconds = STALL_SECONDS + 5.0
        return cls(victim, number, moment, stop_seconds)

    @property
    def words(self):
        return GAME if self.victim in ("environment", "controller") else ()

    @property
    def action(self):
        if not self.stop_seconds:
            return "killed"
        return "stopped past the limit" if self.stop_seconds > STALL_SECONDS else "stopped"


@dataclass
class Outcome:
    plan: Plan
    phase: str = "startup"
    has_resumed: bool = False
    num_restarts: int = 0
    problem: str = ""

    def __str__(self):
        ending = "resumed" if self.has_resumed else "finished"
        replaced = f", {self.num_restarts} replaced" if self.num_restarts else ""
        result = f"FAILED: {self.problem}" if self.problem else ending + replaced
        return f"{self.plan.victim} {self.plan.action} in {self.phase}: {result}"


class Run:
    """One `easyrl grpo` with a mark in the environment of all its processes."""

    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.folder, self.output, self.temporary = folder, folder / "run", folder / "tmp"
        self.temporary.mkdir()
        self.mark = f"EASYRL_CHAOS={folder.name}-{random.randbytes(8).hex()}"
        self.shared_memory: set[Path] = set()

    def start(self, name, *words):
        private = dict.fromkeys(("TMPDIR", "XDG_RUNTIME_DIR"), str(self.temporary))
        private["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "torch")  # not in TMPDIR
        mark, _, value = self.mark.partition("=")
        self.err = self.folder / f"{name}.err"
        with (self.folder / f"{name}.out").open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command("--output", str(self.output), *SETTINGS, *words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **DELAYS, **private, mark: value},
            )

    def wait(self, seconds):
        """Wait at most `seconds` for the end of the run; note its shared memory meanwhile."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.shared_memory |= shared_memory(self.processes())
            time.sleep(max(0.0, min(0.2, deadline - time.monotonic())))
        return self.process.poll() is not None

    def processes(self):
        """Every process of the run that has not ended, orphans too."""
        found, mark = [], self.mark.encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(psutil.Process(int(entry.name)))
        return found

    def victims(self, kind):
        if kind == "controller":
            return [psutil.Process(self.process.pid)]
        start = {"environment": host.PROCESS_NAME, "reward": REWARD_PROCESS}.get(kind, f"{kind}-")
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                is_server = kind == "fork server" and "fork_server" in " ".join(process.cmdline())
                if process.name().startswith("python" if is_server else start):
                    found.append((process.create_time(), process.pid, process))
        return [process for *_, process in sorted(found, key=lambda each: each[:2])]

    def check_leftovers(self):
        def left():
            return [*self.processes(), *(path for path in self.shared_memory if path.exists())]

        deadline = time.monotonic() + LEAVING_SECONDS
        while left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not (found := left()), f"left: {found}"

    def check_files(self):
        """Each iteration, group and sample is there once; return the digest of the weights."""
        summary, lines = summary_of(self.output), lines_of(self.output / "metrics.jsonl")
        iterations = [line["iteration"] for line in lines]
        every = range(1, ITERATIONS + 1)
        assert iterations == [*every], f"iterations in metrics.jsonl: {iterations}"
        expected = {"groups_trained": ITERATIONS * PROMPTS, "groups_off_policy": 0}
        expected |= {"iterations": ITERATIONS, "policy_version": ITERATIONS}
        got = {name: summary[name] for name in expected}
        assert got == expected, f"expected {expected}, got {got}"
        samples = Counter(line["iteration"] for line in lines_of(self.output / "samples.jsonl"))
        expected = dict.fromkeys(every, GENERATIONS)
        assert samples == expected, f"samples by iteration: {dict(samples)}"
        files = self.output.rglob("*")
        left = [path for path in files if path.is_socket() or path.name.endswith(".unfinished")]
        left += self.temporary.iterdir()
        assert not left, f"left: {left}"
        return summary["weights_sha256"]

    def kill(self):
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class Baseline(NamedTuple):
    """Times of an undisturbed run in seconds, and its result."""

    total: float
    ready: float  # the workers have started
    weights_sha256: str


def measure(folder, jobs, words):
    """Measure undisturbed runs, as many at a time as there will be trials."""
    runs = [Run(folder / f"undisturbed-{len(words)}-{n}") for n in range(jobs)]
    try:
        for run in runs:
            run.start("run", *words)
        times = []
        for run in runs:
            run.wait(300.0)
            assert run.process.poll() == 0, f"an undisturbed run failed: see {run.folder}"
            run.check_leftovers()
            weights_sha256 = run.check_files()
            assert any(line["grad_norm"] for line in lines_of(run.output / "metrics.jsonl"))
            began, ready, ended = trace_times(run.output)
            times.append(Baseline(ended - began, ready - began, weights_sha256))
    finally:
        for run in runs:
            run.kill()
    return min(times)


def run_trial(plan, folder, baseline):
    """Run, act, and check. If the run ended before the moment, the moment is put forward."""
    outcome, run = Outcome(plan), Run(folder)
    limit = 4 * baseline.total + plan.stop_seconds + STALL_SECONDS + 2 * TIMEOUT_SECONDS
    try:
        run.start("run", *plan.words)
        if (acted := _act(run, plan, baseline)) is not None:
            _check(run, outcome, acted, limit)
            assert run.check_files() == baseline.weights_sha256, "other weights"
    except AssertionError as error:
        outcome.problem = str(error)
        return outcome
    finally:
        run.kill()
    shutil.rmtree(folder)
    if acted is None:
        return run_trial(replace(plan, moment=plan.moment * 0.75), folder, baseline)
    return outcome


def _act(run, plan, baseline):
    """Kill or stop the victim at its moment; returns the time, or None if the run has ended."""
    if plan.moment < STARTUP:
        run.wait(plan.moment / STARTUP * baseline.ready)
    else:  # starting takes longer on a busy machine
        while not any(line["ph"] == "B" for line in _trace(run.output)) and not run.wait(0.05):
            pass
        part = (plan.moment - STARTUP) / (1.0 - STARTUP)
        run.wait(part * (baseline.total - baseline.ready))
    while run.process.poll() is None:
        if victims := run.victims(plan.victim):
            victim = victims[plan.number % len(victims)]
            try:
                victim.send_signal(signal.SIGSTOP if plan.stop_seconds else signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
            acted = time.time()
            if plan.stop_seconds:
                run.wait(plan.stop_seconds)
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(signal.SIGCONT)
            return acted
        time.sleep(0.02)
    return None


def _check(run, outcome, acted, limit):
    plan, has_ended = outcome.plan, run.wait(limit)
    outcome.phase = phase_at(run.output, acted)
    assert has_ended, f"no end after {limit:.0f} s"
    run.check_leftovers()
    if (code := run.process.returncode) != 0:
        error = run.err.read_text().strip()[-300:]
        assert plan.victim not in MUST_FINISH, f"exit code {code}: {error}"
        assert code != 1 or error, "the run failed without a message"
        outcome.has_resumed = True
        run.start("resumed", *plan.words, "runtime.resume=auto")
        assert run.wait(limit), f"resumed: no end after {limit:.0f} s"
        run.check_leftovers()
        code, error = run.process.returncode, run.err.read_text()[-300:]
        assert code == 0, f"resumed: exit code {code}: {error}"
    outcome.num_restarts = summary_of(run.output).get("worker_restarts", 0)
    if not outcome.has_resumed:
        is_lost = plan.victim == "rollout" and plan.action != "stopped"
        is_needed = plan.action == "killed" and outcome.phase in PHASES[:3]  # to the run's end
        low, high = int(is_lost and is_needed), int(is_lost)
        wrong = f"{outcome.num_restarts} workers replaced, expected {low} to {high}"
        assert low <= outcome.num_restarts <= high, wrong


def _trace(output):
    """The trace's lines by time, without one that is cut off."""
    found, file = [], output / "trace.json"
    for line in file.read_text().splitlines()[1:] if file.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line.rstrip(",")))
    return sorted(found, key=lambda line: line["ts"])


def trace_times(output):
    """Unix times of a run's start, of its first evaluation or iteration, and of its end."""
    lines = [line for line in _trace(output) if line["ph"] != "M"]
    ready = next(line["ts"] for line in lines if line["ph"] == "B")
    return lines[0]["ts"] / 1e6, ready / 1e6, lines[-1]["ts"] / 1e6


def phase_at(output, moment):
    """Return the phase of the run at this Unix time."""
    phase = "startup"
    for line in _trace(output):
        name, began = line["name"], line["ts"] / 1e6
        if name == "CheckpointSaved":
            seconds = line["args"]["event"]["seconds"]
            if began - seconds <= moment <= began:
                return "checkpoint"
        if line["ph"] == "X" and name == "weights" and began <= moment <= began + line["dur"] / 1e6:
            return "weights"
        if began > moment:
            continue
        if line["ph"] == "B":
            phase = {"iteration": "weights"}.get(name, name)
        elif line["ph"] == "X" and name in ("prefill", "generate") and phase == "weights":
            phase = "generate/train"
        elif name == "RunFinished":
            phase = "saving"
    return phase


def main(words=None):
    parser = argparse.ArgumentParser(prog="python tests/chaos.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--only", type=int, help="run this trial alone")
    parser.add_argument("--folder", type=Path, help="where runs are kept that failed")
    arguments = parser.parse_args(words)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="easyrl-chaos-"))
    numbers = range(arguments.trials) if arguments.only is None else [arguments.only]
    plans = {n: Plan.of_trial(arguments.seed, n) for n in numbers}
    jobs = min(arguments.jobs, len(plans))
    baselines = {
        words: measure(folder, jobs, words) for words in {plan.words for plan in plans.values()}
    }
    print(f"undisturbed: {[*baselines.values()]}")

    def one(number):
        plan = plans[number]
        outcome = run_trial(plan, folder / f"trial-{number}", baselines[plan.words])
        print(f"trial {number}: {outcome}", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        outcomes = dict(zip(plans, pool.map(one, plans), strict=True))
    failed = [number for number, outcome in outcomes.items() if outcome.problem]
    for number in failed:
        again = f"python tests/chaos.py --seed {arguments.seed} --only {number}"
        print(f"trial {number} failed, files in {folder}/trial-{number}. To repeat it: {again}")
    if not failed:
        shutil.rmtree(folder)
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} trials passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
