"""The ring buffer against `torch.multiprocessing.Queue`.

This process creates groups (fresh copies of the arrays of tokens) and sends them, another one
reads every element (sums each array). Ring and queue connect the same two processes and hold the
same number of groups. A rate is groups over the time from the producer's start to the end of the
consumer's last sum. Wake-up is the time from the start of `put` of a small group until the `get`
that the consumer is blocked in returns. Both processes share the clock (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch.multiprocessing

from easyrl.bench.harness import Row, median_ratio, take_turns
from easyrl.channels.ring_buffer import RingBuffer, RingLayout
from easyrl.types import RolloutGroup

NUM_GENERATIONS, PROMPT_LENGTH, NUM_SLOTS = 8, 256, 8
TOKEN_BYTES = 9  # id, log-probability, mask
ARRAYS = ("prompt_ids", "completion_ids", "rollout_logprobs", "loss_mask")
WAKEUP_INTERVAL_SECONDS = 0.003
TIMEOUT_SECONDS = 60.0


def run(
    group_bytes: Sequence[int] = (64 * 1024, 4 * 1024**2),
    repetitions: int = 5,
    num_wakeups: int = 1000,
) -> Iterator[Row]:
    """One row per group size."""
    torch.set_num_threads(1)
    for size in group_bytes:
        yield _measure(size, repetitions, num_wakeups)


def _measure(group_bytes: int, repetitions: int, num_wakeups: int) -> Row:
    length = group_bytes // (TOKEN_BYTES * NUM_GENERATIONS)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue(NUM_SLOTS)
    control, theirs = context.Pipe()

    def send(channel: str, completion_length: int, count: int, pause: float = 0.0) -> Any:
        """Return seconds per group, and the latencies of the ring in seconds."""
        group = _make_group(completion_length)
        control.send((channel, count))
        start = time.monotonic()
        for _ in range(count):
            if pause:
                time.sleep(pause)
            copied: dict[str, Any] = {name: getattr(group, name).copy() for name in ARRAYS}
            if channel == "queue":
                tensors = {name: torch.from_numpy(array) for name, array in copied.items()}
                queue.put(tensors, timeout=TIMEOUT_SECONDS)
            else:
                port.put(
                    replace(group, prompt_index=time.monotonic_ns(), **copied), TIMEOUT_SECONDS
                )
        end, latencies = control.recv()
        return (end - start) / count, latencies

    layout = RingLayout(
        NUM_SLOTS, NUM_GENERATIONS, PROMPT_LENGTH, length, num_owners=2, num_groups=1
    )
    with closing(RingBuffer(layout)) as ring:
        consumer = context.Process(target=_consume, args=(ring, queue, theirs), daemon=True)
        consumer.start()
        try:
            theirs.close()  # held by the consumer alone: we read EOF when it dies
            port = ring.attach(0)
            # About as long for every size. The warm-up hides the consumer's start.
            counts = {"ring": 2**29 // group_bytes, "queue": 2**25 // group_bytes}
            sends = {
                name: partial(send, name, length, min(2000, max(32, count)))
                for name, count in counts.items()
            }
            turns = take_turns(sends, repetitions)
            _, latencies = send("ring", 14, num_wakeups, WAKEUP_INTERVAL_SECONDS)
        finally:
            consumer.kill()
            consumer.join()
    seconds = {name: [each for each, _ in results] for name, results in turns.items()}
    p50, p99 = np.quantile(latencies, [0.5, 0.99])
    return {
        "group_bytes": group_bytes,
        "ring_groups_per_second": 1 / statistics.median(seconds["ring"]),
        "queue_groups_per_second": 1 / statistics.median(seconds["queue"]),
        "speedup": median_ratio(seconds["queue"], seconds["ring"]),
        "wakeup_p50_seconds": float(p50),
        "wakeup_p99_seconds": float(p99),
    }


def _make_group(completion_length: int) -> RolloutGroup:
    num_tokens = NUM_GENERATIONS * completion_length
    return RolloutGroup(
        iteration=0,
        policy_version=0,
        group_index=0,
        prompt_index=0,
        prompt_ids=np.ones(PROMPT_LENGTH, np.int32),
        completion_lengths=np.full(NUM_GENERATIONS, completion_length, np.int32),
        completion_ids=np.ones(num_tokens, np.int32),
        rollout_logprobs=np.ones(num_tokens, np.float32),
        loss_mask=np.ones(num_tokens, np.bool_),
        rewards=np.ones(NUM_GENERATIONS, np.float32),
        advantages=np.ones(NUM_GENERATIONS, np.float32),
        truncated=np.zeros(NUM_GENERATIONS, np.bool_),
    )


def _consume(ring: RingBuffer, queue: Any, control: Connection) -> None:
    """The consumer's process: read as many groups as each command says."""
    torch.set_num_threads(1)
    port = ring.attach(1)
    while True:
        channel, count = control.recv()
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
                for name in ARRAYS:
                    getattr(group, name).sum()
        control.send((time.monotonic(), latencies))
