"""Resolve a config once, into the parts that the rest of the program gets (`config.spec`).

`resolve` chooses all values that the config leaves open and that do not depend on the machine.
What depends on it is in the `Placement`. Nothing is loaded, and no file is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from easyrl.config import Config, by_name, change_config, keys_marked
from easyrl.config.algorithm import LOSS_KEY, TEACHER_PROMPT_KEY
from easyrl.config.rollout import RolloutConfig, SamplingChoice
from easyrl.config.section import PROMPT_FORM
from easyrl.config.spec import (
    AdvantageSpec,
    BatchSpec,
    DataSpec,
    EngineSpec,
    EpisodeSpec,
    FaultSpec,
    LossOptions,
    ModelSpec,
    OptimizerSpec,
    RewardSpec,
    RunSpec,
    ScheduleSpec,
    TeacherSpec,
    TokenLimits,
)
from easyrl.config.stopping import parse_condition
from easyrl.data.presets import PRESETS, default_reward, eval_sampling
from easyrl.rewards.loading import is_model


def resolve(config: Config) -> RunSpec:
    """Return the parts of a run. What only a check can find, as a data set without a reward, is
    left to the checks."""
    rewards = _rewards(config)
    return RunSpec(
        model=ModelSpec.of(config),
        data=_data(config),
        rewards=rewards,
        episodes=episodes_of(config, rewards) if config.rollout.has_environments else None,
        limits=_limits(config),
        sampling=SamplingChoice.of_training(config.rollout),
        engine=_engine(config),
        advantages=_advantages(config),
        loss=_loss(config),
        teacher=_teacher(config),
        optimizer=_optimizer(config),
        batches=_batches(config),
        schedule=_schedule(config),
        faults=_faults(config),
        devices=config.devices,
        code=_code(config, rewards),
        trackers=tuple(config.output.log_to),
    )


def _data(config: Config) -> DataSpec:
    rollout = config.rollout
    return DataSpec(
        options=config.data,
        seed=config.runtime.seed,
        environments=tuple(rollout.environments) if rollout.has_environments else (),
        teacher_prompt=config.algorithm.teacher_prompt,
    )


def _limits(config: Config) -> TokenLimits:
    return TokenLimits(config.data.max_prompt_length, config.rollout.max_completion_length)


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A config and the parts that it resolves to. Where a check chooses values, as what fits the
    memory, both change together."""

    config: Config
    spec: RunSpec

    @classmethod
    def of(cls, config: Config) -> Self:
        """Resolve a config."""
        return cls(config, resolve(config))

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the run with other values of these keys, and pictures as before. Raises
        ConfigError for a value that a key cannot have."""
        config = change_config(self.config, changes)
        return type(self)(config, resolve(config).with_pictures(self.spec.model.has_pictures))

    def with_pictures(self, has_pictures: bool) -> Self:
        """Return the run with or without pictures in its prompts, once the data is open."""
        return replace(self, spec=self.spec.with_pictures(has_pictures))


# -- rewards --------------------------------------------------------------------------------------


def _rewards(config: Config) -> RewardSpec:
    reward, rollout = config.reward, config.rollout
    functions = _reward_functions(config)
    given_weights = reward.weights or [1.0] * len(functions)
    num_added = max(0, len(functions) - len(given_weights))  # the agent's reward comes first
    return RewardSpec(
        functions=tuple(functions),
        names=tuple(short_names(functions)),
        weights=(*[1.0] * num_added, *given_weights),
        models=tuple(dict.fromkeys(each for each in reward.functions or () if is_model(each))),
        is_none=reward.is_none,
        timeout_seconds=reward.timeout_seconds or config.runtime.timeout_seconds,
        options=reward,
        datasets=tuple(config.data.datasets),
        acts=_actor(rollout),
        num_generations=rollout.num_generations,
        max_completion_length=rollout.max_completion_length,
        trust_remote_code=config.model.trust_remote_code,
        is_deterministic=config.runtime.deterministic,
    )


def _actor(rollout: RolloutConfig) -> Literal["environment", "tools", "agent"] | None:
    if rollout.agent is not None:
        return "agent"
    if rollout.environment is not None:
        return "environment"
    return "tools" if rollout.tools else None


def _reward_functions(config: Config) -> list[str]:
    """`reward.functions`, by default the environment's `get_reward` or the preset's reward. What an
    agent returns is a reward in any case, the first unless `reward.functions` names it."""
    reward, rollout = config.reward, config.rollout
    given = [] if reward.is_none else list(reward.functions or ())
    if rollout.agent is not None and "agent" not in given and not reward.is_none:
        return ["agent", *given]
    if given:
        return given
    if rollout.environment is not None:
        return ["environment"]
    default = default_reward(config.data)
    if default is not None:
        return [default]
    return ["none"] if reward.is_none else []


def short_names(functions: Sequence[str]) -> list[str]:
    """Return a name for each entry: its function's name; where two are equal, with the names of
    their files (`mine.py:score`), or else the whole entries."""
    forms = [
        [Path(entry.rpartition(":")[2]).name for entry in functions],
        [Path(entry).name for entry in functions],
        list(functions),
    ]
    names = []
    for index in range(len(functions)):
        unique = [form[index] for form in forms if form.count(form[index]) == 1]
        names.append(unique[0])
    return names


# -- generation -----------------------------------------------------------------------------------


def episodes_of(config: Config, rewards: RewardSpec) -> EpisodeSpec:
    rollout = config.rollout
    return EpisodeSpec(
        key="rollout.environment" if rollout.agent is None else "rollout.agent",
        environments=rollout.environments,
        tools=tuple(rollout.tools),
        agent=rollout.agent,
        agent_words=tuple(rollout.agent_words),
        ignores_sampling=rollout.agent_sampling == "ignore",
        keeps_history=rollout.agent_history == "kept",
        tool_format=rollout.tool_format,
        shows_pictures=rollout.takes_pictures,
        max_image_bytes=config.data.max_image_bytes,
        chat_template_kwargs=config.data.chat_template_kwargs,
        max_turns=rollout.max_turns,
        limits=_limits(config),
        stop=tuple(rollout.stop),
        sampling=SamplingChoice.of_training(rollout),
        tool_timeout_seconds=rollout.tool_timeout_seconds,
        episode_timeout_seconds=rollout.episode_timeout_seconds,
        num_processes=rollout.environment_workers,
        num_threads=1 if config.runtime.deterministic else rollout.concurrent_calls,
        rewards=rewards,
        seed=config.runtime.seed,
        is_deterministic=config.runtime.deterministic,
    )


def _engine(config: Config) -> EngineSpec:
    rollout = config.rollout
    return EngineSpec(
        name=rollout.engine,
        tensor_parallel_size=rollout.tensor_parallel_size,
        memory_fraction=rollout.memory_fraction,
        max_concurrent_groups=rollout.max_concurrent_groups,
        stop=tuple(rollout.stop),
        seed=config.runtime.seed,
        is_deterministic=config.runtime.deterministic,
    )


# -- training -------------------------------------------------------------------------------------


def _advantages(config: Config) -> AdvantageSpec:
    algorithm = config.algorithm
    return AdvantageSpec(
        estimator=algorithm.advantage_estimator,
        scale=algorithm.scale_rewards,
        has_rewards=not config.reward.is_none,
        dynamic_sampling=algorithm.dynamic_sampling,
    )


def _loss(config: Config) -> LossOptions:
    algorithm = config.algorithm
    return LossOptions(
        loss_type=algorithm.loss_type,
        importance_sampling_level=algorithm.importance_sampling_level,
        epsilon=algorithm.epsilon,
        epsilon_high=algorithm.resolved_epsilon_high,
        beta=algorithm.beta,
        entropy_coef=algorithm.entropy_coef,
        has_teacher=algorithm.teacher is not None,
        teacher_weight=algorithm.teacher_weight,
        teacher_divergence=algorithm.teacher_divergence,
        correction=config.importance_sampling_correction,
        importance_sampling_cap=algorithm.importance_sampling_cap,
        max_completion_length=config.rollout.max_completion_length,
        config=config,
    )


def _teacher(config: Config) -> TeacherSpec | None:
    algorithm = config.algorithm
    if algorithm.teacher is None:
        return None
    return TeacherSpec(
        path=algorithm.teacher_path,
        has_own_prompt=algorithm.teacher_prompt is not None,
        divergence=algorithm.teacher_divergence,
        temperature=config.rollout.temperature,
        dtype=config.model.dtype,
    )


def _optimizer(config: Config) -> OptimizerSpec:
    train = config.train
    return OptimizerSpec(
        learning_rate=config.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        iterations=train.iterations,
        warmup_iterations=train.warmup_iterations,
        max_grad_norm=train.max_grad_norm,
        compile=train.compile,
        activation_checkpointing=train.activation_checkpointing,
        offload=tuple(train.offload),
        reshard=train.reshard,
    )


def _batches(config: Config) -> BatchSpec:
    return BatchSpec(
        prompts_per_iteration=config.train.prompts_per_iteration,
        updates_per_iteration=config.train.updates_per_iteration,
        num_generations=config.rollout.num_generations,
        max_tokens=config.max_tokens_per_micro_batch,
        mask_truncated_completions=config.algorithm.mask_truncated_completions,
        keeps_zero_advantages=config.algorithm.trains_zero_advantages,
        waits_for_all=config.runtime.schedule == "sync",
        is_deterministic=config.runtime.deterministic,
    )


# -- the run --------------------------------------------------------------------------------------


def _schedule(config: Config) -> ScheduleSpec:
    train = config.train
    return ScheduleSpec(
        schedule=config.runtime.schedule,
        iterations=train.iterations,
        prompts_per_iteration=train.prompts_per_iteration,
        updates_per_iteration=train.updates_per_iteration,
        num_generations=config.rollout.num_generations,
        ring_slots=config.ring_slots,
        dynamic_sampling=config.algorithm.dynamic_sampling,
        seed=config.runtime.seed,
        is_deterministic=config.runtime.deterministic,
        save_every=train.save_every,
        keep_checkpoints=train.keep_checkpoints,
        eval_every=train.eval_every,
        stop_when=tuple(parse_condition(text) for text in train.stop_when or ()),
        correct_reward=config.eval.correct_reward,
        num_samples_kept=config.output.samples,
    )


def _faults(config: Config) -> FaultSpec:
    runtime = config.runtime
    return FaultSpec(
        timeout_seconds=runtime.timeout_seconds,
        stall_seconds=runtime.stall_seconds,
        max_restarts=runtime.max_restarts,
        restart_window_seconds=runtime.restart_window_seconds,
        autoscale=runtime.autoscale,
    )


def _code(config: Config, rewards: RewardSpec) -> dict[str, list[str]]:
    rollout = config.rollout
    agents = [] if rollout.agent is None or rollout.agent_words else [rollout.agent]
    return {
        "reward.functions": list(rewards.functions),
        "rollout.environment": [name for name in rollout.environments.values() if name],
        "rollout.tools": rollout.tools,
        "rollout.agent": agents,
        LOSS_KEY: [config.algorithm.loss_type],
    }


# -- evaluations ---------------------------------------------------------------------------------


def with_eval_data(config: Config) -> Config:
    """Return the config with `data` set to the evaluated problems, in the data's own order. A
    preset that `eval.dataset` names has its own prompts; others have those of `data`."""
    changes: dict[str, Any] = {"data.shuffle": False, TEACHER_PROMPT_KEY: None}
    if config.eval.dataset is not None:
        changes["data.dataset"] = config.eval.dataset
        changes["data.weights"] = None
        changes["data.options"] = {}
        if isinstance(config.data.columns, list):
            columns_of = dict(zip(config.data.datasets, config.data.columns, strict=True))
            changes["data.columns"] = [columns_of.get(config.eval.dataset, {})]
        if config.eval.dataset in PRESETS:
            defaults = by_name(Config().model_dump(include={"data"}))
            for key in keys_marked(PROMPT_FORM):
                changes[key] = defaults[key]
    return change_config(config, changes)


def with_long_problems(config: Config) -> Config:
    """Return the config with a `data.max_prompt_length` for a preset's longest problems, unless it
    is set. A micro-batch, which an evaluation does not have, need not hold them."""
    longest = eval_sampling(config.data).get("max_prompt_length")
    if longest is None or "max_prompt_length" in config.data.model_fields_set:
        return config
    changes = {"data.max_prompt_length": longest, "train.max_tokens_per_micro_batch": None}
    return change_config(config, changes)
