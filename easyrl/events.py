"""Every message of a run: commands to workers, events from workers, events of the run.

    controller ──Command──► worker ──WorkerEvent──► controller ──Event──► observer, observer, …

Commands and worker events cross one pipe per worker. They are small: completions cross in the ring
buffer, weights in the weight channel. Observers (run folder, live view, trace, trackers) get the
run's own events, and every worker event as it is, inside a `FromWorker` (a Note comes without it).
A view is a fold of events: `easyrl watch` reads them back from the run folder and shows the same.

Times are seconds of `time.monotonic`, which all processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from easyrl.types import IndexedPrompt, Prompt

if TYPE_CHECKING:
    from easyrl.config import Config

# -- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InitWeightChannel:
    """Become `rank` of the weight channel's process group; rank 0 sends, the others receive."""

    generation: int  # counts the process groups of a run
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class ExchangeWeights:
    """Send (trainer) or receive (rollout workers) the weights of `policy_version`."""

    policy_version: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Roll out these prompts; put the groups into the ring, except those that are rejected."""

    iteration: int
    prompts: Sequence[IndexedPrompt]
    is_last_round: bool  # no group is rejected: there is no further round to replace it


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Sample completions of each prompt and report their rewards."""

    round: int
    prompts: Sequence[Prompt]
    num_samples: int = 1
    with_texts: bool = False


@dataclass(frozen=True, slots=True)
class TrainIteration:
    """Read this iteration's groups from the ring, accumulate gradients, step once per update."""

    iteration: int


@dataclass(frozen=True, slots=True)
class SaveModel:
    folder: str


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Copy the state at this iteration boundary, and write it while training continues."""

    path: str
    policy_version: int
    state: Mapping[str, Any]  # the controller's part: numbers, strings, lists and mappings
    best_version: int | None = None  # the checkpoint to keep besides the newest ones


@dataclass(frozen=True, slots=True)
class Halt:
    """Drop the current iteration unless all its updates are done, and stop training."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


# -- events of a worker -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Starting:
    """The current step of a worker's start: "importing torch", "loading the model", …"""

    what: str


@dataclass(frozen=True, slots=True)
class Note:
    """One line that the user should read; from a worker, the controller or an observer."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has started."""


SpanKind = Literal["prefill", "generate", "score", "train", "weights", "wait"]
WORKING = ("prefill", "generate", "train")
"""Kinds of spans that process tokens."""


@dataclass(frozen=True, slots=True)
class Span:
    """A finished piece of a worker's work."""

    kind: SpanKind
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Started and not ended; `score`: the worker waits for rewards."""

    kind: SpanKind
    started: float


@dataclass(frozen=True, slots=True)
class Activity:
    """A worker's work since its last report."""

    spans: Sequence[Span]
    num_tokens: int  # completion tokens generated (rollout worker) or trained (train worker)
    num_groups: int  # groups that the train worker has read from the ring
    under_way: UnderWay | None = None  # work started now that may take long


@dataclass(frozen=True, slots=True)
class WeightsExchanged:
    policy_version: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored completion as text."""

    completion: str
    reward: float
    advantage: float
    columns: Mapping[str, Any]  # values that reward functions logged for it (`log_extra`)


@dataclass(frozen=True, slots=True)
class GroupScored:
    """A group has its rewards; it is in the ring unless it is rejected."""

    iteration: int
    group_index: int
    prompt_index: int
    rewards: Sequence[float]  # [G], NaN where the group was skipped
    rewards_by_function: Sequence[Sequence[float | None]]  # [functions][G]
    completion_lengths: Sequence[int]  # [G]
    num_truncated: int
    busy_seconds: float  # the engine's busy time in this iteration so far
    errors: Sequence[str] = ()  # failed reward calls that do not end the run (`reward.on_error`)
    is_skipped: bool = False  # a reward call failed, so the group has no rewards
    is_unwanted: bool = False
    """Skipped or, with `algorithm.dynamic_sampling`, all rewards are equal."""
    is_rejected: bool = False  # unwanted and not in the ring: a fresh prompt replaces it
    logged: Mapping[str, float] = field(default_factory=dict)
    """Metrics that reward functions logged (`log_metric`)."""
    prompt: str | None = None
    samples: Sequence[Sample] = ()


@dataclass(frozen=True, slots=True)
class PromptEvaluated:
    """Shapes: S samples of the prompt."""

    round: int
    prompt_index: int
    rewards: Sequence[float]  # [S], NaN where the reward call failed and the prompt is skipped
    rewards_by_function: Sequence[Sequence[float | None]] = ()  # [functions][S]
    completion_lengths: Sequence[int] = ()  # [S]
    truncated: Sequence[bool] = ()  # [S]
    prompt: str | None = None
    completions: Sequence[str] = ()  # [S], with `Evaluate.with_texts`
    errors: Sequence[str] = ()


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
class CheckpointSaved:
    """A checkpoint is published under its name, or could not be written (`error`)."""

    policy_version: int
    seconds: float
    num_bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Halted:
    """Reply to Halt: training has stopped."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker ends. The traceback is empty where the message is sufficient."""

    message: str
    traceback: str
    is_user_error: bool


Command = (
    InitWeightChannel
    | ExchangeWeights
    | Generate
    | Evaluate
    | TrainIteration
    | SaveModel
    | SaveCheckpoint
    | Halt
    | Stop
)
WorkerEvent = (
    Starting
    | Note
    | Ready
    | Activity
    | WeightsExchanged
    | GroupScored
    | PromptEvaluated
    | IterationTrained
    | ModelSaved
    | CheckpointSaved
    | Halted
    | Failed
)

# -- events of a run --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromWorker:
    """An event of a worker, and when the controller received it."""

    worker: str
    time: float
    event: WorkerEvent


@dataclass(frozen=True, slots=True)
class CheckStarted:
    """The config is being checked; the only event before RunStarted or EvalStarted."""

    what: str


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run folder exists; no worker has been started."""

    started: float  # when the command began
    folder: Path
    config: Config
    devices: Mapping[str, str]
    """Worker -> device, rollout workers first: {"rollout-0": "cpu", "train-0": "cpu"}."""
    description: str  # the placement as text, several lines
    num_iterations: int = 0  # iterations done before, of a resumed run


@dataclass(frozen=True, slots=True)
class RunResumed:
    """What a resumed run did before; follows RunStarted."""

    metrics: Sequence[Mapping[str, Any]]  # the lines of `metrics.jsonl`
    accuracies: Sequence[tuple[int, float]]
    """Held-out accuracies so far, each with the number of iterations trained before."""


@dataclass(frozen=True, slots=True)
class NoEvents:
    """Another second passed without an event from any worker."""

    time: float
    warning: str  # what each worker is doing, if that has lasted long; else empty


@dataclass(frozen=True, slots=True)
class EvaluationStarted:
    """Round 0: before training, 1: after training, 1 + n: after the n-th iteration."""

    time: float
    round: int
    num_prompts: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    time: float
    round: int
    accuracy: float
    num_prompts: int
    standard_error: float | None = None
    num_iterations: int | None = None  # iterations trained before; None: all so far


@dataclass(frozen=True, slots=True)
class FirstRollout:
    seconds: float  # since the command began


@dataclass(frozen=True, slots=True)
class IterationStarted:
    time: float
    iteration: int  # from 0


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """Fresh prompts replace rejected groups of the iteration."""

    time: float
    iteration: int
    round: int  # from 1; the iteration's first prompts are round 0 and have no event
    num_prompts: int


@dataclass(frozen=True, slots=True)
class IterationFinished:
    """All updates of an iteration are done."""

    time: float
    metrics: Mapping[str, Any]  # a line of `metrics.jsonl`, with `iteration` and `policy_version`


@dataclass(frozen=True, slots=True)
class Stopping:
    """The run received a signal and finishes this work before it ends."""

    time: float
    what: str


@dataclass(frozen=True, slots=True)
class SavingModel:
    time: float
    folder: Path


@dataclass(frozen=True, slots=True)
class RunFinished:
    """All iterations are done and the model is saved."""

    time: float
    summary: Mapping[str, Any]  # contents of `summary.json`


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The last event of every run: all workers have ended."""

    exit_code: int
    message: str  # why the run ended, for the user; empty if it finished


# -- events of `easyrl eval` ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvalStarted:
    """The folder of an `easyrl eval` exists; no worker has been started."""

    started: float  # when the command began
    folder: Path
    about: Mapping[str, Any]  # model, data and sampling, as in `eval.json`
    devices: Mapping[str, str]
    description: str
    num_problems: int
    num_done: int  # problems that earlier commands answered


@dataclass(frozen=True, slots=True)
class ProblemsAnswered:
    """More answers of an `easyrl eval` are on the disk."""

    time: float
    num_done: int  # in total
    accuracy: float  # of all answers so far; NaN while none has a reward
    standard_error: float
    num_tokens: int  # of the new answers


@dataclass(frozen=True, slots=True)
class EvalFinished:
    """All problems are answered."""

    time: float
    folder: Path
    results: Mapping[str, Any]  # contents of `eval.json`


@dataclass(frozen=True, slots=True)
class EvalCompared:
    """Two evaluations compared on their common problems."""

    results: Mapping[str, Any]
    comparison: Mapping[str, Any]  # `comparison` in `eval.json`
    problems: Sequence[Mapping[str, Any]]
    """Both accuracies of each common problem, the largest difference first."""
    file: Path  # the file that lists them


Event = (
    FromWorker
    | CheckStarted
    | RunStarted
    | RunResumed
    | NoEvents
    | EvaluationStarted
    | Evaluated
    | FirstRollout
    | IterationStarted
    | RoundStarted
    | IterationFinished
    | Stopping
    | SavingModel
    | Note
    | RunFinished
    | RunEnded
    | EvalStarted
    | ProblemsAnswered
    | EvalFinished
    | EvalCompared
)

Observer = Callable[[Event], Note | None]
"""May return a note for all observers. May raise only at RunStarted: a ValueError, if it cannot do
what the config requests."""


def combine_observers(observers: Sequence[Observer]) -> Observer:
    """Return one observer that calls all of them, and gives the notes they return to all.

    RunEnded reaches every observer, even if one of them raises: a view that misses it would not
    restore the terminal.
    """

    def notify(event: Event) -> None:
        notes: list[Note | None] = []
        failure: Exception | None = None
        for observe in observers:
            try:
                notes.append(observe(event))
            except Exception as error:
                if not isinstance(event, RunEnded):
                    raise
                failure = error
        for note in notes:
            if note is not None:
                notify(note)
        if failure is not None:
            raise failure

    return notify
