"""The conversations of agents: which tokens a request continues, and what an answer says.

A request whose messages begin as a conversation that was answered begins with its tokens, and what
is new is rendered behind them. `matching` decides which messages are the same, and
`conversation_tree` remembers them.
"""

import json
from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from easyrl.agents.conversation_tree import ADDED, ANSWER_ROLE, BranchReason, Node, Placed
from easyrl.agents.matching import Recorded, Thought, split_thought
from easyrl.agents.protocols.base import Choice, IssuedCall, Request
from easyrl.agents.sequences import Episode, RecordedText, Sequence
from easyrl.config import ConfigError
from easyrl.config.spec import EpisodeSpec
from easyrl.data.chat import encode_behind, render_prompt, text_decoder
from easyrl.engines.base import Turn
from easyrl.environments.conversation import Conversations
from easyrl.environments.episodes import extended
from easyrl.environments.loading import Interface
from easyrl.environments.pictures import EpisodePictures
from easyrl.environments.tool_calls.calls import Calls
from easyrl.types import Messages

PREFIX_TOKENS = 256
"""Tokens before an answer that are read with it: they show whether it begins inside a thought."""
NO_TOOLS = "[]"
"""No tools, in the form that conversations are remembered by."""
MAX_TOOL_SETS = 64  # whose conversations are remembered


class _New(NamedTuple):
    """What a request has behind an answer."""

    added: str  # text that the client has written behind the answer
    messages: Messages


class History:
    """Reads and writes the conversations of all episodes of a worker."""

    def __init__(
        self,
        spec: EpisodeSpec,
        tokenizer: Any,
        end_tokens: Collection[int],
        pictures: EpisodePictures | None = None,
    ) -> None:
        """`end_tokens`: those that end an answer; `pictures`: where requests may show some."""
        self._spec = spec
        self._pictures = pictures
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._decode = text_decoder(tokenizer)
        self._conversations_with = lru_cache(MAX_TOOL_SETS)(self._make_conversations)
        self._is_regular = lru_cache(MAX_TOOL_SETS)(self._check_regular)

    # -- requests ---------------------------------------------------------------------------------

    def place(self, episode: Episode, request: Request) -> Placed:
        """Find the tokens of a request: those of the newest answered conversation that it
        continues, and what is new behind them. Raises ConfigError."""
        if request.messages:
            return self._place_chat(episode, request)
        ids = self._ids_of_text(episode, request.prompt)
        return Placed(ids, Node("text"), None, None, form="", tools=NO_TOOLS)

    def _ids_of_text(self, episode: Episode, prompt: str) -> list[int]:
        continued: RecordedText | None = None
        for each in episode.texts:
            is_longer = continued is None or len(each.text) > len(continued.text)
            if is_longer and prompt.startswith(each.text):
                continued = each
        if continued is None:
            return render_prompt(prompt, self._tokenizer)
        rest = prompt[len(continued.text) :]
        return continued.recorded.ids + encode_behind(rest, self._tokenizer)

    def _place_chat(self, episode: Episode, request: Request) -> Placed:
        if not self._takes_later_system:
            request.messages = _with_one_system(request.messages)
        tools = _as_key(request.tools)
        conversations = self._conversations_with(tools)
        node = episode.tree.place(request.messages, conversations.thinking)
        newest = _newest_answer(node)
        node.form = request.output_form if newest.form != request.output_form else ""
        reason: BranchReason | None = None
        if episode.num_requests > 0:  # else it begins its first conversation
            reason = self._branch_reason(episode, node, newest, tools)
        new = _behind_answer(node, newest, request.messages)
        if newest.answer is not None and reason is None:
            continued = self._continue(node, newest, new)
            is_shown = self._spec.keeps_history or self._is_shown(continued, request)
            if is_shown:
                return continued
            reason = "shown_otherwise"
        ids = conversations.prompt_ids(_with_forms(node, request.messages))
        return Placed(ids, node, None, reason, request.output_form, tools)

    def _branch_reason(
        self, episode: Episode, node: Node, newest: Node, tools: str
    ) -> BranchReason | None:
        """Return why a request does not continue its newest answer. None: it does, or has none."""
        marks = self._conversations_with(tools).thinking
        for each in node.ancestors:
            if each is newest:
                break
            if each.is_foreign:
                return episode.tree.difference(each, marks)
        if newest.answer is None:
            return None
        if tools not in (newest.tools, NO_TOOLS):
            return "tools"
        first_new = next(each for each in _below(node, newest) if each.role != ADDED)
        if not self._is_regular(newest.tools, first_new.role):
            return "template"
        return None

    def _continue(self, node: Node, answer: Node, new: _New) -> Placed:
        """Return a request that begins with the tokens of an answer."""
        assert answer.tokens is not None, "the model has sampled it"
        ids = list(answer.tokens.ids)
        if new.added:
            if ids[-1] in self._end_tokens:
                ids.pop()
            ids += encode_behind(new.added, self._tokenizer)
        # The tools that the tokens show: a turn without tools continues one that has them.
        conversations = self._conversations_with(answer.tools)
        last_token = ids[-1]
        ids += conversations.suffix(_with_forms(node, new.messages), last_token)
        form = node.form or answer.form
        return Placed(ids, node, answer, None, form, answer.tools)

    def _is_shown(self, continued: Placed, request: Request) -> bool:
        """Whether tokens are the text that the template writes for the messages of a request."""
        conversations = self._conversations_with(_as_key(request.tools))
        as_sent = conversations.prompt_ids(_with_forms(continued.node, request.messages))
        return self._text_of(continued.ids) == self._text_of(as_sent)

    def _text_of(self, ids: list[int]) -> list[str]:
        """Return the words of tokens. Pictures are those of the messages in any case."""
        return self._decode([token for token in ids if token >= 0]).split()

    def _make_conversations(self, tools: str) -> Conversations:
        schemas = json.loads(tools)
        interface = Interface(schemas, is_game=False, has_reward=False)
        return Conversations(
            self._spec,
            self._tokenizer,
            interface,
            self._end_tokens,
            is_checked=False,
            pictures=self._pictures,
        )

    @cached_property
    def _takes_later_system(self) -> bool:
        """Whether the template takes a system message behind the first message. That of Qwen3.5
        refuses it, and clients send them."""
        user = {"role": "user", "content": "a"}
        later = {"role": "system", "content": "b"}
        conversations = self._conversations_with(NO_TOOLS)
        try:
            conversations.prompt_ids([user, later, user])
        except (ConfigError, ValueError):
            return False
        return True

    def _check_regular(self, tools: str, role: str) -> bool:
        """Return whether the template writes the same behind every answer."""
        try:
            conversations = self._conversations_with(tools)
            conversations.check(role)
        except ConfigError:
            return False
        return True

    # -- answers ----------------------------------------------------------------------------------

    def read_answer(self, request: Request, placed: Placed, sequence: Sequence) -> Choice:
        """Return what a sequence has sampled, and remember it: requests may continue it."""
        if request.messages:
            return self._read_message(request, placed, sequence)
        return self._read_text(request, sequence)

    def _read_text(self, request: Request, sequence: Sequence) -> Choice:
        episode = sequence.episode
        turn = sequence.last_turn
        prompt = request.prompt
        text = self._decode(sequence.sampled_ids)
        whole = RecordedText(prompt + text, sequence.recorded)
        episode.texts.append(whole)
        question = {"role": "user", "content": prompt}
        answer = {"role": ANSWER_ROLE, "content": text}
        episode.keep_conversation(Node(ANSWER_ROLE), [question, answer])
        shown = self._before_stop(text, turn)
        return Choice(shown, "", shown, [], is_cut=turn.is_cut)

    def _read_message(self, request: Request, placed: Placed, sequence: Sequence) -> Choice:
        turn = sequence.last_turn
        episode = sequence.episode
        conversations = self._conversations_with(_as_key(request.tools))
        answer_start = sequence.num_before_turn
        prefix_start = max(answer_start - PREFIX_TOKENS, 0)
        prefix = sequence.ids[prefix_start:answer_start]
        read = conversations.read_turn(sequence.sampled_ids, prefix)
        # What only the schema refuses goes to the agent as written: its own program checks it.
        calls: Calls = []
        if request.reads_calls:
            calls = [call for call in read.calls if call.arguments is not None]
        issued = _issue(calls, episode.num_calls)
        episode.num_calls += len(issued)
        text = self._before_stop(read.around if calls else read.text, turn)
        answer = Node(
            ANSWER_ROLE,
            answer=Recorded(text, read.text, issued, _schemas_of(request.tools)),
            tokens=sequence.recorded,
            tools=placed.tools,
            form=placed.form,
        )
        placed.node.add(answer)
        message: dict[str, Any] = {"role": ANSWER_ROLE, "content": text}
        if issued:
            message["tool_calls"] = [call.as_chat() for call in issued]
        if placed.continued is not None:
            episode.conversations.pop(placed.continued, None)
        episode.keep_conversation(answer, [*request.messages, message])
        parts: Thought = split_thought(text, conversations.thinking)
        return Choice(text, parts.thought, parts.visible, issued, is_cut=turn.is_cut)

    def _before_stop(self, text: str, turn: Turn) -> str:
        """Return the text before the first stop string, as OpenAI's API does."""
        if turn.is_cut:
            return text
        for stop in self._spec.stop:
            text = text.partition(stop)[0]
        return text


def _with_one_system(messages: Messages) -> Messages:
    """Return messages in which the user says what a system message behind the first one does."""
    shown = messages[:1]
    for message in messages[1:]:
        is_system = message["role"] == "system"
        shown.append({**message, "role": "user"} if is_system else message)
    return shown


def _newest_answer(node: Node) -> Node:
    """Return the newest answer before a node; the root if there is none."""
    for each in node.ancestors:
        if each.answer is not None or each.parent is None:
            return each
    raise AssertionError("every node has a root")


def _below(node: Node, above: Node) -> list[Node]:
    """Return a node and its ancestors below another one, the newest last."""
    found: list[Node] = []
    for each in node.ancestors:
        if each is above:
            break
        found.append(each)
    return found[::-1]


def _behind_answer(node: Node, newest: Node, messages: Messages) -> _New:
    """Return what a request has behind an answer, or behind the root."""
    nodes = _below(node, newest)
    added = "".join(each.content for each in nodes if each.role == ADDED)
    num_messages = sum(each.role != ADDED for each in nodes)
    return _New(added, messages[len(messages) - num_messages :])


def _with_forms(node: Node, messages: Messages) -> Messages:
    """Return the last messages before a node, each with the sentence that is shown with it."""
    shown: Messages = []
    nodes = [each for each in node.ancestors if each.role != ADDED]
    for message, each in zip(reversed(messages), nodes, strict=False):
        if each.form and each.answer is None:
            content = extended(message["content"], f"\n\n{each.form}")
            shown.append({**message, "content": content})
        else:
            shown.append(message)
    return shown[::-1]


def _as_key(tools: list[dict[str, Any]]) -> str:
    """Return descriptions of tools in a form that conversations are remembered by."""
    return json.dumps(tools, sort_keys=True)


def _schemas_of(tools: list[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments of tools, by name."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool["function"]
        name = function["name"]
        parameters = function["parameters"]
        takes_any = not isinstance(parameters, dict)  # the schema `true`
        schemas[name] = {} if takes_any else parameters
    return schemas


def _issue(calls: Calls, number: int) -> list[IssuedCall]:
    """Give each call an id. `number`: of the first one in its episode, of which ids are made where
    the model has written none."""
    issued: list[IssuedCall] = []
    used: set[str] = set()
    for index, call in enumerate(calls, number):
        call_id = call.call_id
        if not call_id or call_id in used:
            call_id = f"call{index:05}"
        used.add(call_id)
        issued.append(IssuedCall(call_id, call.name, call.arguments))
    return issued
