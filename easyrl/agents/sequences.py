"""Book of the episodes of agents: their sequences, and the tree that their tokens form.

    group ─► episode ─► sequences: │ shared with a parent │ inserted │ sampled │ inserted │ sampled
                                                          ◄──────── tokens of its own ────────────►

A sequence shares its first tokens with its parent: an earlier sequence of its episode, or the
prompt of the group. So every sampled token is in one node of the episode's tree.
"""

from collections import Counter, deque
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from easyrl.agents.conversation_tree import BranchReason, ConversationTree, Node, Placed
from easyrl.agents.protocols.base import Request
from easyrl.engines.base import Turn
from easyrl.environments.host import Key
from easyrl.environments.pictures import ShownFiles
from easyrl.layout.tree import TokenTree
from easyrl.types import Completion, Messages, Prompt


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence of the engine."""

    episode: "Episode"
    ids: list[int]  # all tokens so far: shared, inserted and sampled ones
    parent: "Sequence | None"  # shares its first tokens; None: these are of the group's prompt
    num_shared: int  # tokens that it shares
    num_prompt: int = 0  # tokens that the engine got as its prompt
    request: Request | None = None  # the request whose answer it samples
    placed: Placed | None = None  # where that request is in the episode's conversations
    num_reserved: int = 0  # most tokens of that answer
    num_left: int = 0  # most tokens that the episode could add when the sequence began
    turn: Turn | None = None  # the newest turn, while the sequence is suspended
    completion: Completion | None = None  # set when the sequence has ended

    @property
    def last_turn(self) -> Turn:
        assert self.turn is not None, "the sequence is not suspended"
        return self.turn

    @property
    def sampled_ids(self) -> list[int]:
        """Tokens of its newest turn."""
        ids: list[int] = self.last_turn.token_ids.tolist()
        return ids

    @property
    def num_before_turn(self) -> int:
        """Tokens before its newest turn."""
        return len(self.ids) - len(self.last_turn.token_ids)

    @property
    def recorded(self) -> "Recorded":
        """All of its tokens so far."""
        return Recorded(self, len(self.ids))


class Shared(NamedTuple):
    """Tokens that a request shares with an earlier sequence of its episode."""

    parent: Sequence | None  # None: the group's prompt
    num_tokens: int


class Recorded(NamedTuple):
    """The tokens of a conversation that was answered: the first ones of a sequence."""

    sequence: Sequence
    length: int

    @property
    def ids(self) -> list[int]:
        return self.sequence.ids[: self.length]


class RecordedText(NamedTuple):
    """A prompt of a text completion with what was sampled behind it."""

    text: str
    recorded: Recorded


@dataclass(slots=True, eq=False)
class Episode:
    group: "Group"
    number: int  # in the group; a group that is started again counts on
    key: str  # with which its requests come to the endpoint
    future: Future[Any]  # the agent's result, with the fields of `program.Value`
    sequences: list[Sequence] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    answering: dict[Request, list[Sequence]] = field(default_factory=dict)
    tree: ConversationTree = field(default_factory=ConversationTree)
    """Its conversations, from which requests continue."""
    texts: list[RecordedText] = field(default_factory=list)
    conversations: dict[Node, Messages] = field(default_factory=dict)
    """Those that nothing continues, by their last answer. The newest is the last."""
    branch_reasons: Counter[BranchReason] = field(default_factory=Counter)
    """Requests that do not continue their newest answer, by reason."""
    files: ShownFiles | None = None  # that its requests have shown
    num_requests: int = 0
    num_counted: int = 0  # requests that only count tokens
    num_tokens: int = 0  # behind the group's prompt; what sequences share counts once
    num_reserved: int = 0  # most tokens of the answers that are being sampled
    num_calls: int = 0
    limit: str = ""  # why requests were refused: "max_turns", "time" or "length"
    num_refused: int = 0
    is_cut: bool = False  # an answer was cut off, because the episode had no tokens left
    has_ended: bool = False
    value: float | None = None
    parts: dict[str, float] = field(default_factory=dict)  # named rewards, whose sum is `value`
    error: str = ""

    @property
    def ended_by(self) -> str:
        if self.group.error or self.error:
            return "error"
        has_answers = self.num_requests > 0
        if self.num_refused and not has_answers:
            return self.limit or "refused"
        return self.limit or "answer"

    def keep_conversation(self, answer: Node, messages: Messages) -> None:
        """Remember a conversation as the newest, by its last answer."""
        self.conversations[answer] = messages


@dataclass(slots=True, eq=False)
class Group:
    key: Key
    prompt: Prompt
    num_generations: int
    episodes: list[Episode] = field(default_factory=list)
    started: float = 0.0
    num_starts: int = 0
    prompt_ids: list[int] | None = None
    """Tokens of the first request, at most as many as a prompt may have. None: there was none."""
    num_open: int = 0  # sequences that have not ended
    error: Exception | None = None  # why it cannot be trained
    is_finished: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it can be finished: all episodes and sequences have ended."""
        have_ended = all(episode.has_ended for episode in self.episodes)
        return have_ended and not self.num_open and not self.is_finished


# -- a completion of sequences ---------------------------------------------------------------------


class _Tokens:
    """Tokens of a completion, one part after another."""

    def __init__(self) -> None:
        self._ids: list[npt.NDArray[np.int32]] = []
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._are_sampled: list[npt.NDArray[np.bool_]] = []

    def add_inserted(self, ids: SequenceOf[int]) -> None:
        self._ids.append(np.array(ids, dtype=np.int32))
        self._logprobs.append(np.zeros(len(ids), dtype=np.float32))
        self._are_sampled.append(np.zeros(len(ids), dtype=np.bool_))

    def add_completion(self, completion: Completion) -> None:
        self._ids.append(completion.token_ids)
        self._logprobs.append(completion.logprobs)
        self._are_sampled.append(completion.is_sampled)

    def joined(self, finish_reason: Literal["stop", "length"], tree: TokenTree) -> Completion:
        return Completion(
            np.concatenate(self._ids),
            np.concatenate(self._logprobs),
            finish_reason,
            np.concatenate(self._are_sampled),
            tree,
        )


def join_sequences(episode: Episode, num_prompt: int, end_token: int) -> Completion:
    """Return the completion of an episode: of each sequence what it does not share with others.
    Without a sequence it has an end token, which is not sampled. `num_prompt`: tokens of the
    group's prompt."""
    tokens = _Tokens()
    predecessors = [np.arange(-1, num_prompt - 1)]
    first_index: dict[Sequence, int] = {}  # of the tokens of its own, counted from the prompt's
    length = num_prompt

    def index_of(sequence: Sequence | None, position: int) -> int:
        """Return the index, in the prompt and the completion, of a token of a sequence."""
        while sequence is not None and position < sequence.num_shared:
            sequence = sequence.parent
        if sequence is None:
            return position
        return first_index[sequence] + position - sequence.num_shared

    for sequence in episode.sequences:
        assert sequence.completion is not None, "a sequence has not ended"
        inserted = sequence.ids[sequence.num_shared : sequence.num_prompt]
        tokens.add_inserted(inserted)
        tokens.add_completion(sequence.completion)
        num_own = len(inserted) + len(sequence.completion.token_ids)
        own = np.arange(length - 1, length - 1 + num_own)
        own[0] = index_of(sequence.parent, sequence.num_shared - 1)
        predecessors.append(own)
        first_index[sequence] = length
        length += num_own
    if not episode.sequences:
        tokens.add_inserted([end_token])
        predecessors.append(np.array([num_prompt - 1]))
    tree = TokenTree.of_predecessors(np.concatenate(predecessors), cuts=[num_prompt])
    is_cut = episode.is_cut or episode.limit == "length"
    return tokens.joined("length" if is_cut else "stop", tree)
