"""The processes of agents: what they leave, and what is known of one that has failed."""

import shlex
import sys
from contextlib import closing
from pathlib import Path

import pytest

from easyrl.agents.pool import AgentPool
from easyrl.config import load_config
from easyrl.environments.host_pool import CallFailed
from easyrl.runtime.resolve import resolve
from runs import wait_until

NUM_EPISODES = 20
LEAVES = """
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path({folder!r})


def start(name):
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (FOLDER / f"{{name}}-{{process.pid}}").touch()
    code = (
        "import os, sys, pathlib\\n"
        "if os.fork(): sys.exit()\\n"
        "os.setsid()\\n"
        "pathlib.Path(sys.argv[1] + str(os.getpid())).touch()\\n"
        "os.execvp('sleep', ['sleep', '600'])\\n"
    )
    subprocess.run([sys.executable, "-c", code, str(FOLDER / f"{{name}}-daemon-")])
    time.sleep(0.05)  # the daemon has lost its parent


def solve(row):
    start("function")
    return 1.0


async def coroutine(row):
    process = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    (FOLDER / f"coroutine-{{process.pid}}").touch()
    return 1.0


if __name__ == "__main__":
    start("command")
    print(1.0)
"""


def results_of(agent, num_episodes, row=None):
    """Run an agent in its pool; return the futures of its episodes."""
    config = load_config(None, {"rollout.agent": agent})
    with closing(AgentPool(resolve(config).episodes, {})) as pool:
        pool.loaded()
        keys = [f"key-of-episode-{number}" for number in range(num_episodes)]
        futures = pool.run_agents((0, 0, 0), row or {}, "http://localhost", keys)
        wait_until(lambda: pool.poll() or all(future.done() for future in futures))
        yield from futures


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("kind", ["command", "function", "coroutine"])
def test_an_episode_leaves_no_process(kind, tmp_path):
    folder = tmp_path / "started"
    folder.mkdir()
    program = tmp_path / "own.py"
    program.write_text(LEAVES.format(folder=str(folder)))
    agents = {
        "command": f"{shlex.quote(sys.executable)} {program}",
        "function": f"{program}:solve",
        "coroutine": f"{program}:coroutine",
    }
    for number, future in enumerate(results_of(agents[kind], NUM_EPISODES)):
        assert future.result()[0] == 1.0
        if number == 0:  # its process still runs
            started = [int(file.name.rpartition("-")[2]) for file in folder.iterdir()]
            assert len(started) >= NUM_EPISODES
            assert not any(map(is_running, started))


def test_a_command_that_fails_shows_its_last_lines_and_its_row(tmp_path):
    program = tmp_path / "own.py"
    program.write_text("import sys\nfor n in range(50): print(n)\nsys.exit('no such room')")
    (future,) = results_of(f"{shlex.quote(sys.executable)} {program} {{room}}", 1, {"room": "R7"})
    error = str(future.exception())
    assert isinstance(future.exception(), CallFailed)
    assert "own.py R7" in error and "no such room" in error and "{'room': 'R7'}" in error


def test_a_command_that_never_ends_leaves_no_process_with_its_pool(tmp_path):
    program = tmp_path / "own.py"
    lines = [
        "import pathlib, subprocess, time",
        'child = subprocess.Popen(["sleep", "600"], start_new_session=True)',
        f"pathlib.Path({str(tmp_path)!r}, 'started').write_text(str(child.pid))",
        "time.sleep(600)",
    ]
    program.write_text("\n".join(lines))
    agent = f"{shlex.quote(sys.executable)} {program}"
    config = load_config(None, {"rollout.agent": agent})
    with closing(AgentPool(resolve(config).episodes, {})) as pool:
        pool.loaded()
        pool.run_agents((0, 0, 0), {}, "http://localhost", ["key"])
        file = tmp_path / "started"
        wait_until(lambda: pool.poll() or (file.exists() and file.read_text()))
        assert is_running(int(file.read_text()))
    wait_until(lambda: not is_running(int(file.read_text())))
