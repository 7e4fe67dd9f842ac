"""Reward processes are forked from one that has imported what they need; none outlives a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from easyrl.rewards.scorer import Scorer
from runs import descendants, wait_until_gone
from scorers import Open, finished

OWN = """
import os, sys, time
import numpy as np

def parent(completions, **_):
    return [os.getppid()] * len(completions)

def process(completions, **_):
    time.sleep(0.2)
    return [os.getpid()] * len(completions)

def draw(completions, **_):
    return [np.random.random()] * len(completions)

def stuck(completions, **_):
    if completions[0] == "stuck":
        sum(range(10**12))  # holds Python's lock
    return [0.0] * len(completions)
"""
SCRIPT = """
import json, select, sys
from easyrl.config import load_config
from easyrl.rewards import scorer

def main():
    {before}
    functions = ["{own}:" + name for name in ("process", "draw", "parent", "stuck")]
    made = scorer.Scorer(load_config(None, {{"reward.functions": functions}}, {words}))
    for key in range(4):
        made.submit(key, "q", ["0"], [[1]], {{}})
    scored = []
    while len(scored) < 4:
        select.select([made], [], [])
        scored += made.finished()
    print(json.dumps([[score for (score,) in each.scores] for each in scored]), flush=True)
    if "{then}" == "close":
        made.close()
        return
    for key in range(4):
        made.submit(key, "q", ["stuck"], [[1]], {{}})
    select.select([], [], [])

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


@pytest.fixture
def open_scorer(own: Path, open_scorer: Open) -> Open:
    def make(*functions: str) -> Scorer:
        mine = [f"{own}:{function}" for function in functions]
        return open_scorer(*mine, reward__num_workers=2, reward__on_error="skip_group")

    return make


def scores(scorer: Scorer, calls: int) -> list[list[float | None]]:
    """What each of the functions gives, for so many calls."""
    for key in range(calls):
        scorer.submit(key, "q", ["2"], [[5]], {})
    scored: list[list[float | None]] = []
    for each in finished(scorer, calls):
        assert each.scores is not None, each.errors
        scored.append([score for (score,) in each.scores])
    return scored


@contextmanager
def started(own: Path, tmp_path: Path, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with a scorer of its own, which tells what four calls have given. Its end is waited
    for; where the test has failed, it is killed first."""
    script = tmp_path / "script.py"
    words = json.dumps(["reward.num_workers=2"])
    given = {"before": "pass", "then": "close", "environment": {}} | settings
    script.write_text(
        SCRIPT.format(own=own, words=words, before=given["before"], then=given["then"])
    )
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | given["environment"],
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def told_by(process: subprocess.Popen[str]) -> list[list[float]]:
    assert process.stdout is not None
    told: list[list[float]] = json.loads(process.stdout.readline())
    return told


def kill(pid: float | None, signum: signal.Signals = signal.SIGKILL) -> None:
    assert pid is not None
    process = psutil.Process(int(pid))
    assert os.getpid() in [parent.pid for parent in process.parents()]
    assert process.pid != os.getpid()
    process.send_signal(signum)


def test_all_are_forked_from_one_and_so_is_who_takes_the_place_of_another(
    open_scorer: Open,
) -> None:
    scorer = open_scorer("process", "parent")
    pids, parents = zip(*scores(scorer, 6), strict=True)
    assert len(set(pids)) == 2 and len(set(parents)) == 1
    template = psutil.Process(int(parents[0]))
    assert template.ppid() == os.getpid() and "forkserver" in " ".join(template.cmdline())
    kill(pids[0])
    again, parents_again = zip(*scores(scorer, 6), strict=True)
    assert pids[0] not in again and set(parents_again) == set(parents)


def test_a_template_that_is_lost_costs_nothing(open_scorer: Open) -> None:
    scorer = open_scorer("process", "parent")
    ((before, template),) = scores(scorer, 1)
    kill(template)
    assert not wait_until_gone([psutil.Process(int(before or 0))], 5)  # with it, by the kernel
    for pid, parent in scores(scorer, 4):
        assert pid != before and parent != template


def test_a_template_that_is_ended_is_followed_by_another(open_scorer: Open) -> None:
    """It has taken the folder of its socket along."""
    ((_, first),) = scores(open_scorer("process", "parent"), 1)
    kill(first, signal.SIGTERM)
    while psutil.Process(int(first or 0)).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    ((_, second),) = scores(open_scorer("process", "parent"), 1)
    assert second not in (first, os.getpid())


def test_all_draw_numbers_of_their_own(own: Path, tmp_path: Path) -> None:
    """Also where NumPy's generator was there, seeded, when they were forked."""
    before = 'scorer.slow_imports = lambda config: ["numpy.random"]'
    with started(own, tmp_path, before=before) as process:
        drawn = {pid: draw for pid, draw, *_ in reversed(told_by(process))}  # the first of each
    assert len(drawn) == 2 and len(set(drawn.values())) == 2


@pytest.mark.parametrize("module", ["token", "pebble"])
def test_nothing_in_the_working_folder_is_imported(module: str, own: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / f"{module}.py").write_text("open('it was', 'w')")
    before = f"import os; os.chdir({str(folder)!r})"
    with started(own, tmp_path, before=before) as process:
        assert len(told_by(process)) == 4
    assert not (folder / "it was").exists()


@pytest.mark.parametrize("error", ["RuntimeError", "ImportError", "SystemExit"])
def test_what_cannot_be_imported_is_told_by_the_call_that_needs_it(
    error: str, own: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    (folder / "math_verify").mkdir(parents=True)
    (folder / "math_verify" / "__init__.py").write_text(f"raise {error}('as I like')")
    before = f"""sys.path.insert(0, {str(folder)!r})
    config = load_config(None, {{"reward.functions": ["math"]}}, ["reward.on_error=zero"])
    made = scorer.Scorer(config)
    made.submit(0, "q", ["0"], [[1]], {{"answer": "0"}})
    select.select([made], [], [])
    print(json.dumps(made.finished()[0].errors), flush=True)
    made.close()
    return"""
    with started(own, tmp_path, before=before) as process:
        (told,) = told_by(process)
    assert "reward 'math' failed" in str(told) and "as I like" in str(told)


def test_without_a_template_each_imports_for_itself(open_scorer: Open) -> None:
    """Its socket is gone: some clean up old temporary files in the midst of a run."""
    scorer = open_scorer("process", "parent")
    ((before, template),) = scores(scorer, 1)
    Path(forkserver._forkserver._forkserver_address).unlink()  # type: ignore[attr-defined]
    kill(before)
    time.sleep(0.5)  # the pool has noticed
    for pid, parent in scores(scorer, 4):
        assert pid != before and parent == os.getpid()
    kill(template)  # the next scorer has another


WAYS = {
    "forked": {},
    "spawned, as a socket's path would be too long": {"environment": {"TMPDIR": "{long}"}},
}


@pytest.mark.parametrize("way", WAYS)
def test_all_end_with_who_started_them_though_it_is_killed_and_they_are_stuck(
    way: str, own: Path, tmp_path: Path
) -> None:
    long = tmp_path / ("long" * 25)
    long.mkdir()
    settings: dict[str, Any] = json.loads(json.dumps(WAYS[way]).replace("{long}", str(long)))
    with started(own, tmp_path, then="stay", **settings) as process:
        told = told_by(process)
        time.sleep(0.5)  # they are stuck by now
        all_processes = descendants(process.pid)
        parents = {int(parent) for *_, parent, _ in told}
        process.kill()
    assert (parents == {process.pid}) == way.startswith("spawned")
    assert {int(pid) for pid, *_ in told} <= {each.pid for each in all_processes}
    assert not wait_until_gone(all_processes, 5)


def test_a_template_that_is_stuck_in_an_import_ends_with_who_started_it(
    own: Path, tmp_path: Path
) -> None:
    """Before it waits for its parent's end, the kernel tells it."""
    is_stuck = tmp_path / "is stuck"
    code = f"import time; open({str(is_stuck)!r}, 'w'); time.sleep(600)"
    (tmp_path / "stuck_import.py").write_text(code)
    before = f"""sys.path.insert(0, {str(tmp_path)!r})
    scorer.slow_imports = lambda config: ["stuck_import"]
    made = scorer.Scorer(load_config(None, {{}}, []))
    print("[[]]", flush=True)
    select.select([], [], [])"""
    with started(own, tmp_path, before=before) as process:
        told_by(process)
        latest = time.monotonic() + 30
        while not is_stuck.exists():
            assert time.monotonic() < latest
            time.sleep(0.01)
        templates = descendants(process.pid)
        process.kill()
    left = wait_until_gone(templates, 5)
    for each in left:
        each.kill()
    assert not left


@pytest.mark.parametrize(
    ("victims", "signum"),
    [("parent", signal.SIGKILL), ("parent", signal.SIGTERM), ("all", signal.SIGTERM)],
)
def test_the_folder_of_the_socket_goes_with_whoever_is_ended(
    victims: str, signum: signal.Signals, own: Path, tmp_path: Path
) -> None:
    with TemporaryDirectory(dir="/tmp") as name:  # in pytest's a socket's path may be too long
        folder = Path(name)
        settings: dict[str, Any] = {"environment": {"TMPDIR": name}}
        with started(own, tmp_path, then="stay", **settings) as process:
            told_by(process)
            assert len(list(folder.glob("easyrl-*/*"))) == 1
            processes = descendants(process.pid)
            for each in processes if victims == "all" else []:
                each.send_signal(signum)
            process.send_signal(signum)
        assert not wait_until_gone(processes, 5)
        assert not list(folder.iterdir())
