"""The tensors of a checkpoint: trained weights and optimizer state.

    model, optimizer ──copy_of_training──► CPU tensors ──write_tensors──► safetensors
                     ◄───────────────────read_tensors───────────────────

Names: `model.<parameter>`, `optimizer.<parameter>.<exp_avg, …>` and `random.<rank>`; frozen
parameters are left out, tied ones are stored once. They are written and read by
torch.distributed.checkpoint with its Hugging Face storage: each rank writes its parts into its own
safetensors files, and reads the parts that it needs, however many ranks have written. No pickle is
involved; everything else is JSON (`checkpoint_files`, which needs no torch).
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from easyrl.model.checkpoint_files import FILE_BYTES

# One rank is intended. Set globally: checkpoints are written in a thread, filters are global.
warnings.filterwarnings("ignore", "torch.distributed is disabled")
warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.10's own use of it

CPU = torch.device("cpu")


@torch.no_grad()
def copy_of_training(
    model: nn.Module, optimizer: Optimizer, *, device: torch.device = CPU, rank: int = 0
) -> dict[str, Tensor]:
    """Copy the tensors, or this rank's parts of them, to the CPU, with the random states of this
    rank, which computes on `device` wherever its weights are kept."""
    tensors = {**_training(model, optimizer), f"random.{rank}": _random_states(device)}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def any_has_failed(has_failed: bool, process_group: Any = None) -> bool:
    """Return whether any of the group's ranks has failed. Collective."""
    if process_group is None:
        return has_failed
    number = torch.tensor(float(has_failed))
    dist.all_reduce(number, dist.ReduceOp.MAX, process_group)
    return bool(number)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], process_group: Any = None) -> None:
    """Write the tensors to `folder`, and return when they are on the disk.

    All ranks of `process_group` (None: there is one rank) call this together. Next to training it
    needs a group of its own. Raises OSError, or torch's wrapper of one.
    """
    index, file_bytes = 1, 0
    files: dict[str, int] = {}
    for name, tensor in tensors.items():
        if file_bytes and file_bytes + tensor.nbytes > FILE_BYTES:
            index, file_bytes = index + 1, 0
        files[name] = index
        file_bytes += tensor.nbytes
    # The first rank's list is used for all, so it must name every rank's random states.
    num_ranks = 1 if process_group is None else process_group.size()
    files |= {f"random.{rank}": 1 for rank in range(num_ranks)}
    save(
        dict(tensors),
        storage_writer=HuggingFaceStorageWriter(str(folder), files, save_distributed=True),
        process_group=process_group,
        no_dist=process_group is None,
    )


@torch.no_grad()
def read_tensors(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    device: torch.device = CPU,
    rank: int = 0,
    process_group: Any = None,
) -> None:
    """Overwrite model and optimizer by the tensors in `folder`, bit for bit.

    Without an optimizer only the weights are read. A rank that did not write to the checkpoint
    keeps its random states. Raises ValueError, before anything is changed, if the checkpoint is of
    another model.
    """
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    sizes = {
        name: tuple(tensor.size)
        for name, tensor in stored.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    _check_model(folder, model, sizes)
    tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in _trained(model).items()}
    random_states = f"random.{rank}"
    if optimizer is not None:
        _allocate_state(model, optimizer, sizes)
        tensors = _training(model, optimizer)
        if random_states in sizes:
            tensors[random_states] = torch.zeros(sizes[random_states], dtype=torch.uint8)
    load(
        tensors,
        storage_reader=HuggingFaceStorageReader(str(folder)),
        process_group=process_group,
        no_dist=process_group is None,
    )
    if random_states in tensors:
        _set_random_states(tensors[random_states], device)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name, tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _training(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(model).items():
        tensors[f"model.{name}"] = parameter
        for kind, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{kind}"] = value
    return tensors


def _allocate_state(
    model: nn.Module, optimizer: Optimizer, sizes: Mapping[str, tuple[int, ...]]
) -> None:
    """Allocate the fused optimizer's state, which does not exist before its first step."""
    for name, parameter in _trained(model).items():
        prefix = f"optimizer.{name}."
        for key, size in sizes.items():
            if key.startswith(prefix):
                is_step = size != tuple(parameter.shape)
                optimizer.state[parameter][key.removeprefix(prefix)] = (
                    torch.zeros(size, device=parameter.device)
                    if is_step
                    else torch.zeros_like(parameter)
                )


def _check_model(folder: Path, model: nn.Module, sizes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if the checkpoint's weights are not the model's."""
    expected = {f"model.{name}": tuple(p.shape) for name, p in _trained(model).items()}
    got = {name: size for name, size in sizes.items() if name.startswith("model.")}
    for name in sorted(expected | got):
        if expected.get(name) != got.get(name):
            raise ValueError(
                f"'{folder}' is a checkpoint of another model than model.path: {name}: expected "
                f"shape {expected.get(name)}, got {got.get(name)}"
            )


def _random_states(device: torch.device) -> Tensor:
    """Return the states of all generators that a model's code may use, as bytes of JSON."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    states["torch"] = torch.get_rng_state()
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    content = json.dumps(states, default=lambda array: array.tolist())
    return torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)


def _set_random_states(content: Tensor, device: torch.device) -> None:
    states = json.loads(bytes(content.tolist()))
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if device.type != "cpu" and "device" in states:
        state = torch.tensor(states["device"], dtype=torch.uint8)
        torch.get_device_module(device).set_rng_state(state, device)
