"""A weight update against bare broadcasts of as many bytes.

A train process sends the weights of a random model of Qwen3-0.6B's shape (596 million, 311 names)
in float32, and rollout processes load them in their dtype, through the weight channel as in a run.

    update   from the moment the trainer begins to send until the last engine has loaded all
    bare     as many bytes, bucket after bucket, in the same process group, which nobody loads

The peak is the largest of all processes' beside the model, during the first update. That is into
zeros, and every bit of it is compared.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.measuring import peak_bytes
from easyrl import devices
from easyrl.bench.harness import Row, take_turns
from easyrl.bench.loop import SIZES
from easyrl.channels import BUCKET_BYTES
from easyrl.config import ConfigError, load_config
from easyrl.runtime import self_test_part
from easyrl.runtime.placement import resolve_placement
from easyrl.runtime.resolve import resolve
from easyrl.runtime.supervisor import Supervisor


def run(
    infer_devices: str | None = None,
    train_devices: str | None = None,
    dtype: str = "float32",
    model: str = "0.6B",
    *,
    repetitions: int = 5,
    size: Mapping[str, Any] | None = None,
) -> Iterator[Row]:
    """Yield one row: medians over the repetitions, which take turns. Raises ConfigError for several
    train devices. `model`: one of `loop.SIZES`, unless there is a `size`.

    On a device that sender and receiver share there are no broadcasts to compare with.
    `unsupported_reason` says why its memory could not be opened twice (None: it was).
    """
    if model not in SIZES:
        raise ConfigError(f"--model: expected one of {', '.join(SIZES)} for weights, got {model}")
    flags = {"devices.infer": infer_devices, "devices.train": train_devices, "model.dtype": dtype}
    spec = resolve(load_config(None, {**flags, "rollout.engine": "embedded"}, ()))
    placement = resolve_placement(spec)
    if placement.train.count > 1:
        raise ConfigError(f"devices.train: expected one device, got '{placement.train}'")
    with Supervisor() as supervisor:
        call = self_test_part.start_members(
            supervisor, spec, placement, size or SIZES[model], __name__
        )
        prepared: list[Prepared] = call("prepare")
        if len(set(call("digest"))) > 1:
            raise RuntimeError("bench weights: an engine's weights differ from those sent")

        def seconds(action: str) -> float:
            """Return the seconds from the trainer's start to the last process's end."""
            spans = call("measure", action)  # start and end of each process, the trainer's first
            trainer_start, _ = spans[0]
            last_end = max(end for _, end in spans)
            return float(last_end - trainer_start)

        actions = {"update": partial(seconds, "update")}
        if not placement.shares_device:
            actions["broadcast"] = partial(seconds, "broadcast")
        taken = take_turns(actions, repetitions)
    num_bytes = prepared[0].num_bytes
    update = statistics.median(taken["update"])
    row = {
        "dtype": dtype,
        "infer_devices": str(placement.infer),
        "train_devices": str(placement.train),
        "weight_bytes": num_bytes,
        "seconds_per_update": update,
        "gigabytes_per_second": num_bytes / 1e9 / update,
        "peak_extra_bytes": max(member.peak_bytes for member in prepared),
        "bucket_bytes": BUCKET_BYTES,
    }
    if placement.shares_device:
        row["unsupported_reason"] = prepared[0].unsupported_reason
    else:
        bare = statistics.median(taken["broadcast"])
        row["bare_broadcast_gigabytes_per_second"] = num_bytes / 1e9 / bare
        row["share_of_bare"] = bare / update
    yield row


class Prepared(NamedTuple):
    """What a process reports of the first update."""

    peak_bytes: int  # beside the model
    num_bytes: int  # of the update
    unsupported_reason: str | None


class Member(self_test_part.Member):
    def prepare(self) -> Prepared:
        """Update once."""
        peak = peak_bytes(self.update, self.policy.device)
        self._num_bytes = self.policy.model.num_parameters() * self.dtype.itemsize
        self._bucket = torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device=self.policy.device)
        return Prepared(peak, self._num_bytes, self.channel.not_shared_reason)

    def measure(self, action: str) -> tuple[float, float]:
        """Return start and end in seconds, on the clock that all processes share."""
        start = time.monotonic()
        getattr(self, action)()
        devices.synchronize(self.policy.device)
        return start, time.monotonic()

    def broadcast(self) -> None:
        for first in range(0, self._num_bytes, BUCKET_BYTES):
            self.channel.broadcast(self._bucket[: self._num_bytes - first], "a bare broadcast")
