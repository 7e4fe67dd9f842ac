"""Choose settings with which a run fits the memory, by `runtime.memory_estimate`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from easyrl import devices
from easyrl.config import ConfigError
from easyrl.config.devices import range_words
from easyrl.config.rollout import VLLM
from easyrl.config.spec import RunSpec
from easyrl.engines.sizes import GROUPS_KEY
from easyrl.model.files import ModelSize
from easyrl.runtime.memory_estimate import bytes_by_memory, estimate_memory
from easyrl.runtime.placement import Placement, resolve_placement
from easyrl.runtime.resolve import ResolvedRun
from easyrl.workers.sizes import TOKENS_KEY

Changes = dict[str, Any]  # new values by key, as {"train.offload": ["optimizer"]}

HEADROOM = 0.95
"""Part of each memory that a choice may fill: gaps between tensors are not estimated."""
MICRO_BATCH_TOKENS = (32_768, 16_384, 8_192)  # instead of 4,096, where they fit
VLLM_SIZES = (1, 2, 4, 8)  # devices that one engine may span
ROLLOUT_FRACTIONS = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2)  # of a shared device, the most usual ones first


def fits(spec: RunSpec, placement: Placement, size: ModelSize) -> bool:
    """Return whether the estimate leaves some headroom in every memory."""
    parts = estimate_memory(spec, placement, size)
    for memory, needed_bytes in bytes_by_memory(parts).items():
        if needed_bytes > HEADROOM * memory.num_bytes:
            return False
    return True


def choose_split(run: ResolvedRun, placement: Placement, size: ModelSize | None) -> Placement:
    """Return the placement with more train devices where the default has too few for the model:
    with the fewest that fit. Devices that are named stay, as do those of a deterministic run, whose
    sums do not depend on memory."""
    named = run.config.devices
    is_default = named.infer is None and named.train is None
    has_choice = placement.train.kind != "cpu" and not placement.is_ray
    if size is None or not (is_default and has_choice) or run.config.runtime.deterministic:
        return placement
    if placement.shares_device:
        return placement
    count = placement.infer.count + placement.train.count
    for num_train in range(placement.train.count, count):
        try:
            split = resolve_placement(run.spec, placement.assumed, num_train)
        except ConfigError:  # engines that span devices, or too few groups for the trainers
            continue
        if fits(run.spec, split, size):
            return split
    return placement


def use_memory(run: ResolvedRun, placement: Placement, size: ModelSize | None) -> ResolvedRun:
    """Choose what `train.reshard` and `train.max_tokens_per_micro_batch` leave open: on this node's
    accelerators what fits into what is free now. The sums of a deterministic run do not depend on
    memory."""
    devices.memory_in_use.cache_clear()
    has_choice = placement.train.kind != "cpu" and not placement.is_ray
    if size is None or not has_choice or run.config.runtime.deterministic:
        return run
    train = run.config.train
    least = run.config.max_tokens_per_micro_batch
    token_choices = []
    if not train.max_tokens_per_micro_batch:
        token_choices = [num_tokens for num_tokens in MICRO_BATCH_TOKENS if num_tokens > least]
    token_choices.append(least)
    reshard_choices = (False, True) if train.reshard == "auto" else (train.reshard,)
    for reshard, max_tokens in product(reshard_choices, token_choices):
        changes = {"train.reshard": reshard, TOKENS_KEY: max_tokens}
        changed = run.changed(changes)
        if fits(changed.spec, placement, size):
            return changed
    return run


def propose_changes(run: ResolvedRun, placement: Placement, size: ModelSize) -> Changes | None:
    """Return changes of settings with which the run fits; None if there are none. What is trained
    stays the same, except for rounding: lengths, batches and LoRA are the user's choice."""

    def is_enough(changes: Changes) -> bool:
        return _is_enough(run, placement, size, changes)

    savings = _savings(run, placement)
    for changes in _candidates(run, placement, size, savings):
        if is_enough(changes):
            return _without_needless(savings, changes, is_enough)
    return None


def _savings(run: ResolvedRun, placement: Placement) -> dict[str, Sequence[Any]]:
    """Return values that save memory, by key: the most welcome key first, and of each key the value
    first that changes least."""
    config = run.config
    max_tokens = config.max_tokens_per_micro_batch
    num_groups = placement.max_concurrent_groups
    policies = []
    if config.algorithm.beta > 0.0 and config.model.lora.rank is None:
        policies.append("reference")
    if config.train.updates_per_iteration > 1:
        policies.append("old")
    longest = config.max_sequence_length
    return {
        TOKENS_KEY: [max(max_tokens // divisor, longest) for divisor in (2, 4, 8)],
        GROUPS_KEY: [max(num_groups // divisor, 1) for divisor in (2, 4, 8, 16)],
        "model.dtype": ["bfloat16"],
        "train.activation_checkpointing": [True],
        "train.offload": [policies, [*policies, "optimizer"]],
    }


def _candidates(
    run: ResolvedRun,
    placement: Placement,
    size: ModelSize,
    savings: Mapping[str, Sequence[Any]],
) -> Iterator[Changes]:
    """Yield changes to try: another engine last, then more savings, then another split."""
    every: Changes = {}
    for key, values in savings.items():
        every[key] = values[-1]
    no_saving: Changes = {}
    stages = (no_saving, _without(every, "train.offload"), every)
    engines = _engines(run, placement, size)
    for engine, saved, split in product(engines, stages, _splits(placement)):
        yield engine | saved | split


def _without(changes: Changes, key: str) -> Changes:
    return {name: value for name, value in changes.items() if name != key}


def _is_enough(run: ResolvedRun, placement: Placement, size: ModelSize, changes: Changes) -> bool:
    """Return whether the run fits with these changes, also of devices and engine."""
    try:
        changed = run.changed(changes)
        split = resolve_placement(changed.spec, placement.assumed)
        split = choose_split(changed, split, size)
        return fits(changed.spec, split, size)
    except ValueError:  # these do not go together
        return False


def _without_needless(
    savings: Mapping[str, Sequence[Any]],
    changes: Changes,
    is_enough: Callable[[Changes], bool],
) -> Changes:
    """Take savings back that are not needed, or not in full, the least welcome first."""
    for key in reversed([*savings]):
        rest = _without(changes, key)
        weaker = [rest]
        for value in savings[key]:
            weaker.append({**rest, key: value})
        for candidate in weaker:
            if is_enough(candidate):
                changes = candidate
                break
    return changes


def _engines(run: ResolvedRun, placement: Placement, size: ModelSize) -> list[Changes]:
    """Return the engine as it is, and vLLM engines that span more and more devices."""
    engines: list[Changes] = [{}]
    # Where vLLM is assumed, it is not installed here.
    is_auto = placement.assumed is not None and run.config.rollout.engine == "auto"
    if placement.engine.is_vllm or (is_auto and size.is_in_vllm):
        for num_devices in VLLM_SIZES:
            key = "rollout.tensor_parallel_size"
            engines.append({"rollout.engine": VLLM, key: num_devices})
    return engines


def _splits(placement: Placement) -> list[Changes]:
    """Return the devices as they are, other parts of a shared one, and more train devices."""
    splits: list[Changes] = [{}]
    num_train_now = placement.train.count
    if placement.shares_device:
        num_train_now = 0
        splits += [{"rollout.memory_fraction": fraction} for fraction in ROLLOUT_FRACTIONS]
    count = placement.num_accelerators
    for num_train in sorted({count // 2, count * 3 // 4, count - 1}):
        if num_train > num_train_now:
            infer = range(count - num_train)
            train = range(count - num_train, count)
            split = {"devices.infer": range_words(infer), "devices.train": range_words(train)}
            splits.append(split)
    return splits
