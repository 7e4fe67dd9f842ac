"""The conversations of agents: which tokens a request continues, and what an answer says.

A request whose messages begin as a conversation that was answered begins with its tokens, and what
is new is rendered behind them. A conversation is found by a digest of its messages: of each the
role, the text and the calls, whatever else a client writes.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from easyrl.agents.endpoint import Request
from easyrl.agents.sequences import Episode, RecordedText, Sequence
from easyrl.config import ConfigError
from easyrl.config.spec import EpisodeSpec
from easyrl.data.chat import render_prompt, text_decoder
from easyrl.engines.base import Turn
from easyrl.environments.conversation import Conversations
from easyrl.environments.loading import Interface
from easyrl.environments.tool_calls.calls import Calls

PREFIX_TOKENS = 256
"""Tokens before an answer that are read with it: they show whether it begins inside a thought."""
DIGEST_BYTES = 16
INSERTED_ROLES = ("tool", "user", "system")  # of messages that the model has not written
MAX_TOOL_SETS = 64  # whose conversations are remembered


class History:
    """Reads and writes the conversations of all episodes of a worker."""

    def __init__(self, spec: EpisodeSpec, tokenizer: Any, end_tokens: Collection[int]) -> None:
        """`end_tokens`: those that end an answer."""
        self._spec = spec
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._decode = text_decoder(tokenizer)
        self._conversations_with = lru_cache(MAX_TOOL_SETS)(self._make_conversations)
        self._is_regular = lru_cache(MAX_TOOL_SETS)(self._check_regular)

    # -- requests ---------------------------------------------------------------------------------

    def ids_of(self, episode: Episode, request: Request) -> list[int]:
        """Return the tokens of a request: those of the longest answered conversation that it
        continues, and what is new behind them. Raises ConfigError."""
        if request.messages:
            return self._ids_of_chat(episode, request)
        return self._ids_of_text(episode, request.prompt)

    def _ids_of_text(self, episode: Episode, prompt: str) -> list[int]:
        continued: RecordedText | None = None
        for each in episode.texts:
            is_longer = continued is None or len(each.text) > len(continued.text)
            if is_longer and prompt.startswith(each.text):
                continued = each
        if continued is None:
            return render_prompt(prompt, self._tokenizer)
        rest = prompt[len(continued.text) :]
        new_ids = self._tokenizer(rest, add_special_tokens=False)["input_ids"]
        return continued.recorded.ids + list(new_ids)

    def _ids_of_chat(self, episode: Episode, request: Request) -> list[int]:
        tools = _as_key(request.tools)
        conversations = self._conversations_with(tools)
        digests = [tools.encode()]  # of the conversation before each message
        for message in request.messages:
            digests.append(_digest(digests[-1], message))
        request.digest = digests.pop()
        num_known = 0  # messages that belong to an answered conversation
        for number, digest in enumerate(digests):
            if digest in episode.recorded:
                num_known = number
        new = request.messages[num_known:]
        has_answer = any(message["role"] not in INSERTED_ROLES for message in new)
        is_continued = num_known > 0 and not has_answer
        if not is_continued or not self._is_regular(tools, new[0]["role"]):
            return conversations.prompt_ids(request.messages)
        request.continued = digests[num_known]
        before = episode.recorded[request.continued].ids
        return before + conversations.suffix(new, before[-1])

    def _make_conversations(self, tools: str) -> Conversations:
        schemas = json.loads(tools)
        interface = Interface(schemas, is_game=False, has_reward=False)
        return Conversations(
            self._spec, self._tokenizer, interface, self._end_tokens, is_checked=False
        )

    def _check_regular(self, tools: str, role: str) -> bool:
        """Return whether the template writes the same behind every answer."""
        try:
            conversations = self._conversations_with(tools)
            conversations.check(role)
        except ConfigError:
            return False
        return True

    # -- answers ----------------------------------------------------------------------------------

    def read_answer(self, request: Request, sequence: Sequence) -> dict[str, Any]:
        """Return what a sequence has sampled, in OpenAI's form, and remember it: requests may
        continue it."""
        if request.messages:
            return self._read_message(request, sequence)
        return self._read_text(request, sequence)

    def _read_text(self, request: Request, sequence: Sequence) -> dict[str, Any]:
        episode = sequence.episode
        turn = sequence.last_turn
        prompt = request.prompt
        text = self._decode(sequence.sampled_ids)
        whole = RecordedText(prompt + text, sequence.recorded)
        episode.texts.append(whole)
        question = {"role": "user", "content": prompt}
        answer = {"role": "assistant", "content": text}
        digest = _digest(prompt.encode(), answer)
        episode.keep_conversation(digest, [question, answer])
        shown = self._before_stop(text, turn)
        return {"text": shown, "finish_reason": _finish_reason(turn)}

    def _read_message(self, request: Request, sequence: Sequence) -> dict[str, Any]:
        turn = sequence.last_turn
        message = self._as_message(request, sequence)
        episode = sequence.episode
        digest = _digest(request.digest, message)
        episode.recorded[digest] = sequence.recorded
        episode.conversations.pop(request.continued, None)
        episode.keep_conversation(digest, [*request.messages, message])
        has_calls = "tool_calls" in message
        reason = "tool_calls" if has_calls else _finish_reason(turn)
        return {"message": message, "finish_reason": reason}

    def _as_message(self, request: Request, sequence: Sequence) -> dict[str, Any]:
        """Return what a sequence has sampled as a message, with the calls that the text has."""
        turn = sequence.last_turn
        tools = _as_key(request.tools)
        conversations = self._conversations_with(tools)
        answer_start = sequence.num_before_turn
        prefix_start = max(answer_start - PREFIX_TOKENS, 0)
        prefix = sequence.ids[prefix_start:answer_start]
        read = conversations.read_turn(sequence.sampled_ids, prefix)
        # What only the schema refuses goes to the agent as written: its own program checks it.
        calls: Calls = []
        if request.reads_calls:
            calls = [call for call in read.calls if call.arguments is not None]
        message: dict[str, Any] = {"role": "assistant"}
        if not calls:
            message["content"] = self._before_stop(read.text, turn)
            return message
        episode = sequence.episode
        message["content"] = self._before_stop(read.around, turn) or None
        message["tool_calls"] = _as_openai(calls, episode.num_calls)
        episode.num_calls += len(calls)
        return message

    def _before_stop(self, text: str, turn: Turn) -> str:
        """Return the text before the first stop string, as OpenAI's API does."""
        if turn.is_cut:
            return text
        for stop in self._spec.stop:
            text = text.partition(stop)[0]
        return text


def _finish_reason(turn: Turn) -> str:
    return "length" if turn.is_cut else "stop"


def _as_key(tools: list[dict[str, Any]]) -> str:
    """Return descriptions of tools in a form that conversations are remembered by."""
    return json.dumps(tools, sort_keys=True)


def _as_openai(calls: Calls, number: int) -> list[dict[str, Any]]:
    """Return calls in OpenAI's form. `number`: of the first one in its episode, of which ids are
    made where the model has written none."""
    found: list[dict[str, Any]] = []
    used: set[str] = set()
    for index, call in enumerate(calls, number):
        call_id = call.call_id
        if not call_id or call_id in used:
            call_id = f"call{index:05}"
        used.add(call_id)
        arguments = json.dumps(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        found.append({"id": call_id, "type": "function", "function": function})
    return found


def _digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Digest a conversation up to a message: roles, texts and calls, whatever else they have."""
    calls: list[tuple[str, Any]] = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        calls.append((function["name"], arguments))
    role = message["role"]
    content = message["content"] or ""
    text = json.dumps([role, content, calls], sort_keys=True)
    digest = hashlib.blake2b(before + text.encode(), digest_size=DIGEST_BYTES)
    return digest.digest()
