"""The sections of the config: every key with its default, meaning and unit.

The docstrings of the keys are the comments that `easyrl config` prints. `easyrl.algorithm` has the
formulas of the losses and their sources; docs/rewards.md describes the rewards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    field_validator,
    model_validator,
)

from easyrl.formatting import counted


class ConfigError(ValueError):
    """An error in a user's settings. The message has one line per problem: the key, what was
    expected, and what it got."""


class Section(BaseModel):
    """Frozen, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_type(cls, value: Any, info: Any) -> Any:
        annotation = cls.model_fields[info.field_name].annotation
        if value is None and is_section(annotation):
            return {}  # a section whose keys are all commented out
        if isinstance(value, bool) and {int, float} & {*kinds(annotation)}:
            raise ValueError("expected a number")
        return value


def kinds(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the type."""
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _check_each_once(value: Any) -> Any:
    if isinstance(value, list) and (len(set(value)) < len(value) or "" in value):
        raise ValueError("expected each name once, and none empty")
    return value


EACH_ONCE = AfterValidator(_check_each_once)
"""Refuses a list that has a string twice, or an empty one."""

AttentionMode = Literal["auto", "shared_prompt", "repeated"]
DType = Literal["float32", "bfloat16"]


class LoraConfig(Section):
    """LoRA: train small adapters beside the linear layers instead of the model's own weights.
    Needs peft: pip install 'easyrl[lora]'. Without dropout, as engines sample without it."""

    rank: int | None = Field(default=None, ge=1)
    """Rank of the adapters; null: no LoRA, all weights are trained."""
    alpha: int | None = Field(default=None, ge=1)
    """An adapter's output is multiplied by alpha / rank; null: twice the rank."""
    target_modules: Annotated[list[str] | None, EACH_ONCE] = Field(default=None, min_length=1)
    """Linear layers that get an adapter, by the ends of their names ([q_proj, v_proj]); null: all
    except the head."""

    @model_validator(mode="after")
    def _has_rank(self) -> Self:
        for key in ("alpha", "target_modules"):
            if self.rank is None and (value := getattr(self, key)) is not None:
                raise ValueError(f"model.lora.{key}: expected model.lora.rank too, got {value}")
        return self

    @property
    def resolved_alpha(self) -> int:
        """`alpha` with its default. There must be a rank."""
        assert self.rank is not None
        return 2 * self.rank if self.alpha is None else self.alpha


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = Field(default="tiny", min_length=1)
    """A Hugging Face folder, a hub id, or a built-in model (`tiny`, `tiny-countdown`)."""
    dtype: DType = "float32"
    """Data type of the computation. The trainer keeps weights, sums of gradients, optimizer state
    and log-probabilities in float32."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""
    attention: AttentionMode = "auto"
    """Train a group's prompt once for all completions (`shared_prompt`) or once for each
    (`repeated`), with the same result. `auto`: shared where the model's layers support it."""
    lora: LoraConfig = LoraConfig()


class DataConfig(Section):
    """Sources of the prompts."""

    dataset: Annotated[str | list[str], EACH_ONCE] = Field(default="arithmetic", min_length=1)
    """A preset (`arithmetic`, `countdown`, `gsm8k`, `math`), a .jsonl, .csv or .parquet file, a
    folder of `save_to_disk`, or a hub id (`owner/name:subset:split`); a list of them is mixed."""
    preset: str | None = Field(default=None, min_length=1)
    """A preset whose settings apply to rows of your own that have its columns. Null: none."""
    weights: list[PositiveFloat] | None = Field(default=None, min_length=1)
    """Shares of a list of data sets, exact to a thousandth; null: equal shares."""
    prompt_column: str | None = Field(default=None, min_length=1)
    """Column with the prompt: a string, or chat messages. All other columns go to the rewards.
    Null: the preset's, else `prompt`."""
    prompt_template: str | None = None
    """Makes the prompt from the row's columns instead: "Solve: {question}"; {{ and }} are braces.
    Null: the preset's, else none."""
    system_prompt: str | None = None
    """System message before a prompt without one; it makes a chat of a string. Null: none."""
    chat: bool | None = None
    """Whether a prompt that is a string goes through the model's chat template as a user's message
    or to the model as it is. Null: the preset's, else false unless there is a system_prompt."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns renamed for the rewards: {answer: solution} passes `solution` as `answer`."""
    shuffle: bool = True
    """Visit the rows in a new random order every epoch, seeded by `runtime.seed`."""
    num_held_out: int | None = Field(default=None, ge=0)
    """Number of the data set's held-out problems that accuracy is measured on; null: all."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Longest prompt in tokens; in `easyrl eval` by default the preset's."""
    long_prompts: Literal["stop", "skip"] = "stop"
    """Name a longer prompt and do not start (`stop`), or leave its row out (`skip`)."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template, as in {enable_thinking: false}."""

    @property
    def datasets(self) -> list[str]:
        """`dataset` as a list, of one or several."""
        return [self.dataset] if isinstance(self.dataset, str) else self.dataset

    @property
    def shown(self) -> str:
        """`dataset` as one line of text."""
        return " + ".join(self.datasets)

    @model_validator(mode="after")
    def _one_weight_per_data_set(self) -> Self:
        weights, num = self.weights, len(self.datasets)
        if weights and (len(weights) != num or min(weights) * 1000 < sum(weights)):
            raise ValueError(
                f"data.weights: expected one for each of {counted(num, 'data set')}, at least a "
                f"thousandth of their sum, got {weights}"
            )
        return self


class RewardConfig(Section):
    """Reward functions (docs/rewards.md)."""

    functions: list[str] | None = None
    """List of `exact_match`, `math`, `gsm8k`, `code`, `regex`, `format`, `countdown`,
    `length_penalty`, `file.py:function`, `package.module:function`; null: the preset's."""
    weights: list[float] | None = None
    """One weight per function, in their order; null: 1 each."""
    pattern: str | None = None
    """Python's regular expression that the function `regex` searches a completion for."""
    code_timeout_seconds: float = Field(default=10.0, gt=0.0, le=3600.0)
    """Longest time of one program with all of its tests, in seconds."""
    code_sandbox: Literal["bwrap", "limits"] = "bwrap"
    """Isolation of programs: bubblewrap (`bwrap`), or resource limits alone (`limits`), for
    containers that allow no namespaces and are the sandbox themselves."""
    num_workers: int = Field(default=2, ge=1, le=512)
    """Processes that score in parallel, per rollout worker."""
    timeout_seconds: float | None = Field(default=None, gt=0.0)
    """Longest time of one reward call, in seconds; null: `runtime.timeout_seconds`."""
    memory_limit_gib: float | None = Field(default=4.0, ge=0.25)
    """Memory that each reward process may allocate, in GiB; null: no limit."""
    on_error: Literal["stop", "skip_group", "zero"] = "stop"
    """After a reward call that raises, returns an invalid value, takes too long, needs too much
    memory or ends its process: end the run (`stop`), replace the group (`skip_group`), or let its
    completions score 0 in that function (`zero`). The last two log to reward_errors.jsonl."""

    @field_validator("code_sandbox", mode="before")
    @classmethod
    def _accept_old_sandbox(cls, value: Any) -> Any:
        """The values of easyrl 0.1, accepted for one release."""
        return {"strict": "bwrap", "best_effort": "limits"}.get(str(value), value)

    @field_validator("pattern")
    @classmethod
    def _is_regular_expression(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"expected a regular expression ({error})") from None
        return value

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        functions = self.functions or ["the preset's"]
        if self.weights is not None and len(self.weights) != len(functions):
            raise ValueError(
                f"reward.weights: expected one for each of {', '.join(functions)}, got "
                f"{self.weights}"
            )
        if ("regex" in functions) != (self.pattern is not None):
            raise ValueError(
                "reward.pattern: expected a regular expression with the reward function regex, and "
                f"null without it, got {self.pattern!r}"
            )
        return self


class RolloutConfig(Section):
    """How completions are sampled."""

    num_generations: int = Field(default=8, ge=2)
    """Completions per prompt: the group whose rewards are compared."""
    max_completion_length: int = Field(default=256, ge=1)
    """Longest completion in tokens; a longer one is cut off."""
    stop: Annotated[list[str], EACH_ONCE] = Field(default_factory=list)
    """Strings that end a completion, as in ["\\n\\n", END]. Their own tokens are trained, and
    rewards see them."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature, of generation and of the trained distribution alike."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from this many most probable tokens; 0: all, as the trained distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample only from the most probable tokens with this sum of probabilities; 1: all."""
    max_concurrent_groups: int | None = Field(default=None, ge=1)
    """Groups in flight per engine; null: chosen from `train.prompts_per_iteration`."""
    ring_slots: int | None = Field(default=None, ge=1)
    """Finished groups that the ring buffer holds; null: `train.prompts_per_iteration`."""
    engine: Literal["auto", "embedded", "vllm"] = "auto"
    """Inference engine: `vllm`, or EasyRL's own engine over transformers' model code (`embedded`).
    `auto`: vLLM on accelerators where a suitable one is installed; the run prints which."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that one vLLM engine spans: a divisor of their number."""
    memory_fraction: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of its accelerator's memory that a rollout worker may take for weights and KV cache.
    Null: 0.9, or 0.5 of an accelerator that it shares with a train worker."""


CISPO_EPSILON_HIGH = 5.0
"""Recommended by ScaleRL (arXiv 2510.13786)."""

REPLACEMENT_ROUNDS = 3
"""Most rounds of fresh prompts per iteration, for groups with equal rewards (dynamic_sampling) and
for groups that `reward.on_error=skip_group` skips."""


class AlgorithmConfig(Section):
    """Advantages and the loss (GRPO and its family)."""

    advantage_estimator: Literal["group", "rloo"] = "group"
    """Baseline of a reward: the mean of its group (`group`) or of the group's other rollouts
    (`rloo`; as published with scale_rewards: none)."""
    scale_rewards: Literal["group", "none"] = "group"
    """Divide a group's advantages by the standard deviation of its rewards (`group`), or not."""
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = "grpo"
    """Average of token losses: over each completion, then over completions (`grpo`); over all
    tokens of an update (`dapo`); as if each completion had `rollout.max_completion_length` tokens
    (`dr_grpo`; as published with scale_rewards: none). `cispo` averages like `dapo`, but clips the
    ratio's weight, so that every token keeps its gradient."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Probability ratio of policy and old policy: of each token, or the geometric mean over a
    completion (`sequence`: GSPO, as published with loss_type: grpo)."""
    epsilon: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped below at 1 - epsilon (not by `cispo`). With one update per
    iteration (`train.updates_per_iteration`) the ratio is 1 and nothing is clipped."""
    epsilon_high: float | None = Field(default=None, gt=0.0)
    """The ratio is clipped above at 1 + epsilon_high, with epsilon_high under 1; for `cispo` at
    epsilon_high itself, at least 1. Null: epsilon, for `cispo` 5."""
    beta: float = Field(default=0.0, ge=0.0)
    """Weight of the KL divergence from the reference, the model at the start of the run."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of a bonus for the entropy of each token's distribution, averaged as the loss is."""
    mask_truncated_completions: bool = False
    """Do not train completions that were cut off, as at `rollout.max_completion_length`. They still
    count in their group's advantages, and in the loss as completions; their tokens do not."""
    importance_sampling_correction: Literal["none", "truncate", "mask", "auto"] = "auto"
    """Weight each token by its probability in the trainer over that in the engine: at most
    importance_sampling_cap (`truncate`), or 0 beyond it (`mask`). `auto`: none in float32."""
    importance_sampling_cap: float = Field(default=3.0, gt=1.0)
    """Largest weight of importance_sampling_correction."""
    dynamic_sampling: bool = False
    """Replace groups with equal rewards, whose advantages are 0, by fresh prompts at the same
    weights (DAPO), in at most three rounds per iteration. Those left count with advantage 0."""

    @property
    def resolved_epsilon_high(self) -> float:
        """`epsilon_high` with its default."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_EPSILON_HIGH if self.loss_type == "cispo" else self.epsilon

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a rollout with advantage 0 has a gradient: of the KL term or entropy bonus."""
        return self.beta > 0.0 or self.entropy_coef > 0.0

    @model_validator(mode="after")
    def _epsilon_high_fits(self) -> Self:
        # The two ranges do not meet, so that a value meant for the other kind of loss is noticed.
        if (self.resolved_epsilon_high >= 1.0) != (self.loss_type == "cispo"):
            raise ValueError(
                "algorithm.epsilon_high: expected null, at least 1 with algorithm.loss_type=cispo, "
                f"or under 1 with any other, got {self.epsilon_high} with {self.loss_type}"
            )
        return self


class TrainConfig(Section):
    """Iterations and the optimizer (AdamW)."""

    iterations: int = Field(default=60, ge=1)
    """Iterations of the run: weights out, groups in, `train.updates_per_iteration` steps."""
    prompts_per_iteration: int = Field(default=16, ge=1)
    """Prompts, and so groups, per iteration."""
    updates_per_iteration: int = Field(default=1, ge=1)
    """Optimizer steps per iteration, each on an equal share of its prompts. Only the first is
    strictly on-policy: the others train on rollouts of the policy before it."""
    learning_rate: float | None = Field(default=None, ge=0.0)
    """Peak learning rate; null: 3e-4 for a built-in model, 1e-6 for any other, and ten times that
    with LoRA (`model.lora.rank`)."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """Course of the learning rate after warm-up; linear and cosine fall to 0."""
    warmup_iterations: int = Field(default=2, ge=0)
    """Iterations in which the learning rate rises linearly to its peak."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """The gradient's norm is clipped to this."""
    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Tokens trained at a time, a group's prompt counted once. It does not change the result."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass: far less memory for a third more time. It does
    not change the result."""
    offload: Annotated[list[Literal["reference", "old", "optimizer"]], EACH_ONCE] = Field(
        default_factory=list
    )
    """List of what to keep in host memory, which costs time: weights of the `reference` (with
    algorithm.beta) and of the `old` policy (updates_per_iteration over 1); the `optimizer`, which
    then steps on the CPU, with gradients and the policy's float32 weights."""
    save_every: int | None = Field(default=10, ge=1)
    """Iterations between checkpoints; null: none in between. The last iteration of a run, also of a
    stopped one, is always saved."""
    keep_checkpoints: int = Field(default=2, ge=0)
    """Newest checkpoints to keep, each three times the trained weights in size; 0: none is written,
    and the run cannot be resumed."""
    eval_every: int = Field(default=0, ge=0)
    """Iterations between evaluations on held-out problems (`eval.dataset`, `data.num_held_out`); 0:
    only before the first iteration and after the last. The checkpoint with the highest accuracy is
    kept as checkpoints/best."""

    @property
    def keep_best(self) -> bool:
        """Whether the checkpoint with the highest accuracy is kept beside the newest ones."""
        return self.eval_every > 0 and self.keep_checkpoints > 0


class EvalConfig(Section):
    """How a model is evaluated by `easyrl eval`. Evaluations during training use `dataset` and
    `correct_reward` alone, with one completion per problem, sampled as `rollout` says."""

    dataset: str | None = Field(default=None, min_length=1)
    """Data set that accuracy is measured on, in the forms of `data.dataset`. Null: the held-out
    problems of `data.dataset`; in `easyrl eval` all of its rows if it has none. A preset uses its
    own prompts; any other data set is read as `data` says."""
    num_samples: int | None = Field(default=None, ge=1)
    """Completions per problem; null: the preset's number, else 1."""
    temperature: float | None = Field(default=None, ge=0.0)
    """Sampling temperature; 0: greedy. Null: the preset's, else 0 for one sample per problem and
    `rollout.temperature` for several."""
    max_completion_length: int | None = Field(default=None, ge=1)
    """Longest completion in tokens; null: the preset's, else `rollout.max_completion_length`."""
    correct_reward: float = 1.0
    """A completion is correct from this reward on, the weighted sum of all functions."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.temperature == 0.0 and (self.num_samples or 1) > 1:
            raise ValueError(
                "eval.num_samples: expected 1 with eval.temperature=0 (all samples of a problem "
                f"are the same), got {self.num_samples}"
            )
        return self


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """How an engine samples completions."""

    num_samples: int
    """Maximum number per prompt."""
    max_completion_length: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of_training(cls, rollout: RolloutConfig) -> Self:
        length, temperature = rollout.max_completion_length, rollout.temperature
        return cls(rollout.num_generations, length, temperature, rollout.top_k, rollout.top_p)

    @classmethod
    def of_evaluation(
        cls, config: EvalConfig, rollout: RolloutConfig, of_preset: Mapping[str, Any]
    ) -> Self:
        """Settings of the user, else of the preset (by the keys of `eval`), else of training."""
        values: dict[str, Any] = {"num_samples": 1, "temperature": 0.0}
        values |= {"max_completion_length": rollout.max_completion_length, "top_p": rollout.top_p}
        values |= of_preset
        values |= {key: value for key, value in config if value is not None}
        if values["temperature"] == 0.0 and values["num_samples"] > 1:
            values["temperature"] = rollout.temperature
        names = ("num_samples", "max_completion_length", "temperature", "top_p")
        return cls(top_k=rollout.top_k, **{name: values[name] for name in names})


class RuntimeConfig(Section):
    """How the run is driven."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the data's order, the sampling, the generated problems and LoRA's first weights."""
    schedule: Literal["periodic", "sync"] = "periodic"
    """`periodic` trains on groups while others are generated; `sync` waits for all of them."""
    deterministic: bool = False
    """The same config gives the same weights to the last bit, under either schedule; slower."""
    resume: Literal["never", "auto"] = "never"
    """`auto`: resume from the newest whole checkpoint in output.dir, or start a new run if there is
    none, so that one command serves for the start and for every restart."""
    timeout_seconds: float = Field(default=120.0, gt=0.0)
    """Longest time, in seconds, of a weight transfer's steps, of a step that train workers take
    together, and of a reward call (then see `reward.on_error`). After it the run stops and says
    why. Waits for groups have no bound."""


class OutputConfig(Section):
    """Files and trackers that a run writes to."""

    dir: str | None = Field(default=None, min_length=1)
    """The run folder; null: runs/<time>-<task>."""
    log_to: Annotated[list[Literal["tensorboard", "wandb", "trackio", "mlflow"]], EACH_ONCE] = (
        Field(default_factory=list)
    )
    """Trackers that also get the metrics: a list of `tensorboard`, `wandb` (Weights & Biases),
    `trackio`, `mlflow`; each needs its extra, as in pip install 'easyrl[wandb]'."""
