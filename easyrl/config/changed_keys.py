"""Config keys of earlier releases: removed, renamed, or merged into another key.

All of them are ignored at their old default, so that the config.yaml of an older run still loads.
Any other value of a removed key is an error that gives the reason. A renamed or merged key is
accepted with a warning for one release.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Removed(NamedTuple):
    default: Any
    """Value that the key had where nobody set it."""
    reason: str
    """Why it is gone, and what to use instead."""


class Renamed(NamedTuple):
    default: Any
    name: str


OTHER_DISTRIBUTION = "it samples from a distribution other than the trained one"
REMOVED: Mapping[str, Removed] = {
    "algorithm.delta": Removed(
        None, "use algorithm.epsilon_high, or loss_type=cispo, to bound the probability ratio"
    ),
    "algorithm.dynamic_sampling_max_rounds": Removed(3, "it is always 3"),
    "devices.lend_cores": Removed(
        True,
        "idle workers always lend their cores; devices.threads=N gives each worker fixed threads",
    ),
    "eval.top_k": Removed(None, "use rollout.top_k"),
    "eval.top_p": Removed(None, "the preset's value is used, else rollout.top_p"),
    "output.project": Removed("easyrl", "trackers put every run under the project 'easyrl'"),
    "output.sample_groups": Removed(1, "one group per iteration is written to samples.jsonl"),
    "reward.code_memory_bytes": Removed(2**30, "each process of a program may use 2 GiB"),
    "reward.code_score": Removed(
        "all", "a program scores 1 where all tests pass; write a function of your own for a share"
    ),
    "reward.length_cache": Removed(None, "it is a fifth of rollout.max_completion_length (DAPO)"),
    "rollout.bad_words": Removed([], OTHER_DISTRIBUTION),
    "rollout.max_completion_seconds": Removed(
        None, "it makes a run depend on a clock; use rollout.max_completion_length"
    ),
    "rollout.max_model_length": Removed(
        None, "lower data.max_prompt_length or rollout.max_completion_length"
    ),
    "rollout.min_p": Removed(0.0, OTHER_DISTRIBUTION),
    "rollout.repetition_penalty": Removed(1.0, OTHER_DISTRIBUTION),
    "rollout.structured_outputs": Removed(None, OTHER_DISTRIBUTION),
    "train.adam_beta1": Removed(0.9, "it is always 0.9"),
    "train.adam_beta2": Removed(0.99, "it is always 0.99"),
    "train.keep_best": Removed(
        False, "the best checkpoint is always kept where train.eval_every is over 0"
    ),
    "train.weight_decay": Removed(0.0, "at RL learning rates (1e-6) it changes nothing measurable"),
}
"""Removed in 0.2."""
RENAMED: Mapping[str, Renamed] = {
    "devices.infer_memory_fraction": Renamed(0.5, "rollout.memory_fraction"),
    "devices.infer_threads": Renamed(None, "devices.threads"),
    "devices.train_threads": Renamed(None, "devices.threads"),
    "rollout.gpu_memory_fraction": Renamed(0.9, "rollout.memory_fraction"),
}
"""Renamed in 0.2; the old name will be refused in 0.3."""
MERGED: Mapping[str, str | None] = {
    "data.subset": None,
    "data.split": None,
    "eval.subset": None,
    "eval.split": None,
    "reward.answer_column": "answer",
    "reward.code_tests_column": "tests",
}
"""Keys with their old defaults that 0.2 merged into another one; they will be refused in 0.3."""


def merge_old_keys(settings: dict[str, dict[str, Any]]) -> list[str]:
    """Replace the MERGED keys in `settings`, sections with their keys; return the warnings.

    data.subset=S, data.split=T         dataset `owner/name` becomes `owner/name:S:T`
    eval.subset=S, eval.split=T         the same with eval.dataset
    reward.answer_column=C              data.columns={answer: C}
    reward.code_tests_column=C          data.columns={tests: C}

    Raises ValueError for a subset or split without a data set.
    """
    given: dict[str, str] = {}
    for name, default in MERGED.items():
        section, _, key = name.partition(".")
        value = settings.get(section, {}).pop(key, default)
        if value not in (None, default):
            given[name] = value
    warnings = []
    for section in ("data", "eval"):
        subset, split = given.get(f"{section}.subset", ""), given.get(f"{section}.split", "")
        if not subset and not split:
            continue
        dataset = settings.setdefault(section, {}).get("dataset")
        if dataset is None:
            raise ValueError(f"{section}.subset, {section}.split: expected {section}.dataset too")
        many = isinstance(dataset, list)
        names = [_with_split(name, subset, split) for name in (dataset if many else [dataset])]
        settings[section]["dataset"] = names if many else names[0]
        warnings.append(
            f"{section}.subset and {section}.split are now part of {section}.dataset="
            f"{', '.join(names)}"
        )
    for name, column in given.items():
        if name.startswith("reward."):
            columns = settings.setdefault("data", {}).get("columns") or {}
            settings["data"]["columns"] = {MERGED[name]: column} | columns
            warnings.append(f"{name} is now data.columns={{{MERGED[name]}: {column}}}")
    return warnings


def _with_split(name: str, subset: str, split: str) -> str:
    if Path(name).expanduser().is_dir():  # of save_to_disk
        return f"{name}/{split}"
    return f"{name}:{subset}" + (f":{split}" if split else "")
