"""`easyrl grpo` in which one end of the weight channel hangs in the middle of an update.

    python hanging_run.py trainer|loading|loaded UPDATE BUCKET ARGUMENTS...

The trainer does not fill bucket BUCKET of update UPDATE; or vLLM does not get past loading that
bucket; or it does not answer any more once all are loaded. Both count from 0. Spawned processes
import the main script too, so that this holds in all of them, vLLM's own among them.
"""

import os
import sys
import time
from dataclasses import replace

from easyrl.channels.weights import WeightChannel
from easyrl.types import Weight
from easyrl.workers.settings import WorkerSettings

if __name__ == "__main__":
    os.environ["HANG"] = ",".join(sys.argv[1:4])
WHO, UPDATE, BUCKET = os.environ["HANG"].split(",")
BUCKET_BYTES = 2**18
"""The built-in model is a dozen of them."""
send, receive = WeightChannel.send, WeightChannel.receive
weight_endpoint = WorkerSettings.weight_endpoint


def hang():
    while True:
        time.sleep(1.0)


def send_and_hang(self, version, weights, **more):
    is_due = version == int(UPDATE)
    return send(self, version, _late(weights) if is_due else weights, **more)


def _late(weights):
    num_bytes = 0
    for weight in weights:
        before, num_bytes = num_bytes, num_bytes + weight.reference.nbytes
        if before <= int(BUCKET) * BUCKET_BYTES < num_bytes:
            yield Weight(weight.name, weight.reference, _never, weight.is_trained)
        else:
            yield weight


def _never():
    hang()
    raise AssertionError


def small_buckets(self, *rank):
    return replace(weight_endpoint(self, *rank), bucket_bytes=BUCKET_BYTES)


def receive_and_hang(self, version, *more):
    num_bytes = 0
    for piece in receive(self, version, *more):
        yield piece
        num_bytes += piece.values.nbytes
        if WHO == "loading" and version == int(UPDATE) and num_bytes > int(BUCKET) * BUCKET_BYTES:
            hang()
    if WHO == "loaded" and version == int(UPDATE):
        hang()


WorkerSettings.weight_endpoint = small_buckets
WeightChannel.receive = receive_and_hang
if WHO == "trainer":
    WeightChannel.send = send_and_hang

if __name__ == "__main__":
    from easyrl.cli import main

    sys.argv[1:] = ["grpo", *sys.argv[4:]]
    main()
