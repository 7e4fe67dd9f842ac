"""Make a config from a YAML file, named options and words like `train.learning_rate=1e-6`."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_origin

import yaml
from pydantic import ValidationError

from easyrl.config.problems import problems_of
from easyrl.config.schema import INPUTS, KEYS, Config, by_name
from easyrl.config.section import kinds
from easyrl.formatting import ConfigError

TYPED_NEWLINE = re.compile(
    r"(?<!\\)\\n(?!(abla|e|eg|eq|ewline|exists|i|mid|ot|otin|u)(?![A-Za-z]))"
)
r"""A `\n` that was typed in a shell. Not one that begins a LaTeX command, as `\neq`."""
NULLS = ("", "~", "null", "Null", "NULL")


def load_config(
    file: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    words: Sequence[str] | None = (),
) -> Config:
    """Merge defaults < `file` < `settings` (by `section.key`) < `words` (`section.key=value`).

    Raises ConfigError with a line for each problem. Of the checks of several keys, only the first
    that fails is reported.
    """
    values = _read_file(file) if file is not None else {}
    for name, value in (settings or {}).items():
        _put(values, name, value)
    runtime = values.get("runtime")
    if isinstance(runtime, dict):  # files of earlier versions have the key `restart`
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
        problems += problems_of(error)
    if problems:
        if file is not None:
            problems.append(f"(the config file was {file})")
        raise ConfigError("\n".join(problems))
    return config


def read_words(words: Sequence[str] | None) -> dict[str, Any]:
    """Return what words like `train.learning_rate=1e-6` set, by the full names of keys. Words that
    cannot be read are left out: `load_config` reports them."""
    settings: dict[str, Any] = {}
    for word in words or ():
        with suppress(ConfigError):
            name, value = _read_word(word)
            settings |= by_name({name: value})
    return settings


def change_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the config with these changes, by the full names of keys. Raises ConfigError."""
    values = config.model_dump(exclude_unset=True)  # it stays known what the user has set
    for name, value in changes.items():
        _put(values, name, value)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(problems_of(error))) from None


def move_inputs(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of a run, by section, with its inputs in `folder`: the run's folder may
    have been moved or copied there."""
    output = settings.get("output") or {}
    before = output.get("dir")
    now = folder.absolute()
    # Beginnings of texts as JSON has them, which escapes quotes and letters like "ä".
    old_text = json.dumps(f"{before}/{INPUTS}/")
    new_text = json.dumps(f"{now}/{INPUTS}/")
    old_beginning = old_text.removesuffix('"')
    new_beginning = new_text.removesuffix('"')
    written = json.dumps(settings)
    moved = written.replace(old_beginning, new_beginning)
    return dict(json.loads(moved))


def _put(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set a key by its full name. If a section is no mapping, do nothing: the validation reports
    it."""
    *sections, key = name.split(".")
    for section in sections:
        if settings.get(section) is None:
            settings[section] = {}
        settings = settings[section]
        if not isinstance(settings, dict):
            return
    settings[key] = value


# -- YAML -----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Reads YAML in which a key that is given twice, or an alias of a list or mapping, is an error.
    What a text without quotes means is defined in SCALARS."""

    yaml_implicit_resolvers = {}  # type: ignore[misc]  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and not isinstance(node, yaml.ScalarNode):
            raise yaml.YAMLError("expected no alias of a list or mapping: it may grow endlessly")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = {}
        for key, value in node.value:
            name = key.value
            if not isinstance(key, yaml.ScalarNode) or name in mapping:
                raise _bad_key(key, f"expected each key once, as a word, got '{name}'")
            if ":" in name and not value.value:
                raise _bad_key(key, f"expected a space after the colon, got '{name}'")
            mapping[name] = self.construct_object(value, deep=True)
        return mapping


def _bad_key(key: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, key.start_mark)


SCALARS = {
    "null": r"~|null|Null|NULL|None|",
    "bool": r"true|false|True|False",
    "int": r"[-+]?(0|[1-9][0-9_]*)",
    "float": r"[-+]?(?!0[0-9])([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?",
}
"""Meaning of a text without quotes: the same as in JSON or Python, so 1e-6 is a number. Any other
text is a string; dates are strings, too."""
for kind, pattern in SCALARS.items():
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
    settings = content or {}
    is_of_run = path.name == "config.yaml" and (path.parent / INPUTS).is_dir()
    return move_inputs(settings, path.parent) if is_of_run else settings


# -- words ----------------------------------------------------------------------------------------


class _Setting(NamedTuple):
    name: str  # of a key, perhaps an unknown one
    value: Any


def _read_word(word: str) -> _Setting:
    r"""Read a word like `train.learning_rate=1e-6`. The value is YAML. A key that takes a string
    takes the text as it is (`_is_plain_text`), as in `reward.pattern=[0-4]$`.

    A typed `\n` in a prompt ends a line, unless it begins a LaTeX command; in a list for
    `rollout.stop` it always does, unless the texts have quotes.
    """
    name, equals, text = word.partition("=")
    name = name.strip()
    if not equals:
        key = name if name in KEYS else "section.key"
        hint = "quote texts with spaces"
        if word.endswith((".yaml", ".yml")):
            hint = f"--config {word}"
        elif word.endswith((".jsonl", ".json", ".csv", ".parquet")):
            hint = f"--dataset {word}, once for each data set"
        raise ConfigError(f"'{word}': expected {key}=value ({hint})")
    if _is_plain_text(name, text):
        is_prompt = name.startswith(("data.", "algorithm.teacher_prompt"))
        return _Setting(name, TYPED_NEWLINE.sub("\n", text) if is_prompt else text)
    value = _parse_yaml(text, name)
    has_quotes = re.search(r"[\[,]\s*['\"]", text) is not None
    if name == "rollout.stop" and isinstance(value, list) and not has_quotes:
        value = [each.replace(r"\n", "\n") if isinstance(each, str) else each for each in value]
    return _Setting(name, value)


def _is_plain_text(name: str, text: str) -> bool:
    """Return whether the text is the value itself, not YAML: the key takes a string, and the text
    has no quotes and is neither null nor, where the key takes them, a list or a mapping."""
    accepted = kinds(KEYS[name].annotation) if name in KEYS else ()
    if str not in accepted:
        return False
    first = text.strip()[:1]
    if first in ("'", '"'):
        return False
    if (text.strip() or text) in NULLS and NoneType in accepted:
        return False
    takes_list = any(get_origin(each) is list for each in accepted)
    takes_mapping = any(get_origin(each) is dict for each in accepted)
    return not ((first == "[" and takes_list) or (first == "{" and takes_mapping))
