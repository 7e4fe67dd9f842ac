"""The small messages between the controller and its workers.

Commands go from the controller to a worker, events come back; both over one pipe per worker.
No tokens' worth of work is in them: completions cross in the ring, weights in their channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from easyrl.types import Prompt

# -- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinWeights:
    """Become member `rank` of the weight channel's `size` members; rank 0 sends."""

    membership: int
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class ExchangeWeights:
    """Send (trainer) or receive (rollout workers) the weights of `policy_version`."""

    policy_version: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Roll out these prompts and put the groups into the ring."""

    iteration: int
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Sample one completion of each prompt and report its reward."""

    round: int
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class TrainIteration:
    """Take this iteration's groups out of the ring, accumulate, and step once."""

    iteration: int
    first_prompt_index: int


@dataclass(frozen=True, slots=True)
class SaveModel:
    folder: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


# -- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has loaded what it needs."""


@dataclass(frozen=True, slots=True)
class WeightsExchanged:
    policy_version: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored completion as text."""

    completion: str
    reward: float
    advantage: float


@dataclass(frozen=True, slots=True)
class GroupScored:
    """A group is in the ring."""

    iteration: int
    prompt_index: int
    rewards: Sequence[float]  # [G]
    rewards_by_function: Sequence[Sequence[float | None]]  # [functions][G]
    completion_lengths: Sequence[int]  # [G]
    num_truncated: int
    busy_seconds: float
    """The engine's busy time in this iteration so far."""
    prompt: str | None = None
    samples: Sequence[Sample] = ()


@dataclass(frozen=True, slots=True)
class PromptEvaluated:
    round: int
    prompt_index: int
    reward: float


@dataclass(frozen=True, slots=True)
class IterationTrained:
    iteration: int
    policy_version: int
    groups_trained: int
    groups_off_policy: int
    completion_tokens: int
    busy_seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ModelSaved:
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot go on. The traceback is empty where the message says it all."""

    message: str
    traceback: str
    is_user_error: bool


Command = JoinWeights | ExchangeWeights | Generate | Evaluate | TrainIteration | SaveModel | Stop
Event = (
    Ready
    | WeightsExchanged
    | GroupScored
    | PromptEvaluated
    | IterationTrained
    | ModelSaved
    | Failed
)
