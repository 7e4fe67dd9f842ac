"""Settings that a worker receives when it is spawned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from socket import socket
from typing import TYPE_CHECKING

from easyrl.config.rollout import EMBEDDED, VLLM, EngineName
from easyrl.config.spec import RolloutSpec, TrainSpec
from easyrl.devices import LOOPBACK
from easyrl.workers.core_sharing import CoreSharing

if TYPE_CHECKING:
    from easyrl.channels.weights import WeightEndpoint


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    name: str  # rollout-0, train-0, …
    owner_id: int  # the worker's number in the ring
    spec: RolloutSpec | TrainSpec
    timeout_seconds: float  # of the weight transfer's steps (`runtime.timeout_seconds`)
    is_deterministic: bool
    device: str  # torch's name in the worker, which sees no other: cpu, or a kind with number 0
    weights_cross_on_cpu: bool  # the weight channel's process group is on the CPU in any case
    num_threads: int
    max_concurrent_groups: int
    store: str  # over which process groups are made (`devices.open_store`)
    log_file: str | None  # for the worker's output; None: the terminal
    device_indices: tuple[int, ...] = ()  # the user's numbers of its accelerators
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of its process
    reward_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that show the process of reward models its device."""
    memory_fraction: float | None = None  # of a device that both roles use; None: it has its own
    cores: tuple[int, ...] = ()  # CPU cores that the worker is pinned to; empty: it is not
    core_sharing: CoreSharing | None = None  # None: every worker keeps its own cores
    rank: int = 0  # of a train worker
    num_train_ranks: int = 1
    engine: EngineName = EMBEDDED  # of the rollout workers
    pipes: tuple[Connection, ...] = ()  # between train rank 0 and each other rank
    checkpoint: str | None = None  # that a resumed run starts from
    policy_version: int = 0  # of that checkpoint
    sources: Mapping[str, str] | None = None  # the user's files, as they were at the run's start
    address: str = LOOPBACK  # of this machine: process groups listen there
    listener: socket | None = None  # where this worker serves `store`; None: it does not
    clock_offset_seconds: float = 0.0  # of the controller's machine's clock to this one's

    @property
    def has_vllm(self) -> bool:
        """Whether the rollout workers' engine is vLLM."""
        return self.engine == VLLM

    def weight_endpoint(self, rank: int, world_size: int, generation: int = 0) -> WeightEndpoint:
        """This worker's end of the weight channel (`events.InitWeightChannel`)."""
        from easyrl.channels.weights import WeightEndpoint

        return WeightEndpoint(
            store=self.store,
            rank=rank,
            world_size=world_size,
            worker=self.name,
            device="cpu" if self.weights_cross_on_cpu else self.device,
            shared_device=None if self.memory_fraction is None else self.device,
            timeout_seconds=self.timeout_seconds,
            generation=generation,
        )
