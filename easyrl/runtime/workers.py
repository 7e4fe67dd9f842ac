"""All workers of a run: spawn them with their settings, receive their events, replace dead ones.

    supervisor.wait ─► all events ────────────────────────► observer (as FromWorker)
                       all except Activity and Note ──────► next_event, for the controller

A rollout worker's way (`Worker.state`); the set of train workers never changes:

    starting ─► ready ─► joining ─► working ─► stopping      the last only after `scale`
       ▲          └── full exchange ──┘ │
       └──────── replacement ◄── Lost ◄─┘

When `next_event` returns `Lost`, the worker's slots in the ring are reclaimed, and its replacement,
which has the same name, is starting.

`easyrl eval` has rollout workers only: no ring, no weight channel; engines keep the weights that
they load.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from easyrl import events
from easyrl.config import Config, ConfigError
from easyrl.config.devices import DeviceSet
from easyrl.config.rollout import SamplingChoice
from easyrl.events import Observer
from easyrl.rewards.loading import read_sources
from easyrl.runtime.launchers import Launcher
from easyrl.runtime.placement import Placement, device_name, engines_on
from easyrl.runtime.resume import Resume
from easyrl.runtime.supervisor import STOP_SECONDS, Supervisor, Worker, WorkerFailure
from easyrl.runtime.watchdog import TICK_SECONDS, Stall, Watchdog
from easyrl.workers.core_sharing import CoreSharing, IdleBoard, make_idle_board
from easyrl.workers.settings import WorkerSettings

LAST_CHECKPOINT_SECONDS = 1800.0  # longest time that a stopped run waits for its last checkpoint


class Workers:
    def __init__(
        self,
        config: Config,
        placement: Placement,
        supervisor: Supervisor,
        launcher: Launcher,
        *,
        log_of: Callable[[str], Path],
        notify: Observer,
        resumed: Resume | None = None,
        sampling: SamplingChoice | None = None,
    ) -> None:
        """Start the workers.

        Args:
            log_of: Path of a worker's log file, by its name.
            sampling: Sampling settings, if not those of training.
        """
        self._config, self._placement, self._supervisor = config, placement, supervisor
        self._log_of, self._notify, self._launcher = log_of, notify, launcher
        checkpoint = resumed.checkpoint if resumed is not None else None
        self._settings: dict[str, Any] = {
            "sampling": sampling,
            "store": launcher.store,
            "sources": read_sources(config),
            "checkpoint": str(checkpoint) if checkpoint is not None else None,
            "policy_version": resumed.state.policy_version if resumed is not None else 0,
        }
        num_train = placement.train.count
        board_size = placement.max_rollout_workers + num_train
        self._board = make_idle_board(board_size) if placement.lends_cores else None
        self._received: deque[tuple[Worker, events.WorkerEvent]] = deque()
        self._watchdog = Watchdog(config.runtime.stall_seconds)
        self._deaths: deque[tuple[float, str]] = deque()  # time, worker and cause
        self.num_restarts: Counter[str] = Counter()  # by worker
        self.num_refused = 0  # added workers that did not start
        self._retiring: list[Worker] = []  # they leave once those that were added are ready
        self._due: dict[Worker, tuple[float, str]] = {}  # when to kill a silent worker, and why
        self._devices = dict(enumerate(engines_on(placement.infer, placement)))
        """Devices by the number of the rollout worker that uses them."""
        self.rollout = [self._spawn_rollout(number) for number in self._devices]
        ranks = [self._settings_of("train", rank) for rank in range(num_train)]
        self.train = launcher.start_train(supervisor, ranks)
        self._needed: list[Worker] | None = None
        self._deadline = math.inf

    def _settings_of(self, role: str, number: int, **others: Any) -> WorkerSettings:
        config, placement, board = self._config, self._placement, self._board
        settings = worker_settings(
            config,
            placement,
            role,
            number,
            log_file=str(self._log_of(f"{role}-{number}")),
            core_sharing=_core_sharing(board, placement, role, number),
            **self._settings,
            **others,
        )
        if board is not None:
            board[settings.owner_id] = False  # a dead worker may have been idle
        return settings

    def _spawn_rollout(
        self, number: int, origin: Literal["start", "replacement", "added"] = "start"
    ) -> Worker:
        settings = self._settings_of("rollout", number, device_indices=self._indices_of(number))
        worker = self._launcher.start_rollout(self._supervisor, settings)
        worker.origin = origin
        if origin != "start":
            device = worker.remote_device
            device = device or device_name(self._placement.accelerator, self._indices_of(number))
            self._notify(events.WorkerSpawned(time.monotonic(), worker.name, device))
        return worker

    def _indices_of(self, number: int) -> tuple[int, ...]:
        """The accelerators of a rollout worker; empty on the CPU."""
        return self._devices[number] if self._placement.infer.kind != "cpu" else ()

    @property
    def infer_devices(self) -> DeviceSet:
        """The devices of the rollout workers that do not leave."""
        staying = [w.number for w in self.rollout if not (w.is_leaving or w in self._retiring)]
        indices = sorted(index for number in staying for index in self._devices[number])
        return replace(self._placement.infer, indices=tuple(indices))

    @property
    def changing(self) -> list[str]:
        """Names of the rollout workers that are starting or leaving. One that waits for a place on
        a cluster may wait for ever, and is not among them."""
        starting = [worker for worker in self.rollout if _is_starting(worker)]
        leaving = [w for w in self.rollout if w.is_leaving or w in self._retiring]
        return [worker.name for worker in (*starting, *leaving)]

    @property
    def all(self) -> list[Worker]:
        return [*self.train, *self.rollout]

    @property
    def rank0(self) -> Worker:
        """Train rank 0: the only train worker that receives commands."""
        return self.train[0]

    def device_of(self, worker: Worker) -> str:
        placement, number = self._placement, worker.number
        is_train = worker in self.train
        indices = placement.indices_of("train", number) if is_train else self._indices_of(number)
        return worker.remote_device or device_name(placement.accelerator, indices)

    # -- events -----------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        while any(worker.state == "starting" for worker in self.all):
            self.next_event()

    def next_event(self) -> tuple[Worker, events.WorkerEvent]:
        """Wait for the next event that the controller has to handle."""
        while True:
            while not self._received:
                self._receive()
            worker, event = self._received.popleft()
            if isinstance(event, events.Note):
                self._notify(event)
                continue
            self._notify(events.FromWorker(worker.name, time.monotonic(), event))
            match event:
                case events.Ready():
                    worker.state = "ready" if worker in self.rollout else "working"
                    self._retire()
                case events.Lost():
                    self._replace(worker, event)
                    self._retire()
            if not isinstance(event, events.Activity | events.Starting | events.Failed):
                return worker, event

    def _receive(self) -> None:
        if time.monotonic() > self._deadline:
            raise WorkerFailure(
                f"the last checkpoint was not written in {LAST_CHECKPOINT_SECONDS:g} s"
            )
        received = self._supervisor.wait(TICK_SECONDS, needed=self._needed)
        self._received.extend(received)
        for worker, event in received:
            self._watchdog.on_event(worker.name, event)
        lost = [worker.number for worker, event in received if isinstance(event, events.Lost)]
        if lost:
            try:
                self._launcher.reclaim(lost)
            except TimeoutError as error:  # another worker was stopped in a move
                raise WorkerFailure(str(error)) from None
        answered = {worker for worker, _ in self._received}  # perhaps
        for worker, (due, reason) in list(self._due.items()):
            if time.monotonic() > due and worker not in answered:
                worker.kill(reason)
        pids = {w.name: w.local_pid for w in self.all if w.is_placed}
        match self._watchdog.tick(pids):
            case Stall(names, cause):
                self._watchdog.write_stacks(self.all, self._log_of("easyrl"))
                self._end_stall(names, cause)
            case str(warning) if warning:
                self._notify(events.NoEvents(time.monotonic(), warning))

    def _end_stall(self, names: Sequence[str], cause: str) -> None:
        """Kill the rollout workers that the others wait for. Raises WorkerFailure if it is a train
        worker, or unknown."""
        stalled = [worker for worker in self.rollout if worker.name in names]
        if not names or len(stalled) < len(names):
            raise WorkerFailure(cause)
        for worker in stalled:
            worker.kill(f"was killed after a stall: {cause}")

    def kill_unless_answered(self, worker: Worker, seconds: float, reason: str) -> None:
        """Kill the worker after this time, unless `answered` is called before."""
        self._due[worker] = time.monotonic() + seconds, reason

    def answered(self, worker: Worker) -> None:
        self._due.pop(worker, None)

    def begin_to_stop(self) -> None:
        """Wait only for the last checkpoint from now on: only the death of a train worker is a
        failure, and LAST_CHECKPOINT_SECONDS are left."""
        self._needed, self._deadline = self.train, time.monotonic() + LAST_CHECKPOINT_SECONDS

    # -- replacing and scaling rollout workers ----------------------------------------------------

    def _replace(self, worker: Worker, lost: events.Lost) -> None:
        """Spawn a replacement, unless the worker was to leave. Raises WorkerFailure after more than
        `runtime.max_restarts` deaths."""
        self.answered(worker)
        position, runtime = self.rollout.index(worker), self._config.runtime
        is_refused = worker.origin == "added" and worker.state == "starting"
        if worker.is_leaving or is_refused:
            del self.rollout[position], self._devices[worker.number]
            self.num_refused += is_refused
            what = "has left"
            if is_refused:
                what = f"{lost.cause} while it started, and is not replaced"
            self._notify(events.Note(f"{worker.name} {what}\n{lost.traceback}".rstrip()))
            self._notify(events.WorkerLeft(time.monotonic(), worker.name))
            return
        now, window = time.monotonic(), runtime.restart_window_seconds
        self._deaths.append((now, f"{worker.name} {lost.cause}"))
        while self._deaths[0][0] < now - window:
            self._deaths.popleft()
        num_deaths, most = len(self._deaths), runtime.max_restarts
        if num_deaths > most:
            lines = [f"{worker.name} {lost.cause}", lost.traceback]
            for time_, text in list(self._deaths)[-2::-1]:
                lines.append(f"{now - time_:.0f} s before (runtime.max_restarts={most}): {text}")
            raise WorkerFailure("\n".join(filter(None, lines)))
        self.num_restarts[worker.name] += 1
        self.rollout[position] = self._spawn_rollout(worker.number, "replacement")
        within = f"{num_deaths} of {most} in {window:g} s (runtime.max_restarts)"
        note = f"{worker.name} {lost.cause}; a new one starts in its place: {within}"
        self._notify(events.Note(f"{note}\n{lost.traceback}".rstrip()))

    def scale(self, wanted: DeviceSet) -> None:
        """Start rollout workers on the new devices of `wanted`; then let those on other devices
        leave. The caller has checked `wanted`. Raises ConfigError, and changes nothing, if a
        process cannot be started."""
        engines, before = engines_on(wanted, self._placement), list(self.rollout)
        most, used = self._placement.max_rollout_workers, {*self._devices.values()}
        for indices in (engine for engine in engines if engine not in used):
            number = next(n for n in range(most) if n not in self._devices)
            self._devices[number] = indices
            try:
                self.rollout.append(self._spawn_rollout(number, "added"))
            except OSError as error:
                del self._devices[number]
                self._retiring = self.rollout[len(before) :]
                self._retire()
                raise ConfigError(f"rollout-{number} cannot be started: {error}") from None
        self._retiring = [w for w in before if self._devices[w.number] not in engines]
        self._retire()

    def _retire(self) -> None:
        """Let the workers on devices that are not wanted leave once the new ones are ready, or stay
        if none of those has started."""
        staying = [worker for worker in self.rollout if worker not in self._retiring]
        if not any(map(_is_starting, staying)):
            for worker in self._retiring if staying else ():
                worker.is_leaving = True
            self._retiring = []

    def dismiss(self, worker: Worker) -> None:
        """End a worker that `is_leaving` and has no prompts."""
        worker.state = "stopping"
        worker.send(events.Stop())
        self.kill_unless_answered(worker, STOP_SECONDS, "did not stop")


def _is_starting(worker: Worker) -> bool:
    """Return whether the worker starts, and has a place if it is on a cluster."""
    return worker.state == "starting" and worker.is_placed


def _core_sharing(
    board: IdleBoard | None, placement: Placement, role: str, number: int
) -> CoreSharing | None:
    """Let a worker use the cores of every n-th worker of the other role while that one waits."""
    if board is None:
        return None
    owner_id = owner_id_of(placement, role, number)
    if role == "rollout" and placement.engine.name == "vllm":
        return CoreSharing(board, owner_id, shared={})
    if role == "rollout" and number >= placement.num_rollout_workers:
        return None  # added later: it has no cores of its own
    other = "train" if role == "rollout" else "rollout"
    first = owner_id_of(placement, other, 0)
    others = range(number, placement.num_workers(other), placement.num_workers(role))
    shared = {first + each: placement.cores_of(other, each) for each in others}
    return CoreSharing(board, owner_id, shared)


def owner_id_of(placement: Placement, role: str, number: int) -> int:
    """The worker's number in the ring and on the idle board: rollout workers come first."""
    return number if role == "rollout" else placement.max_rollout_workers + number


def worker_settings(
    config: Config, placement: Placement, role: str, number: int, **others: Any
) -> WorkerSettings:
    """Settings of a worker that follow from the placement, and `others`."""
    is_rollout = role == "rollout"
    is_cpu = (placement.infer if is_rollout else placement.train).kind == "cpu"
    others.setdefault("device_indices", () if is_cpu else placement.indices_of(role, number))
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
        memory_fraction=placement.memory_fraction(role),
        cores=placement.cores_of(role, number),
        rank=0 if is_rollout else number,
        num_train_ranks=placement.train.count,
        **others,
    )
