"""Runs that lose rollout workers: the same bits in deterministic mode, and no group lost."""

import random
import time

import pytest

from runs import (
    SMALL,
    finish,
    lines_of,
    start,
    summary_of,
    wait_for_line,
    without_timing,
    workers,
)

ITERATIONS = 6
WORDS = (
    *SMALL,
    *("--infer-devices", "cpu:2", "--iterations", str(ITERATIONS), "--no-live"),
    *("runtime.deterministic=true", "rollout.max_completion_length=48", "train.eval_every=3"),
    *("train.learning_rate=1e-3", "train.prompts_per_iteration=6"),
    "rollout.max_concurrent_groups=2",
)
WAYS = {
    "plain": (),
    "replaced groups, two updates": (
        *("algorithm.dynamic_sampling=true", "train.updates_per_iteration=2"),
        "algorithm.beta=0.04",
    ),
}
DELAYS = {"EASYRL_RANDOM_DELAYS": "0.05"}
"""Iterations take about a second, most of it in the rollout workers."""


def bits_of(folder):
    """Return results that are equal in equal runs, whatever they lost."""
    metrics = [without_timing(line) for line in lines_of(folder / "metrics.jsonl")]
    names = "weights_sha256", "accuracy_before", "accuracy_after", "groups_trained", "iterations"
    summary = summary_of(folder)
    return [summary[name] for name in names], metrics, lines_of(folder / "samples.jsonl")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Bits of a run with these words that loses nothing; made once for all tests of this file."""
    known = {}

    def run(*words):
        if words not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            code, _, err = finish("--output", str(folder), *WORDS, *words)
            assert (code, err) == (0, "")
            assert summary_of(folder)["worker_restarts"] == 0
            known[words] = bits_of(folder)
        return known[words]

    return run


@pytest.mark.parametrize(
    ("seed", "way"),
    [
        (1, "replaced groups, two updates"),
        *(pytest.param(seed, way, marks=pytest.mark.long) for way in WAYS for seed in range(2, 5)),
    ],
)
def test_a_run_that_lost_a_worker_ends_in_the_same_bits(tmp_path, undisturbed, seed, way):
    """A rollout worker is killed at a random moment of the first iterations."""
    folder, draw = tmp_path / "run", random.Random(seed)
    process = start("--output", str(folder), *WORDS, *WAYS[way], **DELAYS)
    wait_for_line(process, "held-out accuracy", timeout=600)  # the workers have started
    number, seconds = draw.randrange(2), draw.uniform(0.0, ITERATIONS / 2)
    time.sleep(seconds)
    workers(process.pid)[f"rollout-{number}"].kill()
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
    assert summary_of(folder)["worker_restarts"] == 1
    assert bits_of(folder) == undisturbed(*WAYS[way])


POINTS = {
    "in the first broadcast": "rollout-1@weights:0",
    "in a later broadcast": "rollout-0@weights:2",
    "both in one iteration": "rollout-0@iteration:1,rollout-1@iteration:1",
    "in an evaluation": "rollout-0@evaluation:4",
    "one after the other": "rollout-0@evaluation:0,rollout-1@iteration:0",
}


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_lost_at_this_point_changes_no_bit(tmp_path, undisturbed, point):
    folder, points = tmp_path / "run", POINTS[point]
    code, _, err = finish("--output", str(folder), *WORDS, altered=True, LOSE=points)
    assert (code, err) == (0, "")
    assert summary_of(folder)["worker_restarts"] == len(points.split(","))
    assert bits_of(folder) == undisturbed()
