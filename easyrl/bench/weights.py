"""A weight update against bare broadcasts of as many bytes.

A train process sends the weights of a random model of Qwen3-0.6B's shape (596 million, 311 names)
in float32, and rollout processes load them in their dtype, through the weight channel as in a run.

    update   from the moment the trainer begins to send until the last engine has loaded all
    bare     as many bytes, bucket after bucket, in the same process group: nothing is packed, cast,
             copied or loaded

The peak is the largest of all processes', from before they join the channel to the end of an
update, beside the model. That update is into zeros, and every bit of it is compared.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from easyrl import devices
from easyrl.bench.harness import QWEN3_06B, Row, peak_bytes, random_model, take_turns
from easyrl.channels import BUCKET_BYTES
from easyrl.channels.weights import WeightChannel, WeightEndpoint
from easyrl.config import Config, ConfigError, load_config
from easyrl.model.policy import Policy
from easyrl.model.sharding import gathered
from easyrl.processes import environment_of_children, pin
from easyrl.runtime.launch import run_worker, with_environment
from easyrl.runtime.placement import Placement, resolve_placement
from easyrl.runtime.supervisor import Supervisor
from easyrl.runtime.workers import worker_settings
from easyrl.workers.settings import WorkerSettings


def run(
    infer_devices: str | None = None,
    train_devices: str | None = None,
    dtype: str = "float32",
    *,
    repetitions: int = 5,
    size: Mapping[str, Any] = QWEN3_06B,
) -> Iterator[Row]:
    """One row: medians over the repetitions, which take turns.

    On a device that sender and receiver share there are no broadcasts to compare with.
    `unsupported_reason` says why its memory could not be opened twice, so that weights crossed on
    the CPU (None: they did not). Raises ConfigError for several train devices: one process sends.
    """
    flags = {"devices.infer": infer_devices, "devices.train": train_devices, "model.dtype": dtype}
    config = load_config(None, {**flags, "rollout.engine": "embedded"}, ())
    placement = resolve_placement(config)
    if placement.train.count > 1:
        raise ConfigError(f"devices.train: expected one device, got '{placement.train}'")
    with Supervisor() as supervisor:
        call = _spawn(supervisor, config, placement, size)
        peaks, sizes, digests, reasons = zip(*call("prepare"), strict=True)
        if len(set(digests)) > 1:
            raise RuntimeError("bench weights: an engine's weights differ from those sent")

        def seconds(method: str) -> float:
            """Return the seconds from the trainer's start to the last process's end."""
            spans = call(method)
            return float(max(end for _, end in spans) - spans[0][0])

        ways = ["update"] if placement.shares_device else ["update", "broadcast"]
        taken = take_turns({way: partial(seconds, way) for way in ways}, repetitions)
    num_bytes, update = sizes[0], statistics.median(taken["update"])
    row = {
        "dtype": dtype,
        "infer_devices": str(placement.infer),
        "train_devices": str(placement.train),
        "weight_bytes": num_bytes,
        "seconds_per_update": update,
        "gigabytes_per_second": num_bytes / 1e9 / update,
        "peak_extra_bytes": max(peaks),
        "bucket_bytes": BUCKET_BYTES,
    }
    if placement.shares_device:
        row["unsupported_reason"] = reasons[0]
    else:
        bare = statistics.median(taken["broadcast"])
        row["bare_broadcast_gigabytes_per_second"] = num_bytes / 1e9 / bare
        row["share_of_bare"] = bare / update
    yield row


def _spawn(
    supervisor: Supervisor, config: Config, placement: Placement, size: Mapping[str, Any]
) -> Callable[[str], list[Any]]:
    """Start a process for the trainer and one for each engine. The function returned calls a method
    of every `_Member` at the same time and returns their results, the trainer's first."""
    store = f"/proc/{os.getpid()}/fd/{os.memfd_create('easyrl-store')}"
    names = [("train", 0), *(("rollout", n) for n in range(placement.num_rollout_workers))]
    workers = []
    for rank, (role, number) in enumerate(names):
        settings = worker_settings(config, placement, role, number, store=store, log_file=None)
        settings = with_environment(settings)
        member = (__name__, "_Member", settings, settings.weight_endpoint(rank, len(names)), size)
        with environment_of_children(settings.environment):
            workers.append(supervisor.spawn(settings.name, run_worker, *member))

    def call(method: str) -> list[Any]:
        for worker in workers:
            worker.control.send((method,))
        results: dict[str, Any] = {}
        while len(results) < len(workers):
            for worker, event in supervisor.wait():
                if isinstance(event, tuple):  # not an event of the worker's start
                    (results[worker.name],) = event
        return [results[worker.name] for worker in workers]

    return call


class _Member:
    """The trainer (rank 0) or an engine. Calls the methods it is sent. Those that are measured
    return start and end in seconds, on the clock that all processes share."""

    _channel: WeightChannel

    def __init__(
        self,
        settings: WorkerSettings,
        endpoint: WeightEndpoint,
        size: Mapping[str, Any],
        control: Connection,
    ) -> None:
        pin(settings.cores)
        self._endpoint, self._control = endpoint, control
        self._is_trainer = endpoint.rank == 0
        self._dtype = getattr(torch, settings.config.model.dtype)  # of the engines
        self._version = 0
        device = torch.device(settings.device)
        with device, torch.no_grad():
            model = random_model(size)
            self._num_bytes = model.num_parameters() * self._dtype.itemsize
            self._bucket = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
            if not self._is_trainer:
                model.to(self._dtype)
                for weight in model.parameters():
                    weight.zero_()
        self._policy = Policy(model, device)

    def run(self) -> None:
        while True:
            message = self._control.recv()
            if not isinstance(message, tuple):  # Stop
                return
            (method,) = message
            self._control.send((getattr(self, method)(),))

    def prepare(self) -> tuple[int, int, str, str | None]:
        """Join the channel and update once. Returns the peak of bytes that both take, the bytes
        sent, a hash of all weights in the engines' dtype, and `unsupported_reason`."""

        def join_and_update() -> None:
            self._channel = WeightChannel(self._endpoint)
            self.update()

        peak = peak_bytes(join_and_update, self._policy.device)
        digest = hashlib.sha256()
        for name, weight in self._policy.named_weights():
            bits = weight.detach().to(self._dtype).cpu().view(-1).view(torch.uint8)
            digest.update(name.encode() + bits.numpy().tobytes())
        return peak, self._num_bytes, digest.hexdigest(), self._channel.not_shared_reason

    def update(self) -> tuple[float, float]:
        self._version += 1
        start = time.monotonic()
        if self._is_trainer:
            num_sent = self._channel.send(
                self._version, self._policy.weights(), dtype=self._dtype, gather=gathered
            )
            assert num_sent == self._num_bytes
        else:
            into = dict(self._policy.flat_weights()).get
            self._policy.load_weights(self._channel.receive(self._version, into))
        devices.synchronize(self._policy.device)
        return start, time.monotonic()

    def broadcast(self) -> tuple[float, float]:
        start = time.monotonic()
        for first in range(0, self._num_bytes, BUCKET_BYTES):
            self._channel.broadcast(self._bucket[: self._num_bytes - first], "a bare broadcast")
        devices.synchronize(self._bucket.device)
        return start, time.monotonic()
