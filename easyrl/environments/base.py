"""The interface of episodes, by which a rollout worker generates completions.

    submit(group) ─► … engine.step ─► take ─► advance … ─► a finished group
                                                               │
                              finish: texts ◄──────────────────┤
                              judge:  scores of its own ◄──────┤
                              forget: metrics, columns ◄───────┘

What happens between two turns of the model differs:

    single_turn.SingleTurns          nothing: a completion has one turn
    episodes.EnvironmentEpisodes     an environment acts, or tools are called
    agents.episodes.AgentEpisodes    a program sends requests, which may branch
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from easyrl.environments.host import Key
from easyrl.model.prompt_renderer import PromptRenderer
from easyrl.rewards.worker import Call
from easyrl.types import Completion, Messages, Prompt

if TYPE_CHECKING:
    from easyrl.engines.base import Engine, FinishedGroup


class GroupTexts(NamedTuple):
    """A group as reward functions get it."""

    prompt: str | Messages
    answers: list[str] | list[Messages]
    """[G]: completions; of episodes, all messages behind the prompt."""


class GroupRecord(NamedTuple):
    """What is reported of a group's episodes."""

    metrics: dict[str, float]  # means over the group, as in {"episodes/turns": 2.5}
    columns: dict[str, list[Any]]  # [G] each, shown in samples.jsonl


class Episodes(ABC):
    """The groups of a rollout worker that are being generated and scored."""

    @abstractmethod
    def bind(self, engine: "Engine", renderer: PromptRenderer, num_rows: int) -> None:
        """Use this engine, which keeps `num_rows` sequences, once the user's code is loaded.
        Called once, before anything else: both are loaded at the same time. Raises ConfigError."""

    @abstractmethod
    def submit(self, key: Key, prompt: Prompt, num_generations: int) -> None:
        """Begin a group. `key` seeds its sampling."""

    @abstractmethod
    def take(self, finished: "list[FinishedGroup]") -> "list[FinishedGroup]":
        """Take what the engine has finished; return the groups that are complete with it."""

    @abstractmethod
    def advance(self) -> "list[FinishedGroup]":
        """Exchange turns and answers, without waiting; return groups that have finished in another
        way than by `take`."""

    @abstractmethod
    def finish(self, key: Key, completions: list[Completion]) -> GroupTexts:
        """Return the texts of a finished group, whose `completions` were returned."""

    @abstractmethod
    def judge(self, key: Key, call: Call) -> tuple[Sequence[int], Future[Any]] | None:
        """Return the indices of the reward functions that only the episodes can score, and their
        future result, with the fields of `Scored`. None: there are no such functions."""

    @abstractmethod
    def forget(self, key: Key) -> GroupRecord:
        """Drop a group that has been scored, or is not needed; return what is reported of it."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether `advance` must be called regularly: it finds calls that take too long."""

    @property
    @abstractmethod
    def wakers(self) -> Sequence[Connection | int]:
        """Connections and descriptors that are readable when `advance` has something to do."""

    @abstractmethod
    def close(self) -> None:
        """End the processes of the user's code."""


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences of tokens."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    # Binary search for the first difference: comparing slices is far faster than single tokens.
    num_equal = 0
    num_until_different = length
    while num_until_different - num_equal > 1:
        middle = (num_equal + num_until_different) // 2
        if one[num_equal:middle] == other[num_equal:middle]:
            num_equal = middle
        else:
            num_until_different = middle
    return num_equal


def mean(numbers: Sequence[float]) -> float:
    """Return the mean of the counts of a group's episodes."""
    return sum(numbers) / len(numbers)
