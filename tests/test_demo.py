"""The demo with its defaults, as `make demo` runs it: minutes, so `make test-long`."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import finish, lines_of, summary_of, without_timing

pytestmark = pytest.mark.long


LORA = ("--config", str(Path(__file__).parent.parent / "configs" / "lora.yaml"))


@pytest.mark.parametrize("words", [(), LORA], ids=["full", "lora"])
@pytest.mark.parametrize("seed", [0, 1])
def test_demo_learns(tmp_path: Path, words: tuple[str, ...], seed: int) -> None:
    folder = tmp_path / "run"
    code, _, err = finish(*words, "--output", str(folder), "--seed", str(seed), timeout=600)
    assert (code, err) == (0, "")
    summary = summary_of(folder)
    assert 0.2 <= summary["accuracy_before"] <= 0.6
    assert summary["accuracy_after"] >= 0.85
    assert summary["reward_last"] >= 0.9
    assert summary["updates_not_finite"] == 0
    assert summary["sampling_logp_difference_max"] <= 1e-4


def test_demo_learns_while_it_loses_a_worker_in_every_fifth_iteration(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--output", str(folder), "--infer-devices", "cpu:2", "runtime.max_restarts=1000")
    points = "rollout-0@iteration:4:10,rollout-1@iteration:9:10"
    code, _, err = finish(*words, timeout=1200, altered=True, LOSE=points)
    assert (code, err) == (0, "")
    summary = summary_of(folder)
    assert summary["worker_restarts"] == summary["iterations"] // 5
    assert summary["accuracy_after"] >= 0.9
    assert summary["groups_off_policy"] == summary["updates_not_finite"] == 0


@pytest.mark.parametrize("num_updates", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("num_rollout_workers", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_demo_is_the_same_run_under_both_schedules(
    tmp_path: Path, seed: int, num_rollout_workers: int, beta: float, num_updates: int
) -> None:
    ends = []
    for schedule in ("sync", "periodic"):
        folder = tmp_path / schedule
        code, _, err = finish(
            *("--output", str(folder), "--iterations", "10", "--schedule", schedule),
            *("--seed", str(seed), "--infer-devices", f"cpu:{num_rollout_workers}"),
            *(f"algorithm.beta={beta}", f"train.updates_per_iteration={num_updates}"),
            *("runtime.deterministic=true", "data.num_held_out=16"),
            timeout=600,
            EASYRL_RANDOM_DELAYS="0.01",
        )
        assert (code, err) == (0, "")
        metrics = [without_timing(line) for line in lines_of(folder / "metrics.jsonl")]
        assert ("kl" in metrics[-1]) == (beta > 0)
        summary = summary_of(folder)
        assert summary["policy_version"] == 10 * num_updates
        assert summary["updates_not_finite"] == 0
        ends.append((summary["weights_sha256"], metrics))
    assert ends[0] == ends[1]
