"""The tasks of the library reasoning-gym, as data sets `reasoning_gym:NAME`.

    controller ── (task, seed, index) ──► generator, a process of its own ──► row

Problems of some tasks depend on the order of Python's sets or on global random numbers, or print.
In the generator these are fixed: a seed and an index give the same row in every process.
"""

import hashlib
import json
import os
import pickle
import random
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from pydantic import TypeAdapter, ValidationError

from easyrl.config import ConfigError
from easyrl.data.tasks import Task
from easyrl.formatting import require

SIZE = 10_000
"""Number of rows of the few tasks that make all of them at once."""
MAX_INDEX = 2**31
HELD_OUT = "held out"  # a source of problems
HELD_OUT_BYTES = 64
"""A problem is held out if the first byte of its hash is below this: a quarter of all."""
REFUSED = {
    "coin_flip": "'0' where the answer is 0.25",  # it compares as many characters as both have
    "game_of_life_halting": "any text",  # it compares bool(text)
}
"""Tasks whose scorer gives full marks to a wrong answer, whatever the question: name -> answer. As
of reasoning-gym 0.1.25. `tests/reasoning_gym_scores.py` looks at all tasks."""
NEVER_RIGHT = {"complex_arithmetic": re.compile("nan", re.IGNORECASE)}  # min(1.0, nan) is 1.0
"""Patterns of answers to which a task's scorer gives full marks, whatever the question, but which
no problem of the task has. The reward gives them 0, and the task can be used."""
PROGRAM = "import sys; sys.path[:] = {}; from easyrl.data.reasoning_gym import serve; serve()"
_lock = threading.Lock()  # of the generator's pipes


class Levels(NamedTuple):
    """Levels of the library's curriculum, from 0."""

    first: int
    last: int
    rows_per_level: int

    def at(self, index: int) -> int:
        """Return the level of training row `index`."""
        return min(self.last, self.first + index // self.rows_per_level)


def _take_levels(options: dict[str, Any]) -> Levels | None:
    """Remove the keys `level` and `rows_per_level` from the options, and return what they say; None
    if neither is there. Raises ConfigError."""
    level = options.pop("level", None)
    num_rows = options.pop("rows_per_level", None)
    if level is None and num_rows is None:
        return None
    if isinstance(level, list) and len(level) == 2:
        levels = Levels(level[0], level[1], num_rows)
    else:
        levels = Levels(level, level, 1 if num_rows is None else num_rows)
    are_integers = all(type(number) is int for number in levels)
    if not are_integers or not 0 <= levels.first <= levels.last or levels.rows_per_level < 1:
        expected = "{level: N}, or {level: [FIRST, LAST], rows_per_level: N}"
        raise ConfigError(f"data.options: expected {expected}, got {level} and {num_rows}")
    return levels


def _check_scorer(name: str, source: str) -> None:
    """Raise ConfigError for a task whose scorer rewards a wrong answer."""
    if name in REFUSED:
        raise ConfigError(
            f"{source}: expected a task whose scorer rewards right answers alone, got '{name}', "
            f"which gives full marks to {REFUSED[name]} (reasoning-gym 0.1.25); use another task"
        )


def is_never_right(name: str, answer: str) -> bool:
    """Return whether a text is the answer to no problem of the task, whatever its scorer says."""
    return name in NEVER_RIGHT and NEVER_RIGHT[name].search(answer) is not None


@cache
def library_data(name: str, options: str, size: int = 1, level: int | None = None) -> Any:
    """Return the library's data set of a task. Raises ConfigError.

    `options`: JSON. `level`: of the library's curriculum; by default the last one that the options
    name.
    """
    source = f"data.dataset (--dataset): 'reasoning_gym:{name}'"
    require("reasoning-gym", source)
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        near = ", ".join(get_close_matches(name, DATASETS, 3, 0))
        raise ConfigError(f"{source}: expected a task of reasoning-gym; the nearest are {near}")
    _check_scorer(name, source)
    config_class = DATASETS[name][1]
    kinds = get_type_hints(config_class)
    names = [key for key in kinds if key not in ("seed", "size")]
    given = json.loads(options)
    levels = _take_levels(given)
    for key, value in given.items():
        if key not in names:
            raise ConfigError(f"data.options: expected settings of {name} ({names}), got '{key}'")
        try:
            # The type of some defaults is not the one declared.
            kind = TypeAdapter(kinds[key] | type(getattr(config_class, key, None)))
            given[key] = kind.validate_json(json.dumps(value), strict=True)
        except ValidationError:
            expected = str(getattr(kinds[key], "__name__", kinds[key]))
            raise ConfigError(f"data.options.{key}: expected {expected}, got {value!r}") from None
    if name == "composite":
        for part in given.get("datasets", []):
            _check_scorer(part.name, "data.options.datasets")
    if levels is not None:
        of_level = _settings_of_level(name, levels, level)
        for key in names:
            if key in of_level:
                given.setdefault(key, of_level[key])
    try:
        return create_dataset(name, **given, seed=0, size=size)
    except Exception as error:  # of many types, for values that do not go together or are missing
        raise ConfigError(f"data.options: {name}: {error or repr(error)}") from None


def _settings_of_level(name: str, levels: Levels, level: int | None) -> dict[str, Any]:
    """Return the settings that the library's curriculum has for a level, by default the last one.
    Raises ConfigError if the task does not have so many."""
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(name):
        raise ConfigError(f"data.options.level: expected none, as {name} has no levels")
    curriculum = create_curriculum(name)
    num_levels = max(len(each.levels) for each in curriculum.attributes.values())
    highest = num_levels - 1
    if levels.last > highest:
        raise ConfigError(f"data.options.level: expected at most {highest}, got {levels.last}")
    curriculum.set_global_level(levels.last if level is None else level)
    settings: dict[str, Any] = vars(curriculum.generate_configuration())
    return settings


@dataclass(frozen=True)
class ReasoningGym(Task):
    """One of the library's tasks. A hash of the question decides whether it is held out. In a
    curriculum the level rises with the index of a training row; held-out ones have the last."""

    name: str
    options: str  # `data.options` as JSON
    num_held_out: int  # the task may have fewer different problems

    def train_row(self, seed: int, index: int) -> dict[str, Any]:
        return _generate(self, f"train {seed} {index}", 1)[0]

    def held_out_rows(self) -> list[dict[str, Any]]:
        return _generate(self, HELD_OUT, self.num_held_out)

    def draw_rows(self, source: str, number: int) -> list[dict[str, Any]]:
        """Draw different problems. Runs in the generator's process.

        `source`: `held out`, or `train SEED INDEX`. It seeds the random numbers.
        """
        is_held_out = source == HELD_OUT
        levels = _take_levels(json.loads(self.options))
        level = None
        if levels is not None and not is_held_out:
            level = levels.at(int(source.rsplit(maxsplit=1)[-1]))
        rng = random.Random(source)
        limit = MAX_INDEX
        data = library_data(self.name, self.options, SIZE, level)
        found: dict[str, dict[str, Any]] = {}  # by question
        max_tries = 64 + 8 * number
        for _ in range(max_tries):
            if len(found) == number:
                break
            index = rng.randrange(limit)
            random.seed(index)
            np.random.seed(index)
            data.size = SIZE  # word_ladder lowers it where it fails
            try:
                entry = data[index]
            except Exception:  # there are only SIZE rows, or the library fails with this one
                limit = SIZE
                continue
            question = entry["question"]
            first_byte = hashlib.sha256(question.encode()).digest()[0]
            if (first_byte < HELD_OUT_BYTES) == is_held_out and question not in found:
                found[question] = {
                    "prompt": question,
                    "answer": entry["answer"],
                    "entry": entry,
                    "task": [self.name, self.options],
                }
        if not found and not is_held_out:
            raise ConfigError(f"data.options: {self.name} has too few different problems")
        return list(found.values())


@cache
def _generator() -> Any:
    """Return the generator's process, which starts at the first call."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(sys.path)],
        stdin=subprocess.PIPE,  # at its end the generator ends
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONHASHSEED": "0"},
        process_group=0,  # Ctrl-C is not for it
    )


@lru_cache(maxsize=2**10)
def _generate(task: ReasoningGym, *arguments: Any) -> list[dict[str, Any]]:
    """Call `draw_rows` in the generator. Raises ConfigError."""
    with _lock:
        try:
            pickle.dump((task, arguments), _generator().stdin)
            _generator().stdin.flush()
            rows = pickle.load(_generator().stdout)
        except BaseException:  # also Ctrl-C: nobody may read this answer later
            _generator().kill()
            _generator.cache_clear()
            raise
    if isinstance(rows, Exception):
        raise rows
    return list(rows)


def serve() -> None:
    """Answer the calls of `_generate`, until the other process ends."""
    calls: Any = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tasks print goes to standard error
    while calls.peek():
        task, arguments = pickle.load(calls)
        try:
            rows = task.draw_rows(*arguments)
        except Exception as error:
            rows = error if isinstance(error, ConfigError) else RuntimeError(repr(error))
        pickle.dump(rows, results)
        results.flush()
