"""The ring buffer against `torch.multiprocessing.Queue`.

Throughput: this process creates groups (a fresh copy of every array each time) and sends them,
another one reads every element (sums each array). Ring and queue connect the same two processes and
hold the same number of groups. A rate is groups over the time from the producer's start to the end
of the consumer's last sum.

Wake-up: the time from the start of `put` of a small group until the `get` that the consumer is
blocked in returns. Both processes share the clock (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch.multiprocessing

from easyrl.bench.measure import Row, median_ratio, take_turns
from easyrl.bench.models import random_group
from easyrl.channels.ring_buffer import RingBuffer, RingLayout
from easyrl.types import RolloutGroup

NUM_GENERATIONS = 8
PROMPT_LENGTH = 256
TOKEN_BYTES = 9  # id, log-probability, mask
NUM_SLOTS = 8
WAKEUP_INTERVAL_SECONDS = 0.003
TIMEOUT_SECONDS = 60.0


def run(
    group_bytes: Sequence[int] = (64 * 1024, 1024**2, 8 * 1024**2),
    repetitions: int = 5,
    num_wakeups: int = 1000,
) -> Iterator[Row]:
    """One row per group size."""
    torch.set_num_threads(1)
    for size in group_bytes:
        yield _measure(size, repetitions, num_wakeups)


def _measure(group_bytes: int, repetitions: int, num_wakeups: int) -> Row:
    length = group_bytes // (TOKEN_BYTES * NUM_GENERATIONS)
    group = random_group(PROMPT_LENGTH, [length] * NUM_GENERATIONS)
    small = random_group(PROMPT_LENGTH, [14] * NUM_GENERATIONS)
    layout = RingLayout(
        num_slots=NUM_SLOTS,
        num_generations=NUM_GENERATIONS,
        max_prompt_length=PROMPT_LENGTH,
        max_completion_length=length,
        num_owners=2,
    )
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue(NUM_SLOTS)
    control, theirs = context.Pipe()

    def send(channel: str, count: int) -> Any:
        """Return seconds per group; if `channel` is "wakeup" the latencies in seconds."""
        control.send((channel, count))
        control.recv()  # the consumer is ready
        start = time.monotonic()
        for _ in range(count):
            if channel == "wakeup":
                time.sleep(WAKEUP_INTERVAL_SECONDS)
                port.put(replace(small, prompt_index=time.monotonic_ns()), TIMEOUT_SECONDS)
                continue
            copied = {name: array.copy() for name, array in _arrays(group).items()}
            if channel == "ring":
                port.put(replace(group, **copied), TIMEOUT_SECONDS)
            else:
                tensors = {name: torch.from_numpy(array) for name, array in copied.items()}
                queue.put(tensors, timeout=TIMEOUT_SECONDS)
        end, latencies = control.recv()
        return latencies if channel == "wakeup" else (end - start) / count

    with closing(RingBuffer(layout)) as ring:
        consumer = context.Process(target=_consume, args=(ring, queue, theirs), daemon=True)
        consumer.start()
        try:
            theirs.close()  # held by the consumer alone: we read EOF when it dies
            port = ring.attach(0)
            # About as long for every size, and long enough to hide the start.
            counts = {"ring": 2**29 // group_bytes, "queue": 2**25 // group_bytes}
            sends = {name: partial(send, name, min(2000, max(32, n))) for name, n in counts.items()}
            seconds = take_turns(sends, repetitions)
            p50, p99 = np.quantile(send("wakeup", num_wakeups), [0.5, 0.99])
        finally:
            consumer.kill()
            consumer.join()
    return {
        "group_bytes": group_bytes,
        "ring_groups_per_second": 1 / statistics.median(seconds["ring"]),
        "queue_groups_per_second": 1 / statistics.median(seconds["queue"]),
        "speedup": median_ratio(seconds["queue"], seconds["ring"]),
        "wakeup_p50_seconds": float(p50),
        "wakeup_p99_seconds": float(p99),
    }


def _consume(ring: RingBuffer, queue: Any, control: Connection) -> None:
    """The consumer's process: read as many groups as each command says."""
    torch.set_num_threads(1)
    port = ring.attach(1)
    while True:
        channel, count = control.recv()
        control.send("ready")
        latencies = []
        for _ in range(count):
            if channel == "queue":
                for tensor in queue.get(timeout=TIMEOUT_SECONDS).values():
                    tensor.numpy().sum()
                continue
            lease = port.get(TIMEOUT_SECONDS)
            now = time.monotonic_ns()
            assert lease is not None
            with lease as group:
                latencies.append((now - group.prompt_index) * 1e-9)
                if channel == "ring":
                    for array in _arrays(group).values():
                        array.sum()
        control.send((time.monotonic(), latencies))


def _arrays(group: RolloutGroup) -> dict[str, Any]:
    names = (field.name for field in fields(group))
    return {n: value for n in names if isinstance(value := getattr(group, n), np.ndarray)}
