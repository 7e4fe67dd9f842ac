"""How workers are started and connected: the interface, and the choice between its two classes.

                 LocalLauncher                        RayLauncher
workers run      on this machine                      on the nodes of a Ray cluster
a worker is      a process that is spawned            a child process of a Ray actor
groups cross     in a ring in shared memory           as messages to the node of train rank 0
process groups   over a file, on loopback             over a TCP store, on the nodes' addresses
file             `local_launcher.py`                  `ray/ray_launcher.py`

What runs inside a worker's process is in `worker_process.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from easyrl.channels.ring_buffer import RingBuffer
from easyrl.config.spec import RunSpec
from easyrl.events import Observer
from easyrl.runtime.local_launcher import LocalLauncher
from easyrl.runtime.placement import Placement, ring_layout
from easyrl.runtime.supervisor import Supervisor, Worker
from easyrl.workers.settings import WorkerSettings


class Launcher(Protocol):
    """A context manager. Leave it after the supervisor, when all workers have ended."""

    store: str
    """Address of the store over which process groups are made (`devices.open_store`)."""
    devices: Mapping[str, str]
    """Device of each worker that the run starts with: {"rollout-0": "cuda:0", "train-0": …}."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def start_train(
        self, supervisor: Supervisor, settings: Sequence[WorkerSettings]
    ) -> list[Worker]:
        """Start all train workers, in the order of their ranks; none in an evaluation."""
        ...

    def start_rollout(self, supervisor: Supervisor, settings: WorkerSettings) -> Worker:
        """Start a rollout worker. Raises OSError if no process can be started."""
        ...

    def reclaim(self, owner_ids: Sequence[int]) -> None:
        """Free the ring slots that dead rollout workers hold. Afterwards none of their groups
        arrives. Raises TimeoutError if another worker prevents it."""
        ...

    def delivered(self, iteration: int) -> set[int]:
        """Return the indices of this iteration's groups that are in the ring or trained."""
        ...


def make_launcher(spec: RunSpec, placement: Placement, folder: Path, notify: Observer) -> Launcher:
    """Return the launcher for this placement. A RayLauncher waits until the workers are placed, and
    requires that their nodes see `folder`, that of the run."""
    if placement.is_ray:
        from easyrl.runtime.ray.ray_launcher import RayLauncher

        return RayLauncher(spec, placement, folder, notify)

    is_training = placement.train.count > 0
    ring = RingBuffer(ring_layout(spec, placement)) if is_training else None
    return LocalLauncher(placement, ring)
