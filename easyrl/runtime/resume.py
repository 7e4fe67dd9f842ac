"""Find the checkpoint that a run resumes from, and check that the settings still fit it.

    --resume RUN            the run folder must have a complete checkpoint
    runtime.resume=auto     resume if there is a checkpoint; a run that was killed before its first
                            one starts again in its folder; without a folder, start a new run
    runtime.resume=never    only a run that never finished an iteration starts again in its folder

Writes nothing and imports no torch.
"""

import json
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from shlex import join, quote
from typing import Any

from easyrl.config import Config, by_name, change_config, keys_marked, load_config, to_arguments
from easyrl.config.algorithm import LOSS_KEY, LOSS_TYPES, POLICY, TEACHER_KEY
from easyrl.config.section import MAY_CHANGE, NAMES_FILES
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.data.presets import PRESETS
from easyrl.environments.loading import BUILT_IN as BUILT_IN_ENVIRONMENTS
from easyrl.formatting import ConfigError, counted
from easyrl.model.checkpoint_files import (
    CHECKPOINTS,
    DAMAGED,
    Checkpoint,
    checkpoints_in,
    newest_checkpoint,
)
from easyrl.model.export import ModelSource, find_model, run_of
from easyrl.rewards.loading import BUILT_IN
from easyrl.runtime import run_folder
from easyrl.runtime.resolve import resolve

NAMES: dict[str, Container[str]] = {  # by keys that may name files: names that mean something else
    "data.dataset": PRESETS,
    "eval.dataset": PRESETS,
    "reward.functions": BUILT_IN,
    "rollout.environment": BUILT_IN_ENVIRONMENTS,
    LOSS_KEY: LOSS_TYPES,
    TEACHER_KEY: (POLICY,),
}


@dataclass(frozen=True, slots=True)
class SavedState:
    """State that the controller saves with each checkpoint and resumes from."""

    policy_version: int = 0
    num_iterations: int = 0  # completed iterations
    config: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Fingerprints of the model, the data and the held-out problems (`preflight`)."""
    next_prompt_index: int = 0
    accuracy_before: float | None = None
    held_out_reward_before: float | None = None
    wall_seconds: float = 0.0  # time of the commands so far
    file_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the growing files of the run folder: what follows is discarded on resume."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A run folder to resume in, and the checkpoint to resume from."""

    folder: Path
    lock: int  # descriptor of the folder; no other run can write to it while this is open
    checkpoint: Path | None  # None: the run ended before its first one and starts at the beginning
    state: SavedState  # of that checkpoint, or of a new run
    damaged: Mapping[Path, str]  # newer checkpoints that cannot be read, with the error of each
    is_finished: bool  # has all iterations and the final model; checkpoints are not verified

    def describe(self, config: Config) -> str:
        """Return what the run resumes from, what it skips and which settings have changed."""
        total = counted(config.train.iterations, "iteration")
        done = f"{self.state.num_iterations} of {total} done"
        lines = [f"resumed from the newest complete checkpoint, {self.checkpoint}: {done}"]
        if self.checkpoint is None:
            lines = [f"started again in {self.folder}: the run there has no checkpoint"]
        lines += [f"{why} (renamed: {path.name}{DAMAGED})" for path, why in self.damaged.items()]
        if self.state.config:
            before, now = _resolved(load_config(None, self.state.config)), _resolved(config)
            for key in differing(before, now):
                if key not in ("train.iterations", "output.dir", "runtime.resume"):
                    old, new = map(json.dumps, (before[key], now[key]))
                    lines.append(f"changed: {key} {old} -> {new}")
        return "\n".join(lines)


def config_file_of(path: str | os.PathLike[str], *given: object) -> Path:
    """Return the config file of the run to resume: `path` is its folder, or one of its checkpoints.
    Raises ConfigError, also for `given` arguments."""
    run, checkpoint = Path(path), Path(path).absolute()
    if checkpoint.parent.name == CHECKPOINTS:
        run = checkpoint.parent.parent
        if not checkpoint.is_dir():
            names = ", ".join(each.name for each in checkpoints_in(checkpoint.parent)) or "none"
            raise ConfigError(f"resume (--resume): expected a checkpoint ({names}), got '{path}'")
    file = run / "config.yaml"
    if any(each is not None for each in given):
        raise ConfigError(
            "resume (--resume): expected neither config (--config), output (--output), dataset, "
            "reward, environment nor agent: a resumed run keeps its folder and the settings in it"
        )
    if not file.is_file():
        raise ConfigError(f"resume (--resume): expected a run folder, but there is no {file}")
    return file


def find_resume(config: Config, folder: Path | None) -> Resume | None:
    """Find what to resume from; None if a new run starts in a new folder. Raises ConfigError if
    `folder` (`--resume`) has no complete checkpoint, is in use, or has other settings."""
    is_auto = folder is None
    if folder is None:
        folder = run_folder.folder_of(config.output.dir, config.data.datasets)
        is_wanted = config.runtime.resume == "auto" or run_folder.is_unstarted(folder)
        if not is_wanted or not _is_begun(folder):
            return None
    lock = run_folder.lock_folder(folder)
    try:
        is_finished = _is_finished(folder, config)
        checkpoint, damaged = newest_checkpoint(folder / CHECKPOINTS, verify=not is_finished)
        path, state = None, SavedState()
        if checkpoint is not None:
            path, state = checkpoint.path, _state_of(checkpoint)
            _check_settings(config, state, path)
        is_lost = damaged or not is_auto or (folder / "summary.json").exists()
        if path is None and not is_finished and is_lost:
            reasons = "".join(f"\n{why}" for why in damaged.values())
            why = "" if damaged else " (train.save_every, train.keep_checkpoints)"
            raise ConfigError(
                f"--resume, runtime.resume: '{folder}' has no whole checkpoint{why}{reasons}\n"
                f"to start again: easyrl grpo --config {quote(str(folder / 'config.yaml'))} "
                f"--output {quote(run_folder.free_name(folder))}"
            )
    except BaseException:
        os.close(lock)
        raise
    return Resume(folder, lock, path, state, damaged, is_finished)


def check_resumed(config: Config, folder: Path) -> None:
    """Check the settings of a run to resume as `find_resume` does; read and lock nothing else."""
    checkpoint, _ = newest_checkpoint(folder / CHECKPOINTS, verify=False)
    if checkpoint is not None:
        _check_settings(config, _state_of(checkpoint), checkpoint.path)


def _state_of(checkpoint: Checkpoint) -> SavedState:
    names = SavedState.__dataclass_fields__  # a newer version may add some
    return SavedState(**{name: value for name, value in checkpoint.state.items() if name in names})


def _is_finished(folder: Path, config: Config) -> bool:
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):  # none, or a truncated one
        return False
    return bool(summary["iterations"] == config.train.iterations)


def _is_begun(folder: Path) -> bool:
    """Return whether a run has begun here. An empty folder counts: it may have been killed."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"no folder"}
    has_begun = "config.yaml" in names and not names.isdisjoint({"logs", CHECKPOINTS})
    return has_begun or names <= {"logs", run_folder.UNFINISHED_CONFIG}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ. One that was not there before is of a newer release."""
    return [key for key in now if key in before and before[key] != now[key]]


def _check_settings(config: Config, state: SavedState, path: Path) -> None:
    """Raise ConfigError if a setting that decides what is trained has changed."""
    before, now = by_name(state.config), by_name(config.model_dump(mode="json"))
    changed = [key for key in differing(before, now) if key not in keys_marked(MAY_CHANGE)]
    if changed:
        run = load_config(None, state.config)
        used, given = _resolved(run), _resolved(config)
        line = "{}: expected {} as in the run, got {}".format
        problems = [line(key, json.dumps(used[key]), json.dumps(given[key])) for key in changed]
        raise ConfigError(
            f"'{path}' is a checkpoint of a run with other settings:\n"
            + "\n".join(problems)
            + "\nthese cannot change on resuming (docs/settings.md marks those that can)\n"
            "to train it with other settings, start a new run from the checkpoint: "
            + _new_run(config, run, path)
        )
    if config.train.iterations < state.num_iterations:
        raise ConfigError(
            f"train.iterations (--iterations): expected the run's total, at least "
            f"{state.num_iterations} (done in {path}), got {config.train.iterations}"
        )


def settings_to_evaluate(given: Mapping[str, Any], file: object) -> dict[str, Any]:
    """Return the settings of an evaluation that come before the `given` ones: without a config
    `file` those of the run whose model it is, data, rewards, environment, sampling and data type.
    Not those that a data set or rewards replace: a preset is asked and scored in its own way."""
    path, dataset = given.get("model.path"), given.get("data.dataset")
    settings = {} if dataset is None else {"eval.dataset": None}  # of the run or the file
    run = run_of(os.fspath(path)) if file is None and isinstance(path, str | os.PathLike) else None
    if run is None:
        return settings
    of_run = by_name(run.model_dump(mode="json", include={"data", "reward", "rollout", "eval"}))
    given_anew = {"rollout.engine", "rollout.tensor_parallel_size"}
    of_answers = ("eval.", "reward.judge.")
    given_anew |= {key for key in keys_marked(MAY_CHANGE) if not key.startswith(of_answers)}
    if dataset is not None:
        given_anew |= {"data.dataset", "data.options", "data.weights", "data.num_held_out"}
        given_anew |= {"data.columns"} if isinstance(run.data.columns, list) else set()
        if isinstance(dataset, str) and dataset in {*PRESETS} - {*run.data.datasets}:
            given_anew |= {key for key in of_run if key.startswith(("data.", "reward.", "eval."))}
            given_anew |= {"rollout.environment", "rollout.tools", "rollout.agent"}
    if "reward.functions" in given:
        given_anew |= {"eval.correct_reward", *(key for key in of_run if key.startswith("reward."))}
    kept = {key: value for key, value in of_run.items() if key not in given_anew}
    return {"model.dtype": run.model.dtype, **kept, **settings}


def _resolved(config: Config) -> dict[str, Any]:
    """All values by section and key, with the value that the run uses instead of null."""
    values = by_name(config.model_dump(mode="json"))
    spec = resolve(config)
    values["train.learning_rate"] = spec.optimizer.learning_rate
    values["algorithm.epsilon_high"] = spec.loss.epsilon_high
    if spec.rewards.functions:  # else none is given
        values["reward.functions"] = list(spec.rewards.functions)
        values["reward.weights"] = list(spec.rewards.weights)
    return values


def _new_run(config: Config, run: Config, checkpoint: Path) -> str:
    """The command that trains from the checkpoint with the settings of `config`."""
    folder = checkpoint.parent.parent
    changes: dict[str, Any] = {"output.dir": run_folder.free_name(folder)}
    if config.runtime.seed == run.runtime.seed:
        changes["runtime.seed"] = run.runtime.seed + 1  # other prompts than before
    if config.model.path == run.model.path:
        changes["model.path"] = str(checkpoint)
    file = folder / "config.yaml"
    words = to_arguments(change_config(config, changes), load_config(file))
    return join(["easyrl", "grpo", "--config", str(file), *words])


def with_absolute_paths(
    config: Config, changes: Mapping[str, Any] | None = None, *, is_resumed: bool = False
) -> Config:
    """Return the config with `changes`, and absolute paths of the files and folders that it names,
    so that the run can be resumed from any folder; symbolic links are kept, as they may change. A
    folder wins over a built-in model of the same name, but not in the config of a resumed run,
    whose folders are absolute paths already."""
    names, changes = NAMES | ({"model.path": BUILT_IN_MODELS} if is_resumed else {}), changes or {}

    def absolute(value: Any, names: Container[str]) -> Any:
        if isinstance(value, dict):
            return {name: absolute(each, names) for name, each in value.items()}
        if not isinstance(value, str):
            return [absolute(each, names) for each in value] if value else value
        file, colon, function = value.rpartition(":") if ".py:" in value else (value, "", "")
        path = Path(file).expanduser()
        # (`Path.exists` raises for a long name, as a command may be.)
        is_path = os.path.exists(path) and value not in names  # noqa: PTH110
        return f"{path.absolute()}{colon}{function}" if is_path else value

    values = {key: changes.get(key, attrgetter(key)(config)) for key in keys_marked(NAMES_FILES)}
    paths = {key: absolute(value, names.get(key, ())) for key, value in values.items()}
    return change_config(config, {**changes, **paths})


def start_from(config: Config, *, is_resumed: bool = False) -> tuple[Config, ModelSource | None]:
    """Replace a run, a checkpoint or an adapter as `model.path` by its model, or the model that it
    was trained from, unless the config is that of a resumed run; and make paths absolute. The
    learning rate and a checkpoint's chat template are by default those of the run."""
    folder, changes = Path(config.model.path).expanduser().absolute(), dict[str, Any]()
    source = find_model(str(folder)) if folder.is_dir() and not is_resumed else None
    if source is not None:
        changes["model.path"], run = source.base, run_of(str(folder))
        if run is not None and run.model.lora.rank is None and config.model.lora.rank is None:
            given = config.train.learning_rate
            changes["train.learning_rate"] = given or resolve(run).optimizer.learning_rate
        if run is not None and source.kind == "checkpoint" and config.data.chat_template is None:
            changes["data.chat_template"] = run.data.chat_template  # exported with the model
    is_resolved = is_resumed or source is not None
    return with_absolute_paths(config, changes, is_resumed=is_resolved), source
