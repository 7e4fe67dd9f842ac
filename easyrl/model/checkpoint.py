"""The tensors of a checkpoint: trained weights and optimizer state.

    model, optimizer ──copy_of_training──► CPU tensors ──write_tensors──► safetensors
                     ◄───────────────────read_tensors───────────────────

Names: `model.<parameter>` and `optimizer.<parameter>.<exp_avg, …>`; frozen parameters are left out,
tied ones are stored once. torch.distributed.checkpoint's Hugging Face storage writes and reads
them: each rank writes its parts into its own safetensors files, and reads the parts that it needs,
however many ranks have written. Everything else is JSON (`checkpoint_files`, which needs no torch).
"""

import json
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from easyrl.model.checkpoint_files import FILE_BYTES, finish_file
from easyrl.model.sharding import is_sharded, own_part

# One rank is intended. Set globally: checkpoints are written in a thread, filters are global.
warnings.filterwarnings("ignore", "torch.distributed is disabled")
warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.10's own use of it

OF_MODEL = "model."
OF_OPTIMIZER = "optimizer."
"""The beginnings of the tensors' names."""
STEP = "step"  # state of an optimizer that is a number; all other has the parameter's shape


@torch.no_grad()
def copy_of_training(
    model: nn.Module, optimizer: Optimizer, earlier: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Copy the tensors, or this rank's parts of them, to the CPU. An `earlier` copy is overwritten;
    an empty one asks for memory that an accelerator copies to fast, over and over."""
    tensors = _training(model, optimizer)
    if earlier is not None and earlier.keys() == tensors.keys():
        for name, tensor in tensors.items():
            own_part(earlier[name]).copy_(own_part(tensor), non_blocking=True)
        return earlier
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().to("cpu", copy=True)
        if earlier is not None and tensor.device.type != "cpu":
            part = copy.to_local() if is_sharded(copy) else copy  # the tensor itself
            part.data = part.pin_memory()
        copies[name] = copy
    return copies


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], process_group: Any = None
) -> dict[str, str]:
    """Write the tensors to `folder`, which is created, and return the SHA-256 of this rank's files
    when they are on the disk. All ranks of `process_group` (None: there is one rank) call this
    together; if one fails, all do. Raises OSError, or torch's wrapper of one."""
    file_numbers: dict[str, int] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        file_numbers[name] = 1 + num_bytes // FILE_BYTES
        num_bytes += tensor.nbytes
    writer = _Writer(str(folder), file_numbers, save_distributed=True)
    is_alone = process_group is None
    save(dict(tensors), storage_writer=writer, process_group=process_group, no_dist=is_alone)
    return writer.digests


class _File(NamedTuple):
    """The content of one safetensors file."""

    tensors: dict[str, Tensor]
    offsets: dict[str, Any]  # where each tensor begins in the whole one, as torch reads it


class _Writer(hf_storage.HuggingFaceStorageWriter):
    """Write tensors from where they are: torch's writer copies a file three times in memory."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's files. Raises OSError, which torch passes on to all ranks."""
        files = self._files(plan, planner)
        with ThreadPoolExecutor(2) as threads:
            finished = {}
            for file_name, file in files.items():
                path = Path(self.path, file_name)
                metadata = {CUSTOM_METADATA_KEY: json.dumps(file.offsets), "format": "pt"}
                save_file(file.tensors, path, metadata)
                # It is synced while the next one is written.
                finished[file_name] = threads.submit(finish_file, path)
        self.digests = {file_name: each.result() for file_name, each in finished.items()}
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result([])
        return done

    def _files(self, plan: Any, planner: Any) -> dict[str, _File]:
        """Return the contents of this rank's files by the files' names."""
        rank = plan.storage_data["shard_index"]
        file_numbers = self.fqn_to_index_mapping or {}
        files: dict[str, _File] = {}
        for item in plan.items:
            name = item.index.fqn
            file_name = f"shard-{rank:05d}-model-{file_numbers[name]:05d}.safetensors"
            file = files.setdefault(file_name, _File({}, {}))
            file.tensors[name] = planner.resolve_data(item)
            offsets = [*item.tensor_data.chunk.offsets]
            file.offsets[name] = {SAVED_OFFSETS_KEY: offsets}
        return files


@torch.no_grad()
def read_tensors(
    folder: Path, model: nn.Module, optimizer: Optimizer | None = None, process_group: Any = None
) -> None:
    """Overwrite model and, if given, optimizer by the tensors in `folder`, bit for bit."""
    reader = hf_storage.HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    if optimizer is None:
        for name, parameter in _trained(model).items():
            tensors[f"{OF_MODEL}{name}"] = parameter
    else:
        _allocate_state(model, optimizer, reader.read_metadata().state_dict_metadata)
        tensors = _training(model, optimizer)
    is_alone = process_group is None
    load(tensors, storage_reader=reader, process_group=process_group, no_dist=is_alone)


def names_in(folder: Path) -> set[str]:
    """Return the names of the trained parameters in a checkpoint."""
    reader = hf_storage.HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    return {name.removeprefix(OF_MODEL) for name in stored if name.startswith(OF_MODEL)}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by their names."""
    trained: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter
    return trained


def _training(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the trained weights and the optimizer's state of them by their names."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(model).items():
        tensors[f"{OF_MODEL}{name}"] = parameter
        state = optimizer.state[parameter]
        for kind, value in state.items():
            tensors[f"{OF_OPTIMIZER}{name}.{kind}"] = value
    return tensors


def _allocate_state(model: nn.Module, optimizer: Optimizer, stored: Iterable[str]) -> None:
    """Allocate the stored state of the fused optimizer, which has none before its first step."""
    trained = _trained(model)
    for key in stored:
        if not key.startswith(OF_OPTIMIZER):
            continue
        name, _, kind = key.removeprefix(OF_OPTIMIZER).rpartition(".")
        if name not in trained:
            continue
        parameter = trained[name]
        state = optimizer.state[parameter]
        if kind == STEP:
            state[kind] = torch.zeros((), device=parameter.device)
        else:
            state[kind] = torch.zeros_like(parameter)
