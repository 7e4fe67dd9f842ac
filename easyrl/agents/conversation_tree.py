"""The conversations of an episode as a tree of messages.

    root ─ system ─ user ─ answer ─ tool ─ answer ─ user ─ answer
                                 └─ user ─ answer                        another continuation
                                 └─ (added) ─ user ─ answer              text that the client added

A request is a path from the root. Its messages are found in the tree, or added to it. An answer of
the model has the tokens of the conversation up to its end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from easyrl.agents.matching import Difference, Likeness, Recorded, compare
from easyrl.environments.tool_calls.format import Thinking
from easyrl.types import Messages

ANSWER_ROLE = "assistant"
ADDED = "added"
"""Role of what a client has written behind an answer, inside the same message."""
BranchReason = Literal[Difference, "messages", "tools", "template", "shown_otherwise"]
"""Why a request with earlier answers does not continue their tokens."""
REASONS: dict[BranchReason, str] = {
    "text": "the text of an earlier answer was changed",
    "thinking": "what the model thought in an earlier answer was changed",
    "calls": "the calls of an earlier answer were changed",
    "not_sampled": "a message of the assistant was not sampled here",
    "messages": "a message before an earlier answer was changed or left out",
    "tools": "the tools are others than those of an earlier answer",
    "template": "the chat template writes something else behind a later answer "
    "(data.chat_template)",
    "shown_otherwise": "the chat template shows an earlier answer in another way than it was "
    "sampled (rollout.agent_history=as_sent)",
}


class Tokens(Protocol):
    """The tokens of a conversation."""

    @property
    def ids(self) -> list[int]: ...


@dataclass(slots=True, eq=False)
class Node:
    """A message, behind those of its parent."""

    role: str
    content: str = ""
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)
    sent: Mapping[str, Any] = field(default_factory=dict)
    """The message as a client sent it, where the model has not sampled it."""
    answer: Recorded | None = None  # None: the model has not sampled it
    tokens: Tokens | None = None  # of the conversation up to the end of an answer
    tools: str = ""  # those that the model was shown before an answer, as a key
    form: str = ""
    """Sentence about the form of answers: of a message, the one that is shown with it; of an
    answer, the newest one that its tokens have."""

    def add(self, node: "Node") -> "Node":
        node.parent = self
        self.children.append(node)
        return node

    @property
    def is_foreign(self) -> bool:
        """Whether it is an assistant's message that the model has not sampled."""
        return self.role == ANSWER_ROLE and self.answer is None

    @property
    def ancestors(self) -> Iterator["Node"]:
        """Yield the node itself, its parent, and so on to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def descendants(self) -> Iterator["Node"]:
        waiting = list(self.children)
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children


class Placed(NamedTuple):
    """A request in the tree of its episode's conversations, and its tokens."""

    ids: list[int]
    node: Node  # its last message
    continued: Node | None  # the answer whose tokens it begins with
    branch_reason: BranchReason | None  # why it does not continue its newest answer
    form: str  # the newest sentence about the form of answers that the tokens have
    tools: str  # those that the tokens show, as a key


class ConversationTree:
    """Finds the messages of requests among those of earlier ones."""

    def __init__(self) -> None:
        self.root = Node("root")

    def place(self, messages: Messages, marks: Thinking) -> Node:
        """Return the node of the last message. Messages that are new are added."""
        found = [self.root]
        for message in messages:
            matches: list[_Match] = []
            for node in found:
                matches += _matching_children(node, message, marks)
            best = max((match.likeness for match in matches), default=Likeness.EXACT)
            next_found = [match.node() for match in matches if match.likeness == best]
            if not next_found:
                new = Node(message["role"], _content_of(message), sent=message)
                next_found = [found[-1].add(new)]
            found = next_found
        return found[-1]

    def difference(self, foreign: Node, marks: Thinking) -> Difference | Literal["messages"]:
        """Return how an assistant's message differs from the answers in its place: if there are
        none, it may be one from another place."""
        assert foreign.parent is not None, "the root is no message"
        for sibling in reversed(foreign.parent.children):
            if sibling.answer is not None:
                difference = compare(foreign.sent, sibling.answer, marks).difference
                if difference is not None:
                    return difference
        for node in self.root.descendants:
            if node.answer is None:
                continue
            if compare(foreign.sent, node.answer, marks).difference is None:
                return "messages"
        return "not_sampled"


class _Match(NamedTuple):
    """A child that is the same message."""

    child: Node
    likeness: Likeness
    added: str = ""

    def node(self) -> Node:
        return _with_added(self.child, self.added) if self.added else self.child


def _matching_children(node: Node, message: Mapping[str, Any], marks: Thinking) -> list[_Match]:
    """Return the children that are the same message."""
    role = message["role"]
    content = _content_of(message)
    found: list[_Match] = []
    for child in node.children:
        if child.role != role:
            continue
        if child.answer is not None:
            resent = compare(message, child.answer, marks)
            if resent.difference is None:
                found.append(_Match(child, resent.likeness, resent.added))
            continue
        is_same = child.content == content
        if role == ANSWER_ROLE:  # calls belong to it, too
            is_same = child.sent == message
        if is_same:
            found.append(_Match(child, Likeness.EXACT))
    return found


def _content_of(message: Mapping[str, Any]) -> str:
    return str(message["content"]).strip()


def _with_added(answer: Node, text: str) -> Node:
    """Return the node of a text that a client has added to an answer."""
    for child in answer.children:
        if child.role == ADDED and child.content == text:
            return child
    return answer.add(Node(ADDED, text))
