"""The resolved settings of a run, in parts: each part of the program gets its own, never `Config`.

    Config ──resolve──► RunSpec ──► model, data, rewards, episodes, …   (`easyrl.runtime.resolve`)
                           ├──► RolloutSpec ──► a rollout worker
                           └──► TrainSpec ────► a train worker

Nothing here is `auto` or null where a run uses a value, but what depends on the devices:
`EngineSpec.name`, `memory_fraction` and `max_concurrent_groups`, and `OptimizerSpec.reshard`.
`LossOptions.config` is the only whole config, for a loss of the user's own. A part has no torch and
no code of the user's, is never changed, and can be pickled for a process. The config's sections
explain the settings: a field has its key's name and meaning unless a comment says something else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

from easyrl.config import Config
from easyrl.config.algorithm import LOSS_TYPES, POLICY
from easyrl.config.data import DataConfig
from easyrl.config.devices import DevicesConfig
from easyrl.config.model import AttentionMode, DType, LoraConfig, VisionMode
from easyrl.config.reward import RewardConfig
from easyrl.config.rollout import SamplingChoice, ToolFormat
from easyrl.config.stopping import StopCondition


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Longest prompt and longest completion, in tokens."""

    max_prompt_length: int
    max_completion_length: int

    @property
    def max_sequence_length(self) -> int:
        return self.max_prompt_length + self.max_completion_length


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The policy's model, and how it is computed."""

    path: str
    dtype: DType
    trust_remote_code: bool
    attention: AttentionMode
    lora: LoraConfig
    chat_template: str | None  # instead of the tokenizer's own
    max_image_pixels: int | None = None
    has_pictures: bool = False
    """Whether episodes may show pictures, or prompts do, which is known once the data is open
    (`RunSpec.with_pictures`)."""
    vision: VisionMode = "frozen"  # without pictures it has no effect

    @property
    def has_trained_tower(self) -> bool:
        return self.has_pictures and self.vision == "trained"

    @classmethod
    def of(cls, config: Config) -> Self:
        model = config.model
        return cls(
            path=model.path,
            dtype=model.dtype,
            trust_remote_code=model.trust_remote_code,
            attention=model.attention,
            lora=model.lora,
            chat_template=config.data.chat_template,
            max_image_pixels=config.data.max_image_pixels,
            has_pictures=config.rollout.takes_pictures,
            vision=model.vision,
        )


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Sources of the prompts, and the settings that make a prompt of a row."""

    options: DataConfig
    seed: int
    environments: tuple[str, ...]
    """Names that the column `environment` of a row may have, as ("maze", "guess"). ("",): there is
    one environment, or an agent, which rows do not name. (): completions have one turn."""
    teacher_prompt: str | None


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """The reward functions, and how they are run."""

    functions: tuple[str, ...]
    """Entries as in `reward.functions`: ("math", "mine.py:length"). Empty if neither the config nor
    the data's preset names one, which a check refuses."""
    names: tuple[str, ...]
    """Names for metrics, one per function, each only once: ("math", "length")."""
    weights: tuple[float, ...]  # one per function
    models: tuple[str, ...]  # those of `functions` that are reward models
    is_none: bool  # no reward trains: the teacher is the only signal
    timeout_seconds: float  # of a call
    options: RewardConfig
    """The other settings of the section. Its `functions` and `weights` are not resolved."""
    datasets: tuple[str, ...]  # names of the data sets, which give the default function
    acts: Literal["environment", "tools", "agent"] | None
    """The actor of episodes, which may have a reward of its own. None: there are no episodes."""
    num_generations: int
    max_completion_length: int
    trust_remote_code: bool
    is_deterministic: bool

    @property
    def scores_nothing(self) -> bool:
        """Whether no reward exists: the teacher is the only signal, and the data has no reward of
        its own that held-out problems could be scored by."""
        return self.functions == ("none",)


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Environments, tools or an agent: what acts between two turns of the model."""

    key: Literal["rollout.environment", "rollout.agent"]  # of what acts
    environments: Mapping[str, str | None]
    """Environments by name, as {"maze": "maze.py:Maze"}. A single one has the name "", and is None
    with tools alone."""
    tools: tuple[str, ...]
    agent: str | None
    agent_words: tuple[str, ...]  # the words of an agent that is a command; (): a function
    ignores_sampling: bool  # an agent's requests may ask for any sampling settings
    keeps_history: bool  # an agent's earlier answers are shown as they were sampled
    tool_format: ToolFormat
    shows_pictures: bool  # answers of tools and requests of agents may have some
    max_image_bytes: int  # of the pictures that an episode shows, all together
    chat_template_kwargs: Mapping[str, Any]
    max_turns: int
    limits: TokenLimits
    stop: tuple[str, ...]
    sampling: SamplingChoice  # of training
    tool_timeout_seconds: float
    episode_timeout_seconds: float | None
    num_processes: int  # per rollout worker
    num_threads: int  # calls at a time in each process
    rewards: RewardSpec
    seed: int
    is_deterministic: bool


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The inference engines."""

    name: Literal["auto", "embedded", "vllm"]
    """`auto`: `runtime.placement` chooses, which knows the devices."""
    tensor_parallel_size: int
    memory_fraction: float | None  # None: it depends on whether a device is shared
    max_concurrent_groups: int | None  # None: it depends on the number of engines
    stop: tuple[str, ...]
    seed: int
    is_deterministic: bool


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """How the rewards of a group become advantages."""

    estimator: Literal["group", "rloo"]
    scale: Literal["group", "none"]
    has_rewards: bool  # False: all advantages are 0, and only a teacher trains
    dynamic_sampling: bool


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The settings of the loss. `easyrl.algorithm.losses` has the formulas."""

    loss_type: str
    importance_sampling_level: Literal["token", "sequence"]
    epsilon: float
    epsilon_high: float
    beta: float
    entropy_coef: float
    has_teacher: bool
    teacher_weight: float
    teacher_divergence: float | None
    correction: Literal["none", "truncate", "mask"]  # `importance_sampling_correction`
    importance_sampling_cap: float
    max_completion_length: int
    config: Config  # all settings, for a loss of the user's own

    @property
    def is_own(self) -> bool:
        """Whether the loss is a function of the user's."""
        return self.loss_type not in LOSS_TYPES


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """The model that scores the policy's completions."""

    path: str | None  # None: it is the policy itself, with its current weights
    has_own_prompt: bool
    divergence: float | None
    temperature: float
    dtype: DType

    @property
    def shown(self) -> str:
        return self.path or POLICY


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The optimizer's steps, and what the forward and backward passes keep where."""

    learning_rate: float
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    iterations: int
    warmup_iterations: int
    max_grad_norm: float
    compile: bool
    activation_checkpointing: bool
    offload: tuple[Literal["reference", "old", "optimizer"], ...]
    reshard: Literal["auto"] | bool
    """`auto`: `runtime.memory_fit` chooses; a worker takes it for True."""


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """How the groups of an iteration become micro-batches."""

    prompts_per_iteration: int
    updates_per_iteration: int
    num_generations: int
    max_tokens: int  # of a micro-batch
    mask_truncated_completions: bool
    keeps_zero_advantages: bool
    """Whether a rollout with advantage 0 has a gradient: of the KL term, the entropy bonus or the
    teacher's term."""
    waits_for_all: bool  # the first micro-batch begins once all groups are in (schedule `sync`)
    is_deterministic: bool

    @property
    def groups_per_update(self) -> int:
        return self.prompts_per_iteration // self.updates_per_iteration


class BestMetric(NamedTuple):
    """A metric, and which of its values is the best."""

    name: str
    is_highest: bool


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """The iterations of the run, and what happens between them."""

    schedule: Literal["periodic", "sync"]
    iterations: int
    prompts_per_iteration: int
    updates_per_iteration: int
    num_generations: int
    ring_slots: int
    dynamic_sampling: bool
    seed: int
    is_deterministic: bool
    save_every: int | None
    keep_checkpoints: int
    eval_every: int
    stop_when: tuple[StopCondition, ...]
    correct_reward: float
    num_samples_kept: int | None  # groups of an iteration in samples.jsonl; None: all

    @property
    def best_metric(self) -> BestMetric:
        """The metric whose best checkpoint is kept: the first of an evaluation that a condition
        waits for, else the accuracy. (Other metrics are those of the policy before the update.)"""
        for condition in self.stop_when:
            if condition.is_patience and condition.is_of_evaluation:
                return BestMetric(condition.metric, is_highest=condition.is_rise)
        return BestMetric("eval/accuracy", is_highest=True)


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """How long to wait for workers, and how many to replace."""

    timeout_seconds: float
    stall_seconds: float | None
    max_restarts: int
    restart_window_seconds: float
    autoscale: bool


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What a rollout worker needs."""

    model: ModelSpec
    engine: EngineSpec
    limits: TokenLimits
    sampling: SamplingChoice
    rewards: RewardSpec
    episodes: EpisodeSpec | None
    advantages: AdvantageSpec
    chat_template_kwargs: Mapping[str, Any]
    num_updates: int  # of the whole run
    num_samples_kept: int | None
    max_image_bytes: int


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """What a train worker needs."""

    model: ModelSpec
    optimizer: OptimizerSpec
    loss: LossOptions
    teacher: TeacherSpec | None
    batches: BatchSpec
    temperature: float
    keep_checkpoints: int
    seed: int


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run, resolved (`easyrl.runtime.resolve`)."""

    model: ModelSpec
    data: DataSpec
    rewards: RewardSpec
    episodes: EpisodeSpec | None  # None: a completion has one turn
    limits: TokenLimits
    sampling: SamplingChoice
    engine: EngineSpec
    advantages: AdvantageSpec
    loss: LossOptions
    teacher: TeacherSpec | None
    optimizer: OptimizerSpec
    batches: BatchSpec
    schedule: ScheduleSpec
    faults: FaultSpec
    devices: DevicesConfig
    code: Mapping[str, Sequence[str]]
    """Entries that may be functions or classes of the user's, by their keys, as
    {"reward.functions": ["mine.py:length"], "rollout.tools": []}."""
    trackers: tuple[str, ...]  # `output.log_to`

    @property
    def shows_pictures_in_episodes(self) -> bool:
        return self.episodes is not None and self.episodes.shows_pictures

    def with_pictures(self, has_pictures: bool) -> Self:
        """Return the run with or without pictures in its prompts; episodes may show others."""
        is_needed = has_pictures or self.shows_pictures_in_episodes
        return replace(self, model=replace(self.model, has_pictures=is_needed))

    @property
    def for_rollout(self) -> RolloutSpec:
        return RolloutSpec(
            model=self.model,
            engine=self.engine,
            limits=self.limits,
            sampling=self.sampling,
            rewards=self.rewards,
            episodes=self.episodes,
            advantages=self.advantages,
            chat_template_kwargs=self.data.options.chat_template_kwargs,
            num_updates=self.schedule.iterations * self.schedule.updates_per_iteration,
            num_samples_kept=self.schedule.num_samples_kept,
            max_image_bytes=self.data.options.max_image_bytes,
        )

    @property
    def for_training(self) -> TrainSpec:
        return TrainSpec(
            model=self.model,
            optimizer=self.optimizer,
            loss=self.loss,
            teacher=self.teacher,
            batches=self.batches,
            temperature=self.sampling.temperature,
            keep_checkpoints=self.schedule.keep_checkpoints,
            seed=self.schedule.seed,
        )
