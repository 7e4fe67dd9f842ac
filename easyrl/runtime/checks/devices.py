"""Checks of the machine: its compiler, the disk, devices that are slow or hardly used."""

import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from easyrl import devices
from easyrl.config import ConfigError
from easyrl.config.spec import RunSpec
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.formatting import counted
from easyrl.model.export import ModelSource
from easyrl.model.files import DTYPE_BYTES, FLOAT_BYTES
from easyrl.runtime.checks.engine import MeasuredModel
from easyrl.runtime.memory_estimate import GIB
from easyrl.runtime.placement import Placement

LOPSIDED = 6
"""A split is lopsided if one side has at least this many times the other's devices."""
COPIES_PER_CHECKPOINT = 3  # weights and AdamW's two moments, all in float32


class Disk(NamedTuple):
    folder: Path  # that is written; it need not exist yet
    free_bytes: int


class Written(NamedTuple):
    """What a run or an evaluation writes to the disk for sure."""

    num_bytes: int
    what: str  # "model and checkpoints take"
    advice: str  # "keep fewer (train.keep_checkpoints)"


def find_disk(folder: Path) -> Disk:
    """Find the disk of a folder. An existing one may be another disk than its parent, or link to
    one."""
    path = folder.absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    return Disk(folder, shutil.disk_usage(existing).free)


def written_by_run(
    spec: RunSpec, model: MeasuredModel, source: ModelSource | None, *, is_resumed: bool
) -> Written:
    """Return what a run writes: the model that it starts from if that is to be made, the final
    model, and its checkpoints with the one that replaces the oldest."""
    is_lora = model.num_trained is not None
    num_checkpoints = spec.schedule.keep_checkpoints
    if num_checkpoints > 0 and spec.schedule.eval_every > 0:
        num_checkpoints += 1  # the best one
    # A resumed run was checked when it started; the checkpoints of adapters are small.
    if is_resumed or is_lora:
        num_checkpoints = 0
    num_copies = 0
    if num_checkpoints > 0:
        num_copies = COPIES_PER_CHECKPOINT * (num_checkpoints + 1)
    dtype = spec.model.dtype if is_lora else "float32"  # of the final model, as in the trainer
    num_kept_bytes = model.files.kept.num_bytes
    num_bytes = DTYPE_BYTES[dtype] * model.num_weights + num_kept_bytes
    num_bytes += num_copies * FLOAT_BYTES * model.num_weights
    if source is not None:
        num_bytes += source.made_bytes(model.num_weights, num_kept_bytes)
    advice = "keep fewer (train.keep_checkpoints)"
    return Written(num_bytes, "model and checkpoints take", advice)


def written_by_evaluation(model: MeasuredModel, source: ModelSource) -> Written:
    """Return what an evaluation writes for sure: the model, if it is that of a checkpoint or an
    adapter."""
    advice = "use a folder on another disk"
    num_bytes = source.made_bytes(model.num_weights, model.files.kept.num_bytes)
    return Written(num_bytes, "the model takes", advice)


def check_disk(disk: Disk, written: Written) -> None:
    """Raise ConfigError if what is written does not fit the disk."""
    if written.num_bytes > disk.free_bytes:
        raise ConfigError(
            f"output.dir (--output): {written.what} {written.num_bytes / GIB:.2f} GiB, but "
            f"'{disk.folder}' has {disk.free_bytes / GIB:.2f} GiB left; {written.advice}"
        )


def check_compiler(spec: RunSpec, placement: Placement, has_compiler: bool) -> None:
    """Raise ConfigError if kernels are to be compiled for GPUs without a C compiler. (On a Ray
    cluster the nodes compile them.)"""
    if has_compiler or placement.accelerator == devices.ASCEND or placement.is_ray:
        return
    compiles_layers = spec.optimizer.compile or spec.model.dtype != "float32"
    trains_on_gpu = placement.train.kind == "accelerator"
    has_vllm_on_gpu = placement.infer.kind == "accelerator" and placement.engine.is_vllm
    if (trains_on_gpu and compiles_layers) or has_vllm_on_gpu:
        raise ConfigError(
            "devices: expected a C compiler for GPU kernels (CC, or apt install gcc), got none"
        )


def warn_of_float32(spec: RunSpec, placement: Placement) -> Sequence[str]:
    is_demo = spec.model.path in BUILT_IN_MODELS
    is_on_accelerator = placement.train.kind == "accelerator"
    if is_demo or not is_on_accelerator or spec.model.dtype != "float32":
        return ()
    return [
        "warning: in float32 accelerators take twice the memory and several times as long: "
        "model.dtype=bfloat16"
    ]


def warn_of_unused_gpus(spec: RunSpec, placement: Placement) -> Sequence[str]:
    """Warn if the CPU is the default only because torch cannot use this machine's GPUs."""
    is_default = spec.devices.infer is None and not placement.assumed
    if not is_default or placement.train.kind != "cpu":
        return ()
    reason = devices.unusable_reason()
    if not reason:
        return ()
    return [f"warning: the CPU is used, since torch cannot use the GPUs: {reason}"]


def warn_of_lopsided_split(placement: Placement) -> Sequence[str]:
    num_infer = placement.infer.count
    num_train = placement.train.count
    if max(num_infer, num_train) < LOPSIDED * min(num_infer, num_train):
        return ()
    return [
        f"warning: {counted(num_infer, 'device')} for generation and {num_train} for "
        f"training is lopsided; to find the fastest split: a short run, then easyrl plan "
        f"RUN --devices {num_infer + num_train}"
    ]


def warn_of_slow_copies(placement: Placement) -> Sequence[str]:
    """Warn of devices of this machine that cannot read each other's memory."""
    if placement.assumed or placement.is_ray:
        return ()
    kind = placement.accelerator
    apart = []
    for first, second in combinations(placement.accelerators, 2):
        if not devices.has_peer_access(kind, first, second):
            apart.append(f"{first} and {second}")
    if not apart:
        return ()
    return [
        f"warning: {kind} devices {', '.join(apart)} cannot read each other's memory: copies "
        "through the host's memory are slower"
    ]


def never_run(placement: Placement) -> Sequence[str]:
    """Name what of a plan has never run on real hardware (README, "What has run where")."""
    is_vllm = placement.engine.is_vllm and placement.infer.kind == "accelerator"
    parts = {
        "Ascend NPUs": placement.accelerator == devices.ASCEND and bool(placement.accelerators),
        "several accelerators": len(placement.accelerators) > 1,
        "vLLM on accelerators": is_vllm,
        "Ray with accelerators or over several machines": placement.is_ray,
    }
    planned = [part for part, is_planned in parts.items() if is_planned]
    if not planned:
        return ()
    names = ", ".join(planned)
    return [f"never run on real hardware so far: {names} (README, What has run where)"]
