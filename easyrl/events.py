"""Every message of a run: commands to workers, events from workers, events of the run.

    controller ──Command──► worker ──WorkerEvent──► controller ──Event──► observer, observer, …

Commands and worker events cross one pipe per worker; completions cross in the ring buffer, weights
in the weight channel. Observers (run folder, live view, trace, trackers) get the run's own events,
and every worker event inside a `FromWorker` (a Note comes without it). The trace is these events as
JSON: `easyrl watch` reads them back. Times are those of `time.monotonic`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, dataclass_transform

from easyrl.formatting import shorten

if TYPE_CHECKING:
    from easyrl.config.spec import RunSpec
    from easyrl.types import IndexedPrompt, Prompt


MAX_VALUE = 500
"""Characters of a prompt, a completion or a column that an error message shows."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """Base of all messages. Subclasses become frozen dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Command(Message):
    """Sent by the controller to a worker."""


class WorkerEvent(Message):
    """Sent by a worker to the controller."""


class Event(Message):
    """Passed to the observers of a run."""


# -- commands ---------------------------------------------------------------------------------


class InitWeightChannel(Command):
    """Become `rank` of the weight channel's process group; rank 0 sends, the others receive."""

    rank: int
    world_size: int
    generation: int = 0  # of the process group: each is made once


class ExchangeWeights(Command):
    """Send (trainer) or receive (rollout workers) the weights of `policy_version`."""

    policy_version: int


class SendWeights(Command):
    """Send the policy of this iteration to one new rollout worker, over a temporary channel."""

    policy_version: int
    world_size: int  # the trainer's rank 0 and the ranks of one engine
    generation: int


class CancelExchange(Command):
    """A member of the weight channel is dead: end the waits for it."""


class Generate(Command):
    """Roll out these prompts; put the groups into the ring, except those that are rejected."""

    iteration: int
    prompts: Sequence[IndexedPrompt]
    is_last_round: bool  # no group is rejected: there is no further round to replace it
    known: Mapping[int, int] = field(default_factory=dict)
    """Prompt index -> checksum of groups that are generated again, compared and dropped: a dead
    worker has delivered them."""


class Evaluate(Command):
    """Sample completions of each prompt and report their rewards."""

    evaluation_round: int
    prompts: Sequence[Prompt]
    num_samples: int = 1
    known: Mapping[int, int] = field(default_factory=dict)  # as in Generate


class TrainIteration(Command):
    """Read this iteration's groups from the ring, accumulate gradients, step once per update."""

    iteration: int


class SaveModel(Command):
    folder: str


class SaveCheckpoint(Command):
    """Copy the state at this iteration boundary, and write it while training continues."""

    path: str
    policy_version: int
    state: Mapping[str, Any]  # the controller's part: numbers, strings, lists and mappings
    best_version: int | None = None  # the checkpoint to keep besides the newest ones


class Halt(Command):
    """Drop the current iteration unless all its updates are done, and stop training."""


class Stop(Command):
    pass


# -- events of a worker -----------------------------------------------------------------------


class Starting(WorkerEvent):
    """The current step of a worker's start: "importing torch", "loading the model", …"""

    what: str


class Note(Event, WorkerEvent):
    """One line that the user should read; from a worker, the controller or an observer."""

    text: str
    is_lasting: bool = False  # the live view shows it until the end


class Ready(WorkerEvent):
    """The worker has started."""


SpanKind = Literal["prefill", "generate", "score", "train", "weights", "wait"]
WORKING: Sequence[SpanKind] = ("prefill", "generate", "train")  # kinds of spans that process tokens


class Span(Message):
    """A finished piece of a worker's work."""

    kind: SpanKind
    started: float
    ended: float


class UnderWay(Message):
    """Work that has started and not ended; `score`: waiting for rewards or environments."""

    kind: SpanKind
    started: float


class Activity(WorkerEvent):
    """A worker's work since its last report."""

    spans: Sequence[Span]
    under_way: UnderWay | None = None  # work started now that may take long
    num_tokens: int = 0  # completion tokens sampled; by a trainer: tokens of its micro-batches


class WeightsExchanged(WorkerEvent):
    """A worker has sent or received the weights, or could not (`error`)."""

    policy_version: int
    error: str = ""


class Sample(Message):
    """One scored completion as text."""

    completion: str
    reward: float  # NaN: nothing scores trained groups, or this one was skipped
    advantage: float
    columns: Mapping[str, Any]  # values that reward functions logged for it (`log_extra`)
    rewards: Mapping[str, float | None] = field(default_factory=dict)  # by function
    length: int = 0  # sampled tokens
    truncated: bool = False
    raw: Sequence[str] = ()  # prompt and completion as the model sees them: all of their tokens
    episode: Mapping[str, Any] = field(default_factory=dict)  # by EPISODE_KEYS
    inserted_tokens: int = 0  # by environments, tools and later requests


SAMPLE_COLUMNS = ("iteration", "prompt_index", "prompt", "completion", "reward", "advantage")
"""Names that a reward function's `log_extra` cannot use."""
JUDGE_REPLIES = "judge_replies"
"""Column of what the judge wrote about a completion: a list of {"score": 0.7, "reply": "…"}, one of
each answer (`reward.judge.samples`). Scores are from 0 to 1."""
EPISODE_KEYS = ("messages", "ended_by", "branches", "branch_reasons")
"""What an episode adds to a line of samples.jsonl."""
SAMPLE_VALUES = (
    "completion",
    "reward",
    "rewards",
    "length",
    "inserted_tokens",
    "truncated",
    "raw",
)
"""Fields of `Sample` that a line of samples.jsonl has."""
SAMPLE_KEYS = (*SAMPLE_COLUMNS, *SAMPLE_VALUES, *EPISODE_KEYS, "problem", "sample")


def with_columns(line: dict[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Add columns to a line of samples.jsonl. One that is named like a key of the line becomes
    `column/NAME`."""
    added = dict(line)
    for name, value in columns.items():
        key = f"column/{name}" if name in SAMPLE_KEYS else name
        added[key] = value
    return added


class FailedCall(Message):
    """A call of reward functions that failed, with what they were given."""

    error: str  # what failed, and the function's traceback
    prompt: str = ""  # empty: the failure concerns no group
    completion: str | None = None
    """One that the function fails on; the group's first one if that is unknown."""
    row: Mapping[str, Any] = field(default_factory=dict)  # its columns, as `Prompt.references`

    def __str__(self) -> str:
        lines = [self.error]
        if self.prompt:
            lines.append(f"prompt: {_shown_value(self.prompt)}")
        if self.completion is not None:
            lines.append(f"completion: {_shown_value(self.completion)}")
        if self.row:
            values = [f"{name}={_shown_value(value)}" for name, value in self.row.items()]
            lines.append(f"row: {', '.join(values)}")
        return "\n".join(lines)


def _shown_value(value: Any) -> str:
    """Return a value as Python writes it, at most MAX_VALUE characters and their mark."""
    return shorten(repr(value), MAX_VALUE, " … ")


class GroupScored(WorkerEvent):
    """A group has its rewards; it is in the ring unless it is rejected."""

    iteration: int  # from 1
    group_index: int
    prompt_index: int
    rewards: Sequence[float]  # [G], NaN where the group was skipped
    rewards_by_function: Sequence[Sequence[float | None]]  # [functions][G]
    completion_lengths: Sequence[int]  # [G], sampled tokens
    num_truncated: int
    busy_seconds: float  # the engine's busy time in this iteration so far
    errors: Sequence[FailedCall] = ()
    """Failed reward calls that do not end the run (`reward.on_error`)."""
    is_skipped: bool = False  # a reward call failed, so the group has no rewards
    is_unwanted: bool = False
    """Skipped or, with `algorithm.dynamic_sampling`, all rewards are equal."""
    is_rejected: bool = False  # unwanted and not in the ring: a fresh prompt replaces it
    logged: Mapping[str, float] = field(default_factory=dict)  # by reward functions (`log_metric`)
    prompt: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # `Prompt.references`
    samples: Sequence[Sample] = ()  # all completions, for samples.jsonl
    pictures: Sequence[bytes] = ()  # of the prompt, beside `samples`: small JPEG files
    shown: Sample | None = None  # one of them, for the live view
    checksum: int = 0  # of token ids and log-probabilities
    num_inserted_tokens: int = 0  # in all completions
    num_prompt_tokens: int = 0  # `Completion.num_read_before`, summed over the completions


class GroupRecomputed(WorkerEvent):
    """A group that a dead worker had delivered was generated again: it has the same bits."""

    prompt_index: int


class PromptEvaluated(WorkerEvent):
    evaluation_round: int
    prompt_index: int
    samples: Sequence[Sample]  # of a skipped one the rewards are NaN
    prompt: str | None = None
    pictures: Sequence[bytes] = ()  # of the prompt: small JPEG files
    errors: Sequence[FailedCall] = ()
    logged: Mapping[str, float] = field(default_factory=dict)  # by reward functions
    checksum: int = 0  # of token ids and log-probabilities


class RewardFailed(WorkerEvent):
    """A reward call failed, and `reward.on_error` is `stop`: the run is to end. The worker scores
    no group any more."""

    call: FailedCall
    iteration: int | None = None  # from 1; None: of an evaluation, or of no group
    prompt_index: int | None = None  # None: of no group


class IterationTrained(WorkerEvent):
    iteration: int
    policy_version: int
    groups_trained: int  # each of them checked to be on-policy (`GroupReader._accept`)
    completion_tokens: int  # sampled
    busy_seconds: float
    metrics: Mapping[str, float]
    inserted_tokens: int = 0  # in these completions


class ModelSaved(WorkerEvent):
    weights_sha256: str


class CheckpointSaved(WorkerEvent):
    """A checkpoint is published under its name, or could not be written (`error`)."""

    policy_version: int
    seconds: float
    num_bytes: int
    error: str = ""


class Halted(WorkerEvent):
    """Reply to Halt: training has stopped."""


class Failed(WorkerEvent):
    """The worker ends. The traceback is empty where the message is sufficient."""

    message: str
    traceback: str
    is_user_error: bool
    is_replaceable: bool = False  # another worker in its place may succeed
    is_consequence: bool = False  # a connection was lost: another worker's end may be the cause


class Lost(WorkerEvent):
    """The worker has died or was killed. Its process is gone; nothing follows."""

    cause: str
    traceback: str = ""


# -- events of a run --------------------------------------------------------------------------


class TimedEvent(Event):
    time: float


class FromWorker(Event):
    """An event of a worker, and when the controller received it."""

    worker: str
    time: float
    event: WorkerEvent


class RunStarted(Event):
    """The run folder exists; no worker has been started."""

    started: float  # when the command began
    folder: Path
    spec: RunSpec
    settings: Mapping[str, Any]
    """The config as it is dumped, by section: {"train": {"iterations": 60, …}, …}."""
    devices: Mapping[str, str]
    """Worker -> device, rollout workers first: {"rollout-0": "cpu", "train-0": "cpu"}."""
    description: str  # the placement as text, several lines
    num_iterations: int = 0  # of a resumed run: done before
    earlier: Sequence[Mapping[str, Any]] = ()  # their lines of `metrics.jsonl`
    accuracies: Sequence[tuple[int, float]] = ()
    """Held-out accuracies so far, each with the number of iterations trained before."""


class WorkerSpawned(TimedEvent):
    """A rollout worker is added, or starts in the place of a dead one."""

    worker: str
    device: str


class WorkerLeft(TimedEvent):
    worker: str


class EvaluationStarted(TimedEvent):
    num_prompts: int


class Evaluated(TimedEvent):
    accuracy: float
    num_prompts: int
    standard_error: float
    num_iterations: int  # trained before
    reward: float | None = None  # mean


class IterationStarted(TimedEvent):
    iteration: int  # from 1


class IterationFinished(TimedEvent):
    metrics: Mapping[str, Any]  # a line of `metrics.jsonl`, with `iteration` and `policy_version`


class SavingModel(TimedEvent):
    """All iterations are done; the train workers write the model."""


class RunFinished(TimedEvent):
    """All iterations are done and the model is saved."""

    summary: Mapping[str, Any]  # contents of `summary.json`


class RunEnded(Event):
    """The last event of every run: all workers have ended."""

    exit_code: int
    message: str  # why the run ended, for the user; empty if it finished
    is_planned: bool = False  # stopped by `train.stop_when` or a callback


Observer = Callable[[Event], Note | None]
"""May return a note for all observers. An exception ends the run."""


def combine_observers(observers: Sequence[Observer]) -> Observer:
    """Return one observer that calls all of them, then passes on the notes they returned."""

    def notify(event: Event) -> None:
        for note in [observe(event) for observe in observers]:
            if note is not None:
                notify(note)

    return notify
