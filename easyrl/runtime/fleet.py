"""The workers of a run: start them, give them weights and groups, replace and scale them.

A rollout worker's states, and what it gets in each (`supervisor.NEXT` has the transitions):

    starting   nothing
    ready      its part of a full exchange of weights, or an admission
    joining    weights, in an admission
    working    groups, and its part of a full exchange
    leaving    nothing: it ends once it has answered its groups
    lost       nothing: its process is gone

The set of train workers never changes: they start, and work.

When a rollout worker dies, `Supervisor.wait` returns its last events and then `Lost`, which is
handled in one place, `Fleet._on_lost`:

    ring      its slots are recovered; what it had published stays        `Launcher.reclaim`
    groups    those that are not in the ring wait for a worker again      `Ledger.on_worker_lost`
    weights   nobody waits for it in an exchange any more                 `_stop_waiting_for`
    worker    a new one starts in its place, unless it was leaving        `_spawn_rollout`

The next call of `next_event` hands the waiting groups to workers that work (in deterministic mode,
to the replacement).

Weights go from the trainer to the rollout workers in two ways:

    exchange   to all that are ready or working, over the full channel, before an iteration
    admission  to one that became ready meanwhile, over a temporary channel with train rank 0

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
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from easyrl import events
from easyrl.config import ConfigError
from easyrl.config.devices import DeviceSet
from easyrl.config.spec import RunSpec
from easyrl.rewards.loading import read_sources
from easyrl.runtime.launcher import Launcher
from easyrl.runtime.ledger import Ledger
from easyrl.runtime.placement import Placement, device_name, engines_on
from easyrl.runtime.supervisor import (
    STOP_SECONDS,
    Origin,
    RewardFailure,
    Supervisor,
    Worker,
    WorkerFailure,
)
from easyrl.runtime.watchdog import TICK_SECONDS, Stall, Watchdog
from easyrl.workers.core_sharing import CoreSharing, make_idle_board
from easyrl.workers.settings import WorkerSettings

MAX_FAILURES = 3  # exchanges in a row that may fail although nobody died


class Limit(NamedTuple):
    """When a worker that does not answer is killed, as `time.monotonic` counts, and why."""

    due: float
    reason: str


@dataclass
class Exchange:
    """An exchange of weights or an admission: the one in progress, or the last one."""

    workers: Sequence[Worker] = ()  # the rollout workers that take part
    awaited: set[Worker] = field(default_factory=set)  # that have not answered, train ranks too
    errors: list[str] = field(default_factory=list)  # of those that have


class Fleet:
    ledger: Ledger | None = None  # the groups handed out now: of an iteration or an evaluation

    def __init__(
        self,
        spec: RunSpec,
        placement: Placement,
        supervisor: Supervisor,
        launcher: Launcher,
        *,
        log_of: Callable[[str], Path],
        notify: events.Observer,
        **settings: Any,
    ) -> None:
        """Start the workers. `settings`: more of their `WorkerSettings`."""
        self._spec = spec
        self._placement = placement
        self._supervisor = supervisor
        self._launcher = launcher
        self._log_of = log_of
        self._notify = notify
        sources = read_sources(spec.code, spec.rewards.options.judge)
        self._settings = {"store": launcher.store, "sources": sources, **settings}
        board_size = placement.max_rollout_workers + placement.train.count
        self._board = make_idle_board(board_size) if placement.lends_cores else None

        # Events
        self._received: deque[tuple[Worker, events.WorkerEvent]] = deque()  # not handled yet
        self._watchdog = Watchdog(spec.faults.stall_seconds)
        self._limits: dict[Worker, Limit] = {}
        self._needed: list[Worker] | None = None
        """Workers whose death ends the run, once it is stopping; None: all, if not replaceable."""

        # Deaths
        self._deaths: deque[float] = deque()  # times of the newest ones
        self.num_restarts: Counter[str] = Counter()  # by worker
        self.num_refused = 0  # added workers that did not start

        # Weights
        self._exchange = Exchange()
        self._channel_members: list[Worker] = []  # rollout workers in the full channel
        self._generations = count()  # of channels
        self._version = -1  # that all working engines have
        self._num_failures: Counter[Worker] = Counter()  # failed admissions

        self._retiring: list[Worker] = []
        """Workers that leave once those that were added with them are ready."""
        self._devices = dict(enumerate(engines_on(placement.infer, placement)))
        """Device indices by the number of the rollout worker that uses them: {0: (0, 1), …}."""
        self.rollout = [self._spawn_rollout(number) for number in self._devices]
        ranks = range(placement.train.count)
        train_settings = [self._settings_of("train", rank) for rank in ranks]
        self.train = launcher.start_train(supervisor, train_settings)

    # -- starting workers -------------------------------------------------------------------------

    def _spawn_rollout(self, number: int, origin: Origin = "start") -> Worker:
        settings = self._settings_of("rollout", number, device_indices=self._indices_of(number))
        worker = self._launcher.start_rollout(self._supervisor, settings)
        worker.origin = origin
        if origin != "start":
            device = self._device_of(worker)
            self._notify(events.WorkerSpawned(time.monotonic(), worker.name, device))
        return worker

    def _settings_of(self, role: str, number: int, **others: Any) -> WorkerSettings:
        log_file = str(self._log_of(f"{role}-{number}"))
        core_sharing = self._core_sharing(role, number)
        others |= {"log_file": log_file, **self._settings, "core_sharing": core_sharing}
        return worker_settings(self._spec, self._placement, role, number, **others)

    def _core_sharing(self, role: str, number: int) -> CoreSharing | None:
        """Return whose cores a worker may use while those workers only wait.

        The cores of each worker are lent to one worker of the other role. Where that role has
        fewer workers, each of them gets those of several: of 4 rollout workers and 2 train ranks,
        rank 0 gets the cores of rollout-0 and rollout-2, rollout-0 those of rank 0, and rollout-2
        none."""
        placement = self._placement
        is_added = role == "rollout" and number >= placement.num_rollout_workers
        if self._board is None or is_added:  # an added worker has no cores of its own
            return None
        owner_id = owner_id_of(placement, role, number)
        self._board[owner_id] = False  # a dead worker may have been idle
        if role == "rollout" and placement.engine.is_vllm:
            return CoreSharing(self._board, owner_id, shared={})
        other_role = "train" if role == "rollout" else "rollout"
        num_others = placement.num_workers(other_role)
        shared = {}
        for other in range(number, num_others, placement.num_workers(role)):
            other_id = owner_id_of(placement, other_role, other)
            shared[other_id] = placement.cores_of(other_role, other)
        return CoreSharing(self._board, owner_id, shared)

    def _indices_of(self, number: int) -> tuple[int, ...]:
        """Return the device indices of a rollout worker; none on the CPU."""
        return self._devices[number] if self._placement.infer.kind != "cpu" else ()

    # -- who is there -----------------------------------------------------------------------------

    @property
    def all(self) -> list[Worker]:
        return [*self.train, *self.rollout]

    @property
    def rank0(self) -> Worker:
        """Train rank 0: the only train worker that receives commands."""
        return self.train[0]

    def _in_state(self, *states: str) -> list[Worker]:
        """Return the rollout workers in one of these states."""
        return [worker for worker in self.rollout if worker.state in states]

    def _device_of(self, worker: Worker) -> str:
        if worker.remote_device:
            return worker.remote_device
        if worker.role == "train":
            indices = self._placement.indices_of("train", worker.number)
        else:
            indices = self._indices_of(worker.number)
        return device_name(self._placement.accelerator, indices)

    def rows(self) -> list[dict[str, Any]]:
        """Return the processes of the run, for `easyrl status`."""
        rows: list[dict[str, Any]] = [
            {
                "name": "controller",
                "kind": "controller",
                "pid": os.getpid(),
                "device": "cpu",
                "state": "running",
                "restarts": 0,
            }
        ]
        for worker in (*self.rollout, *self.train):
            row = {
                "name": worker.name,
                "kind": worker.role,
                "pid": worker.process.pid,
                "device": self._device_of(worker),
                "state": worker.state,
                "restarts": self.num_restarts[worker.name],
            }
            rows.append(row)
        return rows

    # -- events -----------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        while any(worker.state == "starting" for worker in self.all):
            self.next_event()

    def next_event(self) -> events.WorkerEvent:
        """Send workers what they can take, then wait for an event, record what it changes, and
        return it. Notes, activity and failures (a `Lost` follows) only go to the observers. Raises
        RewardFailure for a reward call that is to end the run."""
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
            self._record(worker, event)
            return event

    def _record(self, worker: Worker, event: events.WorkerEvent) -> None:
        match event:
            case events.Ready() if worker.state == "starting":
                has_weights = worker in self.train or not self.train
                worker.become("working" if has_weights else "ready")
            case events.WeightsExchanged():
                self._on_exchanged(worker, event)
            case events.Lost():
                self._on_lost(worker, event)
            case events.RewardFailed(call) if self._needed is None:  # else the run is ending
                raise RewardFailure(str(call))
        if self.ledger is not None:
            self.ledger.on_event(worker.name, event)

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
        self._kill_silent_workers()
        pids = {worker.name: worker.local_pid for worker in self.all if worker.is_placed}
        match self._watchdog.tick(pids):
            case Stall(names, cause):
                self._watchdog.write_stacks(self.all, self._log_of("easyrl"))
                self._end_stall(names, cause)
            case str(warning) if warning:
                self._notify(events.Note(warning))

    def _kill_silent_workers(self) -> None:
        # The answer may be among the events that have arrived and are not handled yet.
        may_have_answered = {worker for worker, _ in self._received}
        for worker, limit in list(self._limits.items()):
            if time.monotonic() > limit.due and worker not in may_have_answered:
                worker.kill(limit.reason)

    def _end_stall(self, names: Sequence[str], cause: str) -> None:
        """Kill rollout workers that others wait for. Raises WorkerFailure if that cannot help."""
        stalled = [worker for worker in self.rollout if worker.name in names]
        includes_trainer = len(stalled) < len(names)
        is_stopping = self._needed is not None
        if not names or includes_trainer or is_stopping:
            raise WorkerFailure(cause)
        for worker in stalled:
            worker.kill(f"was killed after a stall: {cause}")

    def begin_to_stop(self) -> None:
        """Wait only for the last checkpoint, which only a train worker's death prevents."""
        self._needed = self.train
        self._supervisor.begin_to_stop()

    def _hand_out(self) -> None:
        """Send groups that wait to the workers that work."""
        if self.ledger is None:
            return
        working = {worker.name: worker for worker in self._in_state("working")}
        commands = self.ledger.take(list(working))
        for name, command in commands.items():
            working[name].send(command)

    # -- a death ----------------------------------------------------------------------------------

    def _on_lost(self, worker: Worker, lost: events.Lost) -> None:
        """Record everything that the death of a rollout worker changes. All events that it has sent
        are handled already. Raises WorkerFailure after more than `runtime.max_restarts` deaths."""
        was_starting = worker.state == "starting"
        was_leaving = worker.state == "leaving"
        worker.become("lost")
        self._limits.pop(worker, None)
        self._reclaim_slots(worker)
        self._reclaim_groups(worker)
        self._stop_waiting_for(worker)
        is_refused = worker.origin == "added" and was_starting
        if is_refused:
            self.num_refused += 1
            what = f"{lost.cause} while it started, and is not replaced"
            self._remove(worker, f"{what}\n{lost.traceback}")
        elif was_leaving:
            self._remove(worker, f"has left\n{lost.traceback}")
        else:
            self._replace(worker, lost)

    def _reclaim_slots(self, worker: Worker) -> None:
        """Recover the ring's slots of a dead worker, after which nothing more of it arrives. Of two
        dead workers each may have died while it moved a slot: they are reclaimed together."""
        dead = [worker.number]
        for other, event in self._received:
            if isinstance(event, events.Lost):
                dead.append(other.number)
        self._launcher.reclaim(dead)

    def _reclaim_groups(self, worker: Worker) -> None:
        """Let the groups of a dead worker that are not in the ring wait again."""
        if self.ledger is None:
            return
        in_ring: set[int] = set()  # an evaluation uses no ring
        if self.ledger.iteration is not None:
            in_ring = self._launcher.delivered(self.ledger.iteration)
        self.ledger.on_worker_lost(worker.name, in_ring)

    def _stop_waiting_for(self, worker: Worker) -> None:
        """Cancel the exchange of weights in which a dead worker took part."""
        if self._exchange.awaited and worker in self._exchange.workers:
            self._exchange.awaited.discard(worker)
            self._cancel_exchange()
            self._end_admission()

    def _remove(self, worker: Worker, what: str) -> None:
        self.rollout.remove(worker)
        del self._devices[worker.number]
        self._notify(events.Note(f"{worker.name} {what}".rstrip()))
        self._notify(events.WorkerLeft(time.monotonic(), worker.name))

    def _replace(self, worker: Worker, lost: events.Lost) -> None:
        within = self._count_death(worker, lost)
        replacement = self._spawn_rollout(worker.number, "replacement")
        position = self.rollout.index(worker)
        self.rollout[position] = replacement
        if worker in self._retiring:  # the replacement leaves instead
            position = self._retiring.index(worker)
            self._retiring[position] = replacement
        note = f"{worker.name} {lost.cause}; a new one starts in its place: {within}"
        self._notify(events.Note(f"{note}\n{lost.traceback}".rstrip()))

    def _count_death(self, worker: Worker, lost: events.Lost) -> str:
        """Return how many of the allowed deaths there were. Raises WorkerFailure after too many."""
        max_deaths = self._spec.faults.max_restarts
        window = self._spec.faults.restart_window_seconds
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - window:
            self._deaths.popleft()
        num_deaths = len(self._deaths)
        if num_deaths > max_deaths:
            deaths = f"{num_deaths}. death in {window:g} s (runtime.max_restarts={max_deaths})"
            raise WorkerFailure(f"{worker.name} {lost.cause}: {deaths}\n{lost.traceback}".rstrip())
        self.num_restarts[worker.name] += 1
        return f"{num_deaths} of {max_deaths} in {window:g} s (runtime.max_restarts)"

    # -- weights ----------------------------------------------------------------------------------

    def exchange(self, policy_version: int) -> None:
        """Broadcast the trainer's weights to all rollout workers that are ready, unless all of them
        have this version (after an evaluation). A deterministic run waits for replacements."""
        num_failures = 0
        while num_failures < MAX_FAILURES:
            workers = self._wait_for_members()
            all_have_weights = all(worker.state == "working" for worker in workers)
            if policy_version == self._version and all_have_weights:
                return
            self._begin_exchange(policy_version, workers)
            while self._exchange.awaited:
                self.next_event()
            if not self._exchange.errors:
                self._version = policy_version
                return
            self._channel_members = []  # all have dropped the channel
            if not any(worker.state == "lost" for worker in workers):
                num_failures += 1
        first_error = self._exchange.errors[0]
        raise WorkerFailure(f"weight exchange: {num_failures} attempts failed: {first_error}")

    def _wait_for_members(self) -> list[Worker]:
        """Return the rollout workers that take part in an exchange, once there are any and no other
        exchange is in progress."""
        while True:
            able = self._in_state("ready", "working")
            if self._spec.schedule.is_deterministic and len(able) < len(self.rollout):
                able = []  # wait for the others
            if able and not self._exchange.awaited:
                return able
            self.next_event()

    def _begin_exchange(self, policy_version: int, workers: list[Worker]) -> None:
        if workers != self._channel_members:
            self._channel_members = workers
            self._init_channel(workers)
        for worker in (self.rank0, *workers):
            worker.send(events.ExchangeWeights(policy_version))
        self._exchange = Exchange(workers, awaited={*self.train, *workers})

    def _init_channel(self, workers: Sequence[Worker]) -> None:
        """Let train rank 0 and these workers make a process group. Each device of an engine has a
        rank of its own."""
        generation = next(self._generations)
        ranks_per_engine = self._placement.engine.tensor_parallel_size
        world_size = 1 + ranks_per_engine * len(workers)
        self.rank0.send(events.InitWeightChannel(0, world_size, generation))
        first_rank = 1
        for worker in workers:
            worker.send(events.InitWeightChannel(first_rank, world_size, generation))
            first_rank += ranks_per_engine

    def _admit(self) -> None:
        """Begin to send the weights of this iteration to a worker that became ready during it, if
        there are groups left for it."""
        ready = self._in_state("ready")
        has_groups = self.ledger is not None and not self.ledger.is_complete
        is_stopping = self._needed is not None
        if not ready or self._exchange.awaited or not has_groups or is_stopping:
            return
        worker = ready[0]
        generation = next(self._generations)
        world_size = 1 + self._placement.engine.tensor_parallel_size
        worker.become("joining")
        worker.send(events.InitWeightChannel(1, world_size, generation))
        worker.send(events.ExchangeWeights(self._version))
        self.rank0.send(events.SendWeights(self._version, world_size, generation))
        self._exchange = Exchange([worker], awaited={worker, self.rank0})

    def _on_exchanged(self, worker: Worker, event: events.WeightsExchanged) -> None:
        self._limits.pop(worker, None)
        self._exchange.awaited.discard(worker)
        if event.error:
            self._exchange.errors.append(f"{worker.name}: {event.error}")
            self._cancel_exchange()
        elif worker is self.rank0:
            self._limit_answers()
        elif worker.state == "ready":
            worker.become("working")
        self._end_admission()

    def _cancel_exchange(self) -> None:
        for worker in self._exchange.awaited:
            worker.send(events.CancelExchange())
        self._limit_answers()

    def _limit_answers(self) -> None:
        """Limit the time in which the rollout workers must answer: rank 0 has sent all weights, or
        the exchange is cancelled."""
        due = time.monotonic() + self._spec.faults.timeout_seconds
        limit = Limit(due, "was killed: it did not take part in a weight exchange")
        for worker in self._exchange.awaited.intersection(self.rollout):
            self._limits[worker] = limit

    def _end_admission(self) -> None:
        """Let the worker that was joining work, once it and rank 0 have answered. If it could not
        get the weights, it is ready for another admission, and is killed after MAX_FAILURES."""
        if self._exchange.awaited:
            return
        errors = self._exchange.errors
        for worker in self._in_state("joining"):
            if not errors:
                worker.become("working")
                continue
            worker.become("ready")
            self._num_failures[worker] += 1
            if self._num_failures[worker] == MAX_FAILURES:
                worker.kill(f"was killed: it could not get the weights: {errors[0]}")

    # -- scaling ----------------------------------------------------------------------------------

    @property
    def infer_devices(self) -> DeviceSet:
        """The devices of the rollout workers that do not leave."""
        going = self._going
        indices: list[int] = []
        for worker in self.rollout:
            if worker not in going:
                indices.extend(self._devices[worker.number])
        return replace(self._placement.infer, indices=tuple(sorted(indices)))

    @property
    def changing(self) -> list[str]:
        """Names of the rollout workers that are starting or leaving."""
        starting = [worker for worker in self.rollout if _is_starting(worker)]
        return [worker.name for worker in starting + self._going]

    @property
    def _going(self) -> list[Worker]:
        """The workers that are leaving, or will leave."""
        return [w for w in self.rollout if w.state == "leaving" or w in self._retiring]

    def scale(self, wanted: DeviceSet) -> None:
        """Start rollout workers on the new devices of `wanted`; then let those on other devices
        leave. Raises ConfigError, and changes nothing, if a process cannot be started."""
        engines = engines_on(wanted, self._placement)
        before = list(self.rollout)
        in_use = set(self._devices.values())
        for indices in engines:
            if indices in in_use:
                continue
            number = self._free_number()
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

    def _free_number(self) -> int:
        """Return the lowest number that no rollout worker has."""
        number = 0
        while number in self._devices:
            number += 1
        assert number < self._placement.max_rollout_workers
        return number

    def _let_leave(self) -> None:
        """Carry on with a change of the workers: let the old ones leave once all new ones have
        started, and end those that are leaving once they have no group."""
        staying = [worker for worker in self.rollout if worker not in self._retiring]
        if not any(_is_starting(worker) for worker in staying):
            if staying:  # else none of the new ones has started: the old ones stay
                for worker in self._retiring:
                    worker.become("leaving")
            self._retiring = []
        if self._exchange.awaited:
            return
        for worker in self._in_state("leaving"):
            has_groups = self.ledger is not None and self.ledger.num_open(worker.name) > 0
            if not has_groups and worker not in self._limits:
                worker.send(events.Stop())
                self._limits[worker] = Limit(time.monotonic() + STOP_SECONDS, "did not stop")


def _is_starting(worker: Worker) -> bool:
    """Return whether the worker's process is starting. A worker for which the cluster has no place
    is not: it may wait for one for ever."""
    return worker.state == "starting" and worker.is_placed


# -- settings of workers --------------------------------------------------------------------------


def owner_id_of(placement: Placement, role: str, number: int) -> int:
    """The worker's number in the ring and on the idle board: rollout workers come first."""
    return number if role == "rollout" else placement.max_rollout_workers + number


def worker_settings(
    spec: RunSpec, placement: Placement, role: str, number: int, **others: Any
) -> WorkerSettings:
    """Return the settings of a worker; `others` has those that do not follow from spec and
    placement."""
    is_rollout = role == "rollout"
    devices = placement.infer if is_rollout else placement.train
    is_cpu = devices.kind == "cpu"
    others.setdefault("device_indices", () if is_cpu else placement.indices_of(role, number))
    return WorkerSettings(
        name=f"{role}-{number}",
        owner_id=owner_id_of(placement, role, number),
        spec=spec.for_rollout if is_rollout else spec.for_training,
        timeout_seconds=spec.faults.timeout_seconds,
        is_deterministic=spec.schedule.is_deterministic,
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
