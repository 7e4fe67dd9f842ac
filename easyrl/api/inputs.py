"""Rows and reward functions that a Python program gives: they become files of the run folder.

    rows, datasets.Dataset ─────► inputs/data.jsonl ──► data.dataset
    functions ──cloudpickle─────► inputs/rewards.py ──► reward.functions

So workers, `resume` and the command line find all that a run needs in its config.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

from easyrl.config import INPUTS, Config, ConfigError, change_config
from easyrl.runtime.run_folder import PRIVATE, has_only_inputs

DATASETS = {"data.dataset": "data", "eval.dataset": "eval"}
REWARDS = "reward.functions"
FILE = '''"""Reward functions of a Python program: {names}."""

import base64
import sys

import cloudpickle

sys.path += [path for path in {paths} if path not in sys.path]
globals().update(
    cloudpickle.loads(
        base64.b64decode(
            "{pickled}"
        )
    )
)
'''


class Inputs:
    """Objects among `values` (settings by their full names), where names replace them."""

    def __init__(self, values: dict[str, Any]) -> None:
        """Raises ConfigError for rows and functions that cannot be stored."""
        self._values: dict[str, Any] = {}  # relative names in the folder of inputs
        self._texts: dict[str, str] = {}
        for key, name in DATASETS.items():
            if (rows := values.get(key)) is not None and not _is_names(rows):
                values[key] = self._values[key] = self._take_rows(key, name, rows)
        functions = values.get(REWARDS)
        if functions is not None:
            if isinstance(functions, str) or not isinstance(functions, Sequence):
                functions = [functions]
            values[REWARDS] = self._take_rewards(functions)

    def _take_rows(self, key: str, name: str, rows: Any) -> str:
        is_dataset = isinstance(getattr(rows, "column_names", None), list)  # and no DatasetDict
        are_rows = is_dataset or isinstance(rows, Sequence)
        if not are_rows or not len(rows):
            raise ConfigError(
                f"{key}: expected a name, a path, a list of rows (dicts; of a DataFrame: "
                "df.to_dict('records')) or a datasets.Dataset (one split), got "
                f"{'no rows' if are_rows else type(rows)}"
            )
        lines = []
        for number, row in enumerate(rows):
            try:
                lines.append(json.dumps(dict(row), default=_plain) + "\n")
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{key}: row {number}: expected a dict of text, numbers and lists: {error}"
                ) from None
        self._texts[f"{name}.jsonl"] = "".join(lines)
        return f"{name}.jsonl"

    def _take_rewards(self, functions: Sequence[Any]) -> list[str]:
        """Return the entries of `reward.functions`."""
        stored: dict[str, Callable[..., Any]] = {}
        specs = []
        for function in functions:
            if isinstance(function, str):
                specs.append(function)
                continue
            if not callable(function):
                raise ConfigError(
                    f"{REWARDS} (reward): expected functions or their names, got {function!r} "
                    "(weights: reward={'functions': [...], 'weights': [...]})"
                )
            name = getattr(function, "__name__", type(function).__name__).strip("<>")
            while name in stored:
                name += "_"
            stored[name] = function
            specs.append(f"rewards.py:{name}")
            try:
                cloudpickle.dumps(function)
            except Exception as error:  # of many types
                raise ConfigError(
                    f"{REWARDS} (reward): '{name}' cannot be sent to another process: {error}; "
                    "create what it uses inside the function, or pass the name of a function in a "
                    f"file: 'my_rewards.py:{name}'"
                ) from None
        if stored:
            self._texts["rewards.py"] = FILE.format(
                names=", ".join(stored),
                paths=list(filter(None, sys.path)),
                pickled=base64.b64encode(cloudpickle.dumps(stored)).decode(),
            )
            self._values[REWARDS] = specs
        return specs

    @contextmanager
    def stored(self, config: Config, folder: Path) -> Iterator[Config]:
        """Write them into the folder, and yield the config with their paths. A folder that nothing
        else is written to is removed in the end."""
        folder, is_new = folder.absolute(), not folder.exists()
        config = change_config(config, {"output.dir": str(folder)})
        try:
            if self._values:
                home = folder / INPUTS
                folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
                home.mkdir(exist_ok=True)
                for name, text in self._texts.items():
                    (home / name).write_text(text, encoding="utf-8")
                paths = {
                    key: f"{home}/{value}"
                    if isinstance(value, str)
                    else [re.sub(r"^rewards\.py:", f"{home}/rewards.py:", each) for each in value]
                    for key, value in self._values.items()
                }
                config = change_config(config, paths)
            yield config
        except ConfigError as error:
            text = str(error).replace(f"{folder / INPUTS}/rewards.py:", "")
            for name in DATASETS.values():
                text = text.replace(f"{folder / INPUTS}/{name}.jsonl", "the rows")
            raise ConfigError(text) from None
        except OSError as error:
            raise ConfigError(
                f"output.dir (output): '{folder}' cannot be written: {error}"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                if is_new and has_only_inputs(folder):
                    shutil.rmtree(folder)

    def __bool__(self) -> bool:
        return bool(self._values)


def _plain(value: Any) -> Any:
    """Numbers and lists of an array or a tensor."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"got a {type(value).__name__}")
    return value.tolist()


def _is_names(value: Any) -> bool:
    """Return whether this is a name or a path, or a list of them."""
    is_list = isinstance(value, list | tuple) and bool(value)
    return isinstance(value, str) or (is_list and all(isinstance(each, str) for each in value))
