"""The train ranks, and how a model is distributed over them: sharded (FSDP2), or whole on one.

Weights, gradients and optimizer state are divided along their first dimension. A layer's weights
are gathered before it computes and dropped afterwards, in forward and again in backward; then its
gradient is summed over the ranks and each keeps its part. Where memory allows
(`train.reshard=false`), weights are gathered once per update, and gradients summed once at its end.

    rank 0   gather layer 1 ─► compute ─► gather layer 2 ─► …      each gather and each sum waits
    rank 1   gather layer 1 ─► compute ─► gather layer 2 ─► …      for all ranks, in the same order

With a narrower `dtype` trained weights are kept in float32 and gathered in `dtype`; gradients are
summed in float32. The caller ensures that all ranks run equally many forwards and backwards.

Source: torch.distributed.fsdp.fully_shard; PyTorch FSDP (arXiv 2304.11277).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from easyrl import devices

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class TrainRanks:
    """This rank's view of all train ranks. Without `join` there is one, and nothing is sharded."""

    rank = 0
    size = 1
    device = torch.device("cpu")
    mesh: DeviceMesh | None = None  # None: models stay whole
    group_for_files: dist.ProcessGroup | None = None  # for checkpoints; None: this rank is alone
    keeps_gathered = False  # weights stay gathered until the update ends; set before `shard`
    _parts: Sequence[Any] = ()  # the sharded modules

    @classmethod
    def join(
        cls, store: str, *, rank: int, size: int, device: torch.device, timeout_seconds: float
    ) -> TrainRanks:
        """Initialize rank `rank` of `size` in torch's default process group over
        `devices.open_store`. Raises TimeoutError if the others do not join within
        `timeout_seconds`, which also bounds every later wait for them."""
        from torch.distributed.device_mesh import DeviceMesh

        ranks = cls()
        ranks.rank = rank
        ranks.size = size
        ranks.device = device
        timeout = timedelta(seconds=timeout_seconds)
        with ranks.naming_failures():
            devices.join_train_world(device, store, rank, size, timeout)
            ranks.mesh = DeviceMesh(device.type, list(range(size)))
            if size > 1:
                # Threads write checkpoints, for as long as they take.
                ranks.group_for_files = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        return ranks

    def shard(
        self, module: nn.Module, layers: Iterable[nn.Module], *, dtype: torch.dtype, offload: bool
    ) -> None:
        """Shard the parameters of `module` over the devices: those of each of `layers` are gathered
        together, and all others. Parts become float32, or `dtype` if frozen. With `offload` they
        stay on the CPU, and with them gradients and optimizer state."""
        from torch.distributed import fsdp

        on_accelerator = self.device.type != "cpu"
        kept = fsdp.OffloadPolicy()
        if offload:
            kept = fsdp.CPUOffloadPolicy(pin_memory=on_accelerator)
        precision = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        self._parts = (*layers, module)
        for sharded in self._parts:
            fsdp.fully_shard(sharded, mesh=self.mesh, mp_policy=precision, offload_policy=kept)
            # Gradients are sums over the update's groups on all ranks, never means.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            _reduce_unused(sharded)
        if self.keeps_gathered:
            root: Any = module
            root.set_reshard_after_forward(False)
            root.set_reshard_after_backward(False)
            root.set_requires_gradient_sync(False)

        def convert(tensor: Tensor) -> Tensor:
            if not is_sharded(tensor):  # a buffer
                return tensor
            return tensor.to(torch.float32 if tensor.requires_grad else dtype)

        module._apply(convert)  # type: ignore[no-untyped-call]

    def drop_gathered(self) -> None:
        """Free gathered weights, before weights are read or written part by part."""
        for part in self._parts:
            part.reshard()

    def reduce(self, values: Sequence[float], operation: Any = dist.ReduceOp.SUM) -> list[float]:
        """Return each value's sum over the ranks, or the result of another operation."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, operation)
        return [float(number) for number in numbers]

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Raise a failed wait for the other ranks as TimeoutError or ConnectionError."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            # Gloo raises plain RuntimeErrors: nothing but their text tells them from others.
            if not isinstance(error, dist.DistError) and "gloo" not in text:
                raise
            message = f"train rank {self.rank} of {self.size}, waiting for the others: {text}"
            if "imed out" in text or "imeout" in text:
                message += " (the bound is twice runtime.timeout_seconds)"
                raise TimeoutError(message) from error
            raise ConnectionError(message) from error


def _reduce_unused(sharded: Any) -> None:
    """Reduce zeros for parameters that this rank's tokens do not use (experts), as others do."""
    if hasattr(sharded, "set_reduce_scatter_unused_params"):  # torch >= 2.13
        sharded.set_reduce_scatter_unused_params(True, recurse=False)
        return
    parts = sharded._get_fsdp_state()._fsdp_param_group
    if parts is None:  # no parameters of its own
        return
    sum_gradients = parts.post_backward

    def sum_all(*_: Any) -> None:
        for part in parts.fsdp_params:
            weight = getattr(part, "_unsharded_param", None)  # None: never gathered
            if weight is not None and weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        sum_gradients()

    parts.post_backward = sum_all


def is_sharded(weight: Tensor) -> TypeGuard[DTensor]:
    """Return whether this rank holds only a part of the weight or gradient."""
    # No weight is a DTensor before its module is imported.
    loaded = sys.modules.get("torch.distributed.tensor")  # importing takes a second
    return loaded is not None and isinstance(weight, loaded.DTensor)


def whole(weight: Tensor) -> Tensor:
    """Return the whole weight, without gradient. A sharded one is gathered: all ranks call this."""
    weight = weight.detach()
    return weight.full_tensor() if is_sharded(weight) else weight


def gathered(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather a sharded weight in `dtype`; return another one as it is, without a copy."""
    return whole(weight.detach().to(dtype) if is_sharded(weight) else weight)


def own_part(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight or gradient, as a view."""
    weight = weight.detach()
    return weight.to_local() if is_sharded(weight) else weight
