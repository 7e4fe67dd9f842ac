"""What a worker is told when it is spawned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    weights_cross_on_cpu: bool
    """Whether the weight channel's buffers live on the CPU, whatever the device."""
    num_threads: int
    max_concurrent_groups: int
    store_path: str
    """The file over which process groups are made."""
    log_file: str | None
    """Where the worker's output goes (None: the terminal)."""

    checkpoint: str | None = None
    """Where a resumed run goes on (None: at its start)."""
    policy_version: int = 0
    """Of that checkpoint."""

    def join_weights(self, membership: int, rank: int, size: int) -> WeightChannel:
        from easyrl.channels.weights import WeightChannel

        return WeightChannel(
            self.store_path,
            membership=membership,
            rank=rank,
            size=size,
            device="cpu" if self.weights_cross_on_cpu else self.device,
            timeout_seconds=self.config.runtime.timeout_seconds,
        )
