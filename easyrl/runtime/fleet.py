"""The workers of a run: start them, give them weights and groups, replace and scale them.

A rollout worker's states, and what it gets in each (`supervisor.NEXT` has the transitions):

    starting   nothing
    ready      its part of a full exchange of weights, or an admission
    joining    weights, alone
    working    groups, and its part of a full exchange
    leaving    nothing: it ends once it has answered its groups
    lost       a replacement, which is starting (`_on_lost`)

The set of train workers never changes: they start, and work.

Weights go from the trainer to the rollout workers in two ways:

    exchange   all that are ready or working, over the full channel, before an iteration
    admission  one that became ready meanwhile, over a temporary channel with train rank 0

    controller               train rank 0              rollout workers
    ────────────────────────────────────────────────────────────────────────────
    InitWeightChannel ─────► join ◄══════════════════► join       if members changed
    ExchangeWeights ───────► broadcast ══════════════► receive
    CancelExchange ────────► drop the channel ───────► drop       if one has died
    ◄── WeightsExchanged, with an error if it failed ──

A process group neither grows nor survives a dead member. So after a death the others drop the
channel, and the version is sent again over a new one. A rollout worker that neither answers nor
dies is killed. `easyrl eval` has rollout workers only, which keep the weights that they load.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from easyrl import events
from easyrl.config import Config, ConfigError
from easyrl.config.devices import DeviceSet
from easyrl.rewards.loading import read_sources
from easyrl.runtime.launcher import Launcher
from easyrl.runtime.ledger import Ledger
from easyrl.runtime.placement import Placement, device_name, engines_on
from easyrl.runtime.supervisor import STOP_SECONDS, Origin, Supervisor, Worker, WorkerFailure
from easyrl.runtime.watchdog import TICK_SECONDS, Stall, Watchdog
from easyrl.workers.core_sharing import CoreSharing, make_idle_board
from easyrl.workers.settings import WorkerSettings

MAX_FAILURES = 3  # exchanges in a row that may fail although nobody died


class Fleet:
    ledger: Ledger | None = None  # the groups handed out now: of an iteration or an evaluation

    def __init__(
        self,
        config: Config,
        placement: Placement,
        supervisor: Supervisor,
        launcher: Launcher,
        *,
        log_of: Callable[[str], Path],
        notify: events.Observer,
        **settings: Any,
    ) -> None:
        """Start the workers. `settings`: more of their `WorkerSettings`."""
        self._config, self._placement, self._supervisor = config, placement, supervisor
        self._log_of, self._notify, self._launcher = log_of, notify, launcher
        self._settings = {"store": launcher.store, "sources": read_sources(config), **settings}
        num_train = placement.train.count
        board_size = placement.max_rollout_workers + num_train
        self._board = make_idle_board(board_size) if placement.lends_cores else None
        self._received: deque[tuple[Worker, events.WorkerEvent]] = deque()
        self._watchdog = Watchdog(config.runtime.stall_seconds)
        self._deaths: deque[float] = deque()  # times
        self.num_restarts: Counter[str] = Counter()  # by worker
        self.num_refused = 0  # added workers that did not start
        self._retiring: list[Worker] = []  # they leave once those that were added are ready
        self._limits: dict[Worker, tuple[float, str]] = {}  # when to kill a silent worker, and why
        self._needed: list[Worker] | None = None  # None: all
        # The weight exchange. `_members` have the full channel, `_taking_part` the present one.
        self._generations = count()
        self._members: list[Worker] = []
        self._taking_part: list[Worker] = []
        self._awaited: set[Worker] = set()  # whose answers are missing
        self._errors: list[str] = []  # of those who have answered
        self._version = -1  # that all working engines have
        self._num_failures: Counter[Worker] = Counter()  # failed admissions

        self._devices = dict(enumerate(engines_on(placement.infer, placement)))
        """Devices by the number of the rollout worker that uses them."""
        self.rollout = [self._spawn_rollout(number) for number in self._devices]
        ranks = [self._settings_of("train", rank) for rank in range(num_train)]
        self.train = launcher.start_train(supervisor, ranks)

    def _settings_of(self, role: str, number: int, **others: Any) -> WorkerSettings:
        others |= {"log_file": str(self._log_of(f"{role}-{number}")), **self._settings}
        others["core_sharing"] = self._core_sharing(role, number)
        return worker_settings(self._config, self._placement, role, number, **others)

    def _core_sharing(self, role: str, number: int) -> CoreSharing | None:
        """Let a worker use the cores of each n-th worker of the other role while that one waits."""
        placement, owner_id = self._placement, owner_id_of(self._placement, role, number)
        is_added = role == "rollout" and number >= placement.num_rollout_workers
        if self._board is None or is_added:  # an added one has no cores of its own
            return None
        self._board[owner_id] = False  # a dead worker may have been idle
        if role == "rollout" and placement.engine.name == "vllm":
            return CoreSharing(self._board, owner_id, shared={})
        other = "train" if role == "rollout" else "rollout"
        first = owner_id_of(placement, other, 0)
        others = range(number, placement.num_workers(other), placement.num_workers(role))
        shared = {first + each: placement.cores_of(other, each) for each in others}
        return CoreSharing(self._board, owner_id, shared)

    def _spawn_rollout(self, number: int, origin: Origin = "start") -> Worker:
        settings = self._settings_of("rollout", number, device_indices=self._indices_of(number))
        worker = self._launcher.start_rollout(self._supervisor, settings)
        worker.origin = origin
        if origin != "start":
            device = self._device_of(worker)
            self._notify(events.WorkerSpawned(time.monotonic(), worker.name, device))
        return worker

    def _indices_of(self, number: int) -> tuple[int, ...]:
        return self._devices[number] if self._placement.infer.kind != "cpu" else ()

    @property
    def all(self) -> list[Worker]:
        return [*self.train, *self.rollout]

    @property
    def rank0(self) -> Worker:
        """Train rank 0: the only train worker that receives commands."""
        return self.train[0]

    def _device_of(self, worker: Worker) -> str:
        placement, number = self._placement, worker.number
        is_train = worker.name.startswith("train")
        indices = placement.indices_of("train", number) if is_train else self._indices_of(number)
        return worker.remote_device or device_name(placement.accelerator, indices)

    def rows(self) -> list[dict[str, Any]]:
        columns = ("name", "kind", "pid", "device", "state", "restarts")
        rows = [("controller", "controller", os.getpid(), "cpu", "running", 0)]
        for worker in (*self.rollout, *self.train):
            name, pid, device = worker.name, worker.process.pid, self._device_of(worker)
            kind, num_restarts = name.partition("-")[0], self.num_restarts[name]
            rows.append((name, kind, pid, device, worker.state, num_restarts))
        return [dict(zip(columns, row, strict=True)) for row in rows]

    # -- events -----------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        while any(worker.state == "starting" for worker in self.all):
            self.next_event()

    def next_event(self) -> events.WorkerEvent:
        """Hand out what workers can take; wait for the next event but activity, and record it."""
        self._let_leave()
        self._hand_out()
        self._admit()
        while True:
            while not self._received:
                self._receive()
            worker, event = self._received.popleft()
            if isinstance(event, events.Note):
                self._notify(event)
                continue
            self._notify(events.FromWorker(worker.name, time.monotonic(), event))
            if isinstance(event, events.Activity | events.Starting | events.Failed):
                continue
            match event:
                case events.Ready() if worker.state == "starting":
                    has_weights = worker in self.train or not self.train
                    worker.become("working" if has_weights else "ready")
                case events.WeightsExchanged():
                    self._on_exchanged(worker, event)
                case events.Lost():
                    self._on_lost(worker, event)
            if self.ledger is not None:
                self.ledger.on_event(worker.name, event)
            return event

    def answers(self, ledger: Ledger) -> Iterator[events.PromptEvaluated]:
        """Send the problems of an evaluation to whichever rollout worker is free, which answers
        with the weights that it has; yield the answers as they arrive."""
        self.ledger = ledger
        try:
            while not ledger.is_complete:
                event = self.next_event()
                if isinstance(event, events.PromptEvaluated):
                    yield event
        finally:
            self.ledger = None

    def _receive(self) -> None:
        """Wait for events for at most TICK_SECONDS; kill workers that are silent for too long."""
        received = self._supervisor.wait(TICK_SECONDS, needed=self._needed)
        self._received.extend(received)
        for worker, event in received:
            self._watchdog.on_event(worker.name, event)
        answered = {worker for worker, _ in self._received}  # perhaps
        for worker, (due, reason) in list(self._limits.items()):
            if time.monotonic() > due and worker not in answered:
                worker.kill(reason)
        pids = {w.name: w.local_pid for w in self.all if w.is_placed}
        match self._watchdog.tick(pids):
            case Stall(names, cause):
                self._watchdog.write_stacks(self.all, self._log_of("easyrl"))
                self._end_stall(names, cause)
            case str(warning) if warning:
                self._notify(events.Note(warning))

    def _end_stall(self, names: Sequence[str], cause: str) -> None:
        """Kill rollout workers that others wait for. Raises WorkerFailure if that cannot help."""
        stalled = [worker for worker in self.rollout if worker.name in names]
        if not names or len(stalled) < len(names) or self._needed is not None:
            raise WorkerFailure(cause)
        for worker in stalled:
            worker.kill(f"was killed after a stall: {cause}")

    def begin_to_stop(self) -> None:
        """Wait only for the last checkpoint, which only a train worker's death prevents."""
        self._needed = self.train

    def _hand_out(self) -> None:
        if self.ledger is not None:
            working = {worker.name: worker for worker in self.rollout if worker.state == "working"}
            for name, command in self.ledger.take([*working]).items():
                working[name].send(command)

    # -- a death ----------------------------------------------------------------------------------

    def _on_lost(self, worker: Worker, lost: events.Lost) -> None:
        """Record everything that the death of a rollout worker changes. All its events have been
        handled. Raises WorkerFailure after more than `runtime.max_restarts` deaths."""
        starting, was_leaving = worker.state == "starting", worker.state == "leaving"
        worker.become("lost")
        self._limits.pop(worker, None)

        # The ring: its slots are free again, and nothing more of it arrives. Of two dead workers
        # one may have died in a move: they are reclaimed together.
        others = [each for each, event in self._received if isinstance(event, events.Lost)]
        self._launcher.reclaim([each.number for each in (worker, *others)])

        # The ledger: what is not in the ring waits again.
        if self.ledger is not None:
            iteration = self.ledger.iteration
            in_ring = () if iteration is None else self._launcher.delivered(iteration)
            self.ledger.on_worker_lost(worker.name, in_ring)

        # The weight exchange: the others must not wait for it.
        if self._awaited and worker in self._taking_part:
            self._awaited.discard(worker)
            self._cancel_exchange()
            self._end_admission()

        # Its place: empty if it was to leave or has never started, else a replacement's.
        position = self.rollout.index(worker)
        is_refused = worker.origin == "added" and starting
        if was_leaving or is_refused:
            del self.rollout[position], self._devices[worker.number]
            self.num_refused += is_refused
            what = "has left"
            if is_refused:
                what = f"{lost.cause} while it started, and is not replaced"
            self._notify(events.Note(f"{worker.name} {what}\n{lost.traceback}".rstrip()))
            self._notify(events.WorkerLeft(time.monotonic(), worker.name))
            return
        within = self._count_death(worker, lost)
        new = self.rollout[position] = self._spawn_rollout(worker.number, "replacement")
        self._retiring = [new if each is worker else each for each in self._retiring]
        note = f"{worker.name} {lost.cause}; a new one starts in its place: {within}"
        self._notify(events.Note(f"{note}\n{lost.traceback}".rstrip()))

    def _count_death(self, worker: Worker, lost: events.Lost) -> str:
        """Return how many of the allowed deaths there were. Raises WorkerFailure after too many."""
        runtime, now = self._config.runtime, time.monotonic()
        most, window = runtime.max_restarts, runtime.restart_window_seconds
        self._deaths.append(now)
        while self._deaths[0] < now - window:
            self._deaths.popleft()
        if len(self._deaths) > most:
            deaths = f"{len(self._deaths)}. death in {window:g} s (runtime.max_restarts={most})"
            raise WorkerFailure(f"{worker.name} {lost.cause}: {deaths}\n{lost.traceback}".rstrip())
        self.num_restarts[worker.name] += 1
        return f"{len(self._deaths)} of {most} in {window:g} s (runtime.max_restarts)"

    # -- weights ----------------------------------------------------------------------------------

    def exchange(self, policy_version: int) -> None:
        """Broadcast the trainer's weights to all rollout workers that are ready, unless all of them
        have this version (after an evaluation). A deterministic run waits for replacements."""
        num_failures = 0
        while num_failures < MAX_FAILURES:
            while self._awaited or not (members := self._ready()):
                self.next_event()
            is_known = policy_version == self._version
            if is_known and all(worker.state == "working" for worker in members):
                return
            self._broadcast(policy_version, members)
            while self._awaited:
                self.next_event()
            if not self._errors:
                self._version = policy_version
                return
            self._members = []
            num_failures += not any(worker.state == "lost" for worker in members)
        raise WorkerFailure(f"weight exchange: {num_failures} attempts failed: {self._errors[0]}")

    def _ready(self) -> list[Worker]:
        """The rollout workers that can take part in an exchange; none while others are awaited."""
        able = [worker for worker in self.rollout if worker.state in ("ready", "working")]
        is_enough = not self._config.runtime.deterministic or len(able) == len(self.rollout)
        return able if is_enough else []

    def _broadcast(self, policy_version: int, members: list[Worker]) -> None:
        if members != self._members:
            self._members, generation = members, next(self._generations)
            size = self._placement.engine.tensor_parallel_size
            world_size = 1 + size * len(members)
            self.rank0.send(events.InitWeightChannel(0, world_size, generation))
            for number, worker in enumerate(members):
                worker.send(events.InitWeightChannel(1 + size * number, world_size, generation))
        for worker in (self.rank0, *members):
            worker.send(events.ExchangeWeights(policy_version))
        self._taking_part, self._errors = members, []
        self._awaited = {*self.train, *members}

    def _admit(self) -> None:
        ready = [worker for worker in self.rollout if worker.state == "ready"]
        has_groups = self.ledger is not None and not self.ledger.is_complete
        if self._awaited or not ready or not has_groups or self._needed is not None:
            return
        worker, generation = ready[0], next(self._generations)
        world_size = 1 + self._placement.engine.tensor_parallel_size
        worker.become("joining")
        worker.send(events.InitWeightChannel(1, world_size, generation))
        worker.send(events.ExchangeWeights(self._version))
        self.rank0.send(events.SendWeights(self._version, world_size, generation))
        self._taking_part, self._errors = [worker], []
        self._awaited = {worker, self.rank0}

    def _on_exchanged(self, worker: Worker, event: events.WeightsExchanged) -> None:
        self._limits.pop(worker, None)
        self._awaited.discard(worker)
        if event.error:
            self._errors.append(f"{worker.name}: {event.error}")
            self._cancel_exchange()
        elif worker is self.rank0:
            self._limit_answers()
        elif worker.state == "ready":
            worker.become("working")
        self._end_admission()

    def _cancel_exchange(self) -> None:
        for worker in self._awaited:
            worker.send(events.CancelExchange())
        self._limit_answers()

    def _limit_answers(self) -> None:
        """Kill the rollout workers that do not answer in time: rank 0 has done its part."""
        due = time.monotonic() + self._config.runtime.timeout_seconds
        for worker in self._awaited.intersection(self.rollout):
            self._limits[worker] = due, "was killed: it did not take part in a weight exchange"

    def _end_admission(self) -> None:
        """Let the worker that was joining work, once it and rank 0 have answered."""
        joining = [worker for worker in self.rollout if worker.state == "joining"]
        for worker in joining if not self._awaited else ():
            worker.become("ready" if self._errors else "working")
            self._num_failures[worker] += bool(self._errors)
            if self._num_failures[worker] == MAX_FAILURES:
                worker.kill(f"was killed: it could not get the weights: {self._errors[0]}")

    # -- scaling ----------------------------------------------------------------------------------

    @property
    def infer_devices(self) -> DeviceSet:
        """The devices of the rollout workers that do not leave."""
        numbers = [each.number for each in self.rollout if each not in self._going]
        indices = sorted(index for number in numbers for index in self._devices[number])
        return replace(self._placement.infer, indices=tuple(indices))

    @property
    def changing(self) -> list[str]:
        """Names of the rollout workers that are starting or leaving."""
        return [worker.name for worker in (*filter(_is_starting, self.rollout), *self._going)]

    @property
    def _going(self) -> list[Worker]:
        return [w for w in self.rollout if w.state == "leaving" or w in self._retiring]

    def scale(self, wanted: DeviceSet) -> None:
        """Start rollout workers on the new devices of `wanted`; then let those on other devices
        leave. Raises ConfigError, and changes nothing, if a process cannot be started."""
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
                self._let_leave()
                raise ConfigError(f"rollout-{number} cannot be started: {error}") from None
        self._retiring = [w for w in before if self._devices[w.number] not in engines]
        self._let_leave()

    def _let_leave(self) -> None:
        """Let the workers on devices that are not wanted leave once the new ones are ready, or stay
        if none of those has started. End those that are leaving and have no group."""
        staying = [worker for worker in self.rollout if worker not in self._retiring]
        if not any(map(_is_starting, staying)):
            for worker in self._retiring if staying else ():
                worker.become("leaving")
            self._retiring = []
        leaving = [worker for worker in self.rollout if worker.state == "leaving"]
        for worker in leaving if not self._awaited else ():
            has_groups = self.ledger is not None and self.ledger.num_open(worker.name) > 0
            if not has_groups and worker not in self._limits:
                worker.send(events.Stop())
                self._limits[worker] = time.monotonic() + STOP_SECONDS, "did not stop"


def _is_starting(worker: Worker) -> bool:
    """Return whether the worker starts. Not one that waits, perhaps for ever, for a place."""
    return worker.state == "starting" and worker.is_placed


# -- settings of workers --------------------------------------------------------------------------


def owner_id_of(placement: Placement, role: str, number: int) -> int:
    """The worker's number in the ring and on the idle board: rollout workers come first."""
    return number if role == "rollout" else placement.max_rollout_workers + number


def worker_settings(
    config: Config, placement: Placement, role: str, number: int, **others: Any
) -> WorkerSettings:
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
        reward_environment=placement.reward_environment if is_rollout else {},
        memory_fraction=placement.memory_fraction(role),
        cores=placement.cores_of(role, number),
        rank=0 if is_rollout else number,
        num_train_ranks=placement.train.count,
        **others,
    )
