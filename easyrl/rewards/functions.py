"""The built-in reward functions. Text in, numbers out: no engine, no trainer.

All have TRL's signature, `f(prompts, completions, completion_ids, **columns)`: G entries in every
list, a column's value repeated for each completion. A completion is a string, or for a chat
prompt `[{"role": "assistant", "content": "..."}]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from easyrl.types import Messages

RewardFunction = Callable[..., list[float | None]]


class RewardError(RuntimeError):
    """A reward function failed, or returned what is no reward. The message names both it and the
    prompt, and holds the function's own traceback."""


def exact_match(
    answer_column: str,
    /,  # so that a column may have this name too
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    **columns: Sequence[Any],
) -> list[float | None]:
    """1.0 where the whole completion is the answer, white space around both aside; else 0.0.

    None, which means "does not apply", where the row has no answer. (`load_reward` binds
    `answer_column`; the rest is the signature of every reward.)
    """
    if answer_column not in columns:
        raise ValueError(
            f"there is no column '{answer_column}' (reward.answer_column) to compare with; "
            f"the data has: {', '.join(columns) or 'no other column'}"
        )
    answers = columns[answer_column]
    return [
        None if answer is None else float(_text(completion).strip() == str(answer).strip())
        for completion, answer in zip(completions, answers, strict=True)
    ]


def _text(completion: str | Messages) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
