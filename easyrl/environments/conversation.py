"""The tokens of a conversation: prompt, sampled turns, and what the template inserts between them.

    prompt ids │ sampled … <end> │ suffix: tool results or the user's turn, and the beginning of
               │                 │         the next answer │ sampled … <end> │ suffix │ …

Sampled tokens are never decoded and encoded again. A suffix is what the chat template writes behind
the end of an answer, found by rendering a short conversation that ends with the same messages. A
template whose suffixes depend on earlier turns is refused. What it would change in earlier turns
(Qwen3's drops their thinking) does not matter.
"""

import json
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from easyrl.config import Config, ConfigError
from easyrl.data.chat import NO_CHAT_TEMPLATE, render_prompt
from easyrl.environments.loading import Interface
from easyrl.environments.tool_calls import (
    PROBE_ARGUMENTS,
    PROBE_NAME,
    PROBE_SCHEMA,
    PROBE_TEXT,
    BadCall,
    Calls,
    Turn,
    check_calls,
    detect_format,
    read_turn,
)
from easyrl.environments.tool_formats import FORMATS, Written
from easyrl.types import Messages

MARK = "zqxanswerqxz"
"""Text that no template writes by itself: it shows where an answer is in a rendered text."""
RESULT = "zqxresultqxz"
CALL_ID = "call00000"  # templates of Mistral's kind demand nine letters or digits
KEY = "data.chat_template"
KEPT_ID = re.compile(r"[a-zA-Z0-9]{9}|functions\.[\w.-]+:[0-9]+")
"""Ids of calls that templates of formats with ids show again beside the results."""
Schemas = Sequence[dict[str, Any]]


class _Parsed(NamedTuple):
    calls: list[Written]
    content: str


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
        self._writes_text = False  # the template takes arguments as JSON in a text
        self._refusal = ""  # why the template writes no call
        self._suffix = lru_cache(1000)(lambda key: self._render_suffix(json.loads(key), []))
        if self._schemas:
            self._variables["tools"] = self._schemas
        if self._schemas and self._format == "auto":
            has_parser = getattr(tokenizer, "response_template", None) is not None
            own = self._probe_tokenizer if has_parser else None
            probes, template = self._probes(), str(tokenizer.chat_template)
            self._format = detect_format(probes, template, own, self._refusal)
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
        # Cleaning up spaces would change what a call says.
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if not self._schemas:
            return text, [], text
        before: str = self._tokenizer.decode(list(prefix), clean_up_tokenization_spaces=False)
        if self._format == "auto":
            turn = self._read_by_tokenizer(text, before)
        else:
            begin_thinking = FORMATS[self._format].thinking[0]
            opening = begin_thinking if before.rstrip().endswith(begin_thinking) else ""
            turn = read_turn(opening + text, self._format, self._schemas)
            turn = turn._replace(around=turn.around.removeprefix(opening).lstrip())
        is_read = any(call.arguments is not None for call in turn.calls)
        return text, turn.calls, turn.around if is_read else text

    # -- the format of calls ----------------------------------------------------------------------

    def _probes(self) -> list[str]:
        """Return how the template writes the probe, up to the end of the turn. Some templates write
        the id of a call in the place of its name, and some take arguments only as text."""
        probes: list[str] = []
        for call_id in (CALL_ID, f"functions.{PROBE_NAME}:0"):
            call = _call(PROBE_NAME, PROBE_ARGUMENTS, call_id)
            written = self._written(call, [PROBE_SCHEMA], PROBE_TEXT)
            if written is not None:
                probes.append(written)
        if not probes:
            call = _call(PROBE_NAME, json.dumps(PROBE_ARGUMENTS), CALL_ID)
            written = self._written(call, [PROBE_SCHEMA], PROBE_TEXT)
            if written is not None:
                self._writes_text = True
                probes.append(written)
        return probes

    def _written(self, call: dict[str, Any], schemas: Schemas, word: str) -> str | None:
        """Return an answer with a call as the template writes it, up to the end token behind a word
        of the call. None: the template refuses it, or does not write the word."""
        question = {"role": "user", "content": MARK}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": call["function"]["name"], "content": RESULT}
        result["tool_call_id"] = call["id"]
        options = {**self._variables, "tools": list(schemas), "tokenize": False}
        render = self._tokenizer.apply_chat_template
        try:
            text: str = render([question, answer, result], **options)
            prompt: str = render([question], add_generation_prompt=True, **options)
        except Exception as error:  # a template is a program and may raise anything
            self._refusal = _reason(error)
            return None
        behind = text.removeprefix(prompt) if text.startswith(prompt) else text.rpartition(MARK)[2]
        behind = behind.partition(RESULT)[0]
        at = behind.find(word)
        if at < 0:
            return None
        ends = [behind.find(end, at) for end in self._ends]
        return behind[: min((end for end in ends if end >= 0), default=len(behind))]

    def _parse(self, text: str, before: str, schemas: Schemas) -> _Parsed:
        """Read a turn by the tokenizer's `response_template`. Raises whatever its parser raises."""
        message = self._tokenizer.parse_response(text, prefix=before, tools=list(schemas))
        found = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [Written(call["name"], dict(call["arguments"])) for call in found]
        return _Parsed(calls, str(message.get("content") or ""))

    def _probe_tokenizer(self, text: str) -> Calls:
        try:
            return check_calls(self._parse(text, "", [PROBE_SCHEMA]).calls, [PROBE_SCHEMA])
        except Exception:  # of the tokenizer's parser
            return []

    def _read_by_tokenizer(self, text: str, before: str) -> Turn:
        """Read a turn by the tokenizer's `response_template`. Such a parser may drop what it does
        not match. So the template writes again what was read: that has to be in the turn."""
        try:
            parsed = self._parse(text, before, self._schemas)
        except Exception as error:  # of the tokenizer's parser, on text that a model has written
            return Turn([BadCall(f"the tool call cannot be read: {error!r:.200}")], text)
        calls = check_calls(parsed.calls, self._schemas)
        for number, call in enumerate(parsed.calls):
            again = _call(call.name, call.arguments, CALL_ID)
            written = "".join((self._written(again, self._schemas, call.name) or "").split())
            begin = written.find(call.name)
            if begin < 0 or written[begin:] not in "".join(text.split()):
                reason = f"the tool call cannot be read: expected {written[begin:]!r:.200}"
                calls[number] = BadCall(reason)
        return Turn(calls, parsed.content)

    # -- what is between two turns ----------------------------------------------------------------

    def suffix(self, messages: Messages, last_token: int) -> list[int]:
        """Return the tokens to insert behind an answer, before the next: those of `messages`, of
        tools and the user. `last_token`: of the answer; an answer that was ended by a stop string
        gets its end token first. Raises ConfigError where the template refuses them."""
        end, suffix = self._suffix(json.dumps(messages))
        return suffix if last_token in self._end_tokens or not self._ends else [end, *suffix]

    def _render_suffix(self, messages: Messages, earlier: Messages) -> tuple[int, list[int]]:
        """Return the token with which the template ends an answer, and those behind it."""
        is_tool = messages[0]["role"] == "tool"
        form = FORMATS.get(self._format)
        answer: dict[str, Any] = {"role": "assistant", "content": MARK}
        shown = messages
        if is_tool:
            answer |= {"tool_calls": [self._call(str(messages[0].get("name", "f")), MARK)]}
            shown = [{**message, "tool_call_id": self._id(message)} for message in messages]
            if form is not None and form.has_text_last:
                answer["content"] = ""
        talk = [{"role": "user", "content": "a"}, *earlier, answer, *shown]
        try:
            text: str = self._tokenizer.apply_chat_template(
                talk, tokenize=False, add_generation_prompt=True, **self._variables
            )
        except Exception as error:  # a template is a program and may raise anything
            reason = _reason(error)
            raise ConfigError(f"{KEY}: the chat template refuses {shown}: {reason}") from error
        behind = text.rpartition(MARK)[2]
        ends = zip(sorted(self._end_tokens), self._ends, strict=True)
        found = [(behind.index(end) + len(end), token) for token, end in ends if end in behind]
        at, end_token = min(found, default=(0, min(self._end_tokens, default=0)))
        first = str(messages[0]["content"])
        if is_tool and (not found or (first == RESULT and RESULT not in behind[at:])):
            ends_of_run = ", ".join(map(repr, self._ends)) or "none"
            raise ConfigError(
                f"{KEY}: expected an end token of the model ({ends_of_run}: `eos_token_id` of its "
                "generation_config.json) between a tool call and its result, got "
                f"{behind.partition(RESULT)[0]!r:.200}"
            )
        return end_token, self._tokenizer(behind[at:], add_special_tokens=False)["input_ids"]

    def _call(self, name: str, value: str) -> dict[str, Any]:
        arguments: Any = {"x": value}
        return _call(name, json.dumps(arguments) if self._writes_text else arguments, CALL_ID)

    def _id(self, result: dict[str, Any]) -> str:
        """Return the id of the call that a message answers, as the template shows it."""
        form = FORMATS.get(self._format)
        given = str(result.get("tool_call_id", ""))
        is_kept = form is not None and form.has_ids and KEPT_ID.fullmatch(given) is not None
        return given if is_kept else CALL_ID

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


def _call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
