"""Config keys of earlier releases: removed or renamed.

All of them are ignored at their old default, so that the config.yaml of an older run still loads.
Any other value of a removed key is an error that gives the reason. A renamed key is accepted with a
warning for one release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAMPLING = "it samples from a distribution other than the trained one"
SPLIT = "name it in the data set: owner/name:subset:split"
REMOVED: Mapping[str, tuple[Any, str]] = {
    "algorithm.delta": (None, "bound the ratio with algorithm.epsilon_high or loss_type=cispo"),
    "algorithm.dynamic_sampling_max_rounds": (3, "it is always 3"),
    "data.split": (None, SPLIT),
    "data.subset": (None, SPLIT),
    "devices.lend_cores": (True, "idle workers always lend their cores, or use devices.threads"),
    "eval.split": (None, SPLIT),
    "eval.subset": (None, SPLIT),
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


def update_old_keys(settings: dict[str, Any]) -> list[str]:
    """Replace old keys in `settings`, sections with their keys; return the warnings. Raises
    ValueError for a removed key."""
    given: dict[str, Any] = {}
    for name, (default, _) in {**REMOVED, **RENAMED}.items():
        section, _, key = name.partition(".")
        if isinstance(settings.get(section), dict):
            value = settings[section].pop(key, None)
            if value not in (None, default):
                given[name] = value
    removed = [f"{name}: removed in 0.2: {REMOVED[name][1]}" for name in given if name in REMOVED]
    if removed:
        raise ValueError("\n".join(removed))
    for name, value in given.items():
        put(settings, RENAMED[name][1], value, replace=False)
    return [f"{name} is now {RENAMED[name][1]}, which wins where both are set" for name in given]


def put(settings: dict[str, Any], name: str, value: Any, *, replace: bool = True) -> None:
    """Set a key, by its full name, in sections with their keys. Unless `replace`, a value that is
    set stays."""
    *sections, key = name.split(".")
    for section in sections:
        if not isinstance(settings.get(section), dict):
            settings[section] = {}
        settings = settings[section]
    if replace or settings.get(key) is None:
        settings[key] = value
