"""Runs on Ray hosts with addresses of their own (`ray_hosts`), and a host that is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_hosts import Host, Hosts, unsupported_reason
from test_lost_workers import bits_of

from runs import SMALL, finish, summary_of, wait_until_gone

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
        self.folder, self._hosts = folder, hosts
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
        deadline = time.monotonic() + 120
        while not any(line.startswith(f"iteration {number}/") for line in self._output):
            assert self._process.poll() is None, "".join(self._output)
            assert time.monotonic() < deadline, "".join(self._output)
            time.sleep(0.05)
        time.sleep(0.3)

    def finish(self, *, is_quiet: bool = True) -> None:
        """Wait for the end. `is_quiet`: expect nothing on standard error."""
        self._process.wait(180)
        self._reader.join()
        assert self._process.stderr is not None
        err = self._process.stderr.read()
        print("".join(self._output), err)
        assert self._process.returncode == 0
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
            assert wait_until_gone(lost, 15) == []
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
