"""Groups and rollouts as messages: the same values arrive, and damaged messages are refused."""

from __future__ import annotations

import dataclasses
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_packing import FIRST, GROUPS, make_group

from easyrl.channels.messages import MAX_UNACKNOWLEDGED, RemoteRing, decode_group, encode_group
from easyrl.channels.ring_buffer import RingBuffer
from easyrl.workers.batches import decode_rollouts, encode_rollouts
from easyrl.workers.packing import pack, split_group
from own_workers import make_ring


def assert_same(one: Any, other: Any) -> None:
    """Every field has the same value and element type."""
    for field in dataclasses.fields(one):
        if field.name in ("slot", "number"):  # of a rollout: where it is in the ring
            continue
        expected, got = getattr(one, field.name), getattr(other, field.name)
        if isinstance(expected, np.ndarray):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)
        else:
            assert type(got)(expected) == got


@given(GROUPS)
def test_groups_arrive_as_they_were_sent(groups: Any) -> None:
    for group in groups:
        assert_same(group, decode_group(encode_group(group)))


def test_a_group_that_was_sent_goes_through_the_ring() -> None:
    ring = make_ring(1)
    group = make_group(FIRST)
    assert ring.attach(0).put(decode_group(encode_group(group)), 0.0)
    lease = ring.attach(1).get(0.0)
    assert lease is not None
    assert_same(group, lease.group)
    ring.close()


@given(GROUPS, st.integers(0, 5))
def test_rollouts_and_their_micro_batches_arrive_as_they_were_sent(
    groups: Any, skipped: int
) -> None:
    rollouts = [
        rollout
        for slot, group in enumerate(groups)
        for rollout in split_group(group, slot=slot, keep_zero_advantages=True)
    ][skipped:]
    assume(rollouts)
    decoded = decode_rollouts(encode_rollouts(rollouts))
    assert len(decoded) == len(rollouts)
    for expected, got in zip(rollouts, decoded, strict=True):
        assert_same(expected, got)
    for shares_prompts in (True, False):
        batches = [pack(each, shares_prompts=shares_prompts) for each in (rollouts, decoded)]
        assert_same(*batches)


WHOLE = encode_group(make_group(FIRST))


@given(st.integers(0, len(WHOLE) - 1))
def test_a_group_that_is_cut_off_is_refused(length: int) -> None:
    with pytest.raises(ValueError):
        decode_group(WHOLE[:length])


@pytest.mark.parametrize("foreign", [
    *(b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04.", b"5\n", b"[]\n", b"{}\n", b"[1, 2]\n"),
    *(b'[[1], [["O", 1]]]\n12345678', b'[[1], [["<i4", -1]]]\n1234', b'[[1], [["?!", 1]]]\n1'),
    *(b'[[1], [[5, 1]]]\n1', b'[[1], [["<i4", "x"]]]\n1234', b"[" * 100_000 + b"\n"),
    *(WHOLE + b"x", b"[[1, 2, 3, 4], []]\n", b"[[1, 2, 3, 4, 5], []]\n"),
])  # fmt: skip
def test_foreign_bytes_are_refused(foreign: bytes) -> None:
    with pytest.raises(ValueError):
        decode_group(foreign)


def test_a_worker_waits_for_tokens_while_its_groups_are_not_acknowledged() -> None:
    host, worker = Pipe()
    layout = make_ring(1).layout
    port = RemoteRing(layout, worker).attach(0)
    for _ in range(MAX_UNACKNOWLEDGED):
        host.send_bytes(b"\x01")
    group = make_group(FIRST)
    assert all(port.put(group, 0.0) for _ in range(MAX_UNACKNOWLEDGED))
    assert not port.put(group, 0.0)
    host.send_bytes(b"\x01")
    assert port.put(group, 1.0)
    too_long = dataclasses.replace(group, prompt_ids=np.zeros(10**4, np.int32))
    with pytest.raises(ValueError):
        port.put(too_long, 0.0)


def test_the_ring_is_not_in_a_message() -> None:
    """A group is a copy: it may outlive the slot that it was read from."""
    ring: RingBuffer = make_ring(1)
    ring.attach(0).put(make_group(FIRST), 0.0)
    lease = ring.attach(1).get(0.0)
    assert lease is not None
    message = encode_group(lease.group)
    lease.release()
    ring.slots["completion_ids"][:] = -1
    assert_same(make_group(FIRST), decode_group(message))
