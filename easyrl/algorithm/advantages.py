"""Advantages of a whole group, computed where the group is whole: in the rollout worker."""

from __future__ import annotations

from typing import Literal

import numpy as np

from easyrl.types import Float32


def group_advantages(rewards: Float32, scale_rewards: Literal["group", "none"]) -> Float32:
    """Advantages relative to the group's mean: rewards [G] -> [G].

    `A_i = (r_i - mean) / (std + 1e-4)` with the sample standard deviation (n - 1) for
    `scale_rewards="group"` (GRPO, arXiv 2402.03300, section 4.1.2), `A_i = r_i - mean` for
    `"none"` (Dr. GRPO, arXiv 2503.20783). A group of equal rewards has advantages of exactly 0.
    """
    values = rewards.astype(np.float64)
    if np.all(values == values[0]):
        return np.zeros(len(values), dtype=np.float32)
    centred = values - values.mean()
    if scale_rewards == "group":
        centred /= values.std(ddof=1) + 1e-4
    advantages: Float32 = centred.astype(np.float32)
    return advantages
