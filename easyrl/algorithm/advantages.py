"""Advantages of a group, computed in the rollout worker, where the group is complete."""

from typing import Literal

import numpy as np

from easyrl.types import Float32


def group_advantages(
    rewards: Float32,
    scale_rewards: Literal["group", "none"],
    estimator: Literal["group", "rloo"] = "group",
) -> Float32:
    """Compute advantages relative to the group's other rollouts: rewards [G] -> [G].

        group   A_i = r_i - mean                    GRPO (arXiv 2402.03300, section 4.1.2)
        rloo    A_i = r_i - mean of the others      RLOO (arXiv 2402.14740, section 2.2)

    With `scale_rewards="group"` they are divided by (std + 1e-4), as in GRPO; std is the group's
    sample standard deviation (n - 1). With `"none"` they are not, as in Dr. GRPO (arXiv 2503.20783)
    and RLOO. A group of equal rewards has advantages of exactly 0.
    """
    values = rewards.astype(np.float64)
    if np.all(values == values[0]):
        return np.zeros(len(values), dtype=np.float32)
    centred = values - values.mean()
    if estimator == "rloo":  # r_i - (sum - r_i) / (G - 1)
        centred *= len(values) / (len(values) - 1)
    if scale_rewards == "group":
        centred /= values.std(ddof=1) + 1e-4
    advantages: Float32 = centred.astype(np.float32)
    return advantages
