"""Turn data sets into the endless stream of prompts that a run takes its prompts from.

    DataSet         rows, epoch after epoch, each in an order of its own; or endless ones of a task
    PromptStream    one data set or several, each with its own share and its own epochs

What a row becomes is said in `row_form`. `prompt(index)` is a pure function of the index, so that a
resumed run needs one number only.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from easyrl.config import ConfigError
from easyrl.data import row_shapes
from easyrl.data.chat import has_picture
from easyrl.data.pictures import PictureError, PictureSize, open_picture, size_of
from easyrl.data.row_form import ANSWER_COLUMN, ENVIRONMENT_COLUMN, Row, RowForm
from easyrl.data.values import column_of, value_at
from easyrl.types import Messages, Picture, Prompt

KEY = "data.dataset (--dataset)"
MAX_DIGESTED_ROWS = 100_000
"""A fingerprint reads at most this many rows, in half a second."""
MAX_DECODED = 256
"""Number of pictures of a data set that are decoded before a run; of the others the header is read.
A run ends at a damaged one that it meets later."""
MAX_OPENED_ROWS = 10_000
"""Number of rows of a data set whose pictures are opened before a run."""
NUM_TASK_EXAMPLES = 256
"""Number of generated training prompts that are checked before a run."""
TEACHER_SUFFIX = " (algorithm.teacher_prompt)"
"""End of the location of a teacher's prompt."""
BLOCK = 1000
"""Number of successive prompts of a mixture in which each data set has its exact share."""
SOURCE_COLUMN = "data_source"
"""Column that names the data set of a mixture's row, unless the rows have this column already."""


def content_of(value: Any) -> Any:
    """Return JSON for a value of a type that JSON lacks: all of its content, and no address."""
    if isinstance(value, Picture):
        return value.digest
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
    locations: Sequence[str] | None = None  # file and line of each row, as in data.jsonl:3
    held_out: DataSet | None = None  # rows that are never trained
    kept: Sequence[int] | None = None  # indices of the rows that are not left out; None: all
    teacher_form: RowForm | None = None  # makes the teacher's prompts, if it has its own

    def __post_init__(self) -> None:
        if self.num_rows == 0:
            raise ConfigError(f"{KEY}: '{self.name}' has no rows")
        for form in self._forms().values():
            form.check_columns(self.first_row, self.name)

    @classmethod
    def of_rows(
        cls,
        name: str,
        rows: Any,
        form: RowForm,
        seed: int | None,
        locations: Sequence[str] | None = None,
    ) -> DataSet:
        """Make a data set of a user's rows, with the form that the first of them shows."""
        fitted = form.fitted_to(rows[0]) if len(rows) else form
        return cls(name, rows, fitted, seed, locations)

    def _forms(self) -> dict[str, RowForm]:
        """Return what makes prompts of a row, by the end of their locations."""
        forms = {"": self.form}
        if self.teacher_form is not None:
            forms[TEACHER_SUFFIX] = self.teacher_form
        return forms

    @property
    def num_rows(self) -> int | None:
        """Number of rows, those left out included. None: a task's rows are endless."""
        return None if callable(self.rows) else len(self.rows)

    @property
    def epoch_length(self) -> int | None:
        """Number of prompts of an epoch. None: a task has no epochs."""
        return self.num_rows if self.kept is None else len(self.kept)

    @property
    def first_row(self) -> Row:
        first: Row = self.rows(0) if callable(self.rows) else self.rows[0]
        return first

    @property
    def columns(self) -> list[str]:
        return list(self.first_row)  # all rows have the same

    def location(self, row: int) -> str:
        return self.locations[row] if self.locations else f"{self.name}, row {row}"

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index that counts over all epochs."""
        number = self._row_number(index)
        row = self.form.named(self.rows(number) if callable(self.rows) else self.rows[number])
        teacher_content = None
        if self.teacher_form is not None:
            teacher_content = self.teacher_form.content(row)
        try:
            pictures = self.form.pictures_of(row)
            columns = self.form.reward_columns(row)
        except PictureError as error:
            raise ConfigError(f"{self.location(number)}: {error}") from None
        return Prompt(
            index,
            self.form.content(row),
            columns,
            teacher_content,
            pictures,
        )

    def _row_number(self, index: int) -> int:
        """Return the number of the row at an index that counts over all epochs."""
        length = self.epoch_length
        if length is None:
            return index
        epoch, number = divmod(index, length)
        if self.seed is not None:
            number = int(_order(self.seed, epoch, length)[number])
        if self.kept is not None:
            number = self.kept[number]
        return number

    def examples(self) -> dict[str, str | Messages]:
        """Return the prompts to check, by location: of all rows or the first generated ones, the
        teacher's, and the held-out ones. Raises ConfigError if a row has none."""
        found = {}
        for number, row in enumerate(self._example_rows()):
            for suffix, form in self._forms().items():
                location = self.location(number) + suffix
                try:
                    found[location] = form.content(form.named(row))
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"{location}: {error}") from None
        if self.held_out is not None:
            found |= self.held_out.examples()
        return found

    def _example_rows(self) -> Iterable[Row]:
        """Return all rows, or the first generated ones. Of a table, they have only the columns that
        prompts are made from."""
        if callable(self.rows):
            return map(self.rows, range(NUM_TASK_EXAMPLES))
        if isinstance(self.rows, list):
            return self.rows
        needed = {ENVIRONMENT_COLUMN}
        for form in self._forms().values():
            needed.update(form.prompt_columns)
        given = self.rows.column_names
        columns = set()
        for name in needed:
            named = column_of(name, self.form.column_names(given))
            columns.add(column_of(self.form.new_names.get(named, named), given))
        if self.form.pictures.column is not None:
            columns.add(self.form.pictures.column)
        columns.intersection_update(given)
        rows: Iterable[Row] = self.rows.only([*columns])
        return rows

    def picture_sizes(self) -> Iterator[tuple[str, list[PictureSize]]]:
        """Yield the sizes of the pictures of prompts to check, by location: of all, or of
        MAX_OPENED_ROWS at equal distances. Raises ConfigError for a picture that cannot be opened;
        the first ones are decoded, of others the header is read."""
        num_decoded = 0
        num_rows = self.num_rows or NUM_TASK_EXAMPLES
        step = math.ceil(num_rows / MAX_OPENED_ROWS)
        for number in range(0, num_rows, step):
            row = self.rows(number) if callable(self.rows) else self.rows[number]
            location = self.location(number)
            sizes = []
            num_bytes = 0
            try:
                for picture in self.form.pictures_of(self.form.named(row)):
                    num_bytes += len(picture.data)
                    if num_decoded < MAX_DECODED:
                        open_picture(picture)
                        num_decoded += 1
                    sizes.append(size_of(picture))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{location}: {error}") from None
            if num_bytes > self.form.max_image_bytes:
                raise ConfigError(
                    f"{location}: expected image files of at most {self.form.max_image_bytes} "
                    f"bytes in a prompt (data.max_image_bytes), got {num_bytes}"
                )
            yield location, sizes
        if self.held_out is not None:
            yield from self.held_out.picture_sizes()

    def without(self, examples: Collection[str]) -> DataSet:
        """Return the data set without the rows at these locations, held-out ones included."""
        held_out = None if self.held_out is None else self.held_out.without(examples)
        num_examples = self.num_rows or NUM_TASK_EXAMPLES
        kept = []
        for row in range(num_examples):
            if self.location(row) not in examples:
                kept.append(row)
        if len(kept) == num_examples:
            return replace(self, held_out=held_out)
        if self.num_rows is None or not kept:
            raise ConfigError(
                f"data.long_prompts: expected stop, because skip leaves no prompt of '{self.name}' "
                "(generated ones cannot be skipped); use a larger data.max_prompt_length"
            )
        return replace(self, held_out=held_out, kept=kept)

    def warnings(self) -> list[str]:
        """Return what may be wrong with the rows, and what their form was recognised to be."""
        found = []
        if self.form.understood:
            found.append(f"note: rows of '{self.name}': {self.form.understood}")
        name = self.form.new_names.get(ANSWER_COLUMN, ANSWER_COLUMN)
        column = column_of(name, self.columns)
        if column in getattr(self.rows, "guessed_columns", ()):
            found.append(
                f"warning: {KEY}: datasets has turned the texts of column '{column}' of "
                f"'{self.name}' into times, which are now written as in {self.rows[0][column]!r}; "
                "if they were written otherwise, no answer equals them: download the file and give "
                "its path"
            )
        if self._answer_is_conversation():
            found.append(
                f"warning: data.columns.answer: '{name}' is a conversation, and rewards get all of "
                f"its messages as `answer`; data.answer_from=last_message gives them the text of "
                "the last one, and takes it out of the prompt"
            )
        return found

    def _answer_is_conversation(self) -> bool:
        """Return whether the user's name for the answer is of a list of messages."""
        name = self.form.new_names.get(ANSWER_COLUMN)
        if name is None:
            return False
        try:
            return row_shapes.is_conversation(value_at(self.first_row, name))
        except LookupError:
            return False

    def fingerprint(self) -> str | None:
        """Digest the number of rows and all columns, however they are stored. Of more than
        MAX_DIGESTED_ROWS rows, read as many at equal distances. None for a task."""
        if self.num_rows is None:
            return None
        lengths = f"{self.num_rows} {self.epoch_length}"
        digest = hashlib.sha256(lengths.encode())
        step = math.ceil(self.num_rows / MAX_DIGESTED_ROWS)
        is_list = isinstance(self.rows, list)
        rows = self.rows[::step] if is_list else self.rows.every(step)
        for row in rows:
            text = json.dumps(self._with_digests(row), sort_keys=True, default=content_of)
            digest.update(text.encode())
        return digest.hexdigest()

    def _with_digests(self, row: Row) -> Row:
        """Return a row with digests of its pictures, wherever their files are."""
        column = self.form.pictures.column
        if column is not None and column in row:
            return {**row, column: self.form.pictures.as_pictures(row[column])}
        named = self.form.named(row)
        prompt_column = self.form.prompt_column
        if column is not None or not _has_picture_part(named.get(prompt_column)):
            return row
        form = copy(self.form)
        form.system_prompt = None  # the rows have none
        return {**named, prompt_column: [form.content(named), form.pictures_of(named)]}


def _has_picture_part(prompt: Any) -> bool:
    """Return whether a prompt is a chat, of which a part is a picture."""
    if not isinstance(prompt, list):
        return False
    messages = [message for message in prompt if isinstance(message, Mapping)]
    return any(has_picture(message.get("content")) for message in messages)


class Turn(NamedTuple):
    """Which data set the prompt at a position of a block is from."""

    dataset: int  # index of the data set
    num_before: int  # number of the data set's prompts before, in the block


class PromptStream:
    """Prompts without end. Of every BLOCK each data set has its exact share, spread evenly."""

    def __init__(self, data: Mapping[str, DataSet], weights: Sequence[float]) -> None:
        """`data` by the names that `data.dataset` has."""
        self._names = list(data)
        self._data = list(data.values())
        self._counts = _shares(weights)
        self._turns = _spread(self._counts)
        self.has_pictures = False  # whether prompts show some: set by `datasets.open_prompts`
        self._columns: dict[str, None] = {}  # of all data sets: a set that keeps the order
        for each in self._data:
            blank = dict.fromkeys(each.form.column_names(each.columns))
            for name in each.form.reward_columns(blank):
                self._columns[name] = None

    @property
    def epoch_length(self) -> int | None:
        """Number of rows of all data sets together; None where prompts are generated."""
        total = 0
        for each in self._data:
            if each.epoch_length is None:
                return None
            total += each.epoch_length
        return total

    def prompt(self, index: int) -> Prompt:
        block, position = divmod(index, BLOCK)
        turn = self._turns[position]
        number = turn.dataset
        num_in_blocks = block * self._counts[number]
        prompt = self._data[number].prompt(num_in_blocks + turn.num_before)
        return self._with_source(prompt, number, index)

    def _with_source(self, prompt: Prompt, number: int, index: int) -> Prompt:
        """Return a mixture's prompt with its index, all columns that any data set has, and the name
        of data set `number`."""
        if len(self._data) == 1:
            return prompt
        columns = {**self._columns, **prompt.columns}
        if columns.get(SOURCE_COLUMN) is None:
            columns[SOURCE_COLUMN] = self._names[number]
        return replace(prompt, index=index, columns=columns)

    def first_of_each(self) -> Iterator[tuple[str, Prompt, Prompt]]:
        """Yield each data set's name, and its first prompt with its own columns and with all."""
        for number, name in enumerate(self._names):
            prompt = self._data[number].prompt(0)
            yield name, prompt, self._with_source(prompt, number, 0)

    @property
    def is_partly_held_out(self) -> bool:
        """Whether some data sets have held-out problems and others have none."""
        return len({each.held_out is None for each in self._data}) > 1

    def held_out(self) -> list[Prompt]:
        """Return the prompts that are never trained. Several data sets take turns."""
        parts: dict[int, DataSet] = {}  # by the number of their data sets
        for number, each in enumerate(self._data):
            if each.held_out is not None:
                parts[number] = each.held_out
        longest = max((part.epoch_length or 0 for part in parts.values()), default=0)
        prompts: list[Prompt] = []
        for row in range(longest):
            for number, part in parts.items():
                if row < (part.epoch_length or 0):
                    index = len(prompts)
                    prompts.append(self._with_source(part.prompt(row), number, index))
        return prompts

    def examples(self) -> dict[str, str | Messages]:
        """Return the examples of all data sets. Raises ConfigError where only some are strings."""
        found: dict[str, str | Messages] = {}
        for each in self._data:
            found.update(each.examples())
        location_of = {type(content): location for location, content in found.items()}
        if len(location_of) > 1:
            raise ConfigError(
                f"{location_of[str]}: expected chat messages as in {location_of[list]}, got a "
                "string; data.chat=true makes a chat of a string"
            )
        return found

    def picture_sizes(self) -> dict[str, list[PictureSize]]:
        """Return the sizes of the pictures of the prompts to check, by location. Raises ConfigError
        for a picture that cannot be opened."""
        found: dict[str, list[PictureSize]] = {}
        for each in self._data:
            found.update(each.picture_sizes())
        return found

    def without(self, examples: Collection[str]) -> PromptStream:
        """Leave out the rows at these locations. Raises ConfigError if none is left."""
        fewer = copy(self)
        fewer._data = [each.without(examples) for each in self._data]
        return fewer

    def warnings(self) -> list[str]:
        found = []
        for each in self._data:
            found += each.warnings()
        return found

    def fingerprint(self) -> str | None:
        """Return a digest of the rows; None where all prompts are generated."""
        prints = [each.fingerprint() for each in self._data]
        if len(prints) == 1 or not any(prints):
            return prints[0]
        return hashlib.sha256(json.dumps(prints).encode()).hexdigest()


def _shares(weights: Sequence[float]) -> list[int]:
    """Return integer shares of BLOCK in proportion to the weights, by the largest remainder, each
    at least 1."""
    total = sum(weights)
    exact = []
    shares = []
    for weight in weights:
        share = weight / total * BLOCK
        exact.append(share)
        shares.append(max(1, int(share)))
    while sum(shares) > BLOCK:
        largest = shares.index(max(shares))
        shares[largest] -= 1

    def excess(number: int) -> float:
        return shares[number] - exact[number]

    num_left = BLOCK - sum(shares)
    by_remainder = sorted(range(len(shares)), key=excess)
    for number in by_remainder[:num_left]:
        shares[number] += 1
    return shares


def _spread(counts: Sequence[int]) -> list[Turn]:
    """Spread the data sets of a block evenly, each with its count of prompts: prompt n of `count`
    stands where (n + 1/2) / count of the block is over."""
    turns = []
    for number, count in enumerate(counts):
        for num_before in range(count):
            turns.append(Turn(number, num_before))

    def part_of_block(turn: Turn) -> float:
        return (turn.num_before + 0.5) / counts[turn.dataset]

    return sorted(turns, key=part_of_block)
