"""Start workers on a Ray cluster, and connect them with the controller.

    Worker.control ◄──pipe──► thread per worker ◄──Ray──► WorkerHost ◄──pipe──► worker

To the supervisor such a worker looks like a process of this machine: `RemoteProcess` has the same
attributes, and its end is an event of its pipe. Ray never restarts an actor itself: a replacement
is a new actor, wherever there is room.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from easyrl.channels.ring_buffer import RingLayout
from easyrl.config import Config, ConfigError
from easyrl.events import Command, Failed, Note
from easyrl.runtime.placement import Placement, ring_layout
from easyrl.runtime.ray.cluster import bundle_of, describe_cluster, options_of, reserve, versions
from easyrl.runtime.ray.host import GROUPS, NodeFacts, WorkerHost
from easyrl.runtime.run_folder import folder_of
from easyrl.runtime.supervisor import Supervisor, Worker, WorkerFailure
from easyrl.workers.settings import WorkerSettings

PENDING_SECONDS = 10.0  # then a worker without a place is reported
KILL_SECONDS = 5.0  # for Ray to confirm that an actor is dead: a lost node confirms nothing
SAME_CLOCK_SECONDS = 0.01  # clocks that differ by less are the same, or as good
QUERY_SECONDS = 30.0

remote: Any = ray.remote
actor_of: Any = remote(concurrency_groups=GROUPS, max_restarts=0, max_task_retries=0)


class Host:
    """The driver's handle of a `WorkerHost`: its methods, each in its concurrency group."""

    def __init__(self, **options: Any) -> None:
        self.actor = actor_of(WorkerHost).options(**options).remote()

    def describe(self, paths: Sequence[str], *, serves_store: bool = False) -> Any:
        return self.actor.describe.remote(paths, serves_store=serves_store)

    def query(self, what: str, *arguments: Any) -> Any:
        return ray.get(self.actor.query.remote(what, *arguments), timeout=QUERY_SECONDS)

    def kill(self) -> None:
        ray.kill(self.actor, no_restart=True)


class RemoteProcess:
    """A worker on a node of the cluster, with the attributes of a multiprocessing.Process."""

    def __init__(self, serve: Callable[[RemoteProcess, Connection], int]) -> None:
        """`serve` runs in a thread until the worker has ended, and returns its exit code."""
        self.pid = 0
        self.exitcode: int | None = None
        self.host: Host | None = None
        self._is_killed = False
        self.control, theirs = Pipe()
        self.sentinel, self._ended = Pipe(duplex=False)

        def run() -> None:
            try:
                self.exitcode = serve(self, theirs)
            finally:
                self.exitcode = 1 if self.exitcode is None else self.exitcode
                theirs.close()
                self._ended.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def is_killed(self) -> bool:
        return self._is_killed

    def kill(self) -> None:
        self._is_killed = True
        if self.host is not None:
            self.host.kill()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the worker has ended. Once it is killed, a node that does not answer is not
        waited for: what its worker still sends is refused."""
        self._thread.join(KILL_SECONDS if self._is_killed and timeout is None else timeout)
        if self._is_killed and self.exitcode is None:
            self.exitcode = 1

    def write_stacks(self) -> None:
        if self.host is not None:
            with contextlib.suppress(RayError):
                self.host.actor.query.remote("write_stacks")


class RayLauncher:
    """Start workers as children of Ray actors."""

    def __init__(self, config: Config, placement: Placement) -> None:
        """Reserve the train ranks' devices, and open the store on the node of rank 0. Raises
        ConfigError if that is impossible, or a node does not fit."""
        self._config, self._placement = config, placement
        self._timeout_seconds = config.runtime.timeout_seconds
        self._folder = folder_of(config).absolute().parent
        self._layout: RingLayout | None = None
        self._group: PlacementGroup | None = None
        self._hosts: list[Host] = []  # of the train ranks
        self._facts: list[NodeFacts] = []
        self._senders: dict[int, str] = {}  # by owner id
        self._numbers = count()
        self.store = ""
        if placement.train.count:
            self._layout = ring_layout(config, placement)
            try:
                self._place_train()
            except BaseException:
                self.__exit__()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for host in self._hosts:
            host.kill()
        if self._group is not None:
            remove_placement_group(self._group)

    def _options(self, role: str) -> dict[str, Any]:
        placement = self._placement
        kind = "cpu" if placement.infer.kind == "cpu" else placement.accelerator
        size = placement.engine.tensor_parallel_size if role == "rollout" else 1
        return options_of(kind, size, placement.num_threads)

    def _place_train(self) -> None:
        options, num_ranks = self._options("train"), self._placement.train.count
        self._group = reserve([bundle_of(options)] * num_ranks, self._timeout_seconds)
        for bundle in range(num_ranks):
            where = PlacementGroupSchedulingStrategy(self._group, bundle)
            self._hosts.append(Host(scheduling_strategy=where, **options))
        asked = [host.describe(self._paths(), serves_store=True) for host in self._hosts]
        found = list(zip(ray.get(asked, timeout=self._timeout_seconds), self._hosts, strict=True))
        found.sort(key=lambda each: (each[0].address, each[0].devices))
        self._facts = [facts for facts, _ in found]
        self._hosts = [host for _, host in found]
        for facts in self._facts:
            if problem := self._problem_of(facts, writes_files=True):
                raise ConfigError(problem)
        self.store = self._facts[0].store

    def _paths(self) -> list[str]:
        """Paths that nodes may need: the folder of runs and, if it is a folder here, the model."""
        self._folder.mkdir(parents=True, exist_ok=True)
        model = Path(self._config.model.path)
        return [str(self._folder), *([str(model.absolute())] if model.exists() else [])]

    def _problem_of(self, facts: NodeFacts, *, writes_files: bool) -> str:
        """Return why a worker cannot run on the node, or an empty string. Train workers write
        checkpoints and the model (`writes_files`)."""
        node, own = f"node {facts.name} ({facts.address})", versions()
        for name, version in own.items():
            if facts.versions[name] != version:
                return f"{node}: expected {name} {version}, as here, got {facts.versions[name]}"
        missing = [p for p in facts.missing if writes_files or p != str(self._folder)]
        if missing:
            return (
                f"{node}: expected {' and '.join(missing)}, as here: put model and run folder "
                "(--model, --output) on storage that the nodes share, or name the model by a hub id"
            )
        return ""

    def start_train(
        self, supervisor: Supervisor, settings: Sequence[WorkerSettings]
    ) -> list[Worker]:
        workers = []
        for rank, each in enumerate(settings):
            others = range(1, len(settings)) if rank == 0 else [0]
            peers = {peer: self._hosts[peer].actor for peer in others if len(settings) > 1}
            host, facts = self._hosts[rank], self._facts[rank]
            layout = self._layout if rank == 0 else None

            def serve(
                process: RemoteProcess,
                control: Connection,
                host: Host = host,
                facts: NodeFacts = facts,
                arguments: tuple[Any, ...] = (each, layout, peers, ""),
            ) -> int:
                process.host = host
                return self._serve(process, control, facts, *arguments)

            workers.append(supervisor.adopt(each.name, RemoteProcess(serve)))
        return workers

    def start_rollout(self, supervisor: Supervisor, settings: WorkerSettings) -> Worker:
        is_first = next(self._numbers) < self._placement.num_rollout_workers
        sender = self._senders[settings.owner_id] = f"{settings.name} {uuid4()}"
        peers = {"ring": self._hosts[0].actor} if self._hosts else {}

        def serve(process: RemoteProcess, control: Connection) -> int:
            process.host = Host(scheduling_strategy="SPREAD", **self._options("rollout"))
            facts = self._wait_for_place(process, control, settings.name, is_first=is_first)
            if facts is None:
                return 1
            return self._serve(process, control, facts, settings, self._layout, peers, sender)

        return supervisor.adopt(settings.name, RemoteProcess(serve), is_replaceable=True)

    def _wait_for_place(
        self, process: RemoteProcess, control: Connection, name: str, *, is_first: bool
    ) -> NodeFacts | None:
        """Wait until Ray has placed a rollout worker: at the start for `timeout_seconds`, later for
        ever. Reports what is wrong and returns None, or returns the node."""
        assert process.host is not None
        asked, started, is_reported = process.host.describe(self._paths()), time.time(), 0
        while True:
            try:
                facts: NodeFacts = ray.get(asked, timeout=PENDING_SECONDS)
            except GetTimeoutError:
                needed = ", ".join(
                    f"{n:g} {k}" for k, n in bundle_of(self._options("rollout")).items()
                )
                pending = f"{name} waits for a place with {needed}; {describe_cluster()}"
                if is_first and time.time() - started > self._timeout_seconds:
                    bound = f"for {self._timeout_seconds:g} s (runtime.timeout_seconds)"
                    control.send(Failed(f"{pending} {bound}", "", is_user_error=True))
                    return None
                if not is_reported:
                    control.send(Note(pending))
                is_reported = True
                continue
            except RayError as error:
                control.send(_lost(error))
                return None
            if problem := self._problem_of(facts, writes_files=False):
                control.send(Failed(problem, "", is_user_error=True))
                return None
            return facts

    def _serve(
        self,
        process: RemoteProcess,
        control: Connection,
        facts: NodeFacts,
        settings: WorkerSettings,
        *arguments: Any,
    ) -> int:
        """Pass on commands and events until the worker ends. Returns its exit code. `arguments`:
        the others of `WorkerHost.run`."""
        host = process.host
        assert host is not None
        try:
            before, there = time.monotonic(), host.query("clock")
            offset = (before + time.monotonic()) / 2 - there
            settings = replace(
                settings,
                address=facts.address,
                clock_offset_seconds=offset if abs(offset) > SAME_CLOCK_SECONDS else 0.0,
                shares_by_message=True,
                core_sharing=None,
                log_file=None if str(self._folder) in facts.missing else settings.log_file,
                device_indices=tuple(range(len(settings.device_indices))),
            )
            stream = host.actor.run.options(num_returns="streaming")
            answers = stream.remote(settings, *arguments)
            process.pid = ray.get(next(answers))
            threading.Thread(target=_pass_commands, args=(control, host), daemon=True).start()
            for reference in answers:
                event = ray.get(reference)
                if isinstance(event, int):
                    return event
                control.send(event)
        except (RayError, GetTimeoutError) as error:
            if not process.is_killed:
                control.send(_lost(error))
        except OSError:  # the controller has closed the pipe: it does not need the worker any more
            pass
        finally:
            host.kill()
        return 1

    def reclaim(self, owner_ids: Sequence[int]) -> None:
        if self._hosts:
            self._query_ring("fence", [self._senders[owner] for owner in owner_ids])

    def delivered(self, iteration: int) -> set[int]:
        found: set[int] = self._query_ring("delivered", iteration)
        return found

    def _query_ring(self, what: str, argument: Any) -> Any:
        try:
            return self._hosts[0].query(what, argument)
        except RayError as error:  # a timeout too
            raise WorkerFailure(f"train-0 {_lost(error).message}") from None


def _pass_commands(control: Connection, host: Host) -> None:
    """Send the controller's commands to the worker, until the pipe is closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            command: Command = control.recv()
            host.actor.deliver.remote("control", command)


def _lost(error: Exception) -> Failed:
    """An actor or its node is gone."""
    cause = " ".join(str(error).split())
    return Failed(f"its Ray actor or node is lost: {cause:.300}", "", False, is_replaceable=True)
