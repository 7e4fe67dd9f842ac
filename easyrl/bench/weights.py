"""A weight update against bare broadcasts of the same bytes.

A train process sends the weights of a random model of Qwen3-0.6B's shape (596 million, 311 names)
in float32, and rollout processes load them in their dtype, through the weight channel as in a run.

    update   from the moment the trainer begins to send until the last engine has loaded all
    bare     as many bytes, in the same process group, straight from weights to weights: nothing is
             packed, cast or copied. One broadcast, or pieces of a bucket's size, if that is faster

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
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from easyrl import devices
from easyrl.bench.measure import Row, peak_bytes, peak_resident_bytes, take_turns
from easyrl.bench.models import QWEN3_06B, random_model
from easyrl.channels import BUCKET_BYTES
from easyrl.channels.weights import WeightEndpoint
from easyrl.config import Config, ConfigError, load_config
from easyrl.config.model import DType
from easyrl.engines.base import PolicyEngine
from easyrl.model.policy import Policy
from easyrl.model.sharding import gathered
from easyrl.processes import pin
from easyrl.runtime.launch import run_worker
from easyrl.runtime.placement import Placement, resolve_placement
from easyrl.runtime.supervisor import Supervisor
from easyrl.runtime.workers import worker_settings
from easyrl.workers.settings import WorkerSettings

MIN_SHARE = 0.7
"""The goal: the share of the bare rate."""


def run(
    infer_devices: str | None = None,
    train_devices: str | None = None,
    dtype: DType = "float32",
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

        def seconds(method: str, *arguments: int) -> float:
            """From the trainer's start to the last one's end."""
            spans = call(method, *arguments)
            return float(max(end for _, end in spans) - spans[0][0])

        num_bytes = sizes[0]
        ways = {"update": partial(seconds, "update")}
        if not placement.shares_device:
            for chunk_bytes in (num_bytes, BUCKET_BYTES):
                ways[f"bare, {chunk_bytes}"] = partial(seconds, "broadcast", num_bytes, chunk_bytes)
        medians = {w: statistics.median(s) for w, s in take_turns(ways, repetitions).items()}
    update = medians.pop("update")
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
        bare = min(medians.values())
        row["bare_broadcast_gigabytes_per_second"] = num_bytes / 1e9 / bare
        row["share_of_bare"] = bare / update
    yield row


def _spawn(
    supervisor: Supervisor, config: Config, placement: Placement, size: Mapping[str, Any]
) -> Callable[..., list[Any]]:
    """Start a process for the trainer and one for each engine. The function returned calls a method
    of every `_Member` at the same time and returns their results, the trainer's first."""
    store_path = f"/proc/{os.getpid()}/fd/{os.memfd_create('easyrl-store')}"
    names = [("train", 0), *(("rollout", n) for n in range(placement.num_rollout_workers))]
    workers = []
    for rank, name in enumerate(names):
        settings = worker_settings(config, placement, *name, store_path=store_path, log_file=None)
        endpoint = settings.weight_endpoint(rank, len(names))
        member = (__name__, "_Member", settings, endpoint, size)
        workers.append(supervisor.spawn(settings.name, run_worker, *member))

    def call(method: str, *arguments: int) -> list[Any]:
        for worker in workers:
            worker.control.send((method, arguments))
        results: dict[str, Any] = {}
        while len(results) < len(workers):
            for worker, event in supervisor.wait():
                if isinstance(event, tuple):  # not an event of the worker's start
                    (results[worker.name],) = event
        return [results[worker.name] for worker in workers]

    return call


class _Member(PolicyEngine):
    """The trainer (rank 0) or an engine. Calls the methods it is sent. Those that are measured
    return start and end in seconds, on the clock that all processes share."""

    has_work = False

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
        self._version = self._num_bytes = 0
        dtype = torch.float32 if self._is_trainer else self._dtype
        self.policy, self._memory = _random_policy(size, dtype, torch.device(settings.device))
        if not self._is_trainer:
            self._memory.zero_()

    def run(self) -> None:
        while isinstance(call := self._control.recv(), tuple):
            method, arguments = call
            self._control.send((getattr(self, method)(*arguments),))

    def prepare(self) -> tuple[int, int, str, str | None]:
        """Join the channel and update once. Returns the peak of bytes that both take, the bytes
        sent, a hash of all weights in the engines' dtype, and `unsupported_reason`."""
        on_cpu = self.policy.device.type == "cpu"
        measure = peak_resident_bytes if on_cpu else partial(peak_bytes, device=self.policy.device)
        peak = measure(self.update)
        digest = hashlib.sha256()
        for name, weight in self.policy.named_weights():
            bits = weight.detach().to(self._dtype).cpu().view(-1).view(torch.uint8)
            digest.update(name.encode() + bits.numpy().tobytes())
        assert self._channel is not None
        return peak, self._num_bytes, digest.hexdigest(), self._channel.not_shared_reason

    def update(self) -> tuple[float, float]:
        if self._channel is None:
            self.join_weights(self._endpoint)
        assert self._channel is not None
        self._version += 1
        start = time.monotonic()
        if self._is_trainer:
            self._num_bytes = self._channel.send(
                self._version, self.policy.weights(), dtype=self._dtype, gather=gathered
            )
        else:
            self.receive_weights(self._version)
        devices.synchronize(self.policy.device)
        return start, time.monotonic()

    def broadcast(self, num_bytes: int, chunk_bytes: int) -> tuple[float, float]:
        assert self._channel is not None
        start = time.monotonic()
        for chunk in torch.split(self._memory[:num_bytes], chunk_bytes):
            self._channel.broadcast(chunk, "a bare broadcast")
        devices.synchronize(self.policy.device)
        return start, time.monotonic()


def _random_policy(
    size: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[Policy, Tensor]:
    """Return a model with all weights in one piece of memory, and this memory as bytes."""
    with torch.device("meta"):
        model = random_model(size)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    memory = torch.empty(num_weights, dtype=dtype, device=device)
    memory.uniform_(-1.0, 1.0, generator=torch.Generator(device).manual_seed(0))
    model.to_empty(device=device).to(dtype)
    model.tie_weights()
    vector_to_parameters(memory, model.parameters())
    return Policy(model, device), memory.view(torch.uint8)
