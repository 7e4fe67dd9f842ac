"""The problems that a model is evaluated on, and an id for each of them.

eval.dataset          all of its rows, or a preset's held-out problems
else data.dataset     the preset's held-out problems; in `easyrl eval` else all of its rows
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from easyrl.config import Config, ConfigError
from easyrl.config.data import DataConfig
from easyrl.data.presets import PRESETS
from easyrl.data.streams import PromptStream
from easyrl.types import Messages, Prompt

ID_DIGITS = 16
FORM_KEYS = {"preset", "prompt_column", "prompt_template", "system_prompt", "chat", "columns"}
"""Keys of `data` that say how rows become prompts."""


def with_eval_data(config: Config) -> Config:
    """Return the config with `data` set to the evaluated problems, in the data's own order.

    A preset that `eval.dataset` names has its own prompts; any other data set is asked as `data`
    says.
    """
    data = config.data
    if config.eval.dataset is not None:
        data = data.model_copy(
            update={"dataset": config.eval.dataset, "weights": None, "shuffle": True}
        )
        if config.eval.dataset in PRESETS:
            data = data.model_copy(update=DataConfig().model_dump(include=FORM_KEYS))
    if data.shown not in PRESETS or PRESETS[data.shown].task is None:
        data = data.model_copy(update={"shuffle": False})
    return config.model_copy(update={"data": data})


@dataclass(frozen=True, slots=True)
class Problems:
    """The problems of an evaluation, which are checked like a stream's examples."""

    prompts: list[Prompt]
    location: Callable[[int], str]

    def examples(self) -> list[str | Messages]:
        return [prompt.content for prompt in self.prompts]

    def without(self, examples: Collection[int]) -> Problems:
        removed = set(examples)
        kept = [number for number in range(len(self.prompts)) if number not in removed]
        return Problems([self.prompts[k] for k in kept], lambda k: self.location(kept[k]))


def problems_of(stream: PromptStream, config: Config) -> Problems:
    """The held-out problems where there are some, else every row once: at most
    `data.num_held_out`. Raises ConfigError where there are none."""
    data = config.data
    if data.num_held_out == 0:
        raise ConfigError("data.num_held_out: expected 1 or more problems to evaluate, got 0")
    if held_out := stream.held_out():
        chosen = held_out[: data.num_held_out]
        return Problems(chosen, lambda k: f"held-out problem {k} of '{data.shown}'")
    if stream.epoch_length is None or len(data.datasets) > 1:
        raise ConfigError(
            "eval.dataset, data.dataset (--dataset): expected a data set with held-out problems, "
            f"or a single one with rows, got '{data.shown}'"
        )
    rows = range(stream.epoch_length)[: data.num_held_out]
    return Problems([stream.prompt(row) for row in rows], stream.location)


def identity_of(ids: Sequence[str]) -> str:
    """Digest a set of problems, in any order."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()[:ID_DIGITS]


def problem_ids(problems: Sequence[Prompt]) -> list[str]:
    """Give each problem an id that depends on its row alone, prompt and columns. The second of two
    equal rows is called `…-2`."""
    seen: Counter[str] = Counter()
    ids = []
    for problem in problems:
        row = json.dumps([problem.content, dict(problem.columns)], sort_keys=True, default=str)
        name = hashlib.sha256(row.encode(errors="backslashreplace")).hexdigest()[:ID_DIGITS]
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids
