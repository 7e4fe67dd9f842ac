"""Find the checkpoint that a run resumes from, and check that the settings still fit it.

    --resume RUN            the run folder must have a complete checkpoint
    runtime.resume=auto     resume if there is a checkpoint; a run that was killed before its first
                            one starts again in its folder; without a folder, start a new run
    runtime.resume=never    only a run that never finished an iteration starts again in its folder

Writes nothing and imports no torch.
"""

import json
import os
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from shlex import join, quote
from typing import Any, NamedTuple

from easyrl.config import (
    Config,
    by_name,
    change_config,
    keys_marked,
    load_config,
    read_words,
    to_arguments,
)
from easyrl.config.algorithm import LOSS_KEY, LOSS_TYPES, POLICY, TEACHER_KEY
from easyrl.config.section import MAY_CHANGE, NAMES_FILES
from easyrl.data.hub import BUILT_IN_MODELS, model_folder
from easyrl.data.presets import PRESETS
from easyrl.environments.loading import BUILT_IN as BUILT_IN_ENVIRONMENTS
from easyrl.formatting import ConfigError, counted
from easyrl.model.adapter_files import (
    ADAPTER_CONFIG,
    check_base,
    read_adapter,
    reason_for_new,
)
from easyrl.model.adapter_files import KEY as ADAPTER_KEY
from easyrl.model.checkpoint_files import (
    CHECKPOINTS,
    DAMAGED,
    Checkpoint,
    checkpoints_in,
    newest_checkpoint,
)
from easyrl.model.export import ADAPTER, ModelSource, find_model, run_of
from easyrl.rewards.builtin import BUILT_IN
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

OF_MACHINE = (
    "rollout.engine",
    "rollout.tensor_parallel_size",
    "rollout.memory_fraction",
    "rollout.max_concurrent_groups",
    "rollout.ring_slots",
    "reward.code_sandbox",
    "reward.model_device",
)
"""Keys whose values in a run fit its machine: an evaluation of the run does not take them."""
CHAT_TEMPLATE = "chat_template.jinja"  # name of a tokenizer's file
REPLACED_AT_START = (
    "model.path",
    ADAPTER_KEY,
    "model.lora.alpha",
    "data.chat_template",
    "train.learning_rate",
)
"""Keys that the start of a run sets where its model is a run, a checkpoint or an adapter."""
EXPECTED_CHANGES = ("train.iterations", "output.dir", "runtime.resume")  # not worth a remark


@dataclass(frozen=True, slots=True)
class SavedState:
    """State that the controller saves with each checkpoint and resumes from."""

    policy_version: int = 0
    num_iterations: int = 0  # completed iterations
    config: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Fingerprints of the model, the data and the held-out problems (`preflight.check_run`)."""
    next_prompt_index: int = 0
    accuracy_before: float | None = None
    error_before: float | None = None  # standard error of that accuracy
    held_out_reward_before: float | None = None
    wall_seconds: float = 0.0  # time of the commands so far
    file_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the growing files of the run folder: what follows is discarded on resume."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings as the user gave them, where the start has replaced them, and what it made of them:
    of a run that trains the weights of another one {"train.learning_rate": [None, 5e-7]}."""


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
        if self.checkpoint is None:
            lines = [f"started again in {self.folder}: the run there has no checkpoint"]
        else:
            total = counted(config.train.iterations, "iteration")
            done = f"{self.state.num_iterations} of {total} done"
            lines = [f"resumed from the newest complete checkpoint, {self.checkpoint}: {done}"]
        for path, reason in self.damaged.items():
            lines.append(f"{reason} (renamed: {path.name}{DAMAGED})")
        lines += _describe_changes(config, self.state)
        return "\n".join(lines)


def config_file_of(path: str | os.PathLike[str], *given: object) -> Path:
    """Return the config file of the run to resume: `path` is its folder, or one of its checkpoints.
    Raises ConfigError, also for `given` arguments."""
    run = Path(path)
    checkpoint = run.absolute()
    if checkpoint.parent.name == CHECKPOINTS:
        run = checkpoint.parent.parent
        if not checkpoint.is_dir():
            names = ", ".join(each.name for each in checkpoints_in(checkpoint.parent))
            expected = f"a checkpoint ({names or 'none'})"
            raise ConfigError(f"resume (--resume): expected {expected}, got '{path}'")
    has_other_settings = any(each is not None for each in given)
    if has_other_settings:
        raise ConfigError(
            "resume (--resume): expected neither config (--config), output (--output), dataset, "
            "reward, environment nor agent: a resumed run keeps its folder and the settings in it"
        )
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"resume (--resume): expected a run folder, but there is no {file}")
    return file


def find_resume(config: Config, folder: Path | None) -> Resume | None:
    """Find what to resume from; None if a new run starts in a new folder. Raises ConfigError if
    `folder` (`--resume`) has no complete checkpoint, is in use, or has other settings."""
    is_asked = folder is not None
    if folder is None:
        folder = run_folder.folder_of(config.output.dir, config.data.datasets)
        if not resumes_by_itself(config, folder):
            return None
    lock = run_folder.lock_folder(folder)
    try:
        return _find_resume(config, folder, lock, is_asked=is_asked)
    except BaseException:
        os.close(lock)
        raise


def _find_resume(config: Config, folder: Path, lock: int, *, is_asked: bool) -> Resume:
    """Find the newest complete checkpoint in a locked folder. `is_asked`: by `--resume`."""
    is_finished = _is_finished(folder, config)
    checkpoint, damaged = newest_checkpoint(folder / CHECKPOINTS, verify=not is_finished)
    if checkpoint is not None:
        state = _state_of(checkpoint)
        _check_settings(config, state, checkpoint.path)
        return Resume(folder, lock, checkpoint.path, state, damaged, is_finished)
    has_results = damaged or (folder / "summary.json").exists()
    if not is_finished and (is_asked or has_results):
        reasons = "\n".join(["", *damaged.values()])
        keys = "" if damaged else " (train.save_every, train.keep_checkpoints)"
        raise ConfigError(
            f"--resume, runtime.resume: '{folder}' has no whole checkpoint{keys}{reasons}\n"
            f"to start again: easyrl grpo --config {quote(str(folder / 'config.yaml'))} "
            f"--output {quote(run_folder.free_name(folder))}"
        )
    return Resume(folder, lock, None, SavedState(), damaged, is_finished)


def resumes_by_itself(config: Config, folder: Path) -> bool:
    """Return whether a run with this folder resumes in it without `--resume`."""
    is_wanted = config.runtime.resume == "auto" or run_folder.is_unstarted(folder)
    return is_wanted and _is_begun(folder)


def saved_state(folder: Path) -> SavedState | None:
    """Return the state in the newest checkpoint, which is not verified; None without one."""
    checkpoint, _ = newest_checkpoint(folder / CHECKPOINTS, verify=False)
    return None if checkpoint is None else _state_of(checkpoint)


def replaced_at_start(given: Config, used: Config) -> dict[str, Any]:
    """Return the settings that the start of a run has replaced: as given, and as used."""
    replaced = {}
    for key in REPLACED_AT_START:
        value_of = attrgetter(key)
        if value_of(given) != value_of(used):
            replaced[key] = [value_of(given), value_of(used)]
    return replaced


def as_started(config: Config, state: SavedState) -> Config:
    """Replace the settings of a restarted run as its start did, where they are the same as then:
    a run as `model.path` may have other weights by now."""
    saved = by_name(state.config)
    may_have_changed = keys_marked(MAY_CHANGE)  # by a later command; files may have been moved
    changes = {}
    for key, (given, used) in state.given.items():
        if attrgetter(key)(config) == given:
            changes[key] = used if key in may_have_changed else saved[key]
    return change_config(config, changes)


def check_resumed(config: Config, folder: Path) -> None:
    """Check the settings of a run to resume as `find_resume` does; read and lock nothing else."""
    checkpoint, _ = newest_checkpoint(folder / CHECKPOINTS, verify=False)
    if checkpoint is not None:
        _check_settings(config, _state_of(checkpoint), checkpoint.path)


def describe_resumed(config: Config, folder: Path) -> list[str]:
    """Return what a plan says of a run to resume: where it continues, and which settings have
    changed."""
    checkpoint, _ = newest_checkpoint(folder / CHECKPOINTS, verify=False)
    if checkpoint is None:
        return []
    state = _state_of(checkpoint)
    total = counted(config.train.iterations, "iteration")
    lines = [f"resumes from {checkpoint.path}: {state.num_iterations} of {total} done"]
    return [*lines, *_describe_changes(config, state)]


def _describe_changes(config: Config, state: SavedState) -> list[str]:
    """Name the settings that have changed since the state was saved."""
    if not state.config:
        return []
    before = _resolved(load_config(None, state.config))
    now = _resolved(config)
    lines = []
    for key in differing(before, now):
        if key not in EXPECTED_CHANGES:
            lines.append(f"changed: {key} {json.dumps(before[key])} -> {json.dumps(now[key])}")
    return lines


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
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if names <= {"logs", run_folder.UNFINISHED_CONFIG}:
        return True
    return "config.yaml" in names and not names.isdisjoint({"logs", CHECKPOINTS})


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ. One that was not there before is of a newer release."""
    return [key for key in now if key in before and before[key] != now[key]]


def _check_settings(config: Config, state: SavedState, path: Path) -> None:
    """Raise ConfigError if a setting that decides what is trained has changed."""
    before = by_name(state.config)
    now = by_name(config.model_dump(mode="json"))
    may_change = keys_marked(MAY_CHANGE)
    changed = [key for key in differing(before, now) if key not in may_change]
    if changed:
        run = load_config(None, state.config)
        used = _resolved(run)
        given = _resolved(config)
        lines = [f"'{path}' is a checkpoint of a run with other settings:"]
        for key in changed:
            expected = json.dumps(used[key])
            lines.append(f"{key}: expected {expected} as in the run, got {json.dumps(given[key])}")
        lines += [
            "these cannot change on resuming (docs/settings.md marks those that can)",
            "to train it with other settings, start a new run from the checkpoint: "
            + _new_run(config, run, path),
        ]
        raise ConfigError("\n".join(lines))
    if config.train.iterations < state.num_iterations:
        raise ConfigError(
            f"train.iterations (--iterations): expected the run's total, at least "
            f"{state.num_iterations} (done in {path}), got {config.train.iterations}"
        )


def load_to_evaluate(
    file: Path | None, given: Mapping[str, Any], words: Sequence[str] | None = ()
) -> Config:
    """Load the config of an evaluation as `load_config` does, with the settings of the run whose
    model it is. Raises ConfigError."""
    named = {**given, **read_words(words)}
    before = settings_to_evaluate(named, file)
    return load_config(file, {**before, **given}, words)


def settings_to_evaluate(
    given: Mapping[str, Any], file: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """Return the settings of an evaluation that come before the `given` ones: without a config
    `file` those of the run whose model it is, data, rewards, environment, sampling and data type.
    Not those that a data set or rewards replace: a preset is asked and scored in its own way. With
    the config file of a run, the results do not go to the run's folder."""
    settings: dict[str, Any] = {}
    if file is not None:
        config_file = Path(file).absolute()
        if config_file.name == "config.yaml" and run_folder.is_run(config_file.parent):
            settings["output.dir"] = None
    if given.get("data.dataset") is not None:
        settings["eval.dataset"] = None  # of the run or the file
    path = given.get("model.path")
    run = None
    if file is None and isinstance(path, str | os.PathLike):
        run = run_of(os.fspath(path))
    if run is None:
        return settings
    of_run = by_name(run.model_dump(mode="json", include={"data", "reward", "rollout", "eval"}))
    replaced = _replaced_settings(given, run, of_run)
    kept = {key: value for key, value in of_run.items() if key not in replaced}
    return {"model.dtype": run.model.dtype, **kept, **settings}


def _replaced_settings(
    given: Mapping[str, Any], run: Config, of_run: Mapping[str, Any]
) -> Collection[str]:
    """Return the run's settings that an evaluation with the `given` ones does not take."""
    replaced = set(OF_MACHINE)
    sections: list[str] = []  # replaced as a whole
    dataset = given.get("data.dataset")
    if dataset is not None:
        replaced |= {"data.dataset", "data.options", "data.weights", "data.num_held_out"}
        if isinstance(run.data.columns, list):  # of each data set of a mixture
            replaced.add("data.columns")
        is_preset = isinstance(dataset, str) and dataset in PRESETS
        if is_preset and dataset not in run.data.datasets:
            sections += ["data.", "reward.", "eval."]
            replaced |= {"rollout.environment", "rollout.tools", "rollout.agent"}
            replaced.add("rollout.takes_pictures")  # of these three
    if "reward.functions" in given:
        replaced.add("eval.correct_reward")
        sections.append("reward.")
    for key in of_run:
        if key.startswith(tuple(sections)):
            replaced.add(key)
    return replaced


def _resolved(config: Config) -> dict[str, Any]:
    """Return all values by section and key, with the value that the run uses instead of null."""
    values = by_name(config.model_dump(mode="json"))
    spec = resolve(config)
    values["train.learning_rate"] = spec.optimizer.learning_rate
    values["algorithm.epsilon_high"] = spec.loss.epsilon_high
    if spec.rewards.functions:  # else none is given
        values["reward.functions"] = list(spec.rewards.functions)
        values["reward.weights"] = list(spec.rewards.weights)
    return values


def _new_run(config: Config, run: Config, checkpoint: Path) -> str:
    """Return the command that trains from the checkpoint with the settings of `config`."""
    folder = checkpoint.parent.parent
    changes: dict[str, Any] = {"output.dir": run_folder.free_name(folder)}
    if config.runtime.seed == run.runtime.seed:
        changes["runtime.seed"] = run.runtime.seed + 1  # other prompts than before
    if config.model.path == run.model.path:
        changes["model.path"] = str(checkpoint)
    file = folder / "config.yaml"
    changed = change_config(config, changes)
    words = to_arguments(changed, load_config(file))
    return join(["easyrl", "grpo", "--config", str(file), *words])


def with_absolute_paths(
    config: Config, changes: Mapping[str, Any] | None = None, *, is_resumed: bool = False
) -> Config:
    """Return the config with `changes`, and absolute paths of the files and folders that it names,
    so that the run can be resumed from any folder; symbolic links are kept, as they may change. A
    folder wins over a built-in model of the same name, but not in the config of a resumed run,
    whose folders are absolute paths already."""
    names = dict(NAMES)
    if is_resumed:
        names["model.path"] = BUILT_IN_MODELS
    changed = dict(changes or {})
    for key in keys_marked(NAMES_FILES):
        value = changed[key] if key in changed else attrgetter(key)(config)
        changed[key] = _absolute(value, names.get(key, ()))
    return change_config(config, changed)


def _absolute(value: Any, names: Container[str]) -> Any:
    """Return the value of a key with absolute paths: a text, a list or a mapping of texts, or
    None. `names` mean something else than a file."""
    if isinstance(value, dict):
        return {name: _absolute(each, names) for name, each in value.items()}
    if isinstance(value, list):
        return [_absolute(each, names) for each in value]
    if value is None:
        return None
    file, colon, function = value, "", ""
    if ".py:" in value:  # "rewards.py:score"
        file, colon, function = value.rpartition(":")
    path = Path(file).expanduser()
    # (`Path.exists` raises for a long name, as a command may be.)
    if value in names or not os.path.exists(path):  # noqa: PTH110
        return value
    return f"{path.absolute()}{colon}{function}"


def _find_source(config: Config, folder: Path) -> ModelSource:
    """Find what a new run starts from. `folder`: of `model.path`, if it is one."""
    lora = config.model.lora
    if lora.adapter is None:
        source = find_model(str(folder))
        if source.kind != "adapter" or lora.rank is None:
            return source
        reason = reason_for_new(read_adapter(Path(source.path)), lora)
        reason = reason or _other_tokenizer(source)
        if reason:
            return replace(source, reason_for_new=reason)
        return replace(source, kind="continued", tokenizer="")
    adapter_folder = Path(lora.adapter).expanduser().absolute()
    base = find_model(str(folder)) if folder.is_dir() else None
    path = config.model.path if base is None else base.path
    if not (adapter_folder / ADAPTER_CONFIG).is_file() or (base and base.kind != "model"):
        raise ConfigError(
            f"{ADAPTER_KEY}: expected the folder of an adapter with {ADAPTER_CONFIG}, and a model "
            f"as model.path (--model), got '{lora.adapter}' and '{config.model.path}'"
        )
    adapter = read_adapter(adapter_folder)
    reason = reason_for_new(adapter, lora)
    if reason:
        raise ConfigError(
            f"{ADAPTER_KEY}: expected an adapter that can be trained further, got "
            f"'{lora.adapter}': {reason}"
        )
    check_base(adapter, path)
    return ModelSource("continued", str(adapter_folder), path)


def _other_tokenizer(source: ModelSource) -> str:
    """Return a reason to merge an adapter whose tokenizer has other tokens than its base's."""
    if not source.tokenizer:
        return ""
    of_adapter = Path(source.tokenizer) / "tokenizer.json"
    of_base = model_folder(source.base) / "tokenizer.json"
    if not (of_adapter.is_file() and of_base.is_file()):
        return ""
    tokens = [json.loads(file.read_text())["model"].get("vocab") for file in (of_adapter, of_base)]
    added = [json.loads(file.read_text())["added_tokens"] for file in (of_adapter, of_base)]
    if tokens[0] == tokens[1] and added[0] == added[1]:
        return ""
    return "its tokenizer has other tokens than its base's"


class StartingPoint(NamedTuple):
    """What a new run starts from."""

    config: Config  # with absolute paths, and the model that the run's model is made from
    source: ModelSource | None  # None: `model.path` is no folder of a model, or a resumed run's


def start_from(config: Config, *, is_resumed: bool = False) -> StartingPoint:
    """Replace a run, a checkpoint or an adapter as `model.path` by its model, or the model that it
    was trained from, unless the config is that of a resumed run; and make paths absolute. The
    learning rate and a checkpoint's chat template are by default those of the run. Raises
    ConfigError, also for `model.lora.adapter` if that cannot be trained further."""
    folder = Path(config.model.path).expanduser().absolute()
    lora = config.model.lora
    if is_resumed or not (folder.is_dir() or lora.adapter):
        return StartingPoint(with_absolute_paths(config, is_resumed=is_resumed), None)
    source = _find_source(config, folder)
    changes: dict[str, Any] = {"model.path": source.base}
    if source.kind == "continued":
        adapter = read_adapter(Path(source.path))
        changes[ADAPTER_KEY] = source.path
        changes["model.lora.alpha"] = adapter.config["lora_alpha"]
        template = Path(source.path) / CHAT_TEMPLATE
        if config.data.chat_template is None and template.is_file():
            changes["data.chat_template"] = template.read_text(encoding="utf-8")
    started_from = Path(source.path) if source.kind == "continued" else folder
    if started_from.name in ("model", ADAPTER):  # of a finished run
        started_from = started_from.parent
    run = run_of(str(started_from))
    if run is not None:
        # Adapters have higher rates than whole models.
        if (run.model.lora.rank is None) == (lora.rank is None):
            given = config.train.learning_rate
            if given is None:
                given = resolve(run).optimizer.learning_rate
            changes["train.learning_rate"] = given
        if source.kind == "checkpoint" and config.data.chat_template is None:
            changes["data.chat_template"] = run.data.chat_template  # exported with the model
    # A built-in model that the source was trained from is meant by its name.
    return StartingPoint(with_absolute_paths(config, changes, is_resumed=True), source)
