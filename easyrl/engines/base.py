"""The interface of every engine: groups are submitted whole and returned whole.

    submit(GroupRequest) ──► [waiting] ──► step() · step() · … ──► its completions
                                             │  ▲
                                  take_turns ▼  │ resume   (only with `has_turns`)

A sequence of a group with turns is suspended where it would end; its keys and values stay in the
cache. The caller takes its `Turn`, then resumes it with tokens that are inserted, or ends it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from easyrl.channels.weights import WeightChannel, WeightEndpoint
from easyrl.config import ConfigError
from easyrl.engines.sampling import SamplingSettings, StopStrings
from easyrl.engines.shown import ShownPictures
from easyrl.model.policy import Policy
from easyrl.types import Completion, Int32, PromptMedia, WeightPiece


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A prompt and the number of completions to sample."""

    key: tuple[int, ...]
    """Sample i is drawn from a random stream that depends on (seed, *key, i) alone."""
    prompt_ids: Sequence[int]  # [P]
    num_generations: int
    has_turns: bool = False  # a sequence that stops is suspended: see `Turn`
    first_tokens: Sequence[Sequence[int]] | None = None
    """[G]: inserted at the start of each completion, where there are any (with `has_turns`)."""
    max_turn_tokens: int | None = None
    """Most tokens of the first turn. With it sequences are suspended also where a turn is cut
    off, so that all of them are ended by `Engine.end` (with `has_turns`)."""
    max_new_tokens: int | None = None
    """Most tokens of each completion, if fewer than the sampling settings allow."""
    family: tuple[int, ...] | None = None
    """The prompt continues what the engine has stored for earlier requests of the same family:
    tokens that it begins with are not computed again. None: it is computed as a whole."""

    media: PromptMedia | None = None
    """The pictures of a row's prompt, which has placeholders. Pictures that an agent or a tool
    shows have ids of their own among the tokens (`shown`)."""

    def limits(self, sampling: SamplingSettings) -> Sequence[int]:
        """Return the maximum tokens of each completion [G]."""
        left = sampling.max_sequence_length - len(self.prompt_ids)
        limit = min(sampling.max_completion_length, left)
        if self.max_new_tokens is not None:
            limit = min(limit, self.max_new_tokens)
        return [limit] * self.num_generations


FinishedGroup = tuple[GroupRequest, list[Completion]]  # with completions [G] in sample order


@dataclass(frozen=True, slots=True)
class Turn:
    """A suspended sequence and what it sampled since it was last resumed."""

    key: tuple[int, ...]  # of the group
    sample_index: int
    token_ids: Int32  # [n], with the end token or stop string
    num_left: int  # most tokens that can follow, inserted ones included
    is_cut: bool = False  # at its most tokens (`max_turn_tokens`)


class Engine:
    report: Callable[[str], None] = staticmethod(print)  # called where a slower way is taken
    use_cores: Callable[[], None] = staticmethod(lambda: None)  # called between parts of long work

    def __init__(self, sampling: SamplingSettings) -> None:
        self.sampling = sampling
        self.num_prompt_tokens = 0  # prefilled so far
        self.num_completion_tokens = 0  # sampled so far
        self.num_steps = 0  # forwards of the embedded engine so far
        self.end_tokens: Sequence[int] = ()  # that end a completion
        self.shown = ShownPictures()  # of episodes: see `engines.shown`
        self._waiting: deque[GroupRequest] = deque()
        self._turns: list[Turn] = []
        self._ended: dict[tuple[int, ...], dict[int, Completion]] = {}
        """Completions of groups of which others are still sampled: by group, then sample."""
        self._finished: list[FinishedGroup] = []  # not returned by `step` yet

    def submit(self, request: GroupRequest) -> None:
        """Queue a group, first come, first served. Raises ConfigError if the prompt is too long."""
        longest = self.sampling.max_prompt_length
        if not 0 < len(request.prompt_ids) <= longest:
            raise ConfigError(
                f"data.max_prompt_length: expected prompts of 1 to {longest} tokens, got "
                f"{len(request.prompt_ids)} in prompt {tuple(request.key)}"
            )
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether sequences are waiting, in flight or suspended."""
        return bool(self._waiting)

    @property
    def can_step(self) -> bool:
        """Whether there is work for `step`: not if all sequences are suspended."""
        return self.has_work

    def take_turns(self) -> list[Turn]:
        """Return the sequences that were suspended since the last call."""
        turns = self._turns
        self._turns = []
        return turns

    def resume(self, turn: Turn, tokens: Sequence[int], max_turn_tokens: int | None = None) -> None:
        """Insert tokens, at least one and fewer than `turn.num_left`, and sample the next turn.
        `max_turn_tokens`: as in `GroupRequest`, and only if the request had it."""
        raise NotImplementedError

    def end(
        self, turn: Turn, reason: Literal["stop", "length"], *, may_continue: bool = False
    ) -> None:
        """End the sequence. The next `step` returns its group, if it was the last. `may_continue`:
        requests of its family may begin with its tokens."""
        raise NotImplementedError

    def step(self) -> list[FinishedGroup]:
        """Do the engine's smallest unit of work; return the groups that have finished."""
        raise NotImplementedError

    def _complete(self, request: GroupRequest, index: int, completion: Completion) -> bool:
        """Add a completion to its group; return whether the group has finished."""
        ended = self._ended.setdefault(request.key, {})
        ended[index] = completion
        if len(ended) < request.num_generations:
            return False
        del self._ended[request.key]
        self._finished.append((request, [ended[number] for number in sorted(ended)]))
        return True

    def _take_finished(self) -> list[FinishedGroup]:
        finished = self._finished
        self._finished = []
        return finished

    def join_weights(self, endpoint: WeightEndpoint, is_cancelled: Callable[[], bool]) -> None:
        """Join this weight channel, one rank per device. Waits end once `is_cancelled()`."""
        raise NotImplementedError

    def receive_weights(self, policy_version: int) -> None:
        """Receive weights. Raises RuntimeError with sequences in flight. After OSError, rejoin."""
        raise NotImplementedError

    def _check_idle(self) -> None:
        if self.has_work:
            raise RuntimeError("weights arrived while sequences of the old policy are in flight")

    def close(self) -> None:
        """Stop what the engine has started."""


class PolicyEngine(Engine):
    """Base of the engines whose model is a `Policy` in this process."""

    _channel: WeightChannel | None = None

    def __init__(self, policy: Policy, sampling: SamplingSettings, tokenizer: Any = None) -> None:
        """`tokenizer` is needed for stop strings."""
        super().__init__(sampling)
        self.policy = policy
        self.end_tokens = policy.eos_token_ids
        self._stop = StopStrings(tokenizer, sampling.stop) if sampling.stop else None

    def join_weights(self, endpoint: WeightEndpoint, is_cancelled: Callable[[], bool]) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = WeightChannel(endpoint, is_cancelled)

    def receive_weights(self, policy_version: int) -> None:
        assert self._channel is not None
        self.load_weights(self._channel.receive(policy_version))

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        self._check_idle()
        self.policy.load_weights(pieces)
