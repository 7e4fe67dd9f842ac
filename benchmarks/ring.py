"""The ring buffer against `torch.multiprocessing.Queue` between the same two processes.

This process sends fresh copies of a group's arrays, another one sums each array. A rate is groups
over the time from the producer's start to the end of the consumer's last sum. Wake-up is the time
from the start of `put` of a small group until the `get` that the consumer is blocked in returns.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
import torch.multiprocessing

from easyrl.bench.harness import Row, median_ratio, take_turns
from easyrl.channels.ring_buffer import RingBuffer, RingLayout
from easyrl.layout.tree import TokenTree
from easyrl.types import RolloutGroup

NUM_GENERATIONS = 8
PROMPT_LENGTH = 256
NUM_SLOTS = 8
TOKEN_BYTES = 9  # id, log-probability, mask
SMALL_LENGTH = 14  # of the completions of a small group
RING_BYTES = 2**29  # sent through the ring in a turn, about as long as QUEUE_BYTES take
QUEUE_BYTES = 2**25
ARRAYS = ("prompt_ids", "completion_ids", "rollout_logprobs", "loss_mask")
WAKEUP_INTERVAL_SECONDS = 0.003
TIMEOUT_SECONDS = 60.0


class Sent(NamedTuple):
    """Measured times of sending groups."""

    seconds_per_group: float
    latencies: list[float]  # of each group, through the ring, in seconds


def run(
    group_bytes: Sequence[int] = (64 * 1024, 4 * 1024**2),
    repetitions: int = 5,
    num_wakeups: int = 1000,
) -> Iterator[Row]:
    """Yield a row per group size."""
    torch.set_num_threads(1)
    for size in group_bytes:
        yield _measure(size, repetitions, num_wakeups)


def _measure(group_bytes: int, repetitions: int, num_wakeups: int) -> Row:
    length = group_bytes // (TOKEN_BYTES * NUM_GENERATIONS)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue(NUM_SLOTS)
    control, theirs = context.Pipe()

    def send(channel: str, completion_length: int, count: int, pause: float = 0.0) -> Sent:
        """Send `count` groups, with a pause of so many seconds before each."""
        group = _make_group(completion_length)
        control.send((channel, count))
        start = time.monotonic()
        for _ in range(count):
            if pause:
                time.sleep(pause)
            copied: dict[str, Any] = {name: getattr(group, name).copy() for name in ARRAYS}
            if channel == "queue":
                tensors = [torch.from_numpy(array) for array in copied.values()]
                queue.put(tensors, timeout=TIMEOUT_SECONDS)
            else:
                # The consumer finds the time of sending in `prompt_index`.
                sent = replace(group, prompt_index=time.monotonic_ns(), **copied)
                is_writable = wait([port.writable_fd], TIMEOUT_SECONDS)
                is_sent = bool(is_writable) and port.put(sent)
                assert is_sent
        end, latencies = control.recv()
        return Sent((end - start) / count, latencies)

    layout = RingLayout(
        NUM_SLOTS,
        NUM_GENERATIONS,
        PROMPT_LENGTH,
        length,
        num_owners=2,
        num_groups=1,
    )
    with closing(RingBuffer(layout)) as ring:
        consumer = context.Process(target=_consume, args=(ring, queue, theirs), daemon=True)
        consumer.start()
        try:
            theirs.close()  # held by the consumer alone: we read EOF when it dies
            port = ring.attach(0)
            actions = {}  # the warm-up hides the consumer's start
            for name, num_bytes in (("ring", RING_BYTES), ("queue", QUEUE_BYTES)):
                count = min(2000, max(32, num_bytes // group_bytes))
                actions[name] = partial(send, name, length, count)
            turns = take_turns(actions, repetitions)
            wakeups = send("ring", SMALL_LENGTH, num_wakeups, WAKEUP_INTERVAL_SECONDS)
        finally:
            consumer.kill()
            consumer.join()
    ring_seconds = [sent.seconds_per_group for sent in turns["ring"]]
    queue_seconds = [sent.seconds_per_group for sent in turns["queue"]]
    p50, p99 = np.quantile(wakeups.latencies, [0.5, 0.99])
    return {
        "group_bytes": group_bytes,
        "ring_groups_per_second": 1 / statistics.median(ring_seconds),
        "queue_groups_per_second": 1 / statistics.median(queue_seconds),
        "speedup": median_ratio(queue_seconds, ring_seconds),
        "wakeup_p50_seconds": float(p50),
        "wakeup_p99_seconds": float(p99),
    }


def _make_group(completion_length: int) -> RolloutGroup:
    num_tokens = NUM_GENERATIONS * completion_length
    tree = TokenTree.of_group(PROMPT_LENGTH, [completion_length] * NUM_GENERATIONS)
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
        node_lengths=tree.lengths.astype(np.int32),
        node_parents=tree.parents.astype(np.int32),
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
                for tensor in queue.get(timeout=TIMEOUT_SECONDS):
                    tensor.numpy().sum()
                continue
            wait([port.readable_fd], TIMEOUT_SECONDS)
            lease = port.get()
            now = time.monotonic_ns()
            assert lease is not None
            latencies.append((now - lease.group.prompt_index) * 1e-9)
            for name in ARRAYS:
                getattr(lease.group, name).sum()
            lease.release()
        control.send((time.monotonic(), latencies))
