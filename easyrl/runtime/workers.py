"""All workers of a run: spawn them with their settings, and receive their events.

    supervisor.wait ─► all events ────────────────────────► observer (as FromWorker)
                       all except Activity and Note ──────► next_event, for the controller

`easyrl eval` has rollout workers only: no ring, no weight channel; engines keep the weights that
they load.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from easyrl import events
from easyrl.channels.ring_buffer import RingBuffer
from easyrl.config import Config
from easyrl.config.rollout import SamplingChoice
from easyrl.events import Observer
from easyrl.runtime.launch import worker_main
from easyrl.runtime.placement import Placement
from easyrl.runtime.resume import Resume
from easyrl.runtime.supervisor import Supervisor, Worker, WorkerFailure
from easyrl.runtime.watchdog import TICK_SECONDS, Stall, Watchdog
from easyrl.workers.core_sharing import CoreSharing, IdleBoard, SharedCores, make_idle_board
from easyrl.workers.settings import WorkerSettings

LAST_CHECKPOINT_SECONDS = 1800.0  # longest time that a stopped run waits for its last checkpoint


class Workers:
    def __init__(
        self,
        config: Config,
        placement: Placement,
        supervisor: Supervisor,
        *,
        log_of: Callable[[str], Path],
        notify: Observer,
        ring: RingBuffer | None = None,
        store_path: str = "",
        resumed: Resume | None = None,
        sampling: SamplingChoice | None = None,
    ) -> None:
        """Spawn the workers, and close this process's copy of `ring`.

        Args:
            log_of: Path of a worker's log file, by its name.
            store_path: File over which process groups are created.
            sampling: Sampling settings, if not those of training.
        """
        self._supervisor = supervisor
        self._notify = notify
        num_rollout, num_train = placement.num_rollout_workers, placement.train.count
        board = make_idle_board(num_rollout + num_train) if placement.lends_cores else None
        checkpoint = resumed.checkpoint if resumed is not None else None

        def spawn(role: str, number: int, pipes: tuple[Connection, ...] = ()) -> Worker:
            settings = worker_settings(
                config,
                placement,
                role,
                number,
                sampling=sampling,
                store_path=store_path,
                log_file=str(log_of(f"{role}-{number}")),
                core_sharing=_core_sharing(board, placement, role, number),
                pipes=pipes,
                checkpoint=str(checkpoint) if checkpoint is not None else None,
                policy_version=resumed.state.policy_version if resumed is not None else 0,
            )
            return supervisor.spawn(settings.name, worker_main, settings, ring)

        self.rollout = [spawn("rollout", number) for number in range(num_rollout)]
        pairs = [Pipe() for _ in range(1, num_train)]  # train rank 0 and each other rank
        of_rank0 = tuple(ours for ours, _ in pairs)
        pipes = [of_rank0, *((theirs,) for _, theirs in pairs)]  # by rank
        self.train = [spawn("train", rank, pipes[rank]) for rank in range(num_train)]
        # Workers have descriptors of their own. A rank would not notice the death of another one
        # while this process held the pipe's end.
        for ours, theirs in pairs:
            ours.close()
            theirs.close()
        if ring is not None:
            ring.close()
        self._received: deque[tuple[Worker, events.WorkerEvent]] = deque()
        self._log_of = log_of
        self._watchdog = Watchdog(config.runtime.stall_seconds)
        self._needed, self._deadline = self.all, math.inf

    @property
    def all(self) -> list[Worker]:
        return [*self.train, *self.rollout]

    @property
    def rank0(self) -> Worker:
        """Train rank 0: the only train worker that receives commands."""
        return self.train[0]

    # -- events -----------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        num_ready = 0
        while num_ready < len(self.all):
            worker, event = self.next_event()
            assert isinstance(event, events.Starting | events.Ready), f"{worker.name} sent {event}"
            num_ready += isinstance(event, events.Ready)

    def next_event(self) -> tuple[Worker, events.WorkerEvent]:
        """Wait for the next event that the controller has to handle."""
        while True:
            while not self._received:
                self._receive()
            worker, event = self._received.popleft()
            self._watchdog.on_event(worker.name, event)
            if isinstance(event, events.Note):
                self._notify(event)
                continue
            self._notify(events.FromWorker(worker.name, time.monotonic(), event))
            if not isinstance(event, events.Activity):
                return worker, event

    def _receive(self) -> None:
        if time.monotonic() > self._deadline:
            raise WorkerFailure(
                f"the last checkpoint was not written in {LAST_CHECKPOINT_SECONDS:g} s"
            )
        self._received.extend(self._supervisor.wait(TICK_SECONDS, needed=self._needed))
        pids = {worker.name: worker.process.pid for worker in self.all if worker.process.pid}
        match self._watchdog.tick(pids):
            case Stall(_, cause):
                self._watchdog.write_stacks(pids, self._log_of("easyrl"))
                raise WorkerFailure(cause)
            case str(warning) if warning:
                self._notify(events.NoEvents(time.monotonic(), warning))

    def begin_to_stop(self) -> None:
        """Wait only for the last checkpoint from now on: only the death of a train worker is a
        failure, and LAST_CHECKPOINT_SECONDS are left."""
        self._needed, self._deadline = self.train, time.monotonic() + LAST_CHECKPOINT_SECONDS


def _core_sharing(
    board: IdleBoard | None, placement: Placement, role: str, number: int
) -> CoreSharing | None:
    """Let a worker use the cores of every n-th worker of the other role while that one waits."""
    if board is None:
        return None
    owner_id = owner_id_of(placement, role, number)
    if role == "rollout" and placement.engine.name == "vllm":
        return CoreSharing(board, owner_id, shared=())
    other = "train" if role == "rollout" else "rollout"
    first = owner_id_of(placement, other, 0)
    shared = tuple(
        SharedCores(first + each, placement.num_threads, placement.cores_of(other, each))
        for each in range(number, placement.num_workers(other), placement.num_workers(role))
    )
    return CoreSharing(board, owner_id, shared)


def owner_id_of(placement: Placement, role: str, number: int) -> int:
    """The worker's number in the ring and on the idle board: rollout workers come first."""
    return number if role == "rollout" else placement.num_rollout_workers + number


def worker_settings(
    config: Config, placement: Placement, role: str, number: int, **others: Any
) -> WorkerSettings:
    """Settings of a worker that follow from the placement, and `others`."""
    is_rollout = role == "rollout"
    is_cpu = (placement.infer if is_rollout else placement.train).kind == "cpu"
    return WorkerSettings(
        name=f"{role}-{number}",
        owner_id=owner_id_of(placement, role, number),
        config=config,
        device="cpu" if is_cpu else f"{placement.accelerator}:0",
        weights_cross_on_cpu=placement.weights_cross_on_cpu,
        num_threads=placement.num_threads,
        max_concurrent_groups=placement.max_concurrent_groups,
        engine=placement.engine.name,
        tensor_parallel_size=placement.engine.tensor_parallel_size,
        device_indices=() if is_cpu else placement.indices_of(role, number),
        memory_fraction=placement.memory_fraction(role),
        cores=placement.cores_of(role, number),
        rank=0 if is_rollout else number,
        num_train_ranks=placement.train.count,
        **others,
    )
