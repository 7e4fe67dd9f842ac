"""The tasks of the library reasoning-gym, as data sets `reasoning_gym:NAME`.

    controller ── (task, seed, index) ──► generator, a process of its own ──► row

Problems of some tasks depend on the order of Python's sets or on global random numbers, or print,
or execute code of the library's data. In the generator hashes and these numbers are fixed, so that
a seed and an index give the same row in every process. It starts with the first row and ends with
the process that asks it.
"""

import dataclasses
import difflib
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.util import find_spec
from inspect import formatannotation
from itertools import islice
from typing import Any, get_type_hints

import numpy as np
from pydantic import TypeAdapter, ValidationError

from easyrl.config import ConfigError, DataConfig
from easyrl.config.data import REASONING_GYM
from easyrl.config.hints import did_you_mean
from easyrl.data.tasks import Task
from easyrl.formatting import install_command
from easyrl.processes import die_with_parent

NUM_HELD_OUT = 256
SIZE = 10_000  # rows of the few tasks that make all of them at once
MAX_FAILURES = 100  # rows that the library may fail to make, one after the other
PROGRAM = "import sys; sys.path[:] = {}; from easyrl.data.reasoning_gym import serve; serve({})"
_lock = threading.Lock()  # of the generator's pipes
_generator: subprocess.Popen[bytes] | None = None


@cache
def library_data(name: str, options: str, size: int = 1) -> Any:
    """Return the library's data set of a task; `options` are JSON. Raises ConfigError."""
    what = f"data.dataset (--dataset): '{REASONING_GYM}{name}'"
    if find_spec("reasoning_gym") is None:
        raise ConfigError(f"{what} needs reasoning-gym: {install_command('reasoning-gym')}")
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        near = ", ".join(difflib.get_close_matches(name, DATASETS, 3, 0))
        raise ConfigError(f"{what}: expected a task of reasoning-gym; the nearest are {near}")
    kinds = get_type_hints(config_class := DATASETS[name][1])
    fields = {each.name: each for each in dataclasses.fields(config_class)}
    del fields["seed"], fields["size"]
    given = json.loads(options)
    if not isinstance(given, dict):
        raise ConfigError(f"data.options.{name}: expected settings, got {given!r:.80}")
    for key, value in given.items():
        if key not in fields:
            known = f"expected settings of '{name}', which are {', '.join(fields)}"
            raise ConfigError(f"data.options: {known}, got '{key}'{did_you_mean(key, fields)}")
        try:  # the type of some defaults is not the one declared
            kind = TypeAdapter(kinds[key] | type(fields[key].default))
            given[key] = kind.validate_json(json.dumps(value), strict=True)
        except ValidationError:
            expected = f"expected {formatannotation(kinds[key])} for '{name}'"
            raise ConfigError(f"data.options.{key}: {expected}, got {value!r:.80}") from None
    try:
        return create_dataset(name, **given, seed=0, size=size)
    except Exception as error:  # of many types, for values that do not go together or are missing
        raise ConfigError(f"data.options: '{name}': {error or repr(error)}") from None


class Question(str):
    """The text of a problem, with all that the library says about it."""

    entry: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ReasoningGym(Task):
    """The problems of one of the library's tasks."""

    name: str
    options: str  # JSON
    num_held_out: int  # fewer, where there are not so many different ones
    seed_prefix = ""
    held_out_share = 1 / 4  # of all problems: many are slow to make

    @classmethod
    def of(cls, name: str, data: DataConfig) -> "ReasoningGym":
        """The task of the data set `name`."""
        options = json.dumps(data.options_of(name), sort_keys=True, default=str)
        num = NUM_HELD_OUT if data.num_held_out is None else data.num_held_out
        return cls(name.removeprefix(REASONING_GYM), options, num)

    def train_row(self, seed: int, index: int) -> dict[str, Any]:
        row: dict[str, Any] = _generate(self, "train_row", seed, index)
        return row

    def held_out_rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = _generate(self, "held_out_rows")
        return rows

    def _drawn(self, name: str) -> Iterator[Question]:
        return islice(super()._drawn(name), 64 + 8 * self.num_held_out)

    def draw(self, rng: random.Random) -> Question:
        data = library_data(self.name, self.options, SIZE)
        for attempt in range(MAX_FAILURES):
            index = rng.randrange(SIZE if attempt % 2 else 2**31)  # see SIZE
            random.seed(index)
            np.random.seed(index)
            data.size = SIZE  # word_ladder lowers it where it fails
            try:
                entry = data[index]
            except Exception as error:  # some tasks fail with some seeds
                failure = error
                continue
            question = Question(entry["question"])
            question.entry = entry
            return question
        raise ConfigError(f"data.options: '{self.name}' makes no problems: {failure!r}")

    def key(self, problem: Question) -> str:
        return str(problem)

    def row(self, problem: Question) -> dict[str, Any]:
        entry = problem.entry
        columns = {"answer": entry["answer"], "entry": entry, "task": [self.name, self.options]}
        return {"prompt": str(problem), **columns}


@lru_cache(maxsize=2**10)
def _generate(task: ReasoningGym, method: str, *arguments: int) -> Any:
    """Call a method of `Task` in the generator. Raises ConfigError."""
    global _generator  # noqa: PLW0603
    with _lock:
        if _generator is None or _generator.poll() is not None:
            _generator = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(sys.path, os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONHASHSEED": "0"},
                process_group=0,  # Ctrl-C is not for it
            )
        assert _generator.stdin is not None and _generator.stdout is not None
        try:
            pickle.dump((task, method, arguments), _generator.stdin)
            _generator.stdin.flush()
            result = pickle.load(_generator.stdout)
        except BaseException as error:  # also Ctrl-C: nobody reads this answer later
            _generator.kill()
            code = _generator.wait()
            if isinstance(error, EOFError | BrokenPipeError):
                raise RuntimeError(f"the generator of {task} ended with {code}") from None
            raise
    if isinstance(result, Exception):
        raise result
    return result


def serve(parent: int) -> None:
    """Answer the calls of `_generate`."""
    die_with_parent(parent)
    calls, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tasks print
    while True:
        try:
            task, method, arguments = pickle.load(calls)
        except EOFError:
            return
        try:
            result = getattr(super(ReasoningGym, task), method)(*arguments)
        except StopIteration:
            result = ConfigError(f"data.options: '{task.name}' has too few different problems")
        except Exception as error:
            result = error if isinstance(error, ConfigError) else RuntimeError(repr(error))
        pickle.dump(result, results)
        results.flush()
