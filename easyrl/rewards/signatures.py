"""Which arguments a reward function takes, and adapters for functions in verl's form.

TRL    f(prompts, completions, completion_ids, **columns) -> [score]      one group
verl   f(data_source, solution_str, ground_truth, extra_info) -> score    one completion
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from easyrl.rewards.functions import RewardFunction, text_of
from easyrl.types import SAMPLE_COLUMNS

ARGUMENTS = ("prompts", "completions", "completion_ids")
TRAINER_ARGUMENTS = ("trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Progress of the run, under the names of transformers' `TrainerState`."""

    global_step: int = 0
    """Optimizer updates of the policy that sampled the completions."""
    max_steps: int = 0
    """Optimizer updates of the whole run."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The keyword arguments of a function."""

    names: frozenset[str]
    takes_any: bool = False
    """It has `**kwargs`."""
    required: tuple[str, ...] = ()
    """Parameters without a default."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a C function may have no signature
            return cls(frozenset(), takes_any=True)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            frozenset(p.name for p in named),
            any(p.kind is p.VAR_KEYWORD for p in parameters),
            tuple(p.name for p in named if p.default is p.empty),
        )

    def select(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the function can be called with."""
        return {n: value for n, value in arguments.items() if self.takes_any or n in self.names}


def required_columns(function: Callable[..., Any]) -> list[str]:
    """The columns without which a function in TRL's form cannot be called."""
    given = {*ARGUMENTS, *TRAINER_ARGUMENTS}
    return [name for name in Signature.of(function).required if name not in given]


def is_verl(function: Callable[..., Any]) -> bool:
    return {"solution_str", "ground_truth"} <= Signature.of(function).names


def ground_truth_column(columns: Collection[str], answer_column: str) -> str | None:
    """The column that a function in verl's form gets its ground truth from."""
    candidates = ("reward_model", "ground_truth", answer_column)
    return next((name for name in candidates if name in columns), None)


def from_verl(
    compute_score: Callable[..., Any], *, answer_column: str, dataset: str
) -> RewardFunction:
    """Wrap a function in verl's form as one in TRL's form.

    It is called for each completion with the columns `data_source` (else the data set's name),
    `reward_model["ground_truth"]` (else the column `ground_truth`, else `answer_column`) and
    `extra_info` (else an empty mapping). It returns a number, or a mapping with the number as
    `score`, whose other entries become columns of the samples.
    """
    signature = Signature.of(compute_score)

    async def score(
        completions: Sequence[Any], log_extra: Callable[..., None], **columns: Sequence[Any]
    ) -> list[Any]:
        name = ground_truth_column(columns, answer_column)
        assert name is not None, "checked before the run"
        num = len(completions)
        sources = columns.get("data_source", [dataset] * num)
        extras = columns.get("extra_info", [None] * num)
        results = []
        for completion, source, truth, extra in zip(
            completions, sources, columns[name], extras, strict=True
        ):
            arguments = {
                "data_source": source,
                "solution_str": text_of(completion),
                "ground_truth": truth["ground_truth"] if name == "reward_model" else truth,
                "extra_info": {} if extra is None else extra,
            }
            results.append(compute_score(**signature.select(arguments)))
        waiting = {n: each for n, each in enumerate(results) if inspect.isawaitable(each)}
        for n, result in zip(waiting, await asyncio.gather(*waiting.values()), strict=True):
            results[n] = result
        mappings = [result if isinstance(result, Mapping) else {} for result in results]
        for key in dict.fromkeys(key for mapping in mappings for key in mapping):
            if key not in ("score", *SAMPLE_COLUMNS):
                log_extra(key, [mapping.get(key) for mapping in mappings])
        return [result["score"] if isinstance(result, Mapping) else result for result in results]

    return score
