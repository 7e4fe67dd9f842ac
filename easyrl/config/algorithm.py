"""Section `algorithm`. `easyrl.algorithm` has the formulas and their sources."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from easyrl.config.section import NamesFiles, NonEmptyStr, NonNegativeFloat, PositiveFloat, Section

LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "cispo")
LOSS_KEY, TEACHER_KEY = "algorithm.loss_type", "algorithm.teacher"
TEACHER_PROMPT_KEY = "algorithm.teacher_prompt"
POLICY = "policy"  # as a teacher: the policy itself, with its current weights
LOSS_FORMS = f"one of {', '.join(LOSS_TYPES)}, or file.py:function, or package.module:function"
REPLACEMENT_ROUNDS = 3
"""Most rounds of fresh prompts per iteration, for groups with equal rewards (dynamic_sampling) and
for groups that `reward.on_error=skip_group` skips."""


class AlgorithmConfig(Section):
    """Advantages and the loss (GRPO and its family)."""

    advantage_estimator: Literal["group", "rloo"] = "group"
    """Baseline of a reward: the mean of its group (`group`) or of the group's other rollouts
    (`rloo`; as published with scale_rewards: none)."""
    scale_rewards: Literal["group", "none"] = "group"
    """Divide a group's advantages by the standard deviation of its rewards; `none`: do not."""
    loss_type: NamesFiles[str] = "grpo"
    """Average of token losses: over each completion, then over completions (`grpo`); over all
    tokens of an update (`dapo`); as if each completion had `rollout.max_completion_length` tokens
    (`dr_grpo`; as published with scale_rewards: none). `cispo` averages like `dapo`, but clips the
    ratio's weight, so that every token keeps its gradient. `file.py:function`: a loss of your own
    (docs/losses.md)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Probability ratio of policy and old policy: of each token, or the geometric mean over a
    completion (`sequence`: GSPO, as published with loss_type: grpo)."""
    epsilon: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped below at 1 - epsilon (not by `cispo`). With one update per
    iteration (`train.updates_per_iteration`) the ratio is 1 and nothing is clipped."""
    epsilon_high: PositiveFloat | None = None
    """The ratio is clipped above at 1 + epsilon_high, with epsilon_high under 1; for `cispo` at
    epsilon_high itself, at least 1. Null: epsilon, for `cispo` 5."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference, the model at the start of the run."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of a bonus for the entropy of each token's distribution, averaged as the loss is."""
    teacher: NamesFiles[str | None] = None
    """A model (folder or hub id) with the policy's tokens: it scores the policy's own completions,
    and the policy is trained to agree with it (docs/distillation.md). With `reward.functions=none`
    it is the only signal. `policy`: the policy itself, which sees `teacher_prompt`."""
    teacher_prompt: NonEmptyStr | None = None
    """The teacher's own prompt: a column, or a template as in `data.prompt_template`:
    "{question} The solution is {solution}". Null: the policy's prompt."""
    teacher_weight: PositiveFloat = 1.0
    """Weight of the teacher's term beside the rewards' advantages."""
    teacher_divergence: float | None = Field(default=None, ge=0.0, le=1.0)
    """Null: a token's advantage is the teacher's log-probability minus the policy's. A number: the
    loss is the generalized Jensen-Shannon divergence over the whole vocabulary with this weight: at
    0 KL(teacher || policy), forward; at 1 KL(policy || teacher), reverse."""
    mask_truncated_completions: bool = False
    """Do not train completions that were cut off at `rollout.max_completion_length`. They still
    count in their group's advantages, and in the loss as completions; their tokens do not."""
    importance_sampling_correction: Literal["none", "truncate", "mask", "auto"] = "auto"
    """Weight each token by its probability in the trainer over that in the engine: at most
    importance_sampling_cap (`truncate`), or 0 beyond it (`mask`). `auto`: `none` in float32, else
    `truncate`."""
    importance_sampling_cap: float = Field(default=3.0, gt=1.0)
    """Largest weight of importance_sampling_correction."""
    dynamic_sampling: bool = False
    """Replace groups with equal rewards, whose advantages are 0, by fresh prompts at the same
    weights (DAPO), in at most three rounds per iteration. Those left count with advantage 0."""

    @property
    def resolved_epsilon_high(self) -> float:
        if self.epsilon_high is not None:
            return self.epsilon_high
        # 5 is what ScaleRL recommends (arXiv 2510.13786).
        return 5.0 if self.loss_type == "cispo" else self.epsilon

    @property
    def teacher_path(self) -> str | None:
        """Folder or hub id of a teacher with weights of its own."""
        return None if self.teacher == POLICY else self.teacher

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a rollout with advantage 0 has a gradient: of the KL term, the entropy bonus or
        the teacher's term."""
        return self.beta > 0.0 or self.entropy_coef > 0.0 or self.teacher is not None

    @property
    def has_own_loss(self) -> bool:
        return self.loss_type not in LOSS_TYPES

    @field_validator("loss_type")
    @classmethod
    def _is_loss(cls, value: str) -> str:
        path, _, name = value.rpartition(":")
        if value not in LOSS_TYPES and not (path and name):
            raise ValueError(f"expected {LOSS_FORMS}")
        return value

    @model_validator(mode="after")
    def _epsilon_high_fits(self) -> Self:
        # The two ranges do not meet, so that a value meant for the other kind of loss is noticed.
        is_of_cispo = self.resolved_epsilon_high >= 1.0
        if is_of_cispo != (self.loss_type == "cispo") and not self.has_own_loss:
            raise ValueError(
                "algorithm.epsilon_high: expected null, at least 1 with algorithm.loss_type=cispo, "
                f"or under 1 with any other, got {self.epsilon_high} with {self.loss_type}"
            )
        return self
