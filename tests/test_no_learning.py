"""A run that cannot learn says so once, with causes and the command that shows its samples."""

from pathlib import Path

import pytest

from easyrl.config import load_config
from easyrl.runtime.metrics import no_learning_warning

HEALTHY = {
    "reward": 0.5,
    "frac_reward_zero_std": 0.5,
    "completions/clipped_ratio": 0.1,
    "completions/mean_length": 40.0,
}


def warning(*changes):
    lines = [{"iteration": number, **HEALTHY, **each} for number, each in enumerate(changes, 5)]
    return no_learning_warning(lines, load_config(), Path("my run"))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"frac_reward_zero_std": 1.0, "reward": 0.0}, "does not find the answers"),
        ({"frac_reward_zero_std": 1.0}, "rollout.temperature"),
        ({"completions/clipped_ratio": 0.97}, "rollout.max_completion_length"),
        ({"completions/mean_length": 1.0}, "data.chat"),
    ],
)
def test_three_iterations_at_an_extreme_are_explained(change, cause):
    text = warning(change, change, change)
    assert cause in text and "iterations 5 to 7" in text
    assert "easyrl samples 'my run' --iteration 7" in text
    assert not warning(change, change) and not warning(change, {}, change)
    skipped = {**change, "reward": None, "frac_reward_zero_std": None}
    assert not warning(skipped, change, change)
