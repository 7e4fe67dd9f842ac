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
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from easyrl.config import ConfigError
from easyrl.config.spec import EpisodeSpec
from easyrl.data.chat import NO_CHAT_TEMPLATE, render_prompt, special_stops
from easyrl.environments.loading import Interface
from easyrl.environments.pictures import EpisodePictures
from easyrl.environments.tool_calls.calls import (
    BadCall,
    Calls,
    Schemas,
    Turn,
    check_calls,
    read_turn,
)
from easyrl.environments.tool_calls.format import USUAL_THINKING, Thinking, Written
from easyrl.environments.tool_calls.formats import FORMATS
from easyrl.environments.tool_calls.probe import (
    PROBE_ARGUMENTS,
    PROBE_NAME,
    PROBE_SCHEMA,
    PROBE_TEXT,
    detect_format,
)
from easyrl.types import Messages

ANSWER = "zqxanswerqxz"
"""Text that no template writes by itself: it shows where an answer is in a rendered text."""
RESULT = "zqxresultqxz"  # the same for the result of a tool
CALL_ID = "call00000"  # templates of Mistral's kind demand nine letters or digits
KEY = "data.chat_template"
KEPT_ID = re.compile(r"[a-zA-Z0-9]{9}|functions\.[\w.-]+:[0-9]+")
"""Ids of calls that templates of formats with ids show again beside the results."""
MAX_SUFFIXES = 1000  # that are remembered


class ReadTurn(NamedTuple):
    """A turn of the model as text."""

    text: str
    calls: Calls
    around: str  # the text around the calls; all of it where none can be read


class _Suffix(NamedTuple):
    """What the template writes behind an answer."""

    end_token: int  # with which it ends the answer
    token_ids: list[int]  # behind that token


class _End(NamedTuple):
    """An end token in a rendered text."""

    position: int  # where the text behind it begins
    token: int


class _Parsed(NamedTuple):
    """A turn as the tokenizer's own parser reads it."""

    calls: list[Written]
    content: str


class Conversations:
    """Renders conversations with the tools of one environment."""

    def __init__(
        self,
        spec: EpisodeSpec,
        tokenizer: Any,
        interface: Interface,
        end_tokens: Collection[int],
        *,
        is_checked: bool = True,
        pictures: EpisodePictures | None = None,
    ) -> None:
        """`end_tokens`: tokens that end an answer; `is_checked`: by `check`; `pictures`: of a run
        whose messages may show some. Raises ConfigError if the chat template cannot be used, or its
        calls have no known format."""
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(f"rollout.environment: {NO_CHAT_TEMPLATE}")
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._schemas: Schemas = interface.schemas
        self._variables = dict(spec.chat_template_kwargs)
        self._format: str = spec.tool_format
        self._ends = {token: tokenizer.decode([token]) for token in sorted(end_tokens)}
        """Texts of the tokens that end an answer."""
        for token, written in special_stops(tokenizer, spec.stop).items():
            if self._ends_answer(written):
                self._ends[token] = written
        self._writes_text = False  # the template takes arguments as JSON in a text
        self._refusal = ""  # why the template writes no call
        self._remembered_suffix = lru_cache(MAX_SUFFIXES)(self._suffix_of_json)
        if self._schemas:
            self._variables["tools"] = self._schemas
        if self._schemas and self._format == "auto":
            has_parser = getattr(tokenizer, "response_template", None) is not None
            own_parser = self._read_probe_by_tokenizer if has_parser else None
            probes = self._probes()
            template = str(tokenizer.chat_template)
            self._format = detect_format(probes, template, own_parser, self._refusal)
        if is_checked and interface.is_game:
            self.check("user")
        elif is_checked and self._schemas:
            self.check("tool")

    @property
    def thinking(self) -> Thinking:
        """What is around the thoughts of the model."""
        form = FORMATS.get(self._format)
        if form is not None:
            return form.thinking
        template = str(self._tokenizer.chat_template)
        for each in FORMATS.values():
            if each.thinking.begin in template:
                return each.thinking
        return USUAL_THINKING

    @property
    def variables(self) -> Mapping[str, Any]:
        """Variables of the chat template, with the descriptions of the tools."""
        return self._variables

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Tokenize a prompt with the descriptions of the tools. Raises ConfigError."""
        if self._pictures is not None:
            return self._pictures.prompt_ids(messages, self._variables)
        return render_prompt(messages, self._tokenizer, self._variables)

    def read_turn(self, token_ids: Sequence[int], prefix: Sequence[int]) -> ReadTurn:
        """Read the calls of a turn. `prefix`: a prompt, which ends as what is before the turn
        does."""
        ids = list(token_ids)
        if ids and ids[-1] in self._ends:
            ids.pop()
        text = self._decode(ids)
        if not self._schemas:
            return ReadTurn(text, [], text)
        before = self._decode(list(prefix))
        if self._format == "auto":
            turn = self._read_by_tokenizer(text, before)
        else:
            begin_thinking = FORMATS[self._format].thinking.begin
            opening = begin_thinking if before.rstrip().endswith(begin_thinking) else ""
            turn = read_turn(opening + text, self._format, self._schemas)
            turn = turn._replace(around=turn.around.removeprefix(opening).lstrip())
        is_read = any(call.arguments is not None for call in turn.calls)
        return ReadTurn(text, turn.calls, turn.around if is_read else text)

    def _decode(self, ids: list[int]) -> str:
        without_pictures = [token for token in ids if token >= 0]
        # Cleaning up spaces would change what a call says.
        return str(self._tokenizer.decode(without_pictures, clean_up_tokenization_spaces=False))

    def _render(self, messages: Messages, **options: Any) -> str:
        """Render messages as the template writes them. Raises whatever the template raises."""
        variables = {**self._variables, **options}
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **variables))

    def _ends_answer(self, token: str) -> bool:
        """Return whether the template writes this token right behind an answer."""
        user = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": ANSWER}
        try:
            text = self._render([user, answer, user])
        except Exception:  # a template is a program and may raise anything
            return False
        behind = text.rpartition(ANSWER)[2]
        return behind.lstrip().startswith(token)

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
        question = {"role": "user", "content": ANSWER}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": call["function"]["name"], "content": RESULT}
        result["tool_call_id"] = call["id"]
        tools = list(schemas)
        try:
            text = self._render([question, answer, result], tools=tools)
            prompt = self._render([question], tools=tools, add_generation_prompt=True)
        except Exception as error:  # a template is a program and may raise anything
            self._refusal = _reason(error)
            return None
        if text.startswith(prompt):
            behind = text.removeprefix(prompt)
        else:
            behind = text.rpartition(ANSWER)[2]
        behind = behind.partition(RESULT)[0]
        word_start = behind.find(word)
        if word_start < 0:
            return None
        ends = [behind.find(end, word_start) for end in self._ends.values()]
        first_end = min((end for end in ends if end >= 0), default=len(behind))
        return behind[:first_end]

    def _parse(self, text: str, before: str, schemas: Schemas) -> _Parsed:
        """Read a turn by the tokenizer's `response_template`. Raises whatever its parser raises."""
        message = self._tokenizer.parse_response(text, prefix=before, tools=list(schemas))
        calls: list[Written] = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = dict(function["arguments"])
            calls.append(Written(function["name"], arguments))
        content = message.get("content") or ""
        return _Parsed(calls, str(content))

    def _read_probe_by_tokenizer(self, text: str) -> Calls:
        schemas = [PROBE_SCHEMA]
        try:
            parsed = self._parse(text, "", schemas)
            return check_calls(parsed.calls, schemas)
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
        text_without_space = "".join(text.split())
        for number, call in enumerate(parsed.calls):
            again = _call(call.name, call.arguments, CALL_ID)
            written = self._written(again, self._schemas, call.name) or ""
            without_space = "".join(written.split())
            name_start = without_space.find(call.name)
            expected = without_space[name_start:]
            if name_start < 0 or expected not in text_without_space:
                reason = f"the tool call cannot be read: expected {expected!r:.200}"
                calls[number] = BadCall(reason)
        return Turn(calls, parsed.content)

    # -- what is between two turns ----------------------------------------------------------------

    def suffix(self, messages: Messages, last_token: int) -> list[int]:
        """Return the tokens to insert behind an answer, before the next: those of `messages`, of
        tools and the user. `last_token`: of the answer; an answer that was ended by a stop string
        gets its end token first. Raises ConfigError where the template refuses them, and ValueError
        for a text that stands for a picture, or pictures that it does not show."""
        if any(isinstance(message["content"], list) for message in messages):
            suffix = self._render_suffix(messages, [])  # ids of pictures are known for a while
        else:
            suffix = self._remembered_suffix(json.dumps(messages))
        if last_token in self._ends or not self._ends:
            return suffix.token_ids
        return [suffix.end_token, *suffix.token_ids]

    def _suffix_of_json(self, messages: str) -> _Suffix:
        return self._render_suffix(json.loads(messages), [])

    def _render_suffix(self, messages: Messages, earlier: Messages) -> _Suffix:
        """Render messages behind a short conversation: a question, `earlier` turns, an answer."""
        is_tool = messages[0]["role"] == "tool"
        form = FORMATS.get(self._format)
        answer: dict[str, Any] = {"role": "assistant", "content": ANSWER}
        shown = messages
        if is_tool:
            answer["tool_calls"] = [self._call(str(messages[0].get("name", "f")), ANSWER)]
            shown = [{**message, "tool_call_id": self._id_of(message)} for message in messages]
            if form is not None and form.has_text_last:
                answer["content"] = ""
        talk = [{"role": "user", "content": "a"}, *earlier, answer, *shown]
        try:
            text = self._render(talk, add_generation_prompt=True)
        except Exception as error:  # a template is a program and may raise anything
            reason = _reason(error)
            raise ConfigError(f"{KEY}: the chat template refuses {shown}: {reason}") from error
        behind = text.rpartition(ANSWER)[2]
        end = self._first_end(behind)
        rest = behind if end is None else behind[end.position :]
        hides_result = messages[0]["content"] == RESULT and RESULT not in rest
        if is_tool and (end is None or hides_result):
            ends_of_run = ", ".join(repr(end) for end in self._ends.values()) or "none"
            raise ConfigError(
                f"{KEY}: expected an end token of the model ({ends_of_run}: `eos_token_id` of its "
                "generation_config.json) between a tool call and its result, got "
                f"{behind.partition(RESULT)[0]!r:.200}"
            )
        end_token = min(self._ends, default=0) if end is None else end.token
        if end is not None:
            # Not as the beginning of a text, before which some tokenizers put a space.
            ids = self._tokenize(self._ends[end_token] + rest, messages)
            if ids[0] == end_token:
                return _Suffix(end_token, ids[1:])
        return _Suffix(end_token, self._tokenize(rest, messages))

    def _tokenize(self, text: str, messages: Messages) -> list[int]:
        """`messages`: those with pictures that the text shows."""
        if self._pictures is not None:
            return self._pictures.ids_behind_answer(text, messages)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _first_end(self, text: str) -> _End | None:
        """Return the first end token in a text."""
        ends: list[_End] = []
        for token, written in self._ends.items():
            start = text.find(written)
            if start >= 0:
                ends.append(_End(start + len(written), token))
        return min(ends, default=None)

    def _call(self, name: str, value: str) -> dict[str, Any]:
        """Return a call with one argument, as the template takes it."""
        arguments: Any = {"x": value}
        return _call(name, json.dumps(arguments) if self._writes_text else arguments, CALL_ID)

    def _id_of(self, result: dict[str, Any]) -> str:
        """Return the id of the call that a message answers, as the template shows it."""
        form = FORMATS.get(self._format)
        given = str(result.get("tool_call_id", ""))
        is_kept = form is not None and form.has_ids and KEPT_ID.fullmatch(given) is not None
        return given if is_kept else CALL_ID

    def check(self, role: str) -> None:
        """Raise ConfigError if the tokens of messages that begin with one of this role, behind an
        answer, depend on earlier turns."""
        messages: Messages = [{"role": "user", "content": RESULT}]
        earlier: Messages = [
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        if role == "tool":
            name = self._schemas[0]["function"]["name"] if self._schemas else "f"
            messages = [{"role": "tool", "name": name, "content": RESULT}]
            call = {"role": "assistant", "content": "d", "tool_calls": [self._call(name, "e")]}
            result = {"role": "tool", "name": name, "content": "f", "tool_call_id": CALL_ID}
            earlier += [call, result]
        behind_first = self._render_suffix(messages, [])
        behind_later = self._render_suffix(messages, earlier)
        if behind_first != behind_later:
            first = self._tokenizer.decode(behind_first.token_ids)
            later = self._tokenizer.decode(behind_later.token_ids)
            raise ConfigError(
                f"{KEY}: expected a template that writes the same behind every answer, got "
                f"{first!r} behind the first and {later!r} behind a later one"
            )


def _call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
