"""The ring buffer: hand-over, order, back-pressure, and killed processes."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count, groupby
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.channels import ring_buffer
from easyrl.channels.ring_buffer import ARRAYS, HEADER, READY, RingBuffer, RingLayout
from easyrl.processes import available_memory_bytes, die_with_parent, kill_reason, oom_kills
from easyrl.types import RolloutGroup
from own_processes import WAIT_SECONDS
from own_workers import assert_same

RING_FILE = sys.modules[RingBuffer.__module__].__file__
BOUND_SECONDS = WAIT_SECONDS
KILLED = -signal.SIGKILL
SHAPE = st.tuples(
    st.integers(0, 10**9), st.lists(st.integers(0, 8), min_size=1, max_size=3), st.integers(0, 16)
)
VICTIM = 5
OUTCOMES = {  # what arrives: from the first line to the last
    "put": [[1, 2], [7, 1, 2], [1, 2, 7]],
    "get": [[1, 2]],
    "release": [[1, 2], [2]],
}


def layout(num_slots=4):
    lengths = {"num_generations": 3, "max_prompt_length": 16, "max_completion_length": 8}
    more = {"nodes_per_completion": 2, "max_teacher_prompt_length": 5, "max_picture_bytes": 60}
    more["max_shown"] = 24
    return RingLayout(num_slots, **lengths, num_owners=8, num_groups=20, **more)


def make_group(index, lengths=None, prompt_length=None):
    """A group whose every element follows from its prompt's index."""
    rng = np.random.default_rng(index)
    lengths = rng.integers(0, 9, 3) if lengths is None else lengths
    tokens, generations = int(sum(lengths)), len(lengths)
    prompt_length = int(rng.integers(0, 17)) if prompt_length is None else prompt_length
    num_nodes = int(rng.integers(0, 2 * generations + 2))
    picture_lengths = np.random.default_rng(index).integers(0, 21, index % 4).astype(np.int32)
    shown = np.random.default_rng(index).integers(0, 9, (3, 2 * (index % 4)), dtype=np.int32)
    return RolloutGroup(
        iteration=index // 10,
        policy_version=index // 20,
        group_index=index % 20,
        prompt_index=index,
        prompt_ids=rng.integers(0, 2**31 - 1, prompt_length, dtype=np.int32),
        completion_lengths=np.asarray(lengths, np.int32),
        completion_ids=rng.integers(0, 2**31 - 1, tokens, dtype=np.int32),
        rollout_logprobs=rng.standard_normal(tokens, dtype=np.float32),
        loss_mask=rng.random(tokens) < 0.5,
        rewards=rng.standard_normal(generations, dtype=np.float32),
        advantages=rng.standard_normal(generations, dtype=np.float32),
        truncated=rng.random(generations) < 0.5,
        node_lengths=rng.integers(1, 9, num_nodes, dtype=np.int32),
        node_parents=rng.integers(-1, 9, num_nodes, dtype=np.int32),
        teacher_prompt_ids=rng.integers(0, 99, int(rng.integers(0, 6)), dtype=np.int32),
        picture_bytes=rng.integers(0, 256, int(picture_lengths.sum()), dtype=np.uint8),
        picture_lengths=picture_lengths,
        shown_files=shown[0],
        shown_starts=shown[1],
        shown_stops=shown[2],
    )


def take_all(port):
    indexes = []
    while (lease := port.get()) is not None:
        assert_same(lease.group, make_group(lease.group.prompt_index))
        indexes.append(lease.group.prompt_index)
        lease.release()
    return indexes


def assert_whole(ring, port):
    """An empty ring has every slot free, each once, and delivers in order of arrival."""
    indexes = [*reversed(range(ring.layout.num_slots))]
    assert all(port.put(make_group(index)) for index in indexes)
    assert not port.put(make_group(0))
    assert take_all(port) == indexes


@pytest.fixture
def new_ring():
    with contextlib.ExitStack() as rings:

        def make(**limits):
            return rings.enter_context(contextlib.closing(RingBuffer(layout(**limits))))

        yield make


@settings(max_examples=60)
@given(st.lists(SHAPE, min_size=1, max_size=12))
def test_ragged_groups_come_out_as_they_went_in(groups):
    with contextlib.closing(RingBuffer(layout(num_slots=3))) as ring:
        port = ring.attach(0)
        for shape in groups:  # more than slots: slots are used again
            group = make_group(*shape)
            assert port.put(group)
            lease = port.get()
            assert_same(lease.group, group)
            lease.release()


def test_memory_has_a_fixed_size_and_groups_are_read_in_place(new_ring):
    ring = new_ring()
    assert os.fstat(ring._memory_fd).st_size == layout().total_bytes
    with pytest.raises(PermissionError):
        os.ftruncate(ring._memory_fd, 2 * ring.layout.total_bytes)
    port = ring.attach(0)
    port.put(make_group(1, [3, 5, 8], 16))
    lease = port.get()
    for name, _, _ in ARRAYS:
        assert np.shares_memory(getattr(lease.group, name), ring.slots[name])
    with pytest.raises(ValueError, match="read-only"):
        lease.group.completion_ids[0] = 1
    lease.release()
    assert_whole(ring, port)


def test_both_sides_wait_for_each_other_and_no_longer_than_asked(new_ring):
    ring = new_ring(num_slots=2)
    producer, consumer = ring.attach(0), ring.attach(1)
    start = time.monotonic()
    assert not wait([consumer.readable_fd], 0.05) and consumer.get() is None
    assert 0.05 <= time.monotonic() - start < 30
    timer = threading.Timer(0.1, producer.put, (make_group(0),))
    timer.start()
    assert wait([consumer.readable_fd], BOUND_SECONDS)
    lease = consumer.get()
    timer.join()
    assert producer.put(make_group(1))
    assert not wait([producer.writable_fd], 0.05) and not producer.put(make_group(2))
    timer = threading.Timer(0.1, lease.release)  # a slot being read is not free
    timer.start()
    assert wait([producer.writable_fd], BOUND_SECONDS) and producer.put(make_group(2))
    assert time.monotonic() - start < 30
    timer.join()
    assert take_all(consumer) == [1, 2]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (make_group(0, [1, 1, 1], 17), "prompt_ids .* at most 16 long, .*17"),
        (make_group(0, [8, 9, 8], 1), "completion_ids .* at most 24 long, .*25"),
        (replace(make_group(0), rewards=np.zeros(3)), "rewards"),
        (replace(make_group(0), node_parents=np.zeros(8, np.int32)), "node_parents"),
        (replace(make_group(0), teacher_prompt_ids=np.zeros(6, np.int32)), "teacher_prompt_ids"),
    ],
)
def test_group_that_does_not_fit_a_slot_or_itself_is_refused(new_ring, group, message):
    port = new_ring().attach(0)
    with pytest.raises(ValueError, match=message):
        port.put(group)
    assert_whole(port.ring, port)


def test_a_number_of_every_slot_fits_into_each_pipe():
    ring = RingBuffer(layout(num_slots=20_000))
    slots = ring.free_pipe.drain()
    assert slots == [*range(20_000)]
    for slot in slots:
        ring.ready_pipe.send(slot)
    assert ring.ready_pipe.drain() == slots
    ring.close()


def test_ring_that_the_system_cannot_hold_is_refused_with_the_keys_to_lower(monkeypatch):
    """It leaves no name and no descriptor, and neither does a ring that was closed."""

    def open_files():
        found = [str(path) for path in Path("/dev/shm").glob("psm_*")]
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one that lists them
                found.append(str(path.readlink()))
        return Counter(n for n in found if n.startswith(("pipe:", "/memfd:", "/dev/shm")))

    files, limits = open_files(), layout()
    with contextlib.closing(RingBuffer(limits)):
        assert open_files() != files
        assert not any(name.startswith("/dev/shm") for name in open_files() - files)
    assert open_files() == files
    monkeypatch.setattr(ring_buffer, "available_memory_bytes", lambda: limits.total_bytes - 1)
    with pytest.raises(ValueError, match=r"rollout.ring_slots .* data.max_prompt_length"):
        RingBuffer(limits)
    assert open_files() == files


@pytest.mark.parametrize(
    ("limit", "available_bytes", "shown"),
    [(str(3 << 20), 3 << 19, "(3 MiB)"), ("max", 4096 << 10, "(10 MiB)")],
)
def test_memory_is_that_of_the_machine_and_its_cgroups(tmp_path, limit, available_bytes, shown):
    pod = "sys/fs/cgroup/pod"
    for name, text in {
        "proc/meminfo": "MemTotal: 9999 kB\nMemAvailable: 4096 kB\n",
        "proc/self/cgroup": "0::/pod/job\n",
        f"{pod}/memory.max": limit,
        f"{pod}/memory.current": str(2 << 20),
        f"{pod}/memory.stat": f"anon 5\ninactive_file {1 << 19}\n",
        f"{pod}/memory.events": "oom_kill 9\n",
        f"{pod}/job/memory.max": "max",
        f"{pod}/job/memory.current": "5",
        f"{pod}/job/memory.stat": "anon 5\n",
        f"{pod}/job/memory.events": "oom 1\noom_kill 3\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory_bytes(tmp_path) == available_bytes
    assert oom_kills(tmp_path) == 3
    assert kill_reason(3, tmp_path) == "" and shown in kill_reason(2, tmp_path)


@pytest.mark.parametrize("num_headers", [2000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_damaged_header_is_an_error_or_gives_a_consistent_group(new_ring, num_headers):
    """Another process may write anything. Nothing outside the slot is read."""
    ring, rng = new_ring(num_slots=3), random.Random(num_headers)
    port, num_errors = ring.attach(0), 0
    for number in range(num_headers):
        port.put(make_group(number % 100))
        slot = ring.slots["status"].tolist().index(READY)
        for name in rng.sample(HEADER, rng.choice([1, 1, 1, 2, 8])):
            # Small, at the limits of a slot, huge, or negative.
            words = rng.randint(-2, 30), rng.getrandbits(64) - (1 << 63), rng.getrandbits(20)
            ring.slots[name][slot] = rng.choice(words)
        if rng.random() < 0.3:
            place = rng.randrange(ring.layout.num_generations)
            ring.slots["completion_lengths"][slot, place] = rng.randint(-(2**31), 2**31 - 1)
        if number % 100 == 0:
            ring.delivered(0)
        try:
            group = port.get().group
        except RuntimeError:
            num_errors += 1
        else:
            for name, _, dimension in ARRAYS:
                array, row = getattr(group, name), ring.slots[name][slot]
                assert len(array) == ring.slots[dimension][slot] <= len(row)
                assert np.shares_memory(array, row) or not len(array)
            slices = group.completion_slices()
            assert all(0 <= each.start <= each.stop <= len(group.completion_ids) for each in slices)
            assert sum(len(group.completion_ids[each]) for each in slices) == slices[-1].stop
        port.free_slot(slot)
    assert num_headers / 5 < num_errors < num_headers * 4 / 5
    assert_whole(ring, port)


def fork(action):
    """Run `action` in a child, which takes milliseconds; return its id."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        signal.setitimer(signal.ITIMER_REAL, BOUND_SECONDS)
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return pid


def exit_code(pid):
    """Wait for a child, which ends with the test if the wait does not."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise


def operate_and_die(operation, port, step, event_kind):
    """Kill this process before the step-th line (or bytecode) of the ring's module."""
    steps_left = step
    lease = port.get() if operation == "release" else None

    def trace(frame, event, _):
        nonlocal steps_left
        if frame.f_code.co_filename != RING_FILE:
            return None
        frame.f_trace_opcodes = event_kind == "opcode"
        if event == event_kind:
            steps_left -= 1
            if steps_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    # Python 3.12 looks for bytecodes only where a frame asked for them before this call.
    sys._getframe().f_trace_opcodes = event_kind == "opcode"
    sys.settrace(trace)
    match operation:
        case "put":
            port.put(make_group(7))
        case "get":
            port.get()
        case "release":
            lease.release()
    sys.settrace(None)


@pytest.mark.parametrize("event_kind", ["line", pytest.param("opcode", marks=pytest.mark.long)])
@pytest.mark.parametrize("operation", OUTCOMES)
def test_process_killed_anywhere_loses_no_slot_and_no_group(new_ring, operation, event_kind):
    ring = new_ring()
    living, outcomes = ring.attach(0), []
    for step in range(1, 5000):
        living.put(make_group(1))
        living.put(make_group(2))
        victim = ring.attach(VICTIM)
        pid = fork(partial(operate_and_die, operation, victim, step, event_kind))
        if (code := exit_code(pid)) == 0:
            break
        assert code == KILLED
        ring.reclaim(VICTIM)
        delivered = ring.delivered(0)
        outcomes.append(take_all(living))
        assert delivered == {*outcomes[-1]}
        assert_whole(ring, living)
    assert step > 10, "hardly anything was traced"
    assert [outcome for outcome, _ in groupby(outcomes)] == OUTCOMES[operation]


def test_two_owners_dead_in_the_middle_of_moves_are_reclaimed_together(new_ring):
    ring = new_ring(num_slots=3)
    port = ring.attach(0)
    port.put(make_group(1))
    port.put(make_group(2))
    ring.ready_pipe.receive()  # each died while it held a number
    ring.free_pipe.receive()
    ring.moves[[1, 2]] = 1
    with pytest.raises(ValueError, match="reclaim it first"):
        ring.attach(1)
    with pytest.raises(TimeoutError, match=r"\[2\]"):
        ring.reclaim(1, timeout_seconds=0.05)
    lease = port.get()  # the ring still works meanwhile
    assert lease.group.prompt_index == 2
    lease.release()
    ring.reclaim(1, 2)
    assert take_all(port) == [1]
    assert_whole(ring, ring.attach(1))


def test_delivered_groups_are_those_published_being_read_or_taken(new_ring):
    ring = new_ring()
    producer, reader = ring.attach(0), ring.attach(1)
    producer.put(make_group(0))
    lease = reader.get()
    ring.taken[lease.group.group_index] = lease.group.iteration
    lease.release()
    for index in (1, 2, 10):  # the last is of iteration 1
        producer.put(make_group(index))
    lease = reader.get()
    assert ring.delivered(0) == {0, 1, 2} and ring.delivered(1) == {10}
    lease.release()  # not accepted
    assert ring.delivered(0) == {0, 2}
    assert take_all(reader) == [2, 10] and ring.delivered(0) == {0}


def stress_producer(ring, owner, log_fd, first):
    port, rng = ring.attach(owner), random.Random(os.getpid())
    for index in range(first, first + 99_999):
        os.write(log_fd, b"P%d\n" % index)
        while not port.put(make_group(index)):
            wait([port.writable_fd], 0.05)
        os.write(log_fd, b"D%d\n" % index)
        time.sleep(rng.random() * 0.002)


def stress_consumer(ring, owner, log_fd, _):
    port, rng = ring.attach(owner), random.Random(os.getpid())
    while True:
        wait([port.readable_fd], 0.05)
        if (lease := port.get()) is not None:
            index = lease.group.prompt_index
            assert_same(lease.group, make_group(index))
            os.write(log_fd, b"B%d\n" % index)
            time.sleep(rng.random() * 0.002)
            lease.release()
            os.write(log_fd, b"E%d\n" % index)


@pytest.mark.parametrize("num_kills", [60, pytest.param(1500, marks=pytest.mark.long)])
def test_processes_killed_at_random_lose_nothing_and_repeat_nothing(new_ring, tmp_path, num_kills):
    ring, rng, firsts = new_ring(num_slots=5), random.Random(num_kills), count(0, 100_000)
    log = tmp_path / "log"
    log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # appended in whole lines

    def start(owner):
        work = stress_producer if owner < 3 else stress_consumer
        return fork(partial(work, ring, owner, log_fd, next(firsts)))

    pids = {owner: start(owner) for owner in range(5)}
    consumer_kills = 2  # at the end
    try:
        for _ in range(num_kills):
            time.sleep(rng.random() * 0.02)
            dead = rng.sample(range(5), rng.choice([1, 1, 1, 2]))  # at times two at once
            for owner in dead:
                os.kill(pids[owner], signal.SIGKILL)
                assert exit_code(pids.pop(owner)) == KILLED
                consumer_kills += owner >= 3
            ring.reclaim(*dead, timeout_seconds=BOUND_SECONDS)
            pids |= {owner: start(owner) for owner in dead}
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(log_fd)
    ring.reclaim(*range(5))
    events = log.read_text().splitlines()
    events += [f"{mark}{index}" for index in take_all(ring.attach(0)) for mark in "BE"]
    assert_whole(ring, ring.attach(0))

    tried, put, deliveries = ([e[1:] for e in events if e[0] == mark] for mark in "PDB")
    assert len(put) > num_kills, "hardly any group went through the ring"
    assert {*put} <= {*deliveries} <= {*tried}
    released = set()
    for event in events:
        assert not (event[0] == "B" and event[1:] in released), "delivered after its release"
        if event[0] == "E":
            released.add(event[1:])
    # Only a group whose reader was killed before its release is delivered again.
    assert len(deliveries) - len({*deliveries}) <= consumer_kills
