"""Turn rows of data sets into the endless stream of prompts that a run takes its prompts from.

    row ─┬─► prompt_column, or prompt_template ─► system_prompt, chat ─► prompt
         ├─► image_column ─► pictures, with their places in the prompt (`picture_columns`)
         └─► all columns but the prompt's, renamed by `columns` ─► rewards
             (with `answer_from` also the last message of a conversation, as `answer`)

    DataSet         rows, epoch after epoch, each in an order of its own; or endless ones of a task
    PromptStream    one data set or several, each with its own share and its own epochs

`prompt(index)` is a pure function of the index, so that a resumed run needs one number only.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from easyrl.config import ConfigError, DataConfig
from easyrl.data import row_shapes
from easyrl.data.chat import read_messages
from easyrl.data.picture_columns import PictureSource
from easyrl.data.pictures import PictureError, PictureSize, open_picture, size_of
from easyrl.data.presets import Preset
from easyrl.data.row_shapes import as_messages
from easyrl.data.values import column_of, is_missing, value_at, with_none
from easyrl.types import Messages, Picture, Prompt

KEY = "data.dataset (--dataset)"
Row = Mapping[str, Any]
MAX_DIGESTED_ROWS = 100_000
"""A fingerprint reads at most this many rows, in half a second."""
MAX_DECODED = 256
"""Number of pictures of a data set that are decoded before a run; of the others the header is read.
A run ends at a damaged one that it meets later."""
MAX_OPENED_ROWS = 10_000
"""Number of rows of a data set whose pictures are opened before a run."""
NUM_TASK_EXAMPLES = 256
"""Number of generated training prompts that are checked before a run."""
RESERVED_COLUMNS = {
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
}
"""Arguments of a reward function that are not columns."""
TEACHER_SUFFIX = " (algorithm.teacher_prompt)"
"""End of the location of a teacher's prompt."""
BLOCK = 1000
"""Number of successive prompts of a mixture in which each data set has its exact share."""
SOURCE_COLUMN = "data_source"
"""Column that names the data set of a mixture's row, unless the rows have this column already."""
ANSWER_COLUMN = "answer"
"""Column that the built-in rewards compare completions with."""
ENVIRONMENT_COLUMN = "environment"
"""Column that names the environment of a row, where a run has several."""
ANSWER_FROM_KEY = "data.answer_from"


class _Template(string.Formatter):
    """Fills templates with columns, with parts of columns as in {choices.text[0]}, and with options
    as in {choices.text:letters}: a line for each, after a letter or a number from 0."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Row) -> tuple[Any, str]:
        return value_at(kwargs, field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec not in ("letters", "numbers"):
            return str(super().format_field(value, format_spec))
        if not isinstance(value, list) or len(value) > len(string.ascii_uppercase):
            most = len(string.ascii_uppercase)
            raise ValueError(f"expected a list of at most {most} options, got {value!r:.80}")
        lines = []
        for number, option in enumerate(value):
            mark = string.ascii_uppercase[number] if format_spec == "letters" else number
            lines.append(f"{mark}. {option}")
        return "\n".join(lines)


class RowForm:
    """Turn a row into a prompt: by the user's keys of the section `data`, else the preset's.

    Rows without a prompt may be recognised by their columns: `fitted_to`.
    """

    def __init__(
        self,
        data: DataConfig,
        preset: Preset | None,
        environments: Collection[str] = (),
        number: int = 0,
        key: str = "",
    ) -> None:
        """`environments`: names of the run's environments. Where there are any, every prompt is a
        chat, and a row needs no prompt. `number`: index of the data set in a mixture. `key`: the
        setting that errors name; by default the one that makes the prompt."""
        has_preset = preset is not None
        preset = preset or Preset(reward="")
        self.prompt_column = data.prompt_column or preset.prompt_column
        self.system_prompt = data.system_prompt
        self._is_mixed = len(data.datasets) > 1
        columns = data.columns
        self.max_image_bytes = data.max_image_bytes
        self.pictures = PictureSource()  # without a column, unless `use_pictures` names one
        self.new_names = columns[number] if isinstance(columns, list) else columns
        """Name for the rewards -> name in the rows, as in {"answer": "solution"}."""
        is_chat = preset.chat if data.chat is None else data.chat
        self.is_chat = bool(is_chat or data.system_prompt or environments)
        self.environments = () if "" in environments else environments
        template = data.prompt_template
        if template is None and data.prompt_column is None:
            template = preset.prompt_template
        self.template = template or None
        if self.template is None:
            self.key = key or "data.prompt_column"
        else:
            self.key = key or "data.prompt_template"
        used = self._columns_of_template()
        if self.template and not (used or environments):
            raise ConfigError(
                f"{self.key}: expected a column, as in {{question}}, got {self.template!r}: "
                "all prompts would be the same; {{ and }} are braces"
            )
        self.prompt_columns = used if self.template else [self.prompt_column]
        self.takes_last_message = data.answer_from is not None
        """Whether the last message of a conversation is the answer, and not part of the prompt."""
        names_prompt = self.template is not None or data.prompt_column is not None
        self.may_lack_prompt = bool(environments) and not (names_prompt or self.takes_last_message)
        self._is_open = not (names_prompt or key or has_preset)
        """Whether the rows may show how prompts are made of them, as no setting does."""
        self._ends_with_user = False  # a row that ends with the assistant's message is refused
        self.keeps_own_answer = False  # the rows have a column `answer` beside their conversation
        self.instruction: row_shapes.Instruction | None = None
        self.system_column: str | None = None
        self.understood = ""  # what `fitted_to` has recognised, for the user
        if self.takes_last_message:
            self._check_answer_from()

    def _check_answer_from(self) -> None:
        """Raise ConfigError for other settings that say where prompt or answer is."""
        if self.template is not None:
            raise ConfigError(
                f"{ANSWER_FROM_KEY}: expected null with data.prompt_template or a preset, because "
                "the prompt is then no conversation whose last message could be the answer"
            )
        if ANSWER_COLUMN in self.new_names:
            raise ConfigError(
                f"{ANSWER_FROM_KEY}: expected null, because data.columns says what `answer` is: "
                f"{self.new_names[ANSWER_COLUMN]}"
            )

    def use_pictures(self, source: PictureSource) -> None:
        """Take the prompts' pictures from a column. Every prompt is then a chat."""
        self.pictures = source
        self.is_chat = self.is_chat or source.column is not None

    def _columns_of_template(self) -> list[str]:
        """Return the columns that the template names. Raises ConfigError for a wrong brace."""
        names = []
        try:
            for _, name, _, _ in string.Formatter().parse(self.template or ""):
                if name is not None:
                    names.append(name)
        except ValueError as error:
            raise ConfigError(f"{self.key}: {error}; braces: {{{{ and }}}}") from None
        return names

    def fitted_to(self, row: Row) -> RowForm:
        """Return the form for rows whose first is `row`. Where no setting names the prompt and
        there is no column `prompt`, a conversation or an instruction is recognised."""
        fitted = copy(self)
        if not self._is_open:
            if self.takes_last_message:
                fitted._use_conversation(self.prompt_column)
            return fitted
        named = self._renamed(row)
        needs_no_prompt = self.may_lack_prompt or self.prompt_column in named
        if self.takes_last_message:
            columns = (self.prompt_column, *row_shapes.CONVERSATION_COLUMNS)
            conversation = row_shapes.conversation_in(named, columns)
            if conversation is not None:
                fitted._use_conversation(conversation)
                fitted._use_system(row)
            return fitted
        if needs_no_prompt:
            return fitted
        conversation = row_shapes.conversation_in(named)
        if conversation is not None:
            fitted.takes_last_message = row_shapes.ends_with_answer(named[conversation])
            fitted._ends_with_user = not fitted.takes_last_message
            fitted.keeps_own_answer = ANSWER_COLUMN in named
            fitted._use_conversation(conversation)
            fitted._use_system(row)
            return fitted
        instruction = row_shapes.instruction_in(row)
        if instruction is not None:
            fitted._use_instruction(instruction, row)
            fitted._use_system(row)
        return fitted

    def _use_conversation(self, column: str) -> None:
        self.prompt_column = column
        self.prompt_columns = [column]
        self.understood = f"the prompt is column '{column}'"
        if self.takes_last_message:
            self.understood += " without its last message"
            if not self.keeps_own_answer:
                self.understood += ", whose text is 'answer' (data.answer_from=last_message)"

    def _use_instruction(self, instruction: row_shapes.Instruction, row: Row) -> None:
        self.instruction = instruction
        self.prompt_columns = [instruction.instruction, instruction.context]
        self.understood = (
            f"the prompt is columns '{instruction.instruction}' and '{instruction.context}'"
        )
        if ANSWER_COLUMN not in {*row, *self.new_names}:
            self.new_names = {**self.new_names, ANSWER_COLUMN: instruction.answer}
            self.understood += f", and '{instruction.answer}' is 'answer'"

    def _use_system(self, row: Row) -> None:
        """Put the message of the rows' own column `system` first, unless the user has given one."""
        name = row_shapes.SYSTEM_COLUMN
        if self.system_prompt or not isinstance(row.get(name), str):
            return
        self.system_column = name
        self.is_chat = True
        self.prompt_columns = [*self.prompt_columns, name]
        self.understood += f"; the system message is column '{name}'"

    def named(self, row: Row) -> Row:
        """Return the row, or a part of one, with the names of `data.columns` beside its own, and
        with the answer that is in its conversation. Raises ValueError for a conversation without
        one."""
        named = self._renamed(row)
        is_asked = self.takes_last_message and not self.keeps_own_answer
        if is_asked and self.prompt_column in named:
            named[ANSWER_COLUMN] = self._conversation(named)[-1]["content"]
        return named

    def _renamed(self, row: Row) -> dict[str, Any]:
        """Return the row with the names of `data.columns`. A part that a row lacks is None."""
        renamed = dict(row)
        for new, old in self.new_names.items():
            if column_of(old, row) not in row:
                continue
            try:
                renamed[new] = value_at(row, old)
            except LookupError:
                renamed[new] = None
        return renamed

    def column_names(self, given: Collection[str]) -> list[str]:
        """Return the names of the columns of `named` rows that have the columns `given`."""
        names = dict.fromkeys(given)
        for new, old in self.new_names.items():
            if column_of(old, given) in given:
                names[new] = None
        if self.takes_last_message:
            names[ANSWER_COLUMN] = None
        return list(names)

    def check_columns(self, first: Row, dataset: str) -> None:
        """Raise ConfigError for a column or a part of one that the data's first row lacks, and a
        new name that is reserved."""
        reserved = sorted(RESERVED_COLUMNS & self.new_names.keys())
        if reserved:
            expected = "expected names that no other argument of a reward function has"
            raise ConfigError(f"data.columns: {expected}, got {', '.join(reserved)}")
        for new, old in self.new_names.items():
            self._check_column(f"data.columns.{new}", old, first, first, dataset)
        known = self.column_names(first)
        needed = [] if self.may_lack_prompt else self.prompt_columns
        for name in needed:
            values = first if column_of(name, first) in first else dict.fromkeys(known)
            self._check_column(self.key, name, values, first, dataset)

    def _check_column(self, key: str, name: str, values: Row, first: Row, dataset: str) -> None:
        """Raise ConfigError if there is no column `name`, or no such part, in `values`."""
        is_template = key == self.key and self.template is not None
        if column_of(name, values) in values:
            try:
                value_at(values, name)
            except LookupError as error:
                hint = "; write braces as {{ and }}" if is_template else ""
                raise ConfigError(f"{key}: '{name}' of '{dataset}': {error}{hint}") from None
            return
        if is_template:
            hint = "write braces as {{ and }}"
        else:
            hint = f"as in {key}={row_shapes.likely_prompt(first)}"
        if self._is_mixed:
            hint += "; 'data.columns=[{}, …]' renames those of each data set"
        names = ", ".join(first)
        raise ConfigError(
            f"{key}: expected a column of '{dataset}', which are {names}, got '{name}'; {hint}"
        )

    def content(self, row: Row) -> str | Messages:
        """Make the prompt of a row. Raises ValueError where it has none, or no environment, or not
        as many pictures as it shows."""
        content = self._given_prompt(row)
        return content if isinstance(content, str) else self.pictures.place(content, row).messages

    def pictures_of(self, row: Row) -> tuple[Picture, ...]:
        """Return the pictures of a row's prompt, in their order. Raises ValueError for a file that
        cannot be read."""
        content = self._given_prompt(row)
        if isinstance(content, str):
            return ()
        return self.pictures.read(self.pictures.place(content, row).values)

    def _given_prompt(self, row: Row) -> str | Messages:
        """Return the prompt of a row, in which pictures may have no places yet."""
        environment = row.get(ENVIRONMENT_COLUMN)
        if self.environments and environment not in self.environments:
            names = ", ".join(self.environments)
            raise ValueError(
                f"column '{ENVIRONMENT_COLUMN}': expected one of {names} (rollout.environment), "
                f"got {environment!r}"
            )
        system_prompt = self.system_prompt
        if self.system_column is not None:
            system_prompt = row[self.system_column]
        content = self._given_content(row)
        if isinstance(content, str) and content:
            if not self.is_chat:
                return content
            content = [{"role": "user", "content": content}]
        messages = self._read(content)
        if self._ends_with_user and row_shapes.ends_with_answer(messages):
            raise ValueError(
                f"column '{self.prompt_column}': expected a prompt as in the first row, got the "
                f"assistant's answer at its end; data.prompt_column={self.prompt_column} takes all "
                "messages as the prompt"
            )
        if system_prompt and messages[0]["role"] != "system":
            return [{"role": "system", "content": system_prompt}, *messages]
        return messages

    def _given_content(self, row: Row) -> Any:
        """Return the prompt column's value, or the filled template."""
        if self.may_lack_prompt and self.prompt_column not in row:
            return [{"role": "user", "content": ""}]
        if self.takes_last_message:
            return self._conversation(row)[:-1]
        if self.instruction is not None:
            return self._instruction_text(self.instruction, row)
        if self.template is None:
            return row[self.prompt_column]
        for name in self.prompt_columns:
            try:
                value = value_at(row, name)
            except LookupError as error:
                raise ValueError(f"{self.key}: column '{name}': {error}") from None
            if is_missing(value):
                raise ValueError(f"{self.key}: expected a value in column '{name}'")
        try:
            return _Template().vformat(self.template, (), row)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.key}: {error}") from None

    def _read(self, content: Any) -> Messages:
        """Return chat messages, also of ShareGPT's turns. Raises ValueError for another value."""
        source = f"column '{self.prompt_column}' ({self.key})"
        try:
            messages = as_messages(content)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        return read_messages(messages, source, takes_pictures=True)

    def _conversation(self, row: Row) -> Messages:
        """Return the messages of a row whose last one is the answer. Raises ValueError where it is
        not an assistant's text, or the only message."""
        where = f"column '{self.prompt_column}' ({ANSWER_FROM_KEY}=last_message)"
        given = row[self.prompt_column]
        if isinstance(given, str):
            try:
                given = row_shapes.messages_of_transcript(given)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        messages = self._read(given)
        role = messages[-1]["role"]
        if role not in row_shapes.ASSISTANT_ROLES:
            raise ValueError(
                f"{where}: expected the assistant's answer in the last message, got one of "
                f"'{role}'; data.prompt_column={self.prompt_column} with "
                f"{ANSWER_FROM_KEY}=null takes all messages as the prompt"
            )
        if not isinstance(messages[-1]["content"], str):
            raise ValueError(f"{where}: expected a text in the last message, got a picture")
        if not messages[-1]["content"].strip():
            raise ValueError(f"{where}: expected a text in the last message, got none")
        if len(messages) == 1:
            raise ValueError(f"{where}: expected a message before the answer, got none")
        return messages

    def _instruction_text(self, names: row_shapes.Instruction, row: Row) -> str:
        instruction = row[names.instruction]
        if is_missing(instruction):
            raise ValueError(f"{self.key}: expected a value in column '{names.instruction}'")
        context = row[names.context]
        return str(instruction) if is_missing(context) else f"{instruction}\n\n{context}"

    def reward_columns(self, row: Row) -> dict[str, Any]:
        """Return the columns of a row for rewards, without the prompt and without reserved and
        replaced names. Every missing value is None, but an empty string may be intended."""
        replaced = set(self.new_names.values()) - self.new_names.keys()
        left_out = {self.prompt_column, *RESERVED_COLUMNS, *replaced}
        columns = with_none({name: value for name, value in row.items() if name not in left_out})
        with_pictures = self.pictures.column
        if with_pictures is not None and with_pictures in columns:
            columns[with_pictures] = self.pictures.as_pictures(columns[with_pictures])
        return columns


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
        if column is None or column not in row:
            return row
        return {**row, column: self.form.pictures.as_pictures(row[column])}


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
