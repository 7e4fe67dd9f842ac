"""Find the format of a chat template by a probe.

The template writes a call with a value of each type, and its format is the one that reads the call
back exactly.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from easyrl.config import ConfigError
from easyrl.environments.tool_calls.calls import Calls, ToolCall, read_calls
from easyrl.environments.tool_calls.formats import FORMATS

KEY = "rollout.tool_format"

PROBE_NAME = "zqx_probe"
PROBE_TEXT = "zqx probe"
PROBE_ARGUMENTS = {
    "text": PROBE_TEXT,
    "flag": False,
    "count": 3,
    "ratio": 1.5,
    "options": {"names": ["a", "b"], "deep": {"on": True}},
}
_PROBE_TYPES = {
    "text": "string",
    "flag": "boolean",
    "count": "integer",
    "ratio": "number",
    "options": "object",
}
_PROBE_PROPERTIES = {
    name: {"type": kind, "description": "An argument."} for name, kind in _PROBE_TYPES.items()
}
PROBE_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": _PROBE_PROPERTIES,
            "required": list(PROBE_ARGUMENTS),
        },
    },
}
"""A tool whose call shows how a template writes each type."""


def is_probe(calls: Calls) -> bool:
    """Whether exactly the probe was read."""
    if len(calls) != 1 or not isinstance(calls[0], ToolCall):
        return False
    got = json.dumps(calls[0].arguments, sort_keys=True)  # here 1 and true differ
    expected = json.dumps(PROBE_ARGUMENTS, sort_keys=True)
    return calls[0].name == PROBE_NAME and got == expected


def detect_format(
    answers: Sequence[str],
    template: str,
    own_parser: Callable[[str], Calls] | None = None,
    refusal: str = "",
) -> str:
    """Return the name of a template's format; "auto": that of the tokenizer's own parser.

    `answers`: the probe as the template writes it, up to the end of the turn; none: it writes no
    calls, or raises an error with the text `refusal`. Raises ConfigError."""
    for answer in answers:
        for name in FORMATS:
            if is_probe(read_calls(answer, name, [PROBE_SCHEMA])):
                return name
        if own_parser is not None and is_probe(own_parser(answer)):
            return "auto"
    known = ", ".join(sorted(FORMATS))
    expected = (
        f"{KEY}: expected one of {known}, got auto, but the chat template (data.chat_template, or "
        "that of model.path)"
    )
    if answers:
        shown = f"{answers[0].strip()!r:.300}"
        raise ConfigError(f"{expected} writes tool calls in another format: {shown}")
    reason = f"refuses them: {refusal}" if refusal else "does not write them"
    raise ConfigError(
        f"{expected} does not show the format of the tool calls in an answer: it {reason}; set "
        f"{KEY} to the format of the model{_hint(template)}"
    )


def _hint(template: str) -> str:
    """Return the first format that a template mentions, in words."""
    for name, form in FORMATS.items():
        for sign in form.signs:
            if sign in template:
                return f" (perhaps {name}: the template mentions {sign})"
    return ""
