"""Find the checkpoint that a run resumes from, and check that the settings still fit it.

    --resume RUN            the run folder must have a complete checkpoint
    runtime.resume=auto     resume if there is a checkpoint; a run that was killed before its first
                            one starts again in its folder; without a folder, start a new run

Writes nothing and imports no torch. Raises ConfigError for mistakes of the user.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from easyrl.config import Config, ConfigError
from easyrl.config.changed_keys import update_old_keys
from easyrl.formatting import counted
from easyrl.model.checkpoint_files import BROKEN, CHECKPOINTS, Checkpoint, newest_checkpoint
from easyrl.runtime.run_folder import folder_of, lock_folder

MAY_CHANGE = {
    "model": ("attention",),
    "reward": ("code_sandbox", "num_workers", "on_error", "timeout_seconds", "memory_limit_gib"),
    "rollout": ("max_concurrent_groups", "memory_fraction", "ring_slots"),
    "train": (
        "iterations",
        "save_every",
        "keep_checkpoints",
        "eval_every",
        "activation_checkpointing",
        "offload",
        "max_tokens_per_micro_batch",
    ),
    "eval": ("*",),
    "devices": ("*",),
    "runtime": ("schedule", "resume", "timeout_seconds"),
    "output": ("*",),
}
"""Settings that decide how long, where and how fast the run is, but not what is trained."""
MEASURE = "accuracy"
"""Key in a run's identity: the problems that its accuracies were measured on."""

STATE_VERSION = 1
"""Version of `RunState`; increased when an older EasyRL would resume a new state wrongly."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What the controller saves with each checkpoint, and continues from.

    Checkpoints of older versions may lack the fields that have a default.
    """

    policy_version: int
    num_iterations: int
    """Completed iterations."""
    config: Mapping[str, Any]
    identity: Mapping[str, Any]
    """Fingerprints of the model, the data and the held-out problems (`preflight`)."""
    next_prompt_index: int = 0
    accuracy_before: float | None = None
    best: Mapping[str, Any] | None = None
    """Accuracy, iteration and policy version of the best evaluation."""
    measured_since: int = 0
    """Accuracies of earlier iterations were measured on other problems."""
    totals: Mapping[str, Any] = field(default_factory=dict)
    file_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the growing files of the run folder: what follows is discarded on resume."""
    version: int = STATE_VERSION

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Self:
        """Raises ConfigError if a required field is missing, or the state is of a newer EasyRL."""
        state = checkpoint.state
        if state.get("version", STATE_VERSION) > STATE_VERSION:
            raise ConfigError(
                f"'{checkpoint.path}': expected a state of version {STATE_VERSION} or older, got "
                f"{state['version']}: resume with the newer EasyRL that wrote it"
            )
        missing = {"policy_version", "num_iterations", "config", "identity"} - state.keys()
        if missing:
            raise ConfigError(f"'{checkpoint.path}': its state lacks {', '.join(sorted(missing))}")
        names = [each.name for each in fields(cls)]
        return cls(**{name: state[name] for name in names if name in state})


@dataclass(frozen=True, slots=True)
class Resume:
    """A run folder to resume in, and the checkpoint to resume from."""

    folder: Path
    lock: int
    """Descriptor of the folder; no other run can write to it while this is open."""
    checkpoint: Path | None
    """None: the run ended before its first checkpoint and starts from the beginning."""
    state: RunState | None
    """State of that checkpoint."""
    broken: Mapping[Path, str]
    """Newer, incomplete checkpoints, each with its defect."""
    is_measured_anew: bool = False
    """Accuracies are measured on other problems from now on (`measured_as`)."""

    @property
    def num_iterations(self) -> int:
        """Completed iterations."""
        return self.state.num_iterations if self.state else 0

    @property
    def file_sizes(self) -> Mapping[str, int]:
        """Sizes of the growing files at the checkpoint; what follows is discarded."""
        return self.state.file_sizes if self.state else {}

    def is_finished(self, config: Config) -> bool:
        """Whether the run has all its iterations and its final model."""
        return _finished_iterations(self.folder) == config.train.iterations

    def describe(self, config: Config) -> str:
        """Several lines of text: what the run resumes from, and what it skips."""
        if self.checkpoint is None:
            lines = [f"{self.folder} has no checkpoint yet: the run starts from the beginning"]
        else:
            lines = [
                f"resumed from {self.checkpoint}: {self.num_iterations} of "
                f"{counted(config.train.iterations, 'iteration')} done"
            ]
        if self.is_measured_anew:
            lines.append(
                "eval.* has changed: from now on accuracy is measured on other problems or with "
                "another eval.correct_reward, earlier accuracies are not compared with it, and the "
                "best checkpoint is chosen anew"
            )
        lines += [
            f"skipped {path}: {why} (now {path.name}{BROKEN})" for path, why in self.broken.items()
        ]
        return "\n".join(lines)


def find_resume(config: Config, folder: Path | None) -> Resume | None:
    """Find what to resume from; None if a new run starts in a new folder.

    `folder`: the value of `--resume`, or None. Raises ConfigError if that is no run folder, has no
    complete checkpoint, is in use by another run, or belongs to a run with other settings.
    """
    is_auto = folder is None
    if folder is None:
        folder = folder_of(config)
        if config.runtime.resume == "never" or not _is_begun(folder):
            return None
    elif not (folder / "config.yaml").is_file():
        raise ConfigError(no_run_folder(folder))
    lock = lock_folder(folder)
    try:
        checkpoint, broken = newest_checkpoint(folder / CHECKPOINTS)
        path, state = (checkpoint.path, RunState.read(checkpoint)) if checkpoint else (None, None)
        found = Resume(folder, lock, path, state, broken)
        if state is not None:
            _check_settings(config, state, path)
        elif not found.is_finished(config):
            has_ended = _finished_iterations(folder) is not None
            if broken or has_ended or not is_auto:
                raise ConfigError(_nothing_to_resume(folder, broken, has_ended=has_ended))
    except BaseException:
        os.close(lock)
        raise
    return found


def measured_as(found: Resume, identity: Mapping[str, Any]) -> Resume:
    """Drop the accuracies so far if they were measured on other problems (`eval.*` may change)."""
    state, now = found.state, identity[MEASURE]
    if state is None or now is None or state.identity.get(MEASURE) in (None, now):
        return found
    state = replace(state, accuracy_before=None, best=None, measured_since=state.num_iterations)
    return replace(found, state=state, is_measured_anew=True)


def _is_begun(folder: Path) -> bool:
    """Whether a run has begun in this folder. An empty folder counts: a scheduler may have created
    it, or a run may have been killed right after."""
    if not folder.is_dir():
        return False
    return (folder / "config.yaml").is_file() or {path.name for path in folder.iterdir()} <= {
        "logs"
    }


def no_run_folder(folder: Path) -> str:
    what = "has no config.yaml" if folder.is_dir() else "is no folder"
    return f"--resume: expected a run folder, such as runs/<time>-<task>, but '{folder}' {what}"


def _finished_iterations(folder: Path) -> int | None:
    """The number of iterations of a finished run; None if it has not finished."""
    try:
        return int(json.loads((folder / "summary.json").read_text())["iterations"])
    except (OSError, ValueError, TypeError, KeyError):  # no summary, or an incomplete one
        return None


def _nothing_to_resume(folder: Path, broken: Mapping[Path, str], *, has_ended: bool) -> str:
    again = f"easyrl grpo --config {folder / 'config.yaml'} --output {folder}-2"
    if broken:
        reasons = "\n".join(f"{path}: {why}" for path, why in broken.items())
        return f"'{folder}' has no complete checkpoint:\n{reasons}\nto start again: {again}"
    why = "has finished and kept none" if has_ended else "ended before its first one"
    return (
        f"--resume, runtime.resume: '{folder}' has no checkpoint: the run {why} "
        f"(train.save_every, train.keep_checkpoints); to start again: {again}"
    )


def _check_settings(config: Config, state: RunState, path: Path | None) -> None:
    """Raise ConfigError if a setting that decides what is trained has changed."""
    before = {name: dict(keys) for name, keys in state.config.items()}
    update_old_keys(before)  # of a run of an earlier release
    problems = [
        f"{section}.{key}: expected {json.dumps(before[section][key])} as in the run, got "
        f"{json.dumps(value)}"
        for section, keys in config.model_dump().items()
        for key, value in keys.items()
        if key not in MAY_CHANGE.get(section, ())
        and "*" not in MAY_CHANGE.get(section, ())
        and key in before.get(section, {})
        and before[section][key] != json.loads(json.dumps(value))
    ]
    if problems:
        can_change = ", ".join(f"{name}.{key}" for name, keys in MAY_CHANGE.items() for key in keys)
        raise ConfigError(
            f"'{path}' is a checkpoint of a run with other settings:\n"
            + "\n".join(problems)
            + f"\non resuming only these can change: {can_change}; to train with other "
            f"settings, start a new run: easyrl export {path} DIR; easyrl grpo --model DIR"
        )
    if config.train.iterations < state.num_iterations:
        raise ConfigError(
            f"train.iterations (--iterations): expected the run's total, at least "
            f"{state.num_iterations} (done in {path}), got {config.train.iterations}"
        )


def check_same(found: Resume | None, key: str, what: str, identity: Mapping[str, Any]) -> None:
    """Raise ConfigError if what `key` names has changed since the run started."""
    if found is None or found.state is None:
        return
    if found.state.identity.get(key) != identity[key]:
        raise ConfigError(
            f"{key}: {what} not those that the run in '{found.folder}' started from; restore them, "
            "or start a new run (--output)"
        )
