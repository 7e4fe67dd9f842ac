"""Turn a row of a data set into a prompt and into the columns that rewards get.

    row ─┬─► prompt_column, or prompt_template ─► system_prompt, chat ─► prompt
         ├─► image_column ─► pictures, with their places in the prompt (`picture_columns`)
         └─► all columns but the prompt's, renamed by `columns` ─► rewards
             (with `answer_from` also the last message of a conversation, as `answer`)

Which columns these are, the settings say, or a preset, or the first row shows it (`row_shapes`).
"""

from __future__ import annotations

import string
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any

from easyrl.config import ConfigError, DataConfig
from easyrl.data import row_shapes
from easyrl.data.chat import read_messages
from easyrl.data.picture_columns import PictureSource
from easyrl.data.presets import Preset
from easyrl.data.row_shapes import as_messages
from easyrl.data.values import column_of, is_missing, value_at, with_none
from easyrl.types import Messages, Picture

Row = Mapping[str, Any]
RESERVED_COLUMNS = {
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
}
"""Arguments of a reward function that are not columns."""
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
            is_text = isinstance(value, str)  # it may be empty, as Alpaca's `input`
            if is_missing(value) and not is_text:
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
        given = {}
        for name, value in row.items():
            if name not in left_out:
                given[name] = value
        columns = with_none(given)
        image_column = self.pictures.column
        if image_column is not None and image_column in columns:
            columns[image_column] = self.pictures.as_pictures(columns[image_column])
        return columns
