"""CPU cores shared between workers: a worker that only waits lets others use its cores.

    rollout worker, all groups done ─────── its cores ──► train worker
    train worker, waiting for a group ───── its cores ──► rollout worker

Each worker has a byte in shared memory that says whether it is idle. Workers read the bytes before
each piece of work: a step of the engine, a decoder layer of the trainer.

More threads may add up in another order, so deterministic runs share nothing. Settings are
unpickled before torch may be imported.
"""

import contextlib
from collections.abc import Iterator, Mapping
from ctypes import Array, c_bool
from dataclasses import dataclass
from itertools import chain
from multiprocessing.sharedctypes import RawArray

from easyrl.processes import pin

IdleBoard = Array[c_bool]  # whether each worker is idle, in memory that spawned workers share


def make_idle_board(num_workers: int) -> IdleBoard:
    """Make a board on which every worker is busy. Its memory has no name that could be left."""
    board: IdleBoard = RawArray(c_bool, num_workers)
    return board


@dataclass(frozen=True, slots=True)
class CoreSharing:
    board: IdleBoard
    worker: int  # its own number on the board
    shared: Mapping[int, tuple[int, ...]]
    """Other workers' cores that it alone may use while they are idle; none: not pinned."""


class WorkerCores:
    """The cores and threads that a worker computes with. Without `sharing` nothing changes them."""

    def __init__(
        self, num_threads: int, cores: tuple[int, ...], sharing: CoreSharing | None
    ) -> None:
        self._num_threads = num_threads
        self._cores = cores
        self._sharing = sharing or CoreSharing(make_idle_board(1), 0, {})
        self._in_use: list[int] = []  # workers
        # A thread keeps the affinity with which it was started, so it may run on all shared cores.
        self._all_cores = {*cores, *chain(*self._sharing.shared.values())}

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Let others use this worker's cores inside the block, in which it only waits."""
        self._sharing.board[self._sharing.worker] = True
        try:
            yield
        finally:
            self._sharing.board[self._sharing.worker] = False

    def use_available(self) -> None:
        """Compute on the calling thread with its own cores and those of idle workers."""
        board = self._sharing.board
        available = [worker for worker in self._sharing.shared if board[worker]]
        if available == self._in_use:
            return
        self._in_use = available
        if self._cores:
            pin(self._all_cores if available else self._cores)

        import torch

        torch.set_num_threads(self._num_threads * (1 + len(available)))
