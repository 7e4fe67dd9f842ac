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
import subprocess
import sys
import threading
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any, get_type_hints

import numpy as np
from pydantic import TypeAdapter, ValidationError

from easyrl.config import ConfigError
from easyrl.data.tasks import Task
from easyrl.formatting import require

SIZE = 10_000  # rows of the few tasks that make all of them at once
REFUSED = {  # tasks whose scorer gives full marks to a wrong answer, whatever the question
    "coin_flip": "'0' where the answer is 0.25",  # it compares as many characters as both have
    "game_of_life_halting": "any text",  # it compares bool(text)
}
"""As of reasoning-gym 0.1.25. `tests/reasoning_gym_scores.py` looks at all tasks."""
PROGRAM = "import sys; sys.path[:] = {}; from easyrl.data.reasoning_gym import serve; serve()"
_lock = threading.Lock()  # of the generator's pipes


def _take_levels(options: dict[str, Any]) -> tuple[int, int, int] | None:
    """Take the first level of the library's curriculum, the last, and the rows of each. Raises
    ConfigError."""
    level, num_rows = options.pop("level", None), options.pop("rows_per_level", None)
    if level is None and num_rows is None:
        return None
    first, last = level if isinstance(level, list) and len(level) == 2 else (level, level)
    levels = first, last, 1 if num_rows is None and level is last else num_rows
    if any(type(n) is not int for n in levels) or not 0 <= first <= last or levels[2] < 1:
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


@cache
def library_data(name: str, options: str, size: int = 1, level: int | None = None) -> Any:
    """Return the library's data set of a task; `options` are JSON. `level`: by default the last one
    that they name. Raises ConfigError."""
    source = f"data.dataset (--dataset): 'reasoning_gym:{name}'"
    require("reasoning-gym", source)
    from reasoning_gym.factory import DATASETS, create_curriculum, create_dataset, has_curriculum

    if name not in DATASETS:
        near = ", ".join(get_close_matches(name, DATASETS, 3, 0))
        raise ConfigError(f"{source}: expected a task of reasoning-gym; the nearest are {near}")
    _check_scorer(name, source)
    kinds = get_type_hints(config_class := DATASETS[name][1])
    names = [key for key in kinds if key not in ("seed", "size")]
    given = json.loads(options)
    levels = _take_levels(given)
    for key, value in given.items():
        if key not in names:
            raise ConfigError(f"data.options: expected settings of {name} ({names}), got '{key}'")
        try:  # the type of some defaults is not the one declared
            kind = TypeAdapter(kinds[key] | type(getattr(config_class, key, None)))
            given[key] = kind.validate_json(json.dumps(value), strict=True)
        except ValidationError:
            expected = str(getattr(kinds[key], "__name__", kinds[key]))
            raise ConfigError(f"data.options.{key}: expected {expected}, got {value!r}") from None
    if name == "composite":
        for part in given.get("datasets", []):
            _check_scorer(part.name, "data.options.datasets")
    if levels is not None:
        if not has_curriculum(name):
            raise ConfigError(f"data.options.level: expected none, as {name} has no levels")
        curriculum = create_curriculum(name)
        highest = max(len(each.levels) for each in curriculum.attributes.values()) - 1
        if levels[1] > highest:
            raise ConfigError(f"data.options.level: expected at most {highest}, got {levels[1]}")
        curriculum.set_global_level(levels[1] if level is None else level)
        of_level = vars(curriculum.generate_configuration())
        given = {key: value for key, value in of_level.items() if key in names} | given
    try:
        return create_dataset(name, **given, seed=0, size=size)
    except Exception as error:  # of many types, for values that do not go together or are missing
        raise ConfigError(f"data.options: {name}: {error or repr(error)}") from None


@dataclass(frozen=True)
class ReasoningGym(Task):
    """One of the library's tasks. A hash of the question decides whether it is held out. In a
    curriculum the level rises with the index of a training row; held-out ones have the last."""

    name: str
    options: str  # JSON
    num_held_out: int  # fewer, where there are not so many different ones

    def train_row(self, seed: int, index: int) -> dict[str, Any]:
        return _generate(self, f"train {seed} {index}", 1)[0]

    def held_out_rows(self) -> list[dict[str, Any]]:
        return _generate(self, "held out", self.num_held_out)

    def draw_rows(self, source: str, number: int) -> list[dict[str, Any]]:
        """Draw different problems, in the generator; a quarter of all is held out."""
        levels, level = _take_levels(json.loads(self.options)), None
        if levels is not None and source != "held out":
            level = min(levels[1], levels[0] + int(source.rpartition(" ")[2]) // levels[2])
        rng, limit = random.Random(source), 2**31
        data = library_data(self.name, self.options, SIZE, level)
        found: dict[str, dict[str, Any]] = {}
        for _ in range(64 + 8 * number):
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
            question, answer = entry["question"], entry["answer"]
            is_held_out = hashlib.sha256(question.encode()).digest()[0] < 64
            if is_held_out == (source == "held out"):
                columns = {"answer": answer, "entry": entry, "task": [self.name, self.options]}
                found.setdefault(question, {"prompt": question, **columns})
        if not found and source != "held out":
            raise ConfigError(f"data.options: {self.name} has too few different problems")
        return [*found.values()]


@cache
def _generator() -> Any:
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
    calls: Any = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tasks print
    while calls.peek():
        task, arguments = pickle.load(calls)
        try:
            rows = task.draw_rows(*arguments)
        except Exception as error:
            rows = error if isinstance(error, ConfigError) else RuntimeError(repr(error))
        pickle.dump(rows, results)
        results.flush()
