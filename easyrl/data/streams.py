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
import string
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from easyrl.config import ConfigError
from easyrl.config.data import DataConfig
from easyrl.data.presets import Preset
from easyrl.types import Messages, Prompt

KEY = "data.dataset (--dataset)"
Row = Mapping[str, Any]
NUM_DIGESTED, ROWS_AT_A_TIME = 100_000, 1000
"""Most rows that a fingerprint reads (half a second), and rows read together."""
NUM_TASK_EXAMPLES = 256
"""Generated training prompts that are checked before a run."""
RESERVED_COLUMNS = {
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric"),
}
"""Arguments of a reward function that are not columns."""
BLOCK = 1000
"""Prompts of a mixture in which each data set has its exact share."""
SOURCE_COLUMN = "data_source"
"""Column of a mixture's prompts: their data set, unless the rows have this column themselves."""


@dataclass(frozen=True, slots=True)
class Source:
    """An opened data set."""

    name: str
    rows: Any
    """A list, a `datasets.Dataset`, or `TaskRows`."""
    location: Callable[[int], str]
    """Name a row in error messages."""


class RowForm:
    """How rows become prompts: by the user's keys of the section `data`, else the preset's."""

    def __init__(self, data: DataConfig, preset: Preset | None) -> None:
        """Raises ConfigError where the keys contradict each other, and for a template with fields
        that are not the name of a column and nothing else."""
        preset = preset or Preset(reward="")
        self.prompt_column = data.prompt_column or preset.prompt_column
        self.system_prompt, self.renamed = data.system_prompt, data.columns
        self.chat = preset.chat if data.chat is None else data.chat
        """None: a string stays a string, messages stay messages."""
        if self.system_prompt:
            if self.chat is False:
                raise ConfigError("data.chat: expected true with data.system_prompt, got false")
            self.chat = True
        template = data.prompt_template
        if template is None and data.prompt_column is None:
            template = preset.prompt_template
        self.template = template or None
        try:
            fields = list(string.Formatter().parse(template or ""))
        except ValueError as error:
            raise ConfigError(f"data.prompt_template: {error}, in {template!r}") from None
        if any(name == "" or spec or conversion for _, name, spec, conversion in fields):
            raise ConfigError(
                "data.prompt_template: expected columns in braces, as in {question} ({{ and }} "
                f"stand for braces), got {template!r}"
            )
        self._parts = [(literal, name) for literal, name, _, _ in fields]
        """Of the template: text, and the column that follows it."""
        columns = [name for _, name in self._parts if name is not None]
        self.prompt_columns = columns if template else [self.prompt_column]

    def check_columns(self, names: Collection[str], dataset: str) -> None:
        """Raise ConfigError for a column that the config names and the data does not have."""
        key = "data.prompt_column" if self.template is None else "data.prompt_template"
        needed = [(key, name) for name in self.prompt_columns]
        needed += [(f"data.columns.{argument}", name) for argument, name in self.renamed.items()]
        for key, name in needed:
            if name not in names:
                raise ConfigError(
                    f"{key}: there is no column '{name}'; the columns of '{dataset}' are "
                    f"{', '.join(names)}"
                )
        for name in sorted(RESERVED_COLUMNS & set(self.reward_columns(dict.fromkeys(names)))):
            raise ConfigError(
                f"{KEY}: column '{name}' of '{dataset}' has the name of an argument that every "
                f"reward function gets; rename it, as in data.columns={{of_data: {name}}}"
            )

    def content(self, row: Row) -> str | Messages:
        """Make the prompt of a row. Raises ValueError where the row has none."""
        content: Any = row[self.prompt_column] if self.template is None else self._filled(row)
        if not content or not (isinstance(content, str) or _is_messages(content)):
            raise ValueError(
                f"column '{self.prompt_column}' (data.prompt_column): expected a string or chat "
                f'messages [{{"role": ..., "content": ...}}], not empty, got {content!r:.80}'
            )
        if isinstance(content, str):
            if not self.chat:
                return content
            content = [{"role": "user", "content": content}]
        elif self.chat is False:
            raise ValueError("expected a string, as data.chat is false, got messages")
        messages: Messages = content
        if self.system_prompt and messages[0]["role"] != "system":
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def _filled(self, row: Row) -> str:
        text = ""
        for literal, name in self._parts:
            value = "" if name is None else row[name]
            if name is not None and (value in (None, "") or _is_messages(value)):
                raise ValueError(
                    f"data.prompt_template: expected a text in column '{name}', got {value!r:.80}"
                )
            text += literal + str(value)
        return text

    def reward_columns(self, row: Row) -> dict[str, Any]:
        """The columns of a row that rewards get."""
        away = {self.prompt_column, *self.renamed.values()}
        kept = {name: value for name, value in row.items() if name not in away}
        return kept | {argument: row[name] for argument, name in self.renamed.items()}


def _is_messages(content: object) -> bool:
    return isinstance(content, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and message.get("content") is not None
        for message in content
    )


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The endless rows of a task (`Preset.task`)."""

    task: Any
    seed: int
    prompt_column: str

    def __getitem__(self, index: int) -> Row:
        return self._row(self.task.train_prompt(self.seed, index))

    def held_out(self) -> list[Row]:
        return [self._row(prompt) for prompt in self.task.held_out_prompts()]

    def _row(self, prompt: Prompt) -> Row:
        return {self.prompt_column: prompt.content, **prompt.columns}


@lru_cache(maxsize=64)
def _order(seed: int, epoch: int, length: int) -> npt.NDArray[np.int64]:
    """Draw the order of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(length)


@dataclass(frozen=True, slots=True, eq=False)
class DataSet:
    """A data set's prompts, epoch after epoch; those of a task have no epochs."""

    source: Source
    form: RowForm
    seed: int | None
    """Seed of the order; None: the order of the rows."""
    held_out: DataSet | None = None
    """Rows that are never trained."""
    kept: Sequence[int] | None = None
    """Rows that are not left out; None: all."""

    def __post_init__(self) -> None:
        if self.num_rows == 0:
            raise ConfigError(f"{KEY}: '{self.source.name}' has no rows")
        self.form.check_columns(self._column_names, self.source.name)

    @property
    def num_rows(self) -> int | None:
        """None: endless."""
        return None if isinstance(self.source.rows, TaskRows) else len(self.source.rows)

    @property
    def epoch_length(self) -> int | None:
        return self.num_rows if self.kept is None else len(self.kept)

    @property
    def _column_names(self) -> list[str]:
        rows = self.source.rows
        return getattr(rows, "column_names", None) or list(rows[0])  # of a list all have all

    @property
    def reward_columns(self) -> list[str]:
        return list(self.form.reward_columns(dict.fromkeys(self._column_names)))

    def prompt(self, index: int) -> Prompt:
        number = index
        if (length := self.epoch_length) is not None:
            epoch, number = divmod(index, length)
            if self.seed is not None:
                number = int(_order(self.seed, epoch, length)[number])
            if self.kept is not None:
                number = self.kept[number]
        row = self.source.rows[number]
        return Prompt(index, self.form.content(row), self.form.reward_columns(row))

    def examples(self) -> Sequence[Row]:
        """The rows to check before a run, as far as prompts are made from them."""
        rows = self.source.rows
        if isinstance(rows, TaskRows):
            return [rows[index] for index in range(NUM_TASK_EXAMPLES)]
        if isinstance(rows, list):
            return rows
        found: list[Row] = rows.select_columns(self.form.prompt_columns).to_list()
        return found

    def without(self, removed: Mapping[DataSet, Collection[int]]) -> DataSet:
        """The data set without these rows, and without those of its held-out part."""
        held_out = self.held_out and self.held_out.without(removed)
        if self not in removed:
            return replace(self, held_out=held_out)
        kept = [row for row in range(self.num_rows or 0) if row not in removed[self]]
        if not kept:
            raise ConfigError(
                "data.long_prompts: expected stop, because skip leaves no prompt of "
                f"'{self.source.name}' (generated ones cannot be skipped); use a larger "
                "data.max_prompt_length"
            )
        return replace(self, held_out=held_out, kept=kept)

    def fingerprint(self) -> str | None:
        """Digest the number of rows and all columns, however they are stored; of more than
        NUM_DIGESTED rows, that many at equal distances. None for a task."""
        if self.num_rows is None:
            return None
        rows, step = self.source.rows, -(-self.num_rows // NUM_DIGESTED)
        if not isinstance(rows, list):
            rows = rows.with_format("arrow")
        digest = hashlib.sha256(f"{self.num_rows} {self.epoch_length}".encode())
        for start in range(0, self.num_rows, step * ROWS_AT_A_TIME):
            chosen = rows[start : start + step * ROWS_AT_A_TIME : step]
            for row in chosen if isinstance(chosen, list) else chosen.to_pylist():
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()


class PromptStream:
    """Prompts without end: `prompt(i)` is always the same.

    Of every BLOCK prompts each data set has its exact share, spread evenly: after any number of
    prompts no data set is off its share by more than one or two. Which data set a prompt is from is
    a function of the index alone, and each data set continues through its own epochs.
    """

    def __init__(self, data: Mapping[str, DataSet], weights: Sequence[float]) -> None:
        """`data` by the names that `data.dataset` has."""
        self._names, self._data = list(data), list(data.values())
        self._counts = _shares(weights)
        turns = [
            ((before + 0.5) / count, number, before)
            for number, count in enumerate(self._counts)
            for before in range(count)
        ]
        self._turns = [turn[1:] for turn in sorted(turns)]
        """Of each position in a block: the data set, and its prompts earlier in the block."""
        self._columns = dict.fromkeys(name for each in self._data for name in each.reward_columns)

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
        columns = {SOURCE_COLUMN: None, **self._columns, **prompt.columns}
        if columns[SOURCE_COLUMN] is None:
            columns[SOURCE_COLUMN] = self._names[number]
        return replace(prompt, index=index, columns=columns)

    def fingerprint(self) -> str | None:
        """A digest of the rows; None where all prompts are generated."""
        prints = [each.fingerprint() for each in self._data]
        if len(prints) == 1 or not any(prints):
            return prints[0]
        return hashlib.sha256(json.dumps(prints).encode()).hexdigest()

    def held_out(self) -> list[Prompt]:
        """Prompts that are never trained; of several data sets in turn: the first few are from
        each."""
        prompts = [
            [(held_out.prompt(index), number) for index in range(held_out.epoch_length or 0)]
            for number, each in enumerate(self._data)
            if (held_out := each.held_out) is not None
        ]
        in_turn = [found for round_ in zip_longest(*prompts) for found in round_ if found]
        return [
            self._with_source(prompt, number, index)
            for index, (prompt, number) in enumerate(in_turn)
        ]

    def examples(self) -> list[str | Messages]:
        """The prompts to check before a run: for each data set those of every row, or the first
        generated ones, followed by the held-out ones.

        Raises ConfigError for the first row without a prompt, or with one of another kind (string,
        messages) than the first row's.
        """
        contents: list[str | Messages] = []
        for part in self._parts():
            for number, row in enumerate(part.examples()):
                location = part.source.location
                try:
                    contents.append(part.form.content(row))
                except ValueError as error:
                    raise ConfigError(f"{location(number)}: {error}") from None
                if type(contents[0]) is not type(contents[-1]):
                    raise ConfigError(
                        f"{location(number)}: expected {_kind(contents[0])} as in "
                        f"{self.location(0)}, got {_kind(contents[-1])}; data.chat=true makes a "
                        "chat of a string"
                    )
        return contents

    def location(self, example: int) -> str:
        """Name an example in error messages."""
        part, number = self._rows()[example]
        return part.source.location(number)

    def without(self, examples: Collection[int]) -> PromptStream:
        """The stream without these examples. Raises ConfigError where prompts are generated or none
        are left."""
        rows, removed = self._rows() if examples else [], defaultdict(set)
        for part, number in (rows[example] for example in examples):
            removed[part].add(number)
        fewer = copy(self)
        fewer._data = [each.without(removed) for each in self._data]
        return fewer

    def _parts(self) -> list[DataSet]:
        return [part for each in self._data for part in (each, each.held_out) if part is not None]

    def _rows(self) -> list[tuple[DataSet, int]]:
        """Of each example: its part, and its row in it."""
        return [
            (part, number)
            for part in self._parts()
            for number in range(NUM_TASK_EXAMPLES if part.num_rows is None else part.num_rows)
        ]


def _kind(content: str | Messages) -> str:
    return "a string" if isinstance(content, str) else "chat messages"


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
