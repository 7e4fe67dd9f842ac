"""What a worker is told when it is spawned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from easyrl import devices
from easyrl.config import Config

if TYPE_CHECKING:
    from easyrl.channels.weights import WeightChannel


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    name: str
    """`rollout-0`, `train-0`, …"""
    owner_id: int
    """Its number in the ring."""
    config: Config
    device: str
    shares_device: bool
    """Whether the other group uses the same accelerator."""
    num_threads: int
    max_concurrent_groups: int
    store_path: str
    """The file over which process groups are made."""

    def join_weights(self, membership: int, rank: int, size: int) -> WeightChannel:
        from easyrl.channels.weights import WeightChannel

        return WeightChannel(
            self.store_path,
            membership=membership,
            rank=rank,
            size=size,
            device=devices.communication_device(self.device, shared=self.shares_device),
            timeout_seconds=self.config.runtime.timeout_seconds,
        )
