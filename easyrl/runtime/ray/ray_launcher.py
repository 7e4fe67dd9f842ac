"""Start workers on a Ray cluster, and connect them with the controller (interface: `launcher.py`).

    Worker.control ◄──pipe──► thread per worker ◄──Ray──► WorkerHost ◄──pipe──► worker
                              (`_serve`)                  (`host.py`)

A `RemoteProcess` has what the supervisor uses of a process of this machine. Ray never restarts an
actor itself: a replacement is a new actor, wherever there is room.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from socket import SHUT_RDWR, socket
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, Self, TypeAlias
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from easyrl.channels.ring_buffer import RingLayout
from easyrl.config import ConfigError
from easyrl.config.spec import RunSpec
from easyrl.devices import RAY_RESOURCES
from easyrl.events import Command, Failed, Note, Observer
from easyrl.runtime.placement import Placement, device_name, ring_layout
from easyrl.runtime.ray import cluster
from easyrl.runtime.ray.host import GROUPS, NodeFacts, WorkerHost
from easyrl.runtime.run_folder import resume_hint
from easyrl.runtime.supervisor import FAILED, PENDING, Supervisor, Worker, WorkerFailure
from easyrl.workers.settings import WorkerSettings

PENDING_SECONDS = 10.0
"""A worker without a place is reported after this time."""
NOTICE_SECONDS = 60.0
"""A place on a lost node is tried again for this long: Ray takes about half of it to notice."""
PAUSE_SECONDS = 1.0  # between two such tries
CHECK_SECONDS = 10.0  # between two checks of the cluster's head
HEAD_SECONDS = 45.0
"""A head that has not answered for this long is lost; Ray would end the process after 60."""
KILL_SECONDS = 5.0
"""How long to wait for Ray to confirm that an actor is dead: a lost node confirms nothing."""
QUERY_SECONDS = 30.0

remote: Any = ray.remote
actor_of: Any = remote(concurrency_groups=GROUPS, max_restarts=0, max_task_retries=0)

Host: TypeAlias = Any  # Ray's handle of a `WorkerHost`


def query(host: Host, what: str, *arguments: Any) -> Any:
    """Call a method of a host that answers at once."""
    method = getattr(host, what).options(concurrency_group="query")
    return ray.get(method.remote(*arguments), timeout=QUERY_SECONDS)


class RemoteProcess:
    """A worker on a node of the cluster, with the attributes of a multiprocessing.Process."""

    def __init__(self, host: Host, serve: Callable[[RemoteProcess, Connection], int]) -> None:
        """`serve` runs in a thread until the worker has ended, and returns its exit code."""
        self.pid = 0
        self.exitcode: int | None = None
        self.host = host
        self.device = PENDING  # once it is placed: its node and device
        self.is_killed = False
        self._given_up = math.inf  # when a killed worker counts as ended without confirmation
        self.control, theirs = Pipe()
        self.sentinel, self._ended = Pipe(duplex=False)

        def run() -> None:
            try:
                self.exitcode = serve(self, theirs)
            finally:
                if self.exitcode is None:
                    self.exitcode = 1
                with socket(fileno=os.dup(theirs.fileno())) as end:  # another thread receives there
                    end.shutdown(SHUT_RDWR)
                self._ended.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._given_up = min(self._given_up, time.monotonic() + KILL_SECONDS)
        self.is_killed = True
        ray.kill(self.host)

    def replace_host(self, host: Host) -> None:
        """Use this host instead, which dies at once if the worker is killed."""
        ray.kill(self.host)
        self.host = host
        if self.is_killed:
            ray.kill(host)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the worker has ended; once it is killed, only for KILL_SECONDS."""
        if self.is_killed and timeout is None:
            timeout = max(0.0, self._given_up - time.monotonic())
        self._thread.join(timeout)
        if self.is_killed and self.exitcode is None:
            self.exitcode = 1

    def write_stacks(self) -> None:
        with contextlib.suppress(RayError):
            self.host.write_stacks.options(concurrency_group="query").remote()


class PlacedHost(NamedTuple):
    """A host that Ray has placed on a node."""

    facts: NodeFacts
    host: Host


class RayLauncher:
    """Start workers as children of Ray actors."""

    def __init__(self, spec: RunSpec, placement: Placement, folder: Path, notify: Observer) -> None:
        """Place the workers. Raises ConfigError without room for all, or if a node does not fit."""
        self._spec = spec
        self._placement = placement
        self._timeout_seconds = spec.faults.timeout_seconds
        self._folder = folder.absolute()
        self._layout: RingLayout | None = None
        self._group: PlacementGroup | None = None  # of the train ranks
        self._all_hosts: list[Host] = []
        self._train: list[PlacedHost] = []  # by rank
        self._rollout: list[PlacedHost] = []  # those whose worker is not started yet
        self._senders: dict[int, str] = {}  # names of the rollout workers' groups, by owner id
        self.store = ""
        self._closed = threading.Event()
        threading.Thread(target=self._watch_head, daemon=True).start()
        notify(Note("waiting for places on the Ray cluster"))
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            # A folder of this name may exist on every node.
            with NamedTemporaryFile(dir=self._folder.parent, prefix=".easyrl-") as probe:
                self._probe = Path(probe.name)
                self._place_all()
            self._probe = self._folder / "config.yaml"
        except BaseException:
            self.__exit__()
            raise
        devices = {}
        for role, placed in (("rollout", self._rollout), ("train", self._train)):
            for number, host in enumerate(placed):
                devices[f"{role}-{number}"] = self._device_of(host.facts)
        self.devices: Mapping[str, str] = devices

    def _watch_head(self) -> None:
        """End this process when the head does not answer: some of Ray's calls never return."""
        while not self._closed.wait(CHECK_SECONDS):
            call = threading.Thread(target=ray.nodes, daemon=True)
            call.start()
            call.join(HEAD_SECONDS)
            if call.is_alive() and not self._closed.is_set():
                hint = resume_hint(self._folder) if self._train else ""
                lost = f"the head of the Ray cluster has not answered for {HEAD_SECONDS:g} s"
                os.write(2, f"easyrl: {lost}{hint}\n".encode())
                os._exit(FAILED)

    def _place_all(self) -> None:
        num_ranks = self._placement.train.count
        if num_ranks > 0:
            self._layout = ring_layout(self._spec, self._placement)
            bundles = [self._bundle("train")] * num_ranks
            group = cluster.reserve(bundles, self._timeout_seconds)
            self._group = group
            ranks = range(num_ranks)
            strategies = [PlacementGroupSchedulingStrategy(group, rank) for rank in ranks]
            self._train = self._place("train", strategies)
            self.store = query(self._rank0, "open_store")
        self._rollout = self._place("rollout", ["SPREAD"] * self._placement.num_rollout_workers)

    @property
    def _rank0(self) -> Host:
        """The host of train rank 0, which has the ring."""
        return self._train[0].host

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed.set()
        for host in self._all_hosts:
            ray.kill(host)
        if self._group is not None:
            remove_placement_group(self._group)

    def _bundle(self, role: str) -> dict[str, float]:
        """Return what a worker needs, as {"CPU": 2} or {"GPU": 1}."""
        placement = self._placement
        if placement.infer.kind == "cpu":
            return {"CPU": placement.num_threads}
        size = placement.engine.tensor_parallel_size if role == "rollout" else 1
        return {RAY_RESOURCES[placement.accelerator]: size}

    def _new_host(self, role: str, strategy: Any) -> Host:
        needed = self._bundle(role)
        actor = actor_of(WorkerHost).options(
            scheduling_strategy=strategy,
            num_cpus=needed.pop("CPU", 0),
            num_gpus=needed.pop("GPU", 0),
            resources=needed,  # the rest
        )
        host = actor.remote()
        self._all_hosts.append(host)
        return host

    def _device_of(self, facts: NodeFacts) -> str:
        return f"{facts.address}/{device_name(self._placement.accelerator, facts.devices)}"

    def _place(self, role: str, strategies: Sequence[Any]) -> list[PlacedHost]:
        """Start a host with each strategy, wait until all are placed, and sort them by node address
        and device. Raises ConfigError as `__init__`."""
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            hosts = [self._new_host(role, each) for each in strategies]
            asked = [self._describe(host, role) for host in hosts]
            left = max(0.0, deadline - time.monotonic())
            _, pending = ray.wait(asked, num_returns=len(asked), timeout=left)
            if pending:
                counts = f"{len(pending)} of {len(asked)}"
                bundle = self._bundle(role)
                raise ConfigError(cluster.no_place(role, counts, bundle, self._timeout_seconds))
            try:
                placed = list(map(PlacedHost, ray.get(asked), hosts))
                return sorted(placed, key=lambda each: each.facts)
            except RayError as error:
                _raise_unless_lost(error)
            # Ray still places workers on a node that was lost a moment ago.
            time.sleep(PAUSE_SECONDS)
            for host in hosts:
                ray.kill(host)

    def _describe(self, host: Host, role: str) -> Any:
        """Ask the host for its node's facts. Return Ray's reference of the answer."""
        model = Path(self._spec.model.path)
        paths = [str(model.absolute())] if model.exists() else []  # else it is a hub id
        needs_folder = role == "train"  # for checkpoints and the model; rollout workers write logs
        return host.describe.remote(cluster.versions(), paths, str(self._probe), needs_folder)

    def start_train(
        self, supervisor: Supervisor, settings: Sequence[WorkerSettings]
    ) -> list[Worker]:
        workers = []
        for rank, each in enumerate(settings):
            other_ranks = range(1, len(settings)) if rank == 0 else [0]
            peers = {other: self._train[other].host for other in other_ranks}
            own = self._train[rank]
            serve = partial(self._serve, each, own.facts, (self._layout, peers, ""))
            process = RemoteProcess(own.host, serve)
            workers.append(supervisor.watch(Worker(each.name, process, process.control)))
        return workers

    def start_rollout(self, supervisor: Supervisor, settings: WorkerSettings) -> Worker:
        sender = f"{settings.name} {uuid4()}"
        self._senders[settings.owner_id] = sender
        peers = {"ring": self._rank0} if self._train else {}
        if self._rollout:  # the run starts
            facts, host = self._rollout.pop(0)
        else:  # a replacement, or an added worker
            facts = None
            host = self._new_host("rollout", "SPREAD")
        serve = partial(self._serve, settings, facts, (self._layout, peers, sender))
        process = RemoteProcess(host, serve)
        return supervisor.watch(Worker(settings.name, process, process.control))

    def _wait_for_place(
        self, process: RemoteProcess, control: Connection, name: str
    ) -> NodeFacts | None:
        """Wait until Ray has placed a later rollout worker; report what is wrong, return None."""
        asked = self._describe(process.host, "rollout")
        is_reported = False
        deadline = time.monotonic() + NOTICE_SECONDS
        while True:
            try:
                facts: NodeFacts = ray.get(asked, timeout=PENDING_SECONDS)
                return facts
            except GetTimeoutError:
                if not is_reported:
                    needed = cluster.text_of(self._bundle("rollout"))
                    available = cluster.cluster_text()
                    control.send(Note(f"{name} waits for a place with {needed}; {available}"))
                is_reported = True
            except RayError as error:
                if process.is_killed:
                    return None
                failed = _lost(error)
                if failed.is_user_error or time.monotonic() > deadline:
                    control.send(failed)
                    return None
                # Ray still places workers on a node that was lost a moment ago.
                time.sleep(PAUSE_SECONDS)
                process.replace_host(self._new_host("rollout", "SPREAD"))
                asked = self._describe(process.host, "rollout")

    def _serve(
        self,
        settings: WorkerSettings,
        facts: NodeFacts | None,
        others: tuple[Any, ...],
        process: RemoteProcess,
        control: Connection,
    ) -> int:
        """Pass on commands and events until the worker ends; return its exit code. `others` are
        the other arguments of `WorkerHost.run`; `facts` is None if it has no place yet."""
        if facts is None:
            facts = self._wait_for_place(process, control, settings.name)
        if facts is None:
            return 1
        host = process.host
        process.device = self._device_of(facts)
        try:
            log_file = None
            if facts.sees_folder and settings.log_file:
                log_file = str(Path(settings.log_file).absolute())
            settings = replace(
                settings,
                address=facts.address,
                clock_offset_seconds=_clock_offset(host),
                log_file=log_file,
                device_indices=tuple(range(len(settings.device_indices))),
            )
            answers = host.run.options(num_returns="streaming").remote(settings, *others)
            process.pid = ray.get(next(answers))
            threading.Thread(target=_pass_commands, args=(control, host), daemon=True).start()
            for reference in answers:
                event = ray.get(reference)
                if isinstance(event, int):
                    return event
                control.send(event)
        except RayError as error:
            if not process.is_killed:
                control.send(_lost(error))
        except OSError:  # the controller has closed the pipe: it does not need the worker any more
            pass
        finally:
            ray.kill(host)
        return 1

    def reclaim(self, owner_ids: Sequence[int]) -> None:
        if self._train:
            self._query_ring("fence", [self._senders[owner] for owner in owner_ids])

    def delivered(self, iteration: int) -> set[int]:
        found: set[int] = self._query_ring("delivered", iteration)
        return found

    def _query_ring(self, what: str, argument: Any) -> Any:
        try:
            return query(self._rank0, what, argument)
        except RayError as error:  # a timeout too
            raise WorkerFailure(f"train-0 {_lost(error).message}") from None


def _clock_offset(host: Host) -> float:
    """Return this machine's clock minus that of the host's, in seconds."""
    before = time.monotonic()
    remote_time: float = query(host, "clock")
    after = time.monotonic()
    return (before + after) / 2 - remote_time


def _pass_commands(control: Connection, host: Host) -> None:
    """Send the controller's commands to a worker until it closes the pipe."""

    def after_call(done: Any) -> None:
        if done.exception() is not None:  # the command may be lost
            # In this thread, Ray's own, `ray.kill` would wait for itself.
            threading.Thread(target=ray.kill, args=(host,), daemon=True).start()

    with contextlib.suppress(EOFError, OSError):
        while True:
            command: Command = control.recv()
            reference = host.deliver.remote("control", command)
            reference.future().add_done_callback(after_call)


def _lost(error: Exception) -> Failed:
    """Report an exception of `WorkerHost.run`, or that the actor or its node is gone."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        is_user_error = isinstance(cause, ConfigError)
        return Failed(f"{cause}", "", is_user_error=is_user_error, is_replaceable=True)
    cause_text = " ".join(str(error).split())
    return Failed(f"its Ray actor or node is lost: {cause_text:.300}", "", False, True)


def _raise_unless_lost(error: RayError) -> None:
    """Raise ConfigError unless a host could not be placed because its node is lost."""
    failed = _lost(error)
    if failed.is_user_error:
        raise ConfigError(failed.message) from None
    # Ray gives no reason but a text. It names the node if the actor has failed there.
    text = str(error)
    node = re.search(r"ip=([^,)]+)", text)
    if node is not None:
        raise ConfigError(
            f"node {node[1]}: expected EasyRL and what it needs as here, but its worker cannot "
            f"start: {text.strip().splitlines()[-1]}"
        ) from None
