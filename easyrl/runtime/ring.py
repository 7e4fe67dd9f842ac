"""The run's ring buffer, made before anything is started: too large a one is the user's to mend."""

from __future__ import annotations

from easyrl.channels.ring_buffer import RingBuffer
from easyrl.channels.ring_layout import RingLayout
from easyrl.config import Config
from easyrl.runtime.placement import Placement


def ring_layout(config: Config, placement: Placement) -> RingLayout:
    """How large the run's ring is. Raises ValueError where that does not fit the memory."""
    layout = RingLayout(
        num_slots=config.ring_slots,
        num_generations=config.rollout.num_generations,
        max_prompt_length=config.data.max_prompt_length,
        max_completion_length=config.rollout.max_completion_length,
        num_owners=placement.num_rollout_workers + placement.train.count,
    )
    layout.check_memory()
    return layout


def make_ring(config: Config, placement: Placement) -> RingBuffer:
    """Raises ValueError where it does not fit the memory, or has too many slots."""
    return RingBuffer(ring_layout(config, placement))
