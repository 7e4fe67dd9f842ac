"""The ring buffer against `torch.multiprocessing.Queue`.

Throughput: this process creates groups (a fresh copy of every array each time) and sends them,
another one reads every element (sums each array). Ring and queue carry the same group between the
same two processes, hold the same number of groups, and take turns. A rate is groups over the time
from the producer's start to the end of the consumer's last sum.

Wake-up: the consumer is blocked in `get`. Measured is the time from the start of the producer's
`put` of a small group until the consumer's `get` returns with its views of it. Both processes share
the clock (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.multiprocessing

from easyrl.bench.measure import median_ratio
from easyrl.channels.ring_buffer import RingBuffer, RingLayout
from easyrl.types import RolloutGroup

if TYPE_CHECKING:
    from torch.multiprocessing import Queue

NUM_GENERATIONS = 8
PROMPT_LENGTH = 256
TOKEN_BYTES = 9  # id, log-probability, mask
NUM_SLOTS = 8
WAKEUP_INTERVAL_SECONDS = 0.003
TIMEOUT_SECONDS = 60.0
COLUMNS = {
    "group_bytes": "bytes a group",
    "ring_groups_per_second": "ring, groups/s",
    "queue_groups_per_second": "queue, groups/s",
    "speedup": "speedup",
    "wakeup_p50_seconds": "wake-up p50, s",
    "wakeup_p99_seconds": "wake-up p99, s",
}


def run(
    group_bytes: Sequence[int] = (64 * 1024, 1024**2, 8 * 1024**2),
    repetitions: int = 5,
    num_wakeups: int = 500,
) -> list[dict[str, Any]]:
    """One row per group size: medians over the repetitions. The wake-up times, medians of the
    quantiles of `num_wakeups` small groups, are the same in every row."""
    torch.set_num_threads(1)
    context = torch.multiprocessing.get_context("spawn")
    groups = [_make_group(size) for size in group_bytes]
    small = _make_group(1024)
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
        queue = context.Queue(NUM_SLOTS)
        control, theirs = context.Pipe()
        consumer = context.Process(target=_consume, args=(rings, queue, theirs), daemon=True)
        consumer.start()
        stack.callback(consumer.join)
        stack.callback(consumer.kill)
        theirs.close()  # held by the consumer alone: we read EOF when it dies
        ports = [ring.attach(0) for ring in rings]

        def send(channel: str, index: int, count: int) -> list[float]:
            """Latencies if `channel` is "wakeup", else one duration, in seconds."""
            control.send((channel, index, count))
            control.recv()  # it is ready
            start = time.monotonic()
            for _ in range(count):
                if channel == "wakeup":
                    time.sleep(WAKEUP_INTERVAL_SECONDS)
                    ports[index].put(
                        replace(small, prompt_index=time.monotonic_ns()), TIMEOUT_SECONDS
                    )
                    continue
                copied = {name: array.copy() for name, array in _arrays(groups[index]).items()}
                if channel == "ring":
                    ports[index].put(replace(groups[index], **copied), TIMEOUT_SECONDS)
                else:
                    tensors = {name: torch.from_numpy(array) for name, array in copied.items()}
                    queue.put(tensors, timeout=TIMEOUT_SECONDS)
            end, latencies = control.recv()
            return latencies if channel == "wakeup" else [end - start]

        wakeups = [send("wakeup", 0, num_wakeups) for _ in range(repetitions)]
        p50, p99 = np.median(np.quantile(wakeups, [0.5, 0.99], axis=1), axis=1)
        rows = []
        for index, size in enumerate(group_bytes):
            # About as long for every size, and long enough to hide the start.
            counts = {"ring": min(2000, max(64, 2**29 // size))}
            counts["queue"] = min(2000, max(32, 2**25 // size))
            seconds: dict[str, list[float]] = {"ring": [], "queue": []}  # per group
            for repetition in range(repetitions + 1):
                for channel, count in counts.items():
                    (took,) = send(channel, index, count)
                    if repetition > 0:  # the first one touches the memory
                        seconds[channel].append(took / count)
            rows.append(
                {
                    "group_bytes": size,
                    "ring_groups_per_second": 1 / statistics.median(seconds["ring"]),
                    "queue_groups_per_second": 1 / statistics.median(seconds["queue"]),
                    "speedup": median_ratio(seconds["queue"], seconds["ring"]),
                    "wakeup_p50_seconds": float(p50),
                    "wakeup_p99_seconds": float(p99),
                }
            )
    return rows


def _make_group(group_bytes: int) -> RolloutGroup:
    """A group whose completions take about `group_bytes`."""
    length = max(1, group_bytes // (TOKEN_BYTES * NUM_GENERATIONS))
    num_tokens = length * NUM_GENERATIONS
    rng = np.random.default_rng(0)
    return RolloutGroup(
        iteration=0,
        policy_version=0,
        group_index=0,
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


def _consume(rings: list[RingBuffer], queue: Queue[Any], control: Connection) -> None:
    """The consumer's process: read as many groups as each command says."""
    torch.set_num_threads(1)
    ports = [ring.attach(1) for ring in rings]
    while True:
        channel, index, count = control.recv()
        control.send("ready")
        latencies = []
        for _ in range(count):
            if channel == "queue":
                for tensor in queue.get(timeout=TIMEOUT_SECONDS).values():
                    tensor.numpy().sum()
                continue
            lease = ports[index].get(TIMEOUT_SECONDS)
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
