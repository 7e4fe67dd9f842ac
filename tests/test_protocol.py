"""The protocol of an iteration, explored: 2 producers, 2 consumers, 3 slots, crashes at every step.

The ring, its ports, `GroupReader` and `Ledger` are the real ones. Each process is a
thread, and one runs at a time. A step is a store to shared memory, a transfer on a pipe, a rest of
`reclaim` or `delivered`, or a message to the controller. Before each step a schedule may switch to
another process, or kill this one: nothing of it runs any more. Without such a decision a process
runs until it has to wait. All schedules with few decisions are tried, and many random ones.

    controller ──prompts──► producer 0, 1 ══ ring ══► consumer 2, 3

A run has one reader, and ends when it dies. Here two consumers share what a reader knows (which
groups are due), and one may die: the other gets the groups of its leases again. One that was
already trained is a late duplicate.
"""

import contextlib
import random
import threading
from collections import Counter, deque
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from types import SimpleNamespace

import numpy as np
import pytest
import test_ring_buffer

from easyrl import events
from easyrl.channels import ring_buffer
from easyrl.channels.ring_buffer import FREE, READING, STATE_BITS, RingBuffer, RingLayout, TokenPipe
from easyrl.config import load_config
from easyrl.runtime.ledger import Ledger
from easyrl.runtime.resolve import resolve
from easyrl.types import Prompt
from easyrl.workers.batches import GroupReader, Origin

PRODUCERS, CONSUMERS = (0, 1), (2, 3)
NUM_GROUPS, NUM_SLOTS = 4, 3
REJECTED = {1, 6}  # prompts, unless it is the last round
KILL = "kill"
MAX_STEPS = 5000
SPEC = resolve(load_config(None, {"train.prompts_per_iteration": NUM_GROUPS}))
PLACEMENT = SimpleNamespace(max_concurrent_groups=1, max_rollout_workers=2, num_rollout_workers=2)
SMALL_GROUP = test_ring_buffer.make_group(0, lengths=[1], prompt_length=1)


class Killed(BaseException):
    """This process is dead."""


class Process:
    def __init__(self, world, owner, work):
        self.world, self.owner, self.work = world, owner, work
        self.baton = threading.Semaphore(0)
        self.is_done = False
        self.is_ready = lambda: True  # what it waits for
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self):
        self.baton.acquire()
        try:
            if not self.world.is_over:
                self.work()
        except Killed:
            if not self.world.is_over:
                self.world.died(self.owner)
        except BaseException as error:
            self.world.end(error)
        self.is_done = True
        self.world.pass_on()


class Shared(np.ndarray):
    """An array in shared memory: each store is a step."""

    def __setitem__(self, index, value):
        Shared.step()
        super().__setitem__(index, value)


class StepPipe(TokenPipe):
    def receive(self):
        Shared.step()
        return super().receive()

    def send(self, slot):
        Shared.step()
        super().send(slot)


class World:
    """One run under one schedule. `choose(step, can_die, num_others)` returns None, KILL, or the
    number of the process to switch to."""

    def __init__(self, ring, choose, num_iterations):
        self.ring, self.choose, self.num_iterations = ring, choose, num_iterations
        self.is_over = False
        self.failure = None
        self.counts = Counter()
        self.trace = []  # of each step: can the process die, how many others can run
        self.decisions = {}  # by step
        self.clock = 0.0
        self.finished = threading.Semaphore(0)
        self.processes, self.running = [], None
        # The controller
        self.inbox = deque()  # a producer and its scored group, or who died, in order
        self.tasks = {}  # of each producer: prompts that it has not begun
        # What the reader knows, shared by the consumers
        self.iteration, self.is_stopped = -1, False
        self.prompts = {}  # of the accepted groups, by group index
        self.trained = Counter()
        self.reading = set()  # consumers that are not idle

    def run(self):
        self.processes.append(Process(self, None, partial(control, self)))
        for owner in PRODUCERS + CONSUMERS:
            self.spawn(owner)
        self.resume(self.processes[0])
        self.finished.acquire()
        for process in self.processes:
            process.baton.release()
            process.thread.join()
        try:
            if self.failure is not None:
                raise self.failure
            Shared.step = lambda: None
            free, most = self.ring.free_pipe.drain(), [*range(NUM_SLOTS)]
            assert sorted(free) == most, "a slot is lost, or free twice"
            # Without a dead reader, no group is produced again that was delivered.
            num_dead_readers = sum(self.counts[f"deaths of {owner}"] for owner in CONSUMERS)
            assert self.counts["duplicates"] <= num_dead_readers
        except Exception as error:
            raise AssertionError(f"with the decisions {self.decisions}") from error

    def spawn(self, owner):
        work = produce if owner in PRODUCERS else consume
        if owner in PRODUCERS:
            self.tasks[owner] = deque()
        self.processes.append(Process(self, owner, partial(work, self, owner)))

    def others(self):
        """Processes that can run, the one that has not run for longest first."""
        able = (each for each in self.processes if not each.is_done and each.is_ready())
        return [each for each in able if each is not self.running]

    def step(self):
        """The running process is about to do something that others can see."""
        if self.is_over:
            raise Killed
        others = self.others()
        can_die = self.running.owner is not None
        number = len(self.trace)
        self.trace.append((can_die, len(others)))
        assert number < MAX_STEPS, "no end in sight"
        decision = self.choose(number, can_die, len(others))
        if decision is None:
            return
        self.decisions[number] = decision
        if decision == KILL:
            raise Killed
        self.switch_to(others[decision])
        self.step()

    def let_others_run(self):
        if others := self.others():
            self.switch_to(others[0])

    def wait_for(self, is_ready):
        """The running process waits for something that others do."""
        own = self.running
        own.is_ready = is_ready
        if not is_ready():
            self.let_others_run()
        assert is_ready(), "deadlock"
        own.is_ready = lambda: True

    def switch_to(self, other):
        own = self.running
        self.resume(other)
        own.baton.acquire()
        if self.is_over:
            raise Killed

    def resume(self, process):
        self.running = process
        self.processes.remove(process)
        self.processes.append(process)
        process.baton.release()

    def pass_on(self):
        if self.is_over:
            return
        if others := self.others():
            self.resume(others[0])
        else:
            is_stuck = not all(process.is_done for process in self.processes)
            self.end(AssertionError("deadlock") if is_stuck else None)

    def end(self, failure):
        if not self.is_over:
            self.is_over, self.failure = True, failure
            self.finished.release()

    def died(self, owner):
        self.counts[f"deaths of {owner}"] += 1
        self.reading.discard(owner)
        held, slots = owner << STATE_BITS | READING, self.ring.slots
        for slot in np.flatnonzero(slots["status"] == held):
            index = int(slots["group_index"][slot])
            if not self.trained[int(slots["iteration"][slot]), index]:
                self.prompts.pop(index, None)
        self.inbox.append((owner, None))

    def sleep(self, seconds):
        self.clock += seconds
        self.step()


def make_group(iteration, group_index, prompt_index):
    return replace(
        SMALL_GROUP,
        iteration=iteration,
        policy_version=iteration,
        group_index=group_index,
        prompt_index=prompt_index,
        completion_ids=np.array([prompt_index], np.int32),
    )


def produce(world, owner):
    """A rollout worker: report a group, then put it into the ring."""
    port, tasks = world.ring.attach(owner), world.tasks[owner]
    while True:
        world.wait_for(lambda: tasks or world.is_stopped)
        if not tasks:
            return
        iteration, group_index, prompt_index, is_last_round = tasks.popleft()
        is_rejected = prompt_index in REJECTED and not is_last_round
        world.step()
        scored = events.GroupScored(
            iteration, group_index, prompt_index, (), (), (), 0, 0.0, is_rejected=is_rejected
        )
        world.inbox.append((owner, scored))
        while not is_rejected:
            if port.put(make_group(iteration, group_index, prompt_index)):
                break
            world.wait_for(lambda: wait([port.writable_fd], 0))


def consume(world, owner):
    """A reader: train each group once, then free its slot."""
    port = world.ring.attach(owner)
    while not world.is_stopped:
        iteration, version = world.iteration, world.iteration
        reader = GroupReader(SPEC.batches, port, Origin(iteration, version), lambda: None)
        reader._prompts = world.prompts

        def may_go_on(iteration=iteration):
            is_over = world.is_stopped or world.iteration != iteration
            return is_over or wait([port.readable_fd], 0)

        while not world.is_stopped and world.iteration == iteration:
            world.reading.add(owner)
            lease = reader.next(0, wait=False)
            if lease is not None:
                group = lease.group
                assert (group.completion_ids == group.prompt_index).all()
                world.step()
                world.trained[iteration, group.group_index] += 1
                lease.release()
            world.counts["duplicates"] += reader.num_duplicates
            reader.num_duplicates = 0
            world.reading.discard(owner)
            if lease is None:
                world.wait_for(may_go_on)


def control(world):
    next_index, num_samples = 0, SPEC.schedule.num_generations
    for iteration in range(world.num_iterations):
        ledger = Ledger(
            SPEC.schedule,
            PLACEMENT,
            lambda index: Prompt(index, "", {}),
            partial(events.Generate, iteration),
            iteration=iteration,
            next_index=next_index,
            num_groups=NUM_GROUPS,
            num_samples=num_samples,
            max_replacements=1,
        )
        world.iteration, world.prompts = iteration, {}
        run_iteration(world, iteration, ledger)
        assert [world.trained[iteration, i] for i in range(NUM_GROUPS)] == [1] * NUM_GROUPS
        expected = {*range(next_index, ledger.next_index)} - REJECTED
        assert {*world.prompts.values()} == expected
        next_index = ledger.next_index
    world.is_stopped = True


def run_iteration(world, iteration, ledger):
    ring, dead = world.ring, set()
    owners = {f"rollout-{owner}": owner for owner in PRODUCERS}

    def is_over():
        states = ring.slots["status"].view(np.ndarray) & (1 << STATE_BITS) - 1
        is_drained = len(world.prompts) == NUM_GROUPS and (states == FREE).all()
        return ledger.is_complete and is_drained and not world.reading

    def hand_out():
        for name, command in ledger.take([*owners]).items():
            for group_index, prompt in command.prompts:
                task = iteration, group_index, prompt.index, command.is_last_round
                world.tasks[owners[name]].append(task)

    while True:
        hand_out()
        if not dead:
            world.wait_for(lambda: world.inbox or is_over())
            if not world.inbox:
                return
        while world.inbox:  # what dead workers have reported comes before their deaths
            owner, group = world.inbox.popleft()
            if group is None:
                dead.add(owner)
                continue
            ledger.on_event(f"rollout-{owner}", group)
            hand_out()
        if dead:
            try:
                ring.reclaim(*dead, timeout_seconds=3 * ring_buffer.SETTLE_SECONDS)
                in_ring = ring.delivered(iteration)
            except TimeoutError:  # another process is in a move, or has died in it
                world.let_others_run()
                continue
            while dead:
                owner = dead.pop()
                if owner in PRODUCERS:
                    was_reported = [g for g in ledger.groups.values() if g.report is not None]
                    ledger.on_worker_lost(f"rollout-{owner}", in_ring)
                    lost = [each for each in was_reported if each.state == "WAITING"]
                    world.counts["lost"] += len(lost)
                world.spawn(owner)


@pytest.fixture
def ring(monkeypatch):
    monkeypatch.setattr(ring_buffer, "TokenPipe", StepPipe)
    monkeypatch.setattr(Shared, "step", lambda: None, raising=False)
    lengths = {"num_generations": 1, "max_prompt_length": 1, "max_completion_length": 1}
    lengths |= {"nodes_per_completion": 2, "max_teacher_prompt_length": 5}
    layout = RingLayout(NUM_SLOTS, **lengths, num_owners=4, num_groups=NUM_GROUPS)
    with contextlib.closing(RingBuffer(layout)) as ring:
        for name in ("status", "group_index"):
            ring.slots[name] = ring.slots[name].view(Shared)
        ring.moves, ring.taken = ring.moves.view(Shared), ring.taken.view(Shared)
        yield ring


def run(ring, choose, num_iterations):
    Shared.step = lambda: None
    for pipe in (ring.ready_pipe, ring.free_pipe):
        pipe.drain()
    for slot in range(NUM_SLOTS):
        ring.free_pipe.send(slot)
    ring.slots["status"][:], ring.moves[:], ring.taken[:] = FREE, 0, ring_buffer.NEVER
    world = World(ring, choose, num_iterations)
    clock = SimpleNamespace(sleep=world.sleep, monotonic=lambda: world.clock)
    ring_buffer.time, time = clock, ring_buffer.time
    Shared.step = world.step
    try:
        world.run()
    finally:
        ring_buffer.time, Shared.step = time, lambda: None
    return world


def explore(ring, *, num_crashes, num_switches, num_iterations=2):
    counts = Counter()
    schedules = [({}, 0, num_crashes, num_switches)]
    while schedules:
        decisions, first, crashes, switches = schedules.pop()
        choose = partial(lambda chosen, step, *_: chosen.get(step), decisions)
        world = run(ring, choose, num_iterations)
        counts += world.counts
        for step, (can_die, num_others) in enumerate(world.trace[first:], first):
            if crashes and can_die:
                schedules.append(({**decisions, step: KILL}, step + 1, crashes - 1, switches))
            for other in range(num_others if switches else 0):
                schedules.append(({**decisions, step: other}, step + 1, crashes, switches - 1))
    return counts


def assert_all_was_seen(counts):
    assert all(counts[f"deaths of {owner}"] for owner in PRODUCERS + CONSUMERS)
    assert counts["lost"] and counts["duplicates"]


def test_one_crash_at_any_step_and_one_switch_at_any_step(ring):
    assert_all_was_seen(explore(ring, num_crashes=1, num_switches=0))
    explore(ring, num_crashes=0, num_switches=1)


@pytest.mark.long
@pytest.mark.parametrize(("num_switches", "num_iterations"), [(0, 2), (1, 1)])
def test_two_crashes_at_any_steps_and_a_crash_and_a_switch_at_any_steps(
    ring, num_switches, num_iterations
):
    how = {"num_switches": num_switches, "num_crashes": 2 - num_switches}
    assert_all_was_seen(explore(ring, num_iterations=num_iterations, **how))


@pytest.mark.parametrize("num_runs", [300, pytest.param(5_000, marks=pytest.mark.long)])
def test_many_switches_and_crashes(ring, num_runs):
    counts = Counter()
    for number in range(num_runs):
        rng = random.Random(f"{num_runs} {number}")
        switch_rate, crash_rate = rng.choice([0.03, 0.3]), rng.choice([0.005, 0.02])

        def choose(step, can_die, num_others, *, rng=rng, rates=(switch_rate, crash_rate)):
            if can_die and step < MAX_STEPS / 4 and rng.random() < rates[1]:
                return KILL
            return rng.randrange(num_others) if num_others and rng.random() < rates[0] else None

        counts += run(ring, choose, 2).counts
    assert_all_was_seen(counts)
