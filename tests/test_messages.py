"""Groups as messages: the same values arrive, and damaged messages are refused."""

import dataclasses
from multiprocessing import Pipe

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from easyrl.channels.messages import MAX_UNACKNOWLEDGED, RemoteRing, decode_group, encode_group
from own_workers import FIRST, assert_same, make_group, make_ring

WHOLE = encode_group(make_group(FIRST))


@given(st.integers(0, 10**6))
def test_groups_arrive_as_they_were_sent(seed):
    group = make_group(seed)
    assert_same(group, decode_group(encode_group(group)))


def test_a_group_that_was_sent_goes_through_the_ring_and_a_message_is_a_copy():
    ring, group = make_ring(1), make_group(FIRST)
    assert ring.attach(0).put(decode_group(WHOLE), 0.0)
    lease = ring.attach(1).get(0.0)
    assert_same(group, lease.group)
    message = encode_group(lease.group)
    lease.release()
    ring.slots["completion_ids"][:] = -1
    assert_same(group, decode_group(message))
    ring.close()


@pytest.mark.parametrize("foreign", [b"", b"\xff" * len(WHOLE), bytes(48), WHOLE[:-1]])
def test_foreign_bytes_are_refused(foreign):
    with pytest.raises(SafetensorError):
        decode_group(foreign)


def test_a_worker_waits_for_tokens_while_its_groups_are_not_acknowledged():
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
