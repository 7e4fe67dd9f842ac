"""Learning-rate schedule."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate_factor(
    iteration: int,
    *,
    num_iterations: int,
    warmup_iterations: int,
    kind: Literal["constant", "linear", "cosine"],
) -> float:
    """Return the factor of the peak learning rate in `iteration` (from 0).

    Warm-up rises linearly and reaches 1 in iteration `warmup_iterations`. `linear` and `cosine`
    then fall to 0, which they would reach just after the last iteration.
    """
    if iteration < warmup_iterations:
        return (iteration + 1) / (warmup_iterations + 1)
    progress = (iteration - warmup_iterations) / max(1, num_iterations - warmup_iterations)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
