"""The plan of a run, which `easyrl grpo --dry-run` prints: placement, memory, and changes of the
settings if the run does not fit.

Nothing is started, and no weights are read. The devices may be assumed ones (`--assume`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from easyrl.config import Config, ConfigError, change_config
from easyrl.data.hub import describe_model
from easyrl.devices import ASCEND, AssumedDevices
from easyrl.model.files import read_model_files
from easyrl.runtime import memory, preflight
from easyrl.runtime.placement import Placement, describe, resolve_placement


class Plan(NamedTuple):
    text: str
    would_start: bool
    is_tight: bool  # some memory may not suffice, or surely does not
    changes: Mapping[str, Any]  # settings with which everything fits; empty if there are none
    host_bytes: int  # that all processes need with the changes


def make_plan(config: Config, assumed: AssumedDevices | None = None) -> Plan:
    """Plan a run. Raises ConfigError for devices that are missing."""
    placement = resolve_placement(config, assumed)
    lines = [describe_model(config.model.path), describe(placement), *never_run(placement), ""]
    warnings, size = preflight.choice_warnings(config, placement), None
    is_refused = is_tight = False
    try:
        files = read_model_files(config.model.path, is_whole=False)
        preflight.check_positions(config, files)
        num_trained = preflight.count_trained(config)
        size = preflight.read_model_size(config, files, num_trained)
        preflight.check_engine(config, placement, size)
        config = memory.use_memory(config, placement, size)
        if size is None:
            path = config.model.path
            lines.append(f"memory: unknown, as the config.json of '{path}' gives no sizes")
        else:
            parts = memory.estimate_memory(config, placement, size)
            budgets = memory.memory_budgets(placement)
            lines.append(memory.memory_table(parts, budgets))
            is_tight = True  # if the next line raises
            tight = memory.check_memory(parts, budgets, memory.held_by_others(placement))
            is_tight, warnings = bool(tight), warnings + tight
        # Last: what is known of the memory is shown first.
        warnings += preflight.check_inputs(config)
    except ConfigError as refused:
        warnings, is_refused = [f"a run would not start: {refused}", *warnings], True
    changes, host_bytes = None, 0
    if size is not None and is_tight and placement.accelerator != "cpu":
        changes = memory.propose_changes(config, placement, size)
        if changes is not None:
            changed = change_config(config, changes)
            parts = memory.estimate_memory(changed, resolve_placement(changed, assumed), size)
            host_bytes = memory.bytes_by_memory(parts)["cpu"]
    text = "\n".join([*lines, *warnings])
    return Plan(text, not is_refused, is_tight, changes or {}, host_bytes)


def never_run(placement: Placement) -> list[str]:
    """Name what of a plan has never run on real hardware (README, "What has run where")."""
    kind, sets = placement.accelerator, (placement.infer, placement.train)
    used = {index for each in sets if each.kind == "accelerator" for index in each.indices}
    is_vllm = placement.engine.name == "vllm" and placement.infer.kind == "accelerator"
    parts = {
        "Ascend NPUs": kind == ASCEND and bool(used),
        "several accelerators": len(used) > 1,
        "vLLM on accelerators": is_vllm,
        "Ray with accelerators or over several machines": placement.is_ray,
    }
    found = [part for part, is_planned in parts.items() if is_planned]
    text = f"never run on real hardware so far: {', '.join(found)} (README, What has run where)"
    return [text] * bool(found)
