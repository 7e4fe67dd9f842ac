"""Start workers and connect them: on this machine here, on a Ray cluster in `ray.launcher`.

                 one machine                          Ray cluster
worker           spawned process                      child process of an actor
groups           ring in memory that all share        messages to the node of train rank 0
process groups   over a file, on loopback             over a TCP store, on the nodes' addresses
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Self, TypeAlias

from easyrl.channels.ring_buffer import RingBuffer
from easyrl.config import Config
from easyrl.events import Observer
from easyrl.processes import environment_of_children
from easyrl.runtime.launch import with_environment, worker_main
from easyrl.runtime.placement import Placement, device_names, ring_layout
from easyrl.runtime.supervisor import Supervisor, Worker
from easyrl.workers.settings import WorkerSettings

if TYPE_CHECKING:
    from easyrl.runtime.ray.launcher import RayLauncher

Launcher: TypeAlias = "ProcessLauncher | RayLauncher"
"""Leave it after the supervisor: the workers have ended then."""


def make_launcher(config: Config, placement: Placement, notify: Observer) -> Launcher:
    if placement.is_ray:
        from easyrl.runtime.ray.launcher import RayLauncher

        return RayLauncher(config, placement, notify)
    is_training = placement.train.count > 0
    ring = RingBuffer(ring_layout(config, placement)) if is_training else None
    return ProcessLauncher(placement, ring)


class ProcessLauncher:
    def __init__(self, placement: Placement, ring: RingBuffer | None = None) -> None:
        """`ring` is None in an evaluation, which has no train workers."""
        self._ring = ring
        # No name, so that no file is left behind.
        self._store_fd = os.memfd_create("easyrl-store")
        self.store = f"/proc/{os.getpid()}/fd/{self._store_fd}"
        """Address of the store over which process groups are made (`devices.open_store`)."""
        self.devices = device_names(placement)  # by worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._store_fd)
        if self._ring is not None:
            self._ring.close()

    def start_rollout(self, supervisor: Supervisor, settings: WorkerSettings) -> Worker:
        """Start a rollout worker. Raises OSError if that is impossible."""
        return self._start(supervisor, settings)

    def start_train(
        self, supervisor: Supervisor, settings: Sequence[WorkerSettings]
    ) -> list[Worker]:
        pairs = [Pipe() for _ in settings[1:]]  # train rank 0 and each other rank
        pipes = [tuple(ours for ours, _ in pairs), *((theirs,) for _, theirs in pairs)]
        workers = [
            self._start(supervisor, replace(each, pipes=own))
            for each, own in zip(settings, pipes, strict=False)  # no rank at all in an evaluation
        ]
        # Workers have descriptors of their own. A rank would not notice the death of another one
        # while this process held the pipe's end.
        for pair in pairs:
            for end in pair:
                end.close()
        return workers

    def _start(self, supervisor: Supervisor, settings: WorkerSettings) -> Worker:
        settings, name = with_environment(settings), settings.name
        is_copy = settings.device == "cpu" and settings.engine == "embedded"
        with environment_of_children(settings.environment):
            return supervisor.spawn(name, worker_main, settings, self._ring, is_copy=is_copy)

    def reclaim(self, owner_ids: Sequence[int]) -> None:
        """Free what dead rollout workers hold of the ring. Nothing more of them arrives. Raises
        TimeoutError if another worker prevents it."""
        if self._ring is not None:
            self._ring.reclaim(*owner_ids)

    def delivered(self, iteration: int) -> set[int]:
        assert self._ring is not None
        return self._ring.delivered(iteration)
