"""The Ray actor that hosts a worker: it starts the worker as its child process, and passes its
messages on.

    controller ──deliver──► host ──pipe──► worker
               ◄──run────── host ◄──pipe── worker            its events, as a stream
    host of train rank 0 ◄──deliver──► hosts of the other ranks
    host of train rank 0 ◄──put──────── hosts of rollout workers: groups for its ring

Ray runs `run`, `deliver`, `put` and the other methods (`query`) in a thread each, and calls of one
kind in their order. The child dies with the thread that started it, which is that of `run`. This
process imports no torch.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from socket import create_server, socket
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

from ray import get_runtime_context, method
from ray.util import get_node_ip_address

from easyrl import devices
from easyrl.channels.messages import MAX_UNACKNOWLEDGED, TOKEN, RemoteRing, decode_group
from easyrl.channels.ring_buffer import RingBuffer, RingLayout, RingPort
from easyrl.config import ConfigError
from easyrl.processes import environment_of_children
from easyrl.runtime.ray.cluster import versions
from easyrl.runtime.worker_process import with_environment, worker_main
from easyrl.workers.settings import WorkerSettings

GROUPS = {"deliver": 1, "put": 1, "query": 1}
"""Ray's concurrency groups: the number of threads by kind of call."""
RETRY_SECONDS = 1.0
"""How often `put` looks again for a free slot, and whether its sender is fenced."""
Peer: TypeAlias = int | str
"""The other end of one of a worker's pipes: "control", "ring", or a train rank."""


class NodeFacts(NamedTuple):
    address: str
    devices: tuple[str, ...]  # accelerators of the actor, as Ray numbers them
    sees_folder: bool  # where the run folder is


def _accelerators() -> dict[str, list[str]]:
    """Return the numbers of this actor's accelerators by kind: {"cuda": ["0", "1"]}."""
    ids = get_runtime_context().get_accelerator_ids()
    found = {}
    for kind, name in devices.RAY_RESOURCES.items():
        if ids.get(name):
            found[kind] = ids[name]
    return found


def check_node(expected: Mapping[str, str], address: str, missing: Sequence[str]) -> None:
    """Check that a worker can run on this node. Raises ConfigError. `expected` has the versions of
    the controller's machine, `missing` the paths that are not there."""
    for name, version in versions().items():
        if expected.get(name) != version:
            raise ConfigError(f"expected {name} {expected.get(name)}, as here, got {version}")
    devices.network_environment(address)
    if missing:
        raise ConfigError(
            f"expected {' and '.join(missing)}, as here: put model and run folder (--model, "
            "--output) on storage that the nodes share, or name the model by a hub id"
        )


class WorkerHost:
    def __init__(self) -> None:
        self._pipes: dict[Peer, Connection] = {}  # this process's ends of the child's pipes
        self._ring: RingBuffer | None = None
        self._port: RingPort | None = None
        self._putting = threading.Lock()
        self._fenced: set[str] = set()  # rollout workers whose groups are refused
        self._listener: socket | None = None
        self._process: BaseProcess | None = None

    def describe(
        self, expected: Mapping[str, str], paths: Sequence[str], probe: str, needs_folder: bool
    ) -> NodeFacts:
        """Describe the node. Raises ConfigError if a worker cannot run there. `expected`: versions;
        `paths`: of the model; `probe`: a file where the run folder is."""
        address = get_node_ip_address()
        sees_folder = Path(probe).exists()
        missing = [path for path in paths if not Path(path).exists()]
        if needs_folder and not sees_folder:
            missing.append(str(Path(probe).parent))
        try:
            check_node(expected, address, missing)
        except ConfigError as error:
            raise ConfigError(f"node {os.uname().nodename} ({address}): {error}") from None
        ids = tuple(chain.from_iterable(_accelerators().values()))
        return NodeFacts(address, ids, sees_folder)

    def run(
        self,
        settings: WorkerSettings,
        layout: RingLayout | None,
        peers: dict[Peer, Any],
        sender: str,
    ) -> Iterator[Any]:
        """Start the worker. Yield its process id, its events, and its exit code. `peers` has the
        hosts of other train ranks by rank, and the host of the ring as "ring"; `sender` is a name
        that no other rollout worker ever has."""
        context = multiprocessing.get_context("spawn")
        ring: Any = None
        children: list[Connection] = []

        def pipe_to(peer: Peer) -> Connection:
            """Return the child's end of a new pipe."""
            self._pipes[peer], theirs = context.Pipe()
            children.append(theirs)
            return theirs

        # Ray sets this too, unless RAY_EXPERIMENTAL_NOSET_... is set.
        for kind, numbers in _accelerators().items():
            os.environ[devices.VISIBLE_DEVICES[kind]] = ",".join(numbers)
        control = pipe_to("control")
        ranks = sorted(peer for peer in peers if isinstance(peer, int))
        settings = replace(settings, pipes=tuple(pipe_to(rank) for rank in ranks))
        if settings.name == "train-0" and layout is not None:
            ring = self._ring = RingBuffer(layout)
            self._port = ring.attach(0)
            settings = replace(settings, listener=self._listener)
        elif "ring" in peers and layout is not None:
            ring = RemoteRing(layout, pipe_to("ring"))
            for _ in range(MAX_UNACKNOWLEDGED):
                self._pipes["ring"].send_bytes(TOKEN)
        settings = with_environment(settings)
        process = context.Process(
            target=worker_main, args=(settings, ring, control), name=settings.name
        )
        sys.modules["__main__"] = ModuleType("__main__")  # else the child imports Ray's program
        with environment_of_children(settings.environment):
            process.start()
        for child in children:
            child.close()
        self._process = process
        yield process.pid
        yield from self._pump(peers, sender, settings.rank)
        process.join()
        yield process.exitcode

    def _pump(self, peers: dict[Peer, Any], sender: str, rank: int) -> Iterator[Any]:
        """Pass on what the child sends to others; yield its events until it ends."""
        open_pipes = {pipe: peer for peer, pipe in self._pipes.items()}
        while self._pipes["control"] in open_pipes:
            for pipe in wait(list(open_pipes)):
                assert isinstance(pipe, Connection)
                peer = open_pipes[pipe]
                try:
                    message = pipe.recv_bytes() if peer == "ring" else pipe.recv()
                except (EOFError, OSError):
                    del open_pipes[pipe]
                    continue
                if peer == "control":
                    yield message
                elif peer == "ring":
                    reference = peers["ring"].put.remote(sender, message)
                    reference.future().add_done_callback(self._after_put)
                else:
                    reference = peers[peer].deliver.remote(rank, message)
                    reference.future().add_done_callback(self._after_call)

    def _after_call(self, done: Any) -> None:
        """End the worker if its message may be lost: then the run replaces it, or ends."""
        if done.exception() is not None and self._process is not None:
            self._process.kill()

    def _after_put(self, done: Any) -> None:
        """Give the worker a token back, once its group is in the ring."""
        self._after_call(done)
        if done.exception() is None and done.result():
            with contextlib.suppress(OSError):  # the worker has ended
                self._pipes["ring"].send_bytes(TOKEN)

    @method(concurrency_group="deliver")  # type: ignore[untyped-decorator]
    def deliver(self, pipe: Peer, message: Any) -> None:
        """Send a message to the worker: a command, or what another train rank has sent."""
        self._pipes[pipe].send(message)

    @method(concurrency_group="put")  # type: ignore[untyped-decorator]
    def put(self, sender: str, message: bytes) -> bool:
        """Put a group into the ring. Returns False if the sender is dead."""
        assert self._port is not None
        group = decode_group(message)
        while True:
            with self._putting:
                if sender in self._fenced:
                    return False
                if self._port.put(group):
                    return True
            wait([self._port.writable_fd], RETRY_SECONDS)

    def clock(self) -> float:
        return time.monotonic()

    def fence(self, senders: Sequence[str]) -> None:
        """Refuse all later groups of these rollout workers."""
        with self._putting:
            self._fenced.update(senders)

    def delivered(self, iteration: int) -> set[int]:
        assert self._ring is not None
        return self._ring.delivered(iteration)

    def open_store(self) -> str:
        """Open the port of the store, which the worker then serves; return its address."""
        self._listener = create_server((get_node_ip_address(), 0), backlog=1024)
        host, port = self._listener.getsockname()
        return f"tcp://{host}:{port}"

    def write_stacks(self) -> None:
        if self._process is not None and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)
