"""Runs on Ray hosts with addresses of their own (`ray_hosts`), and a host that is lost."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_hosts import Host, Hosts, bridge, unsupported_reason
from test_lost_workers import bits_of

from runs import SMALL, finish, summary_of, wait_for_line, wait_until_gone

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason()),
]

ITERATIONS = 6
WORDS = (
    *SMALL,
    *("--iterations", str(ITERATIONS), "--no-live", "devices.threads=1"),
    *("runtime.deterministic=true", "rollout.max_completion_length=48", "train.eval_every=3"),
    *("train.learning_rate=1e-3", "train.prompts_per_iteration=6"),
    *("rollout.max_concurrent_groups=2", "runtime.timeout_seconds=60"),
)
LONGEST_SECONDS = 180.0  # of a run, after a kill too
LEAVING_SECONDS = 15.0
ACTOR = "ray::WorkerHost"
KEPT = "sh", "sleep"  # of `Host`
AGENTS = "ray::DashboardAgent", "ray::RuntimeEnvAgent"
"""Ray's own: they try for a minute to report that their raylet is gone, and end."""
RAY = ("--infer-devices", "ray:cpu:2", "--train-devices", "ray:cpu:1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Bits of the run on one machine, without Ray."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, _, err = finish("--output", str(folder), *WORDS, "--infer-devices", "cpu:2")
    assert (code, err) == (0, "")
    return bits_of(folder)


class Run:
    """A run on the hosts' cluster."""

    def __init__(self, hosts: Hosts, folder: Path, *words: str) -> None:
        self.folder = folder
        self._process = hosts.start("--output", str(folder), *WORDS, *RAY, *words)
        self._output: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._output.append(line)

    def wait_for_iteration(self, number: int) -> None:
        """Wait until `number` iterations are over and the next one is going on."""
        self.wait_for_line(f"iteration {number}/")
        time.sleep(0.3)

    def wait_for_line(self, beginning: str) -> None:
        deadline = time.monotonic() + 120
        while not any(line.startswith(beginning) for line in self._output):
            assert self._process.poll() is None, "".join(self._output)
            assert time.monotonic() < deadline, "".join(self._output)
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns exit code and standard error."""
        code = self._process.wait(LONGEST_SECONDS)
        self._reader.join()
        assert self._process.stderr is not None
        err = self._process.stderr.read()
        print("".join(self._output), err)
        return code, err

    def finish(self, *, is_quiet: bool = True) -> None:
        """Wait for the end. `is_quiet`: expect nothing on standard error."""
        code, err = self.end()
        assert code == 0
        assert err == "" or not is_quiet
        assert summary_of(self.folder)["groups_trained"] == 6 * ITERATIONS


def test_workers_on_all_hosts_listen_on_the_hosts_addresses_alone(
    tmp_path: Path, undisturbed: tuple[Any, ...]
) -> None:
    with Hosts(3, num_cpus=3) as hosts:
        run = Run(hosts, tmp_path / "run")
        run.wait_for_iteration(1)
        workers = {host: host.workers() for host in hosts.nodes}
        assert all(workers.values())
        listening = {
            host.address: set[str]().union(*(host.listening(each) for each in own.values()))
            for host, own in workers.items()
        }
        run.finish()
        assert sorted(n for own in workers.values() for n in own) == [
            "rollout-0",
            "rollout-1",
            "train-0",
        ]
        assert all(found <= {address} for address, found in listening.items()), listening
        assert any(listening.values())
    assert bits_of(run.folder) == undisturbed


def kill_raylet(host: Host) -> None:
    (raylet,) = host.named("raylet")
    raylet.kill()


def cut_off(host: Host) -> None:
    host.ip("link set eth0 down")


@pytest.mark.parametrize("lose", [kill_raylet, Host.kill, cut_off])
def test_a_lost_host_changes_no_bit(
    tmp_path: Path, undisturbed: tuple[Any, ...], lose: Callable[[Host], None]
) -> None:
    with Hosts(3, num_cpus=3) as hosts:
        run = Run(hosts, tmp_path / "run")
        run.wait_for_iteration(2)
        trainer = hosts.host_of("train-0")
        (other,) = (host for host in hosts.nodes if host is not trainer)
        lost = list(other.workers().values())
        lose(other)
        run.finish()
        if lose is not cut_off:
            assert wait_until_gone(lost, LEAVING_SECONDS) == []
    assert summary_of(run.folder)["worker_restarts"] == 1
    assert bits_of(run.folder) == undisturbed


def test_a_run_finishes_on_a_slow_network(tmp_path: Path, undisturbed: tuple[Any, ...]) -> None:
    with Hosts(3, num_cpus=3, delay_seconds=0.05) as hosts:
        run = Run(hosts, tmp_path / "run")
        run.finish()
    assert bits_of(run.folder) == undisturbed


def test_a_lost_trainer_restarts_the_run_where_there_is_room(
    tmp_path: Path, undisturbed: tuple[Any, ...]
) -> None:
    with Hosts(3, num_cpus=3) as hosts:
        run = Run(hosts, tmp_path / "run", "runtime.restart=on_failure", "train.save_every=1")
        run.wait_for_iteration(2)
        kill_raylet(hosts.host_of("train-0"))
        run.finish(is_quiet=False)  # each restart is reported
    assert bits_of(run.folder) == undisturbed


def kill_driver(hosts: Hosts, draw: random.Random) -> None:
    drivers = [p for p in hosts.head.processes() if "grpo" in p.cmdline()]
    drivers[0].kill()


def kill_some_raylet(hosts: Hosts, draw: random.Random) -> None:
    kill_raylet(draw.choice(hosts.nodes))


def kill_actor(hosts: Hosts, draw: random.Random) -> None:
    actors = [p for node in hosts.nodes for p in node.named(ACTOR)]
    draw.choice(actors).kill()


@pytest.mark.parametrize("seed", range(20))
def test_a_random_kill_leaves_no_process_and_the_run_finishes_or_resumes(
    tmp_path: Path, undisturbed: tuple[Any, ...], seed: int
) -> None:
    draw = random.Random(seed)
    kill = draw.choice([kill_driver, kill_some_raylet, kill_actor])
    moments = ["importing", "loading", "held-out", *(f"iteration {n}/" for n in range(1, 6))]
    with Hosts(3, num_cpus=3) as hosts:
        run = Run(hosts, tmp_path / "run", "train.save_every=1")
        run.wait_for_line(draw.choice(moments))
        time.sleep(draw.uniform(0.0, 1.0))
        kill(hosts, draw)
        code, err = run.end()
        left = [p for host in hosts.all for p in [*host.named(ACTOR), *host.workers().values()]]
        assert wait_until_gone(left, LEAVING_SECONDS) == []
        if code != 0:
            assert err or kill is kill_driver
            run = Run(hosts, run.folder, "train.save_every=1", "runtime.resume=auto")
            run.finish()
        print(f"outcome {seed}: {kill.__name__}: exit code {code}")
    assert bits_of(run.folder) == undisturbed


def test_a_killed_driver_leaves_nothing_of_its_own_cluster(tmp_path: Path) -> None:
    host = Host(1)
    try:
        bridge([host])
        words = ("--output", str(tmp_path / "run"), *WORDS, "train.iterations=100", *RAY)
        process = host.popen(sys.executable, "-m", "easyrl", "grpo", *words, stdout=subprocess.PIPE)
        wait_for_line(process, "iteration 2/")
        (driver,) = (p for p in host.processes() if "grpo" in p.cmdline())
        others = [p for p in host.processes() if p.name() not in (*KEPT, *AGENTS)]
        driver.kill()
        assert wait_until_gone(others, LEAVING_SECONDS) == []
        process.communicate()
    finally:
        host.kill()
