"""Turn rows of data sets into the endless stream of prompts that a run takes its prompts from.

    row ─┬─► prompt_column, or prompt_template ─► system_prompt, chat ─► prompt
         └─► all columns but the prompt's, renamed by `columns` ─► rewards

    DataSet         rows, epoch after epoch, each in an order of its own; or endless ones of a task
    PromptStream    one data set or several, each with its own share and its own epochs

`prompt(index)` is a pure function of the index, so that a resumed run needs one number only.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from easyrl.config import ConfigError, DataConfig
from easyrl.data.chat import read_messages
from easyrl.data.presets import Preset
from easyrl.data.values import is_missing, with_none
from easyrl.types import Messages, Prompt

KEY = "data.dataset (--dataset)"
Row = Mapping[str, Any]
NUM_DIGESTED = 100_000  # most rows that a fingerprint reads (half a second)
NUM_TASK_EXAMPLES = 256  # generated training prompts that are checked before a run
RESERVED_COLUMNS = {  # arguments of a reward function that are not columns
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
}
OF_TEACHER = " (algorithm.teacher_prompt)"  # ends the location of a teacher's prompt
BLOCK = 1000  # prompts of a mixture in which each data set has its exact share
SOURCE_COLUMN = "data_source"  # names the data set of a mixture's row, unless rows have this column
ENVIRONMENT_COLUMN = "environment"  # names the environment of a row, where there are several


class RowForm:
    """Turn a row into a prompt: by the user's keys of the section `data`, else the preset's."""

    def __init__(
        self,
        data: DataConfig,
        preset: Preset | None,
        environments: Collection[str] = (),
        number: int = 0,
        key: str = "",
    ) -> None:
        """`environments`: their names. Where there are any, every prompt is a chat, and a row needs
        no prompt. `number`: the data set's place in a mixture. `key`: the one that errors name."""
        preset = preset or Preset(reward="")
        self.prompt_column = data.prompt_column or preset.prompt_column
        columns, self.system_prompt = data.columns, data.system_prompt
        self._is_mixed = len(data.datasets) > 1
        self.names = columns[number] if isinstance(columns, list) else columns
        is_chat = preset.chat if data.chat is None else data.chat
        self.is_chat = bool(is_chat or data.system_prompt or environments)
        self.environments = () if "" in environments else environments
        template = data.prompt_template
        if template is None and data.prompt_column is None:
            template = preset.prompt_template
        self.template = template or None
        self.key = key or f"data.prompt_{'column' if self.template is None else 'template'}"
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(template or "")]
        except ValueError as error:
            raise ConfigError(f"{self.key}: {error}; braces: {{{{ and }}}}") from None
        used = [name for name in names if name is not None]
        if template and not (used or environments):
            raise ConfigError(
                f"{self.key}: expected a column, as in {{question}}, got {template!r}: "
                "all prompts would be the same; {{ and }} are braces"
            )
        self.prompt_columns = used if template else [self.prompt_column]
        self.may_lack_prompt = bool(environments) and not (template or data.prompt_column)

    def named(self, row: Row) -> Row:
        """Return the row, or the part of one, with the names of `data.columns` beside its own."""
        return {**row, **{new: row[old] for new, old in self.names.items() if old in row}}

    def check_columns(self, given: Collection[str], dataset: str) -> None:
        """Raise ConfigError for a column that the data lacks, and a new name that is reserved."""
        names = self.named(dict.fromkeys(given))
        if reserved := sorted(RESERVED_COLUMNS & self.names.keys()):
            expected = "expected names that no other argument of a reward function has"
            raise ConfigError(f"data.columns: {expected}, got {', '.join(reserved)}")
        needed = [] if self.may_lack_prompt else self.prompt_columns
        own = [(f"data.columns.{new}", old) for new, old in self.names.items() if old not in given]
        for key, name in own + [(self.key, name) for name in needed if name not in names]:
            is_template = key == self.key and self.template is not None
            example = f"; as in {key}={next(iter(given), 'COLUMN')}"
            hint = "; write braces as {{ and }}" if is_template else example
            hint += "; 'data.columns=[{}, …]' renames those of each data set" * self._is_mixed
            raise ConfigError(
                f"{key}: expected a column of '{dataset}', which are {', '.join(given)}, got "
                f"'{name}'{hint}"
            )

    def content(self, row: Row) -> str | Messages:
        """Make the prompt of a row. Raises ValueError where it has none, or no environment."""
        name = row.get(ENVIRONMENT_COLUMN)
        if self.environments and name not in self.environments:
            raise ValueError(
                f"column '{ENVIRONMENT_COLUMN}': expected one of "
                f"{', '.join(self.environments)} (rollout.environment), got {name!r}"
            )
        if self.may_lack_prompt and self.prompt_column not in row:
            content: Any = [{"role": "user", "content": ""}]
        elif self.template is None:
            content = row[self.prompt_column]
        else:
            if lacking := [name for name in self.prompt_columns if is_missing(row[name])]:
                raise ValueError(f"{self.key}: expected a value in column '{lacking[0]}'")
            content = self.template.format_map(row)
        if isinstance(content, str) and content:
            if not self.is_chat:
                return content
            content = [{"role": "user", "content": content}]
        messages = read_messages(content, f"column '{self.prompt_column}' ({self.key})")
        if self.system_prompt and messages[0]["role"] != "system":
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def reward_columns(self, row: Row) -> dict[str, Any]:
        """Return the columns of a row for rewards, without the prompt and without reserved and old
        names. Every missing value is None, but an empty string may be meant."""
        away = {self.prompt_column, *RESERVED_COLUMNS}
        away |= {*self.names.values()} - self.names.keys()
        return with_none({name: value for name, value in row.items() if name not in away})


def content_of(value: Any) -> Any:
    """Return JSON with the content of a value of another type: no address, no abridged array."""
    if getattr(value, "shape", ()):  # an array or a tensor
        return value.tolist()
    text = re.sub(" at 0x[0-9a-fA-F]+", "", str(value))
    if text == str(value):
        return text
    if hasattr(value, "getpalette"):  # an image
        palette = bytes(value.getpalette(None) or b"")
        return [text, hashlib.sha256(value.tobytes() + palette).hexdigest()]
    return [text, getattr(value, "_hf_encoded", getattr(value, "__dict__", None))]


@lru_cache(maxsize=64)
def _order(seed: int, epoch: int, length: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(length)


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set's prompts, epoch after epoch; those of a task have no epochs."""

    name: str
    rows: Any  # a list, a `Table`, or a task's function from an index to a row
    form: RowForm
    seed: int | None = None  # seed of the order; None: the order of the rows
    locations: Sequence[str] | None = None  # files and lines that the rows are from
    held_out: DataSet | None = None  # rows that are never trained
    kept: Sequence[int] | None = None  # rows that are not left out; None: all
    teacher_form: RowForm | None = None  # of the teacher's prompts, if it has its own

    def __post_init__(self) -> None:
        if self.num_rows == 0:
            raise ConfigError(f"{KEY}: '{self.name}' has no rows")
        for form in filter(None, (self.form, self.teacher_form)):
            form.check_columns(self.columns, self.name)

    @property
    def num_rows(self) -> int | None:
        """None: endless."""
        return None if callable(self.rows) else len(self.rows)

    @property
    def epoch_length(self) -> int | None:
        return self.num_rows if self.kept is None else len(self.kept)

    @property
    def columns(self) -> list[str]:
        return list(self.rows(0) if callable(self.rows) else self.rows[0])  # all rows have the same

    def location(self, row: int) -> str:
        return self.locations[row] if self.locations else f"{self.name}, row {row}"

    def prompt(self, index: int) -> Prompt:
        if (length := self.epoch_length) is None:
            row = self.rows(index)
        else:
            epoch, number = divmod(index, length)
            if self.seed is not None:
                number = int(_order(self.seed, epoch, length)[number])
            row = self.rows[number if self.kept is None else self.kept[number]]
        row = self.form.named(row)
        of_teacher = None if self.teacher_form is None else self.teacher_form.content(row)
        return Prompt(index, self.form.content(row), self.form.reward_columns(row), of_teacher)

    def examples(self) -> dict[str, str | Messages]:
        """Return the prompts to check, by location: of all rows or the first generated ones, the
        teacher's, and the held-out ones. Raises ConfigError if a row has none."""
        rows = self.rows
        forms = {"": self.form} | ({OF_TEACHER: self.teacher_form} if self.teacher_form else {})
        if callable(rows):
            rows = map(rows, range(NUM_TASK_EXAMPLES))
        elif not isinstance(rows, list):
            needed = {ENVIRONMENT_COLUMN}.union(*(form.prompt_columns for form in forms.values()))
            needed = {self.form.names.get(name, name) for name in needed}
            rows = rows.only([*needed.intersection(rows.column_names)])
        found = {}
        for number, row in enumerate(rows):
            for what, form in forms.items():
                location = self.location(number) + what
                try:
                    found[location] = form.content(form.named(row))
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"{location}: {error}") from None
        return found if self.held_out is None else found | self.held_out.examples()

    def without(self, examples: Collection[str]) -> DataSet:
        """Return the data set without the rows at these locations, held-out ones included."""
        held_out = None if self.held_out is None else self.held_out.without(examples)
        num_examples = self.num_rows or NUM_TASK_EXAMPLES
        kept = [row for row in range(num_examples) if self.location(row) not in examples]
        if len(kept) == num_examples:
            return replace(self, held_out=held_out)
        if self.num_rows is None or not kept:
            raise ConfigError(
                f"data.long_prompts: expected stop, because skip leaves no prompt of '{self.name}' "
                "(generated ones cannot be skipped); use a larger data.max_prompt_length"
            )
        return replace(self, held_out=held_out, kept=kept)

    def fingerprint(self) -> str | None:
        """Digest the number of rows and all columns, however they are stored; of more than
        NUM_DIGESTED rows, that many at equal distances. None for a task."""
        if self.num_rows is None:
            return None
        digest = hashlib.sha256(f"{self.num_rows} {self.epoch_length}".encode())
        step = -(-self.num_rows // NUM_DIGESTED)
        rows = self.rows[::step] if isinstance(self.rows, list) else self.rows.every(step)
        for row in rows:
            digest.update(json.dumps(row, sort_keys=True, default=content_of).encode())
        return digest.hexdigest()


class PromptStream:
    """Prompts without end. Of every BLOCK each data set has its exact share, spread evenly."""

    def __init__(self, data: Mapping[str, DataSet], weights: Sequence[float]) -> None:
        """`data` by the names that `data.dataset` has."""
        self._names, self._data = list(data), list(data.values())
        self._counts = _shares(weights)
        turns = [(number, n) for number, count in enumerate(self._counts) for n in range(count)]
        self._turns = sorted(turns, key=lambda turn: (turn[1] + 0.5) / self._counts[turn[0]])
        """The data set at each position in a block, and the number of its prompts before."""
        forms = [(each.form, dict.fromkeys(each.columns)) for each in self._data]
        found = (form.reward_columns(form.named(row)) for form, row in forms)
        self._columns = dict.fromkeys(name for columns in found for name in columns)

    @property
    def epoch_length(self) -> int | None:
        """Rows of all data sets together; None where prompts are generated."""
        lengths = [each.epoch_length for each in self._data]
        return None if None in lengths else sum(length or 0 for length in lengths)

    def prompt(self, index: int) -> Prompt:
        block, position = divmod(index, BLOCK)
        number, before = self._turns[position]
        prompt = self._data[number].prompt(block * self._counts[number] + before)
        return self._with_source(prompt, number, index)

    def _with_source(self, prompt: Prompt, number: int, index: int) -> Prompt:
        if len(self._data) == 1:
            return prompt
        columns = {**self._columns, **prompt.columns}
        if columns.get(SOURCE_COLUMN) is None:
            columns[SOURCE_COLUMN] = self._names[number]
        return replace(prompt, index=index, columns=columns)

    def first_of_each(self) -> Iterator[tuple[str, Prompt, Prompt]]:
        """Yield each data set's name, and its first prompt with its own columns and with all."""
        for number, (name, data) in enumerate(zip(self._names, self._data, strict=True)):
            prompt = data.prompt(0)
            yield name, prompt, self._with_source(prompt, number, 0)

    @property
    def is_partly_held_out(self) -> bool:
        return len({each.held_out is None for each in self._data}) > 1

    def held_out(self) -> list[Prompt]:
        """The prompts that are never trained. Several data sets take turns."""
        parts = [(number, each.held_out) for number, each in enumerate(self._data) if each.held_out]
        found = [
            (row, number, part.prompt(row))
            for number, part in parts
            for row in range(part.epoch_length or 0)
        ]
        in_turn = enumerate(sorted(found, key=lambda each: each[:2]))
        return [self._with_source(prompt, number, index) for index, (_, number, prompt) in in_turn]

    def examples(self) -> dict[str, str | Messages]:
        """Return the examples of all data sets. Raises ConfigError where only some are strings."""
        found = {location: c for each in self._data for location, c in each.examples().items()}
        kinds = {type(content): location for location, content in found.items()}
        if len(kinds) > 1:
            raise ConfigError(
                f"{kinds[str]}: expected chat messages as in {kinds[list]}, got a string; "
                "data.chat=true makes a chat of a string"
            )
        return found

    def without(self, examples: Collection[str]) -> PromptStream:
        """Leave out the rows at these locations. Raises ConfigError if none is left."""
        fewer = copy(self)
        fewer._data = [each.without(examples) for each in self._data]
        return fewer

    def fingerprint(self) -> str | None:
        """A digest of the rows; None where all prompts are generated."""
        prints = [each.fingerprint() for each in self._data]
        if len(prints) == 1 or not any(prints):
            return prints[0]
        return hashlib.sha256(json.dumps(prints).encode()).hexdigest()


def _shares(weights: Sequence[float]) -> list[int]:
    """Integer shares of BLOCK in proportion, by the largest remainder, each at least 1."""
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) > BLOCK:
        shares[shares.index(max(shares))] -= 1
    by_remainder = sorted(range(len(shares)), key=lambda k: shares[k] - exact[k])
    for number in by_remainder[: BLOCK - sum(shares)]:
        shares[number] += 1
    return shares
