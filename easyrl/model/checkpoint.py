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
from itertools import accumulate
from pathlib import Path
from typing import Any

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


@torch.no_grad()
def copy_of_training(
    model: nn.Module, optimizer: Optimizer, earlier: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Copy the tensors, or this rank's parts of them, to the CPU. An `earlier` copy is overwritten;
    an empty one asks for memory that an accelerator copies to fast, over and over."""
    tensors = _training(model, optimizer)
    if earlier is None or earlier.keys() != tensors.keys():
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        for name, copy in copies.items():
            if earlier is not None and tensors[name].device.type != "cpu":
                part = copy.to_local() if is_sharded(copy) else copy  # the tensor itself
                part.data = part.pin_memory()
        return copies
    for name, tensor in tensors.items():
        own_part(earlier[name]).copy_(own_part(tensor), non_blocking=True)
    return earlier


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], process_group: Any = None
) -> dict[str, str]:
    """Write the tensors to `folder`, which is created, and return the SHA-256 of this rank's files
    when they are on the disk. All ranks of `process_group` (None: there is one rank) call this
    together; if one fails, all do. Raises OSError, or torch's wrapper of one."""
    starts = accumulate((tensor.nbytes for tensor in tensors.values()), initial=0)
    files = {name: 1 + start // FILE_BYTES for name, start in zip(tensors, starts, strict=False)}
    is_alone = process_group is None
    writer = _Writer(str(folder), files, save_distributed=True)
    save(dict(tensors), storage_writer=writer, process_group=process_group, no_dist=is_alone)
    return writer.digests


class _Writer(hf_storage.HuggingFaceStorageWriter):
    """Write tensors from where they are: torch's writer copies a file three times in memory."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's files. Raises OSError, which torch passes on to all ranks."""
        shard, numbers = plan.storage_data["shard_index"], self.fqn_to_index_mapping or {}
        files: dict[Path, list[Any]] = {}
        for item in plan.items:
            name = f"shard-{shard:05d}-model-{numbers[item.index.fqn]:05d}.safetensors"
            files.setdefault(Path(self.path, name), []).append(item)
        with ThreadPoolExecutor(2) as threads:
            finished = {}
            for path, items in files.items():
                tensors = {each.index.fqn: planner.resolve_data(each) for each in items}
                starts = {each.index.fqn: [*each.tensor_data.chunk.offsets] for each in items}
                parts = {fqn: {SAVED_OFFSETS_KEY: at} for fqn, at in starts.items()}
                metadata = {CUSTOM_METADATA_KEY: json.dumps(parts), "format": "pt"}
                save_file(tensors, path, metadata)
                finished[path.name] = threads.submit(finish_file, path)  # meanwhile
        self.digests = {name: each.result() for name, each in finished.items()}
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result([])
        return done


@torch.no_grad()
def read_tensors(
    folder: Path, model: nn.Module, optimizer: Optimizer | None = None, process_group: Any = None
) -> None:
    """Overwrite model and, if given, optimizer by the tensors in `folder`, bit for bit."""
    reader = hf_storage.HuggingFaceStorageReader(str(folder))
    if optimizer is None:
        tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in _trained(model)}
    else:
        _allocate_state(model, optimizer, reader.read_metadata().state_dict_metadata)
        tensors = _training(model, optimizer)
    load(tensors, storage_reader=reader, process_group=process_group, no_dist=process_group is None)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _training(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(model):
        tensors[f"model.{name}"] = parameter
        for kind, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{kind}"] = value
    return tensors


def _allocate_state(model: nn.Module, optimizer: Optimizer, stored: Iterable[str]) -> None:
    """Allocate the stored state of the fused optimizer, which has none before its first step."""
    for name, parameter in _trained(model):
        prefix = f"optimizer.{name}."
        for kind in (key.removeprefix(prefix) for key in stored if key.startswith(prefix)):
            is_step = kind == "step"  # a number; all other state has the parameter's shape
            reference = torch.empty((), device=parameter.device) if is_step else parameter
            optimizer.state[parameter][kind] = torch.zeros_like(reference)
