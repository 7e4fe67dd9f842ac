"""Start workers as processes of this machine, and connect them (interface: `launcher.py`).

groups           a ring in memory that all workers share
process groups   a store in a file, connections on loopback
train ranks      a pipe between rank 0 and each other rank
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Self

from easyrl.channels.ring_buffer import RingBuffer
from easyrl.processes import environment_of_children
from easyrl.runtime.placement import Placement, device_names
from easyrl.runtime.supervisor import Supervisor, Worker
from easyrl.runtime.worker_process import with_environment, worker_main
from easyrl.workers.settings import WorkerSettings


class LocalLauncher:
    def __init__(self, placement: Placement, ring: RingBuffer | None = None) -> None:
        """`ring` is None in an evaluation, which has no train workers."""
        self._ring = ring
        # Anonymous memory instead of a file with a name: nothing is left behind.
        self._store_fd = os.memfd_create("easyrl-store")
        self.store = f"/proc/{os.getpid()}/fd/{self._store_fd}"
        self.devices: Mapping[str, str] = device_names(placement)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._store_fd)
        if self._ring is not None:
            self._ring.close()

    def start_rollout(self, supervisor: Supervisor, settings: WorkerSettings) -> Worker:
        return self._start(supervisor, settings)

    def start_train(
        self, supervisor: Supervisor, settings: Sequence[WorkerSettings]
    ) -> list[Worker]:
        if not settings:  # an evaluation
            return []
        ends_of_rank0: list[Connection] = []
        ends_of_others: list[Connection] = []
        for _ in settings[1:]:
            ours, theirs = Pipe()
            ends_of_rank0.append(ours)
            ends_of_others.append(theirs)
        rank0, *others = settings
        workers = [self._start(supervisor, replace(rank0, pipes=tuple(ends_of_rank0)))]
        for other, end in zip(others, ends_of_others, strict=True):
            workers.append(self._start(supervisor, replace(other, pipes=(end,))))
        # Workers have their own copies of the descriptors. A rank would not notice the death of
        # another one while this process held an end of their pipe.
        for end in (*ends_of_rank0, *ends_of_others):
            end.close()
        return workers

    def _start(self, supervisor: Supervisor, settings: WorkerSettings) -> Worker:
        settings = with_environment(settings)
        # A copy of the fork server starts faster, but accelerators do not survive a fork, and vLLM
        # starts processes of its own.
        is_copy = settings.device == "cpu" and not settings.has_vllm
        with environment_of_children(settings.environment):
            return supervisor.spawn(
                settings.name, worker_main, settings, self._ring, is_copy=is_copy
            )

    def reclaim(self, owner_ids: Sequence[int]) -> None:
        if self._ring is not None:
            self._ring.reclaim(*owner_ids)

    def delivered(self, iteration: int) -> set[int]:
        assert self._ring is not None
        return self._ring.delivered(iteration)
