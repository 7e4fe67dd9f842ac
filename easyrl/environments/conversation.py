"""The tokens of a conversation: prompt, sampled turns, and what the template inserts between them.

    prompt ids │ sampled … <end> │ suffix: tool results or the user's turn, and the beginning of
               │                 │         the next answer │ sampled … <end> │ suffix │ …

Sampled tokens are never decoded and encoded again. A suffix is what the chat template writes behind
the end of an answer, found by rendering a short conversation that ends with the same messages. A
template whose suffixes depend on earlier turns is refused. What it would change in earlier turns
(Qwen3's drops their thinking) does not matter.
"""

import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.data.chat import NO_CHAT_TEMPLATE, render_prompt
from easyrl.environments.loading import Interface
from easyrl.environments.tool_calls import (
    BadCall,
    Calls,
    ToolCall,
    detect_format,
    read_calls,
    without_calls,
)
from easyrl.types import Messages

MARK = "zqxanswerqxz"
"""Text that no template writes by itself: it shows where an answer is in a rendered text."""
RESULT = "zqxresultqxz"
CALL_ID = "call00000"  # templates of Mistral's kind demand nine letters or digits
KEY = "data.chat_template"


class Conversations:
    """Renders conversations with the tools of one environment."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        interface: Interface,
        end_tokens: Collection[int],
        *,
        is_checked: bool = True,
    ) -> None:
        """`end_tokens`: tokens that end an answer; `is_checked`: by `check`. Raises ConfigError if
        the chat template cannot be used, or its calls have no known format."""
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(f"rollout.environment: {NO_CHAT_TEMPLATE}")
        self._tokenizer, self._schemas = tokenizer, interface.schemas
        self._variables = dict(config.data.chat_template_kwargs)
        self._format: str = config.rollout.tool_format
        self._end_tokens = set(end_tokens)
        self._ends = [tokenizer.decode([token]) for token in sorted(end_tokens)]
        self._suffix = lru_cache(1000)(lambda key: self._render_suffix(json.loads(key), []))
        if self._schemas:
            self._variables["tools"] = self._schemas
        has_own_format = getattr(tokenizer, "response_template", None) is not None
        if self._schemas and self._format == "auto" and not has_own_format:
            self._format = detect_format(str(tokenizer.chat_template))
        if is_checked and (self._schemas or interface.is_game):
            self.check("user" if interface.is_game else "tool")

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Tokenize a prompt with the descriptions of the tools. Raises ConfigError."""
        return render_prompt(messages, self._tokenizer, self._variables)

    def read_turn(self, token_ids: Sequence[int], prefix: Sequence[int]) -> tuple[str, Calls, str]:
        """Return the text of a turn, its calls, and the text around these; all of the text where
        none can be read. `prefix`: a prompt, which ends as what is before the turn does."""
        ids = list(token_ids)
        if ids and ids[-1] in self._end_tokens:
            ids.pop()
        text: str = self._tokenizer.decode(ids)
        if not self._schemas:
            return text, [], text
        before = self._tokenizer.decode(list(prefix))
        if self._format != "auto":
            opening = "<think>" if before.rstrip().endswith("<think>") else ""
            calls = read_calls(opening + text, self._format, self._schemas)
            is_read = any(isinstance(call, ToolCall) for call in calls)
            return text, calls, without_calls(text) if is_read else text
        try:
            message = self._tokenizer.parse_response(text, prefix=before, tools=self._schemas)
            found = [call["function"] for call in message.get("tool_calls") or ()]
            calls = [ToolCall(call["name"], dict(call["arguments"])) for call in found]
            return text, calls, str(message.get("content") or "") if calls else text
        except Exception as error:  # of the template's parser, on text that a model has written
            return text, [BadCall(f"the tool call cannot be read: {error!r:.200}")], text

    def suffix(self, messages: Messages, last_token: int) -> list[int]:
        """Return the tokens to insert behind an answer, before the next: those of `messages`, of
        tools and the user. `last_token`: of the answer; an answer that was ended by a stop string
        gets its end token first. Raises ConfigError where the template refuses them."""
        end, suffix = self._suffix(json.dumps(messages))
        return suffix if last_token in self._end_tokens or not self._ends else [end, *suffix]

    def _render_suffix(self, messages: Messages, earlier: Messages) -> tuple[int, list[int]]:
        """Return the token with which the template ends an answer, and those behind it."""
        is_tool = messages[0]["role"] == "tool"
        answer: dict[str, Any] = {"role": "assistant", "content": MARK}
        shown = messages
        if is_tool:
            answer |= {"tool_calls": [self._call(str(messages[0].get("name", "f")), MARK)]}
            shown = [{**message, "tool_call_id": CALL_ID} for message in messages]
        talk = [{"role": "user", "content": "a"}, *earlier, answer, *shown]
        try:
            text: str = self._tokenizer.apply_chat_template(
                talk, tokenize=False, add_generation_prompt=True, **self._variables
            )
        except Exception as error:  # a template is a program and may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise ConfigError(f"{KEY}: the chat template refuses {shown}: {reason}") from error
        behind = text.rpartition(MARK)[2]
        ends = zip(sorted(self._end_tokens), self._ends, strict=True)
        found = [(behind.index(end) + len(end), token) for token, end in ends if end in behind]
        at, end_token = min(found, default=(0, min(self._end_tokens, default=0)))
        first = str(messages[0]["content"])
        if is_tool and (not found or (first == RESULT and RESULT not in behind[at:])):
            raise ConfigError(f"{KEY}: the chat template writes no end token behind a tool call")
        return end_token, self._tokenizer(behind[at:], add_special_tokens=False)["input_ids"]

    def _call(self, name: str, value: str) -> dict[str, Any]:
        function = {"name": name, "arguments": {"x": value}}
        return {"type": "function", "id": CALL_ID, "function": function}

    def check(self, role: str) -> None:
        """Raise ConfigError if the tokens of messages that begin with one of this role, behind an
        answer, depend on earlier turns."""
        messages = [{"role": "user", "content": RESULT}]
        earlier: Messages = [
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        if role == "tool":
            name = self._schemas[0]["function"]["name"] if self._schemas else "f"
            messages = [{"role": "tool", "name": name, "content": RESULT}]
            call = {"role": "assistant", "content": "d", "tool_calls": [self._call(name, "e")]}
            earlier += [call, {**messages[0], "content": "f", "tool_call_id": CALL_ID}]
        short, long = (self._render_suffix(messages, each) for each in ([], earlier))
        if short != long:
            shown = [self._tokenizer.decode(ids) for _, ids in (short, long)]
            raise ConfigError(
                f"{KEY}: expected a template that writes the same behind every answer, got "
                f"{shown[0]!r} behind the first and {shown[1]!r} behind a later one"
            )
