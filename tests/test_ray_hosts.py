"""Runs on Ray hosts with addresses of their own (`ray_hosts`), and a host that is lost."""

import random
import time

import pytest
from ray_hosts import Host, Hosts, unsupported_reason
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
    *("rollout.max_concurrent_groups=2", "runtime.timeout_seconds=60", "train.save_every=1"),
)
RAY = ("--infer-devices", "ray:cpu:2", "--train-devices", "ray:cpu:1")
LONGEST_SECONDS = 180.0  # of a run, after a kill too
LEAVING_SECONDS = 15.0
ACTOR = "ray::WorkerHost"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Bits of the run on one machine, without Ray."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, _, err = finish("--output", str(folder), *WORDS, "--infer-devices", "cpu:2")
    assert (code, err) == (0, "")
    return bits_of(folder)


def kill_raylet(host):
    (raylet,) = host.named("raylet")
    raylet.kill()


def cut_off(host):
    host.ip("link set eth0 down")


@pytest.mark.parametrize("lose", [None, Host.kill, cut_off])
def test_a_lost_host_changes_no_bit(tmp_path, undisturbed, lose):
    """Without a loss: workers listen on their hosts' addresses alone."""
    folder = tmp_path / "run"
    with Hosts(3, num_cpus=3) as hosts:
        process = hosts.start("--output", str(folder), *WORDS, *RAY)
        wait_for_line(process, "iteration 2/")
        trainer = hosts.host_of("train-0")
        (other,) = (host for host in hosts.nodes if host is not trainer)
        assert trainer.workers() and other.workers()
        if lose is not None:
            lose(other)
        for host in hosts.nodes if lose is None else ():
            every = [
                process for own in host.workers().values() for process in (own, *own.children())
            ]
            assert set[str]().union(*map(host.listening, every)) <= {host.address}
        _, err = process.communicate(timeout=LONGEST_SECONDS)
        assert (process.returncode, err) == (0, "")
    assert summary_of(folder)["worker_restarts"] == int(lose is not None)
    assert summary_of(folder)["groups_trained"] == 6 * ITERATIONS
    assert bits_of(folder) == undisturbed


def test_a_lost_trainer_restarts_the_run_where_there_is_room(tmp_path, undisturbed):
    with Hosts(3, num_cpus=3) as hosts:
        words = ("--output", str(tmp_path / "run"), *WORDS, *RAY, "runtime.restart=on_failure")
        process = hosts.start(*words)
        wait_for_line(process, "iteration 2/")
        kill_raylet(hosts.host_of("train-0"))
        process.communicate(timeout=LONGEST_SECONDS)
        assert process.returncode == 0
    assert bits_of(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("seed", range(20))
def test_a_random_kill_leaves_no_process_and_the_run_finishes_or_resumes(
    tmp_path, undisturbed, seed
):
    draw = random.Random(seed)
    victim = draw.choice(["driver", "raylet", ACTOR])
    moments = ["importing", "loading", "held-out", *(f"iteration {n}/" for n in range(1, 6))]
    words = ("--output", str(tmp_path / "run"), *WORDS, *RAY)
    with Hosts(3, num_cpus=3) as hosts:
        process = hosts.start(*words)
        wait_for_line(process, draw.choice(moments))
        time.sleep(draw.uniform(0.0, 1.0))
        found = [p for node in hosts.nodes for p in node.named(victim)]
        if victim == "driver":
            found = [p for p in hosts.head.processes() if "grpo" in p.cmdline()][:1]
        draw.choice(found).kill()
        _, err = process.communicate(timeout=LONGEST_SECONDS)
        left = [p for host in hosts.all for p in [*host.named(ACTOR), *host.workers().values()]]
        assert wait_until_gone(left, LEAVING_SECONDS) == []
        if process.returncode != 0:
            assert err or victim == "driver"
            process = hosts.start(*words, "runtime.resume=auto")
            process.communicate(timeout=LONGEST_SECONDS)
            assert process.returncode == 0
    assert bits_of(tmp_path / "run") == undisturbed
