"""Every setting of a run, once, with its meaning, unit and default.

`load_config` makes a `Config` from four layers; the later wins:

    defaults  <  --config FILE.yaml  <  named flags  <  section.key=value words

A `Config` is checked when it is made. The docstrings of the keys are the comments that
`easyrl config` prints, and the text of docs/settings.md.
"""

import json
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self, get_origin

import yaml
from pydantic import ValidationError, model_validator

from easyrl.config.algorithm import AlgorithmConfig as AlgorithmConfig
from easyrl.config.data import DataConfig as DataConfig
from easyrl.config.devices import DevicesConfig
from easyrl.config.eval import EvalConfig
from easyrl.config.hints import INSTEAD, names_of_others, similar_names
from easyrl.config.model import LoraConfig, ModelConfig
from easyrl.config.reward import JudgeConfig as JudgeConfig
from easyrl.config.reward import RewardConfig as RewardConfig
from easyrl.config.rollout import RolloutConfig
from easyrl.config.runtime import OutputConfig, RuntimeConfig
from easyrl.config.section import Mark, Section, kinds
from easyrl.config.train import TrainConfig
from easyrl.formatting import ConfigError as ConfigError


class Config(Section):
    """All sections."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    devices: DevicesConfig = DevicesConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    output: OutputConfig = OutputConfig()

    @property
    def learning_rate(self) -> float:
        if self.train.learning_rate is not None:
            return self.train.learning_rate
        is_built_in = self.model.path in ("tiny", "tiny-countdown", "tiny-guess")
        if self.model.lora.rank is not None:
            return 3e-3 if is_built_in else 1e-5
        return 3e-4 if is_built_in else 1e-6

    @property
    def importance_sampling_correction(self) -> Literal["none", "truncate", "mask"]:
        """`algorithm.importance_sampling_correction` with `auto` resolved."""
        chosen = self.algorithm.importance_sampling_correction
        if chosen != "auto":
            return chosen
        return "none" if self.model.dtype == "float32" else "truncate"

    @property
    def max_sequence_length(self) -> int:
        return self.data.max_prompt_length + self.rollout.max_completion_length

    @property
    def ring_slots(self) -> int:
        return self.rollout.ring_slots or self.train.prompts_per_iteration

    @property
    def max_tokens_per_micro_batch(self) -> int:
        return self.train.max_tokens_per_micro_batch or max(4096, self.max_sequence_length)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        updates, prompts = self.train.updates_per_iteration, self.train.prompts_per_iteration
        longest, budget = self.max_sequence_length, self.max_tokens_per_micro_batch
        runtime, algorithm, rollout = self.runtime, self.algorithm, self.rollout
        must_hold_all = runtime.schedule == "sync" or runtime.deterministic or updates > 1
        if self.ring_slots < prompts and (must_hold_all or algorithm.dynamic_sampling):
            raise ValueError(
                f"rollout.ring_slots: expected null or at least {prompts}, as all groups of an "
                "iteration may wait in the ring with runtime.schedule=sync, runtime.deterministic, "
                "train.updates_per_iteration over 1 or algorithm.dynamic_sampling, got "
                f"{self.ring_slots}"
            )
        if prompts % updates:
            raise ValueError(
                f"train.updates_per_iteration: expected a divisor of {prompts} "
                f"(train.prompts_per_iteration), got {updates}"
            )
        if longest > budget:
            raise ValueError(
                f"train.max_tokens_per_micro_batch: expected null or at least {longest}, one "
                f"rollout (data.max_prompt_length + rollout.max_completion_length), got {budget}"
            )
        if runtime.resume == "auto" and self.output.dir is None:
            raise ValueError("runtime.resume: expected output.dir (--output) too with auto")
        if runtime.autoscale and (runtime.deterministic or self.devices.spare is None):
            raise ValueError(
                "runtime.autoscale: expected false without devices.spare (--spare-devices) or with "
                "runtime.deterministic, got true"
            )
        if runtime.deterministic and rollout.episode_timeout_seconds is not None:
            raise ValueError(
                "rollout.episode_timeout_seconds: expected null with runtime.deterministic, got "
                f"{rollout.episode_timeout_seconds:g}"
            )
        has_no_use = algorithm.teacher is None or rollout.has_environments
        if algorithm.teacher_prompt is not None and has_no_use:
            raise ValueError(
                "algorithm.teacher_prompt: expected null without algorithm.teacher, and with "
                f"rollout.environment or rollout.tools, got {algorithm.teacher_prompt!r}"
            )
        if runtime.deterministic and self.train.compile:
            raise ValueError("train.compile: expected false with runtime.deterministic, got true")
        return self


SECTIONS: dict[str, Any] = {"model": ModelConfig, "model.lora": LoraConfig, "data": DataConfig}
SECTIONS |= {"reward": RewardConfig, "reward.judge": JudgeConfig}
SECTIONS |= {name: field.annotation for name, field in Config.model_fields.items()}
"""All sections by their names, each before those inside it."""
KEYS = {
    f"{name}.{key}": field
    for name, section in SECTIONS.items()
    for key, field in section.model_fields.items()
    if f"{name}.{key}" not in SECTIONS
}
"""All keys by their full names, as `model.lora.rank`."""
OPTIONS = {
    "model": "model.path",
    "dataset": "data.dataset",
    "reward": "reward.functions",
    "environment": "rollout.environment",
    "agent": "rollout.agent",
    "infer_devices": "devices.infer",
    "train_devices": "devices.train",
    "spare_devices": "devices.spare",
    "ray_address": "devices.ray_address",
    "output": "output.dir",
    "iterations": "train.iterations",
    "seed": "runtime.seed",
    "schedule": "runtime.schedule",
}
"""Named options of `easyrl grpo` and arguments of `easyrl.train`, with the keys that they set."""
EVAL_OPTIONS = {"num_samples": "eval.num_samples", "engine": "rollout.engine"}
"""Those that only `easyrl eval` and `easyrl.evaluate` have."""
NEWLINE = re.compile(r"(?<!\\)\\n(?!(abla|e|eg|eq|ewline|exists|i|mid|ot|otin|u)(?![A-Za-z]))")
NAME = re.compile(r"[A-Za-z_~/.][\w~/.:@+-]*", re.ASCII)
INPUTS = "inputs"
"""Subfolder of a run: objects of Python that it was given, or a model that was made for it."""


def options_by_key(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options among `given` that are not None, by the keys that they set."""
    keys = OPTIONS | EVAL_OPTIONS
    return {keys[name]: given[name] for name in keys if given.get(name) is not None}


def keys_marked(*marks: Mark) -> list[str]:
    return [name for name, field in KEYS.items() if any(mark in field.metadata for mark in marks)]


def by_name(settings: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return the values of sections, as in a dumped config, by the full names of their keys."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{within}{key}"
        is_within = name in SECTIONS and isinstance(value, Mapping)
        values |= by_name(value, f"{name}.") if is_within else {name: value}
    return values


def load_config(
    file: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    words: Sequence[str] | None = (),
) -> Config:
    """Merge defaults < `file` < `settings` (by `section.key`) < `words` (`section.key=value`).
    Raises ConfigError with a line per problem; of sections that disagree, the first."""
    values = _read_file(file) if file is not None else {}
    for name, value in (settings or {}).items():
        _put(values, name, value)
    if isinstance(runtime := values.get("runtime"), dict):  # `restart` is in earlier runs' files
        values["runtime"] = {key: runtime[key] for key in runtime if key != "restart"}
    problems: list[str] = []
    for word in words or ():
        try:
            _put(values, *_read_word(word))
        except ConfigError as error:
            problems.append(str(error))
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems += map(_problem, error.errors(include_url=False))
    if problems:
        source = [f"(the config file was {file})"] if file is not None else []
        raise ConfigError("\n".join(problems + source))
    return config


def move_inputs(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of a run, by section, with its inputs in `folder`, perhaps a copy."""
    before = (settings.get("output") or {}).get("dir")
    text = json.dumps(settings).replace(f'"{before}/{INPUTS}/', f'"{folder.absolute()}/{INPUTS}/')
    return dict(json.loads(text))


def change_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the config with these changes, by the full names of keys. Raises ConfigError."""
    values = config.model_dump(exclude_unset=True)  # what was set is still known
    for name, value in changes.items():
        _put(values, name, value)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(map(_problem, error.errors(include_url=False)))) from None


def _put(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set a key by its full name. A section that is no mapping is left for the validation."""
    *sections, key = name.split(".")
    for section in sections:
        if settings.get(section) is None:
            settings[section] = {}
        settings = settings[section]
        if not isinstance(settings, dict):
            return
    settings[key] = value


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice, or an alias of a list or mapping, is an error."""

    yaml_implicit_resolvers = {}  # type: ignore[misc]  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias, node = self.check_event(yaml.AliasEvent), super().compose_node(parent, index)
        if is_alias and not isinstance(node, yaml.ScalarNode):
            raise yaml.YAMLError("expected no alias of a list or mapping: it may grow endlessly")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in mapping:
                problem = f"expected each key once, as a word, got '{key.value}'"
                raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
            if ":" in key.value and not value.value:
                problem = f"expected a space after the colon, got '{key.value}'"
                raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
            mapping[key.value] = self.construct_object(value, deep=True)
        return mapping


# What a scalar without quotes means: as in JSON or Python, also 1e-6; else a string (no dates).
for kind, pattern in {
    "null": r"~|null|Null|NULL|None|",
    "bool": r"true|false|True|False",
    "int": r"[-+]?(0|[1-9][0-9_]*)",
    "float": r"[-+]?(?!0[0-9])([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"({pattern})$"), None)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or error
        raise ConfigError(f"{source}{line}: not readable as YAML: {reason}") from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file cannot be read: {error}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"{path}: expected sections with keys in them, got {content!r}")
    is_of_run = path.name == "config.yaml" and (path.parent / INPUTS).is_dir()
    return move_inputs(content or {}, path.parent) if is_of_run else content or {}


def _read_word(word: str) -> tuple[str, Any]:
    """Read `train.learning_rate=1e-6`: the key's name and its value, as YAML. But for a key that
    takes a string every text is one, as in `reward.pattern=[0-4]$`, except null, text in quotes
    and, where the key takes them, lists and mappings. In `data` and `teacher_prompt` a typed
    \\n ends a line, unless it begins a LaTeX command; in `rollout.stop` without quotes always."""
    name, equals, text = word.partition("=")
    name, first = name.strip(), text.strip()[:1]
    if not equals:
        key = name if name in KEYS else "section.key"
        hint = f"--config {word}" if word.endswith((".yaml", ".yml")) else "quote texts with spaces"
        raise ConfigError(f"'{word}': expected {key}=value ({hint})")
    accepted = kinds(KEYS[name].annotation) if name in KEYS else ()
    is_text = str in accepted and not (
        first in ("'", '"')
        or ((text.strip() or text) in ("", "~", "null", "Null", "NULL") and NoneType in accepted)
        or (first == "[" and any(get_origin(each) is list for each in accepted))
        or (first == "{" and any(get_origin(each) is dict for each in accepted))
    )
    value = text if is_text else _parse_yaml(text, name)
    is_prompt = is_text and name.startswith(("data.", "algorithm.teacher_prompt"))
    if name == "rollout.stop" and isinstance(value, list) and not re.search(r"[\[,]\s*['\"]", text):
        value = [each.replace(r"\n", "\n") if isinstance(each, str) else each for each in value]
    return name, NEWLINE.sub("\n", value) if is_prompt else value


def _problem(details: Any) -> str:
    name = ".".join(map(str, details["loc"]))
    message = str(details["msg"]).removeprefix("Value error, ")
    if details["type"] == "extra_forbidden":
        if name in KEYS or name in SECTIONS:  # a full name in a file
            nested = name.replace(".", ": {") + ": ..." + "}" * name.count(".")
            return f"{name}: expected in its section, as in {nested}"
        inside = details["input"]
        while isinstance(inside, dict) and len(inside) == 1:  # of a section that is not ours
            ((key, inside),) = inside.items()
            name += f".{key}"
        return f"{name}: unknown setting; {key_hint(name)}"
    if details["type"] == "value_error" and name in ("", *SECTIONS):
        return message  # of a check of several keys, which names them
    if details["type"] == "model_type":
        key = next(key for key in KEYS if key.startswith(f"{name}."))
        message = f"expected keys of this section, as in {key}=..."
    value = json.dumps(details["input"], ensure_ascii=False, default=str)
    instead = INSTEAD.get((name, str(details["input"]).lower()))
    return f"{name}: {message}, got {value}" + (f"; use {instead}" if instead else "")


def key_hint(name: str, suffix: str = "") -> str:
    """Return which setting an unknown one may mean, or where to look."""
    last = name.rpartition(".")[2].replace("-", "_")  # as of an option
    if last in names_of_others() and not any(key.endswith(f".{last}") for key in KEYS):
        return f"in EasyRL: {names_of_others()[last]}"
    sections = [each for each in SECTIONS if not suffix and each.count(".") == name.count(".")]
    if names := similar_names(name, [*sections, *KEYS]):
        return f"did you mean {' or '.join(each + suffix for each in names)}?"
    return (
        "`easyrl config` prints every key, `easyrl config --search WORD` finds some; "
        "docs/trl_and_verl.md has the names that TRL and verl use"
    )


def to_commented_yaml(
    config: Config, *, only_changes: bool = False, only: Collection[str] = ()
) -> str:
    """Print the config as YAML with comments. `only_changes`: only the keys whose value is not the
    default; `only`: only these keys and sections. A comment then gives the default."""
    shown, text = _changed_keys(config, Config()) if only_changes else [*KEYS], ""
    if only:
        shown = [key for key in shown if any(f"{key}.".startswith(f"{each}.") for each in only)]
    for name, section in SECTIONS.items():
        if not any(key.startswith(f"{name}.") for key in shown):
            continue
        *outer, last = name.split(".")
        indent = "  " * len(outer)
        text += "" if outer or not text else "\n"
        text += f"{_comment(section.__doc__, indent)}{indent}{last}:\n"
        for key in (key for key in shown if key.rpartition(".")[0] == name):
            text += _comment(KEYS[key].description, f"{indent}  ")
            if only_changes or only:
                text += _comment(f"Default: {yaml_value(attrgetter(key)(Config()))}", f"{indent}  ")
            value = yaml_value(attrgetter(key)(config))
            text += f"{indent}  {key.rpartition('.')[2]}: {value}\n"
    return text


def _changed_keys(config: Config, base: Config) -> list[str]:
    return [key for key in KEYS if attrgetter(key)(config) != attrgetter(key)(base)]


def find_keys(names: Sequence[str], search: str | None) -> list[str]:
    """Return these keys and sections, and the keys that `search` finds. Raises ConfigError."""
    for name in names:
        if name not in KEYS and name not in SECTIONS:
            raise ConfigError(f"{name}: unknown setting; {key_hint(name)}")
    if search is None:
        return [*names]
    texts = {key: f"{key} {on_one_line(field.description)}".lower() for key, field in KEYS.items()}
    found = [key for key, text in texts.items() if search.lower() in text]
    if not found:
        here = f"; in EasyRL: {theirs[search]}" if search in (theirs := names_of_others()) else ""
        raise ConfigError(f"--search: no setting has '{search}' in its name or meaning{here}")
    return [*names, *found]


def on_one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _comment(text: str | None, indent: str) -> str:
    lines = textwrap.wrap(on_one_line(text), 96 - len(indent), break_on_hyphens=False)
    return "".join(f"{indent}# {line}\n" for line in lines)


def yaml_value(value: Any) -> str:
    """Write a value as JSON, which is YAML, but names without quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_value, value))}]"
    is_printable = not re.search(r"\\[xuU]", repr(value))
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=not is_printable)
    if NAME.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    quoted = yaml.safe_dump(value, default_style='"', width=2**31, allow_unicode=is_printable)
    return quoted.rstrip("\n")


def to_arguments(config: Config, base: Config) -> list[str]:
    """Return the arguments of `easyrl grpo` that make `config` of `base`: options, then words."""
    options, words = [], []
    names = {key: f"--{name.replace('_', '-')}" for name, key in OPTIONS.items()}
    for key in _changed_keys(config, base):
        value = attrgetter(key)(config)
        if key in names and not isinstance(value, dict | None):
            for each in value if isinstance(value, list) else [value]:
                options += [names[key], str(each)]
        else:
            words.append(f"{key}={yaml_value(value)}")
    return options + words
