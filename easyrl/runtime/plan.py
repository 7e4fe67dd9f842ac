"""The plan of a run, which `easyrl grpo --dry-run` prints: placement, memory, and changes of the
settings if the run does not fit.

Nothing is started, and no weights are read. The devices may be assumed ones (`--assume`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from typing import Any

from easyrl.config import Config, ConfigError, change_config
from easyrl.config.devices import range_words
from easyrl.data.hub import describe_model
from easyrl.devices import AssumedDevices, parse_assumed
from easyrl.formatting import install_command
from easyrl.model.files import read_model_files
from easyrl.runtime.memory import (
    GIB,
    ModelSize,
    bytes_by_memory,
    check_memory,
    estimate_memory,
    fits,
    held_by_others,
    memory_budgets,
    memory_table,
    use_memory,
)
from easyrl.runtime.placement import Placement, describe, resolve_placement
from easyrl.runtime.preflight import (
    check_inputs,
    check_positions,
    count_trained,
    read_model_size,
    sampling_warnings,
)

Option = tuple[float, Mapping[str, Any]]
"""The cost of a change (higher: less welcome), and the new settings by key."""


@dataclass(frozen=True, slots=True)
class Plan:
    text: str
    would_start: bool
    is_tight: bool = False
    """Some memory may not suffice, or surely does not."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings by key with which everything fits; empty if it does, or if none were found."""
    host_bytes: int = 0
    """Memory of the host, of all processes, that a run with the changes needs."""
    larger: Sequence[str] = ()
    """If no changes were found: values of `--assume` with which a command fits."""


def make_plan(config: Config, assumed: AssumedDevices | None = None) -> Plan:
    """Plan a run. Raises ConfigError for devices that are missing."""
    placement = resolve_placement(config, assumed)
    lines = [describe_model(config.model.path), describe(placement), ""]
    warnings, is_refused, size = sampling_warnings(config), False, None
    try:
        files = read_model_files(config.model.path, is_whole=False)
        check_positions(config, files)
        num_trained = count_trained(config, is_planned=assumed is not None)
        if num_trained is not None and find_spec("peft") is None:
            warnings.append(f"the run itself needs peft: {install_command('lora')}")
        size = read_model_size(config, files, num_trained)
        config = use_memory(config, placement, size)
        if size is None:
            path = config.model.path
            lines.append(f"memory: unknown, as the config.json of '{path}' gives no sizes")
        else:
            parts, budgets = estimate_memory(config, placement, size), memory_budgets(placement)
            lines.append(memory_table(parts, budgets))
            warnings += check_memory(parts, budgets, held_by_others(placement))
        warnings += check_inputs(config)  # last: what is known of the memory is shown first
    except ConfigError as refused:
        warnings, is_refused = [f"a run would not start: {refused}", *warnings], True
    is_tight = size is not None and not fits(config, placement, size, headroom=1.0)
    changes: Mapping[str, Any] = {}
    host_bytes, larger = 0, []
    if size is not None and is_tight and placement.accelerator != "cpu":
        changes = propose_changes(config, placement, size)
        changed = change_config(config, changes)
        parts = estimate_memory(changed, resolve_placement(changed, assumed), size)
        host_bytes = bytes_by_memory(parts)["cpu"]
        if assumed is not None and not changes:
            larger = _larger_devices(config, assumed, size)
    text = "\n".join([*lines, *warnings])
    return Plan(text, not is_refused, is_tight, changes, host_bytes, larger)


def propose_changes(config: Config, placement: Placement, size: ModelSize) -> Mapping[str, Any]:
    """Return the cheapest changes with which the run fits; empty if there are none. What is
    trained stays the same, except for rounding: lengths, batches and LoRA are the user's choice."""
    options = product(*_options(config, placement))
    for chosen in sorted(options, key=lambda chosen: sum(cost for cost, _ in chosen)):
        changes = {key: value for _, settings in chosen for key, value in settings.items()}
        try:
            changed = change_config(config, changes)
            if fits(changed, resolve_placement(changed, placement.assumed), size):
                return changes
        except ValueError:  # these do not go together
            continue
    return {}


def _larger_devices(config: Config, assumed: AssumedDevices, size: ModelSize) -> list[str]:
    """Return the fewest devices of this size, and the smallest ones of this number, with which a
    command fits, of a short list."""

    def can_fit(text: str) -> bool:
        try:
            placement = resolve_placement(config, parse_assumed(text))
        except ConfigError:
            return False
        return fits(config, placement, size) or bool(propose_changes(config, placement, size))

    count, gib = assumed.count, assumed.num_bytes / GIB
    more = (f"{n}x{assumed.size}" for n in (2, 4, 8, 16) if n > count)
    larger = (f"{count}x{n}GiB".removeprefix("1x") for n in (24, 48, 80, 140) if n > gib)
    return [text for texts in (more, larger) for text in [next(filter(can_fit, texts), "")] if text]


def _options(config: Config, placement: Placement) -> list[list[Option]]:
    """For each key, or pair of keys, its value as it is and what it can be changed to."""
    train, least = config.train, config.max_sequence_length
    has_reference = config.algorithm.beta > 0.0 and config.model.lora.rank is None
    policies = ["reference"] * has_reference + ["old"] * (train.updates_per_iteration > 1)
    tokens = (max(config.max_tokens_per_micro_batch >> n, least) for n in range(4))
    groups = (placement.max_concurrent_groups >> n for n in range(5))
    options = [
        _ranked(0.5, "train.max_tokens_per_micro_batch", tokens),
        _ranked(1.0, "rollout.max_concurrent_groups", (number for number in groups if number)),
        _ranked(1.5, "model.dtype", (config.model.dtype, "bfloat16")),
        _ranked(3.0, "train.activation_checkpointing", (train.activation_checkpointing, True)),
        _ranked(8.0, "train.offload", (train.offload, policies, [*policies, "optimizer"])),
        [(0.0, {}), *_splits(placement)],
    ]
    if placement.shares_device:
        given = placement.infer_memory_fraction
        others = sorted((0.2, 0.3, 0.4, 0.5, 0.6, 0.7), key=lambda part: abs(part - given))
        options.append(_ranked(0.5, "rollout.memory_fraction", (given, *others)))
    size = placement.engine.tensor_parallel_size
    sizes = _ranked(2.0, "rollout.tensor_parallel_size", (size, 2, 4, 8))
    if placement.engine.name == "vllm":
        options.append(sizes)
    elif placement.assumed and config.rollout.engine == "auto":  # else it is not installed
        with_vllm = [(cost + 6.0, {"rollout.engine": "vllm", **tp}) for cost, tp in sizes]
        options.append([(0.0, {}), *with_vllm])
    return options


def _ranked(cost: float, key: str, values: Iterable[Any]) -> list[Option]:
    """Options from the current value to the most expensive one, each value once."""
    different = {repr(value): value for value in values}.values()
    return [(n * cost, {key: value} if n else {}) for n, value in enumerate(different)]


def _splits(placement: Placement) -> Iterator[Option]:
    """Yield splits of all devices with more train devices than now."""
    count, before = placement.num_accelerators, placement.train.count
    before = 0 if placement.shares_device else before
    for num_train in sorted({*(2**n for n in range(12)), count * 3 // 4, count - 1}):
        if before < num_train < count:
            split = count - num_train
            sets = range_words(range(split)), range_words(range(split, count))
            cost = 0.5 + 4.0 * abs(num_train / count - 0.5)
            yield cost, dict(zip(("devices.infer", "devices.train"), sets, strict=True))
