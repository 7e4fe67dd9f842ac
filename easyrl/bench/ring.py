"""`easyrl bench ring`: the ring buffer against `torch.multiprocessing.Queue`.

Throughput: one spawned process makes groups (a fresh copy of every array each time) and sends
them, another reads every element (sums each array). Ring and queue carry the same group between
the same two processes, hold the same number of groups, and take turns within a repetition. A rate
is groups over the time from the producer's start to the end of the consumer's last sum.

Wake-up: the consumer is blocked in `get`. Measured, on the clock both processes share
(CLOCK_MONOTONIC), is the time from just before the producer's `put` sends the slot's number, the
small group being written, to the return of the consumer's `get` with its views of the group.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.multiprocessing

from easyrl.channels.ring_buffer import RingBuffer, RingPort
from easyrl.channels.ring_layout import RingLayout
from easyrl.channels.ring_resources import TokenPipe
from easyrl.types import RolloutGroup

if TYPE_CHECKING:
    from torch.multiprocessing import Queue

NUM_GENERATIONS = 8
PROMPT_LENGTH = 256
BYTES_PER_TOKEN = 9  # id, log-probability, mask
NUM_SLOTS = 8
BOUND_SECONDS = 60.0
COLUMNS = {
    "group_bytes": "bytes a group",
    "ring_groups_per_second": "ring, groups/s",
    "queue_groups_per_second": "queue, groups/s",
    "speedup": "speedup",
    "wakeup_p50_seconds": "wake-up p50, s",
    "wakeup_p99_seconds": "wake-up p99, s",
}

Result = dict[str, int | float]


def run(
    group_bytes: tuple[int, ...] = (64 * 1024, 1024**2, 8 * 1024**2),
    repetitions: int = 5,
    num_wakeups: int = 500,
    wakeup_interval_seconds: float = 0.003,
) -> list[Result]:
    """One row per group size: medians of the throughputs over the repetitions.

    Keys: `group_bytes`, `ring_groups_per_second`, `queue_groups_per_second`, `speedup` (median
    of the repetitions' ratios) and, the same in every row, `wakeup_p50_seconds` and
    `wakeup_p99_seconds`: medians of the quantiles of `num_wakeups` small groups per repetition.
    """
    groups = [make_group(size) for size in group_bytes]
    with _two_processes(groups) as (producer, consumer):
        wakeups = [
            _ask(producer, consumer, ("wakeup", 0, num_wakeups, wakeup_interval_seconds))
            for _ in range(repetitions)
        ]
        p50, p99 = np.median(np.quantile(wakeups, [0.5, 0.99], axis=1), axis=1)
        rows: list[Result] = []
        for index, size in enumerate(group_bytes):
            # About as long for every size, and long enough to swamp the start.
            counts = {"ring": max(64, 2**29 // size), "queue": max(32, 2**25 // size)}
            counts = {channel: min(count, 2000) for channel, count in counts.items()}
            rates: dict[str, list[float]] = {"ring": [], "queue": []}
            for repetition in range(repetitions + 1):
                for channel, count in counts.items():
                    seconds = _ask(producer, consumer, (channel, index, count, 0.0))[0]
                    if repetition:  # the first one touches the memory, and is not counted
                        rates[channel].append(count / seconds)
            ratios = [a / b for a, b in zip(rates["ring"], rates["queue"], strict=True)]
            rows.append(
                {
                    "group_bytes": size,
                    "ring_groups_per_second": statistics.median(rates["ring"]),
                    "queue_groups_per_second": statistics.median(rates["queue"]),
                    "speedup": statistics.median(ratios),
                    "wakeup_p50_seconds": float(p50),
                    "wakeup_p99_seconds": float(p99),
                }
            )
        return rows


def make_group(group_bytes: int) -> RolloutGroup:
    """A group whose completions come to about `group_bytes`."""
    length = max(1, group_bytes // (BYTES_PER_TOKEN * NUM_GENERATIONS))
    num_tokens = length * NUM_GENERATIONS
    rng = np.random.default_rng(0)
    return RolloutGroup(
        iteration=0,
        policy_version=0,
        place=0,
        prompt_index=0,
        prompt_ids=rng.integers(0, 2**15, PROMPT_LENGTH, dtype=np.int32),
        completion_lengths=np.full(NUM_GENERATIONS, length, np.int32),
        completion_ids=rng.integers(0, 2**15, num_tokens, dtype=np.int32),
        rollout_logprobs=-rng.random(num_tokens, dtype=np.float32),
        loss_mask=np.ones(num_tokens, np.bool_),
        rewards=rng.random(NUM_GENERATIONS, dtype=np.float32),
        advantages=rng.random(NUM_GENERATIONS, dtype=np.float32),
        truncated=np.zeros(NUM_GENERATIONS, np.bool_),
    )


@contextlib.contextmanager
def _two_processes(groups: list[RolloutGroup]) -> Iterator[tuple[Connection, Connection]]:
    """Control connections to a producer and a consumer, each on one thread."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue(NUM_SLOTS)
    processes = []
    with contextlib.ExitStack() as stack:
        rings = []
        for group in groups:
            layout = RingLayout(
                num_slots=NUM_SLOTS,
                num_generations=NUM_GENERATIONS,
                max_prompt_length=PROMPT_LENGTH,
                max_completion_length=int(group.completion_lengths[0]),
                num_owners=2,
            )
            rings.append(stack.enter_context(contextlib.closing(RingBuffer(layout))))
        try:
            connections = []
            for target in (_producer, _consumer):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=target, args=(rings, queue, groups, theirs), daemon=True
                )
                process.start()
                theirs.close()  # its end is the process's alone: we read EOF when it dies
                processes.append(process)
                connections.append(ours)
            for connection in connections:
                _receive(connection)
            yield connections[0], connections[1]
            for connection in connections:
                connection.send(None)
            for process in processes:
                process.join(BOUND_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.join(BOUND_SECONDS)
            queue.close()


def _ask(producer: Connection, consumer: Connection, order: tuple[Any, ...]) -> list[float]:
    """Have both carry out one order; `wakeup`: each latency, else: the one duration, in s."""
    consumer.send(order)
    assert _receive(consumer) == "ready"
    producer.send(order)
    start: float = _receive(producer)
    ends: list[float] = _receive(consumer)
    return ends if order[0] == "wakeup" else [ends[0] - start]


def _receive(connection: Connection) -> Any:
    if not connection.poll(BOUND_SECONDS):
        raise TimeoutError(f"bench ring: a process did not answer within {BOUND_SECONDS:.0f} s")
    return connection.recv()


def _arrays(group: RolloutGroup) -> dict[str, Any]:
    names = (field.name for field in fields(group))
    return {n: value for n in names if isinstance(value := getattr(group, n), np.ndarray)}


def _producer(
    rings: list[RingBuffer],
    queue: Queue[Any],
    groups: list[RolloutGroup],
    orders: Connection,
) -> None:
    ports = [ring.attach(0) for ring in rings]
    for order in _obey(orders):
        channel, index, count, interval_seconds = order
        if channel == "wakeup":
            _send_stamped(rings[0], ports[0], count, interval_seconds)
            orders.send(0.0)
            continue
        start = time.monotonic()
        for _ in range(count):
            made = {name: array.copy() for name, array in _arrays(groups[index]).items()}
            if channel == "ring":
                assert ports[index].put(replace(groups[index], **made), BOUND_SECONDS)
            else:
                tensors = {name: torch.from_numpy(array) for name, array in made.items()}
                queue.put(tensors, timeout=BOUND_SECONDS)
        orders.send(start)


def _obey(orders: Connection) -> Iterator[tuple[Any, ...]]:
    """What a measured process is told to do, until it is told to end."""
    torch.set_num_threads(1)
    orders.send("started")
    while (order := orders.recv()) is not None:
        yield order


def _send_stamped(ring: RingBuffer, port: RingPort, count: int, interval_seconds: float) -> None:
    """Small groups, each with its time of sending (ns) for an index."""
    group, pipe = make_group(1024), ring.ready
    ring.ready = _StampingPipe(ring)
    for _ in range(count):
        time.sleep(interval_seconds)
        assert port.put(group, BOUND_SECONDS)
    ring.ready = pipe


class _StampingPipe(TokenPipe):
    """Writes the time into the slot just before it sends the slot's number."""

    def __init__(self, ring: RingBuffer) -> None:
        super().__init__(*ring.ready.fds)
        self._stamps = ring.slots["prompt_index"]

    def send(self, slot: int) -> None:
        self._stamps[slot] = time.monotonic_ns()
        super().send(slot)


def _consumer(
    rings: list[RingBuffer],
    queue: Queue[Any],
    groups: list[RolloutGroup],
    orders: Connection,
) -> None:
    ports = [ring.attach(1) for ring in rings]
    for order in _obey(orders):
        orders.send("ready")
        channel, index, count, _ = order
        latencies = []
        for _ in range(count):
            if channel == "queue":
                tensors = queue.get(timeout=BOUND_SECONDS)
                _touch({name: tensor.numpy() for name, tensor in tensors.items()})
                continue
            lease = ports[index].get(BOUND_SECONDS)
            now = time.monotonic_ns()
            assert lease is not None
            with lease as group:
                latencies.append((now - group.prompt_index) * 1e-9)
                if channel == "ring":
                    _touch(_arrays(group))
        orders.send(latencies if channel == "wakeup" else [time.monotonic()])


def _touch(arrays: dict[str, Any]) -> None:
    """Read every element, as a consumer would."""
    for array in arrays.values():
        array.sum()
