"""Section `eval`."""

from typing import Self

from pydantic import model_validator

from easyrl.config.section import (
    MayChange,
    NamesFiles,
    NonEmptyStr,
    NonNegativeFloat,
    PositiveInt,
    Section,
)


class EvalConfig(Section):
    """Evaluations of a model by `easyrl eval`. Evaluations during training use `dataset` and
    `correct_reward` alone, with one completion per problem, sampled as `rollout` says."""

    dataset: NamesFiles[NonEmptyStr | None] = None
    """Data set that accuracy is measured on, in the forms of `data.dataset`. Null: the held-out
    problems of `data.dataset`; in `easyrl eval` all of its rows if it has none. A preset uses its
    own prompts; any other data set is read as `data` says."""
    num_samples: MayChange[PositiveInt | None] = None
    """Completions per problem; null: the preset's number, else 1, and 1 if `temperature` is 0."""
    temperature: MayChange[NonNegativeFloat | None] = None
    """Sampling temperature; 0: greedy. Null: the preset's, else 0 for one sample per problem and
    `rollout.temperature` for several."""
    max_completion_length: MayChange[PositiveInt | None] = None
    """Longest completion in tokens; null: the preset's, else `rollout.max_completion_length`."""
    correct_reward: float = 1.0
    """Smallest reward (the weighted sum of all functions) of a correct completion."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.temperature == 0.0 and (self.num_samples or 1) > 1:
            expected = "expected 1 with eval.temperature=0, as samples would be the same"
            raise ValueError(f"eval.num_samples: {expected}, got {self.num_samples}")
        return self
