"""Config keys of earlier releases: removed or renamed.

All of them are ignored at their old default, so that the config.yaml of an older run still loads.
Any other value of a removed key is an error that gives the reason. A renamed or merged key is
accepted with a warning for one release.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAMPLING = "it samples from a distribution other than the trained one"
REMOVED: Mapping[str, tuple[Any, str]] = {
    "algorithm.delta": (None, "bound the ratio with algorithm.epsilon_high or loss_type=cispo"),
    "algorithm.dynamic_sampling_max_rounds": (3, "it is always 3"),
    "devices.lend_cores": (True, "idle workers always lend their cores, or use devices.threads"),
    "eval.top_k": (None, "use rollout.top_k"),
    "eval.top_p": (None, "the preset's value is used, else rollout.top_p"),
    "output.project": ("easyrl", "trackers put every run under the project 'easyrl'"),
    "output.sample_groups": (1, "one group per iteration is written to samples.jsonl"),
    "reward.code_memory_bytes": (2**30, "each process of a program may use 2 GiB"),
    "reward.code_score": ("all", "1 where all tests pass; write your own function for a share"),
    "reward.length_cache": (None, "it is a fifth of rollout.max_completion_length (DAPO)"),
    "rollout.bad_words": ([], SAMPLING),
    "rollout.max_completion_seconds": (None, "use rollout.max_completion_length"),
    "rollout.max_model_length": (None, "use data.max_prompt_length, rollout.max_completion_length"),
    "rollout.min_p": (0.0, SAMPLING),
    "rollout.repetition_penalty": (1.0, SAMPLING),
    "rollout.structured_outputs": (None, SAMPLING),
    "train.adam_beta1": (0.9, "it is always 0.9"),
    "train.adam_beta2": (0.99, "it is always 0.99"),
    "train.keep_best": (False, "the best checkpoint is always kept with train.eval_every"),
    "train.weight_decay": (0.0, "at RL learning rates (1e-6) it changes nothing measurable"),
}
"""Removed in 0.2: the old default, and why, or what to use instead."""
RENAMED: Mapping[str, tuple[Any, str]] = {
    "devices.infer_memory_fraction": (0.5, "rollout.memory_fraction"),
    "devices.infer_threads": (None, "devices.threads"),
    "devices.train_threads": (None, "devices.threads"),
    "reward.answer_column": ("answer", "data.columns.answer"),
    "reward.code_tests_column": ("tests", "data.columns.tests"),
    "rollout.gpu_memory_fraction": (0.9, "rollout.memory_fraction"),
}
"""Renamed in 0.2: the old default, and the new name. The old name will be refused in 0.3."""
MERGED = ("data.split", "data.subset", "eval.split", "eval.subset")
"""Part of the data set's name in 0.2: `owner/name:subset:split`. They will be refused in 0.3."""


def update_old_keys(settings: dict[str, Any]) -> list[str]:
    """Replace old keys in `settings`, sections with their keys; return the warnings. Raises
    ValueError for a removed key."""
    given: dict[str, Any] = {}
    old = {**REMOVED, **RENAMED, **dict.fromkeys(MERGED, (None, ""))}
    for name, (default, _) in old.items():
        section, _, key = name.partition(".")
        if isinstance(settings.get(section), dict):
            value = settings[section].pop(key, None)
            if value not in (None, default):
                given[name] = value
    removed = [f"{name}: removed in 0.2: {REMOVED[name][1]}" for name in given if name in REMOVED]
    if removed:
        raise ValueError("\n".join(removed))
    warnings = []
    for name, value in given.items():
        if name in RENAMED:
            new = RENAMED[name][1]
            put(settings, new, value, replace=False)
            warnings.append(f"{name} is now {new}, which wins where both are set")
    for section in ("data", "eval"):
        subset, split = (given.get(f"{section}.{key}", "") for key in ("subset", "split"))
        if subset or split:
            dataset = _with_split(settings[section].get("dataset"), section, subset, split)
            settings[section]["dataset"] = dataset
            warnings.append(f"{section}.subset, {section}.split: use {section}.dataset={dataset}")
    return warnings


def _with_split(dataset: Any, section: str, subset: str, split: str) -> Any:
    """Return the name of a data set, or a list of names, with subset and split in it."""
    if isinstance(dataset, list):
        return [_with_split(name, section, subset, split) for name in dataset]
    if not isinstance(dataset, str):
        raise ValueError(
            f"{section}.dataset: expected a name, as {section}.subset or {section}.split is set, "
            f"got {dataset!r}"
        )
    is_folder = Path(dataset).expanduser().is_dir()  # of save_to_disk
    return dataset + (f"/{split}" if is_folder else f":{subset}:{split}".rstrip(":"))


def put(settings: dict[str, Any], name: str, value: Any, *, replace: bool = True) -> None:
    """Set a key, by its full name, in sections with their keys. Unless `replace`, a value that is
    set stays. A section that is no mapping is left for the validation to refuse."""
    *sections, key = name.split(".")
    for section in sections:
        if settings.get(section) is None:
            settings[section] = {}
        settings = settings[section]
        if not isinstance(settings, dict):
            return
    if replace or settings.get(key) is None:
        settings[key] = value
