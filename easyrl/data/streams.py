"""Turn rows of data sets into the endless stream of prompts that a run takes its prompts from.

    row ─┬─► prompt_column, or prompt_template ─► system_prompt, chat ─► prompt
         └─► all columns but the prompt's, renamed by `columns` ─► rewards

    TaskStream     problems generated from a seed
    RowStream      a finite data set, epoch after epoch, each in an order of its own
    MixedStream    several of these, each with its own share and its own epochs

`prompt(index)` is a pure function of the index, so that a resumed run needs one number only.
"""

from __future__ import annotations

import hashlib
import json
import string
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, zip_longest
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from easyrl.config import ConfigError
from easyrl.config.data import DataConfig
from easyrl.data.presets import Preset
from easyrl.data.sources import KEY, Source
from easyrl.types import Messages, Prompt

NUM_DIGESTED, ROWS_AT_A_TIME = 100_000, 1000
"""Most rows that a fingerprint reads (half a second), and rows read together."""
NUM_TASK_EXAMPLES = 256
"""Generated training prompts that are checked before a run."""
RESERVED_COLUMNS = {"prompts", "completions", "completion_ids"}
RESERVED_COLUMNS |= {"trainer_state", "log_extra", "log_metric"}
"""Arguments of a reward function that are not columns."""
BLOCK = 1000
"""Prompts of a mixture in which each data set has its exact share."""
SOURCE_COLUMN = "data_source"
"""Column of a mixture's prompts: their data set, unless the rows have this column themselves."""


def _template_parts(text: str) -> tuple[tuple[str, str | None], ...]:
    """Split a template into pairs of a text and the column that follows it. Raises ConfigError for
    a field that is not the name of a column and nothing else."""
    expected = "expected columns in braces, as in {question} ({{ and }} stand for braces)"
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(f"data.prompt_template: {expected}, got {text!r}: {error}") from None
    for _, name, form, conversion in parts:
        if name is not None and (not name or form or conversion):
            raise ConfigError(f"data.prompt_template: {expected}, got {text!r}")
    return tuple((literal, name) for literal, name, _, _ in parts)


@dataclass(frozen=True, slots=True)
class RowForm:
    """How rows become prompts."""

    prompt_column: str
    template: tuple[tuple[str, str | None], ...] | None
    system_prompt: str | None
    is_chat: bool | None
    """None: a string stays a string, messages stay messages."""
    renamed: Mapping[str, str]
    """Argument of the rewards: column of the data."""

    @classmethod
    def of(cls, data: DataConfig, preset: Preset | None) -> RowForm:
        """The user's keys of the section `data`, else the preset's. Raises ConfigError where they
        contradict each other."""
        preset = preset or Preset(rows=None, reward="")

        def chosen(given: Any, of_preset: Any) -> Any:
            return of_preset if given is None else given

        system_prompt = chosen(data.system_prompt, preset.system_prompt) or None
        # A prompt_column of the user's own is not overridden by the preset's template.
        of_preset = preset.prompt_template if data.prompt_column is None else None
        template = chosen(data.prompt_template, of_preset)
        is_chat = chosen(data.chat, preset.chat)
        if system_prompt is not None and is_chat is False:
            raise ConfigError(
                "data.chat: expected true together with data.system_prompt, got false; use "
                'data.chat=true, or data.system_prompt="" for no system prompt'
            )
        return cls(
            prompt_column=chosen(data.prompt_column, preset.prompt_column),
            template=_template_parts(template) if template else None,
            system_prompt=system_prompt,
            is_chat=is_chat or (True if system_prompt is not None else is_chat),
            renamed={**preset.columns, **data.columns},
        )

    @property
    def prompt_columns(self) -> list[str]:
        """The columns that a prompt is made from."""
        if self.template is None:
            return [self.prompt_column]
        return [name for _, name in self.template if name is not None]

    def check_columns(self, names: Collection[str], dataset: str) -> None:
        """Raise ConfigError for a column that the config names and the data does not have."""
        has = f"the columns of '{dataset}' are {', '.join(names)}"
        key = "data.prompt_column" if self.template is None else "data.prompt_template"
        needed = [(key, name) for name in self.prompt_columns]
        needed += [(f"data.columns.{argument}", name) for argument, name in self.renamed.items()]
        for key, name in needed:
            if name not in names:
                raise ConfigError(f"{key}: there is no column '{name}'; {has}")
        for name in sorted(RESERVED_COLUMNS & set(self.reward_columns(dict.fromkeys(names)))):
            raise ConfigError(
                f"data.dataset (--dataset): column '{name}' of '{dataset}' has the name of an "
                "argument that every reward function gets; rename it, as in "
                f"data.columns={{of_data: {name}}}"
            )

    def content(self, row: Mapping[str, Any]) -> str | Messages:
        """Make the prompt of a row. Raises ValueError where the row has none."""
        if self.template is None:
            where = f"column '{self.prompt_column}' (data.prompt_column)"
            content: Any = row[self.prompt_column]
        else:
            where, content = "data.prompt_template", self._filled(row)
        if not _is_prompt(content):
            raise ValueError(
                f"{where}: expected a string that is not empty, or chat messages "
                f'[{{"role": ..., "content": ...}}], got {content!r:.80}'
            )
        if isinstance(content, str):
            if not self.is_chat:
                return content
            content = [{"role": "user", "content": content}]
        elif self.is_chat is False:
            raise ValueError(f"{where}: expected a string, as data.chat is false, got messages")
        if self.system_prompt is not None and content[0]["role"] != "system":
            content = [{"role": "system", "content": self.system_prompt}, *content]
        messages: Messages = content
        return messages

    def _filled(self, row: Mapping[str, Any]) -> str:
        text = ""
        for literal, name in self.template or ():
            value = "" if name is None else row[name]
            is_chat = isinstance(value, list) and value and isinstance(value[0], dict)
            if name is not None and (value is None or value == "" or is_chat):
                raise ValueError(
                    f"data.prompt_template: expected a text in column '{name}', got {value!r:.80}"
                )
            text += literal + str(value)
        return text

    def reward_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row that rewards get."""
        away = {self.prompt_column, *self.renamed.values()}
        kept = {name: value for name, value in row.items() if name not in away}
        return kept | {argument: row[name] for argument, name in self.renamed.items()}


def _is_prompt(content: object) -> bool:
    if isinstance(content, str) or not isinstance(content, list):
        return isinstance(content, str) and bool(content)
    return bool(content) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and message.get("content") is not None
        for message in content
    )


class PromptStream(Protocol):
    """Prompts without end: `prompt(i)` is always the same."""

    @property
    def epoch_length(self) -> int | None:
        """Rows of the data set; None where prompts are generated."""
        ...

    def prompt(self, index: int) -> Prompt: ...

    def fingerprint(self) -> str | None:
        """A digest of the rows; None where prompts are generated."""
        ...

    def held_out(self) -> list[Prompt]:
        """Prompts that are never trained; empty where the data has none."""
        ...

    def examples(self) -> list[str | Messages]:
        """The prompts to check before a run: of every row, or the first generated ones, followed by
        the held-out ones."""
        ...

    def location(self, example: int) -> str:
        """Where an example is, for errors."""
        ...

    def without(self, examples: Collection[int]) -> PromptStream:
        """The stream without these examples. Raises ConfigError where prompts are generated or none
        are left."""
        ...


class TaskStream:
    """The problems that `task` generates: see `Preset.rows`."""

    def __init__(self, name: str, task: Any, form: RowForm, seed: int) -> None:
        self._name = name
        self._task = task
        self._form = form
        self._train_prompts = task.train_prompts(seed)
        form.check_columns([form.prompt_column, *self._train_prompts[0].columns], name)

    @property
    def epoch_length(self) -> None:
        return None

    def prompt(self, index: int) -> Prompt:
        return self._formed(self._train_prompts[index])

    def _formed(self, generated: Prompt) -> Prompt:
        row = {self._form.prompt_column: generated.content, **generated.columns}
        return Prompt(generated.index, self._form.content(row), self._form.reward_columns(row))

    def fingerprint(self) -> None:
        return None

    def held_out(self) -> list[Prompt]:
        return [self._formed(generated) for generated in self._task.held_out_prompts()]

    def examples(self) -> list[str | Messages]:
        first = [self.prompt(index) for index in range(NUM_TASK_EXAMPLES)]
        return [prompt.content for prompt in [*first, *self.held_out()]]

    def location(self, example: int) -> str:
        return f"task '{self._name}', for example {self.examples()[example]!r}"

    def without(self, examples: Collection[int]) -> PromptStream:
        raise ConfigError(
            f"data.long_prompts: expected stop, because the prompts of '{self._name}' are "
            "generated and none can be skipped, got skip; use a larger data.max_prompt_length"
        )


class RowStream:
    """A finite data set, epoch after epoch, each in an order of its own."""

    def __init__(
        self,
        source: Source,
        form: RowForm,
        *,
        seed: int | None,
        held_out: RowStream | None = None,
    ) -> None:
        """`seed` of the order; None: the order of the rows. `held_out`: rows never trained."""
        self._source = source
        self._form = form
        self._seed = seed
        self._held_out = held_out
        if len(source.rows) == 0:
            raise ConfigError(f"{KEY}: '{source.name}' has no rows")
        form.check_columns(source.column_names, source.name)
        self._contents()
        self._keep(np.arange(len(source.rows)))

    def _keep(self, rows: npt.NDArray[np.int64]) -> None:
        self._kept = rows
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def _draw_order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._seed is None:
            return self._kept
        return np.random.default_rng([self._seed, epoch]).permutation(self._kept)

    def _contents(self) -> list[str | Messages]:
        """Every row's prompt. Raises ConfigError for the first row without a prompt, or with one of
        another kind than the first row's."""
        rows: Any = self._source.rows
        if not isinstance(rows, list):
            rows = rows.data.select(self._form.prompt_columns).to_pylist()
        contents: list[str | Messages] = []
        for number, row in enumerate(rows):
            try:
                contents.append(self._form.content(row))
            except ValueError as error:
                raise ConfigError(f"{self._source.location(number)}: {error}") from None
            if type(contents[0]) is not type(contents[-1]):
                raise ConfigError(
                    f"{self._source.location(number)}: expected {_kind(contents[0])} as in "
                    f"{self._source.location(0)}, got {_kind(contents[-1])}; data.chat=true makes "
                    "a chat of a string"
                )
        return contents

    @property
    def epoch_length(self) -> int:
        return len(self._kept)

    def prompt(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self._kept))
        row = dict(self._source.rows[int(self._order(epoch)[position])])
        return Prompt(index, self._form.content(row), self._form.reward_columns(row))

    def fingerprint(self) -> str:
        """Digest the number of rows and all columns, however they are stored; of more than
        NUM_DIGESTED rows, that many at equal distances."""
        num_rows = len(self._source.rows)
        chosen = range(0, num_rows, -(-num_rows // NUM_DIGESTED))
        digest = hashlib.sha256(f"{num_rows} {len(self._kept)}".encode())
        for start in range(0, len(chosen), ROWS_AT_A_TIME):
            for row in self._rows_at(chosen[start : start + ROWS_AT_A_TIME]):
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def _rows_at(self, numbers: range) -> list[dict[str, Any]]:
        rows: Any = self._source.rows
        if isinstance(rows, list):
            return [rows[number] for number in numbers]
        # Not by the table's own `take`, which copies the whole table first.
        found: list[dict[str, Any]] = rows.with_format("arrow")[numbers].to_pylist()
        return found

    def held_out(self) -> list[Prompt]:
        if self._held_out is None:
            return []
        return [self._held_out.prompt(index) for index in range(self._held_out.epoch_length)]

    def examples(self) -> list[str | Messages]:
        held_out = [] if self._held_out is None else self._held_out.examples()
        return self._contents() + held_out

    def location(self, example: int) -> str:
        beyond = example - len(self._source.rows)
        if self._held_out is not None and beyond >= 0:
            return f"held out, {self._held_out.location(beyond)}"
        return self._source.location(example)

    def without(self, examples: Collection[int]) -> RowStream:
        fewer = copy(self)
        fewer._keep(np.setdiff1d(self._kept, np.array(sorted(examples), dtype=np.int64)))
        if len(fewer._kept) == 0:
            raise ConfigError(
                f"data.long_prompts: skip leaves no row of '{self._source.name}'; use a larger "
                "data.max_prompt_length"
            )
        if self._held_out is not None:
            beyond = [example - len(self._source.rows) for example in examples]
            fewer._held_out = self._held_out.without([number for number in beyond if number >= 0])
        return fewer


class MixedStream:
    """Several data sets, each with its share of the prompts.

    Of every BLOCK prompts each data set has its exact share, spread evenly: after any number of
    prompts no data set is off its share by more than one or two. Which data set a prompt is from is
    a function of the index alone, and each data set continues through its own epochs.
    """

    def __init__(self, streams: Mapping[str, PromptStream], weights: Sequence[float]) -> None:
        """`streams` by the names of their data sets."""
        assert len(streams) == len(weights)
        self._names = list(streams)
        self._streams = list(streams.values())
        self._weights = weights
        counts = _shares(weights)
        at = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        whose = np.repeat(np.arange(len(counts)), counts)
        self._whose = whose[np.lexsort((whose, at))]  # [BLOCK]: stream of each position
        self._before = np.zeros(BLOCK, dtype=np.int64)  # [BLOCK]: its prompts earlier in the block
        for number, count in enumerate(counts):
            self._before[self._whose == number] = np.arange(count)
        self._counts = counts
        firsts = [stream.prompt(0) for stream in self._streams]
        self._columns = list(dict.fromkeys(name for first in firsts for name in first.columns))
        for name, first in zip(self._names, firsts, strict=True):
            if isinstance(first.content, str) != isinstance(firsts[0].content, str):
                raise ConfigError(
                    f"{KEY}: expected {_kind(firsts[0].content)} for a prompt of '{name}' as in "
                    f"'{self._names[0]}', got {_kind(first.content)}; data.chat=true makes a chat "
                    "of a string"
                )

    @property
    def epoch_length(self) -> int | None:
        """Rows of all data sets together; None where one is generated."""
        lengths = [stream.epoch_length for stream in self._streams]
        return None if None in lengths else sum(length or 0 for length in lengths)

    def prompt(self, index: int) -> Prompt:
        block, position = divmod(index, BLOCK)
        number = int(self._whose[position])
        own_index = block * self._counts[number] + int(self._before[position])
        return self._with_source(number, self._streams[number].prompt(own_index), index)

    def _with_source(self, number: int, prompt: Prompt, index: int) -> Prompt:
        columns = {SOURCE_COLUMN: None, **dict.fromkeys(self._columns), **prompt.columns}
        if columns[SOURCE_COLUMN] is None:
            columns[SOURCE_COLUMN] = self._names[number]
        return replace(prompt, index=index, columns=columns)

    def fingerprint(self) -> str | None:
        prints = [stream.fingerprint() for stream in self._streams]
        if not any(prints):
            return None
        return hashlib.sha256(json.dumps(prints).encode()).hexdigest()

    def held_out(self) -> list[Prompt]:
        """Those of all data sets in turn: the first few are from each."""
        rounds = zip_longest(*(stream.held_out() for stream in self._streams))
        prompts = [
            (number, prompt)
            for in_turn in rounds
            for number, prompt in enumerate(in_turn)
            if prompt is not None
        ]
        return [self._with_source(number, prompt, i) for i, (number, prompt) in enumerate(prompts)]

    def examples(self) -> list[str | Messages]:
        return [example for stream in self._streams for example in stream.examples()]

    def location(self, example: int) -> str:
        number = bisect_right(self._starts, example) - 1
        return self._streams[number].location(example - self._starts[number])

    def without(self, examples: Collection[int]) -> MixedStream:
        own: list[list[int]] = [[] for _ in self._streams]
        for example in examples:
            number = bisect_right(self._starts, example) - 1
            own[number].append(example - self._starts[number])
        fewer = {
            name: stream.without(removed) if removed else stream
            for name, stream, removed in zip(self._names, self._streams, own, strict=True)
        }
        return MixedStream(fewer, self._weights)

    @cached_property
    def _starts(self) -> list[int]:
        """The number of each stream's first example."""
        lengths = [len(stream.examples()) for stream in self._streams]
        return list(accumulate(lengths[:-1], initial=0))


def _kind(content: str | Messages) -> str:
    return "a string" if isinstance(content, str) else "chat messages"


def _shares(weights: Sequence[float]) -> list[int]:
    """Integer shares of BLOCK in proportion, by the largest remainder, each at least 1."""
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(shares)), key=lambda k: shares[k] - exact[k])
    while (missing := BLOCK - sum(shares)) != 0:
        if missing > 0:
            for number in by_remainder[:missing]:
                shares[number] += 1
        else:
            shares[int(np.argmax(shares))] -= 1
    return shares
