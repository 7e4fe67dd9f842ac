"""Random delays for the proof that timing changes nothing (DESIGN.md, invariant 5).

With `EASYRL_RANDOM_DELAYS=0.02` in the environment, engine, rewards, ring and trainer sleep up to
that many seconds at the places that call `maybe_sleep`, drawn anew in every process. Without it
nothing happens.
"""

from __future__ import annotations

import os
import random
import time

_LONGEST = float(os.environ.get("EASYRL_RANDOM_DELAYS", "0") or 0)
_GENERATOR = random.Random()


def maybe_sleep() -> None:
    if _LONGEST > 0.0 and _GENERATOR.random() < 0.25:
        time.sleep(_GENERATOR.random() * _LONGEST)
