"""Shapes of rows that other tools read: conversations of fine-tuning, instructions, nested columns.

    messages, conversations ─► turns as chat messages ─► prompt, and the last answer as reference
    instruction, input      ─► prompt                    output ─► reference

A shape is recognised only where a row has no prompt and its columns leave no doubt. What is not
recognised is named in an error, together with the setting that reads it.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from easyrl.data.values import column_of, is_missing, value_at
from easyrl.types import Messages

Row = Mapping[str, Any]
CONVERSATION_COLUMNS = ("messages", "conversations")
SYSTEM_COLUMN = "system"
"""Column with the system message of a row's conversation or instruction, where it has one."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}
"""Values of `from` in ShareGPT's turns -> roles of chat messages."""
ASSISTANT_ROLES = ("assistant", "model")
TURN_KEYS = {"from", "value"}
PROMPT_COLUMNS = ("question", "problem", "instruction", "query", "input", "inputs", "text")
"""Usual names of columns with a prompt that is text, the most specific first."""
REFERENCES = {
    "answer": (
        "ground_truth",
        "reward_model.ground_truth",
        "final_answer",
        "solution",
        "answer.aliases",
        "answers.text",
        "answers",
        "answerKey",
        "response",
        "output",
        "completion[-1].content",
        "completion",
        "target",
        "label",
        "chosen[-1].content",
        "chosen",
    ),
    "tests": ("input_output", "test_list", "test", "test_code", "test_cases"),
}
"""Column that rewards read -> usual names of it in public data sets, the most specific first."""
HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
"""Beginnings of the turns of a conversation that is one text, as in HH-RLHF."""


class Instruction(NamedTuple):
    """Columns of rows that have an instruction, what it is about, and the answer to it."""

    instruction: str
    context: str  # may be empty in a row
    answer: str


INSTRUCTIONS = (
    Instruction("instruction", "input", "output"),  # Alpaca
    Instruction("instruction", "context", "response"),  # Dolly
)


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of chat messages, or of ShareGPT's turns."""
    if not isinstance(value, list) or not value:
        return False
    first = value[0]
    return isinstance(first, dict) and ("role" in first or first.keys() >= TURN_KEYS)


def ends_with_answer(conversation: list[Any]) -> bool:
    """Return whether the last message or turn of a conversation is the assistant's."""
    last = conversation[-1]
    if not isinstance(last, dict):
        return False
    role = str(last.get("role") or last.get("from")).lower()
    return ROLES.get(role) == "assistant"


def conversation_in(row: Row, columns: Collection[str] = CONVERSATION_COLUMNS) -> str | None:
    """Return the first of these columns that has a conversation; None if there is none."""
    for name in columns:
        if is_conversation(row.get(name)):
            return name
    return None


def instruction_in(row: Row) -> Instruction | None:
    """Return which columns of a row are an instruction and its answer; None if it has none."""
    for each in INSTRUCTIONS:
        if _has_texts(row, each):
            return each
    return None


def _has_texts(row: Row, columns: Collection[str]) -> bool:
    return all(name in row and isinstance(row[name], str | None) for name in columns)


def as_messages(value: Any) -> Any:
    """Return chat messages for ShareGPT's turns, and any other value as it is. Raises ValueError
    for a turn of a speaker that has no role."""
    if not is_conversation(value):
        return value
    for turn in value:
        if not isinstance(turn, dict) or not turn.keys() >= TURN_KEYS:
            return value
    messages = []
    for number, turn in enumerate(value):
        role = ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise ValueError(
                f"turn {number}: expected from {', '.join(ROLES)}, got {turn['from']!r:.80}; write "
                "other turns, such as calls of tools, as messages with role and content"
            )
        messages.append({"role": role, "content": turn["value"]})
    return messages


def messages_of_transcript(text: str) -> Messages:
    """Return the messages of a conversation that is one text, of turns after HUMAN and ASSISTANT.
    Raises ValueError for another text."""
    if not text.startswith(HUMAN):
        expected = f"expected chat messages, or a text of turns that begins with {HUMAN!r}"
        raise ValueError(f"{expected}, got {text!r:.80}")
    messages = []
    for part in text.replace(ASSISTANT, f"{HUMAN}{ASSISTANT}").split(HUMAN)[1:]:
        role = "assistant" if part.startswith(ASSISTANT) else "user"
        messages.append({"role": role, "content": part.removeprefix(ASSISTANT).strip()})
    return messages


def likely_prompt(columns: Collection[str]) -> str:
    """Return the column that is most likely to have the prompt, to name it in an error."""
    for name in (*PROMPT_COLUMNS, *CONVERSATION_COLUMNS):
        if name in columns:
            return name
    return next(iter(columns), "COLUMN")


def likely_reference(row: Row, wanted: str = "answer") -> str | None:
    """Return the column of a row, or the path in one, that is most likely to be what rewards read
    as the column `wanted`; None if no usual name is there."""
    for name in REFERENCES.get(wanted, ()):
        if column_of(name, row) not in row:
            continue
        try:
            value = value_at(row, name)
        except LookupError:
            continue
        if not is_missing(value) and not is_nested(value):
            return name
    return None


def quoted_name(name: str) -> str:
    """Return a column's name, or a path, as a mapping in YAML has it."""
    return name if name.isidentifier() else f'"{name}"'


def is_nested(value: Any) -> bool:
    """Return whether a value has parts with names, so that it is no answer to compare with."""
    if isinstance(value, list):
        return any(isinstance(each, dict) for each in value)
    return isinstance(value, dict)
