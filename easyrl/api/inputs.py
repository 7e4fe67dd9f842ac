"""Rows, functions and classes that a Python program gives: they become files of the run folder.

    rows, datasets.Dataset ──────────────► inputs/data.jsonl ────► data.dataset
    functions, classes ──cloudpickle─────► inputs/rewards.py ────► reward.functions
                                           inputs/tools.py, … ───► rollout.tools, …

So workers, `resume` and the command line find all that a run needs in its config.
"""

import base64
import hashlib
import json
import pickletools
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import cloudpickle

from easyrl.config import INPUTS, Config, ConfigError, change_config
from easyrl.data.pictures import data_address, read_picture
from easyrl.data.tables import Table
from easyrl.data.values import plain_rows, with_none
from easyrl.runtime.run_folder import PRIVATE, has_only_inputs
from easyrl.user_code import CONTENT_DIGEST

DATASETS = {"data.dataset": "data", "eval.dataset": "eval"}
CODE = {  # by key: the name of the file, and of the argument
    "reward.functions": ("rewards", "reward"),
    "rollout.environment": ("environments", "environment"),
    "rollout.agent": ("agents", "agent"),
    "rollout.tools": ("tools", "rollout={'tools': …}"),
}
HERE = "<inputs>"  # stands for the folder of the files until it is known
FILE = '''"""What a Python program has given: {names}."""
# content {digest}

import base64
import sys

import cloudpickle

sys.path += [path for path in {paths} if path not in sys.path]
globals().update(cloudpickle.loads(base64.b64decode("{pickled}")))
'''


class Inputs:
    """The objects that a Python program gives instead of names."""

    def __init__(self, values: dict[str, Any]) -> None:
        """Replace the objects in `values`, settings by the full names of their keys, by names in
        files. Raises ConfigError for rows and functions that cannot be stored."""
        self._texts: dict[str, str] = {}  # contents of the files, by their names
        for key, name in DATASETS.items():
            rows = values.get(key)
            if rows is not None and not _is_names(rows):
                values[key] = self._take_rows(key, name, rows)
        for key in CODE:
            given = values.get(key)
            if given is not None:
                values[key] = self._take_code(key, given)

    def _take_rows(self, key: str, name: str, rows: Any) -> str:
        is_dataset = isinstance(getattr(rows, "column_names", None), list)  # and no DatasetDict
        are_rows = isinstance(rows, Sequence) or (is_dataset and isinstance(rows, Sized))
        if not are_rows or not len(rows):
            raise ConfigError(
                f"{key}: expected a name, a path, a list of rows (dicts; of a DataFrame: "
                "df.to_dict('records'); no stream) or a datasets.Dataset (one split), got "
                f"{'no rows' if are_rows else type(rows)}"
            )
        if is_dataset:
            try:
                rows = _open_table(rows)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from None
        given = []
        for number, row in enumerate(rows):
            try:
                given.append(with_none(row))
            except (TypeError, ValueError, AttributeError) as error:
                raise _unusable_row(key, number, error) from None
        lines = []
        for number, row in enumerate(plain_rows(given)):
            try:
                lines.append(json.dumps(row, default=_to_json) + "\n")
            except (TypeError, ValueError, AttributeError) as error:
                raise _unusable_row(key, number, error) from None
        self._texts[f"{name}.jsonl"] = "".join(lines)
        return f"{HERE}/{name}.jsonl"

    def _take_code(self, key: str, given: Any) -> Any:
        """Return the value of the setting, in which names stand for functions and classes."""
        file, argument = CODE[key]
        stored: dict[str, Callable[..., Any]] = {}

        def name_of(each: Any) -> str:
            if isinstance(each, str):
                return each
            if not callable(each):
                raise ConfigError(
                    f"{key} ({argument}): expected functions, classes or their names, got {each!r}"
                )
            name = getattr(each, "__name__", type(each).__name__).strip("<>")
            while name in stored:
                name += "_"
            stored[name] = each
            return f"{HERE}/{file}.py:{name}"

        if isinstance(given, Mapping):
            value: Any = {name: name_of(each) for name, each in given.items()}
        elif isinstance(given, list | tuple):
            value = [name_of(each) for each in given]
        else:
            value = name_of(given)
        if stored:
            try:
                pickled = cloudpickle.dumps(stored)
            except Exception as error:  # of many types
                raise ConfigError(
                    f"{key} ({argument}): {', '.join(stored)}: cannot be sent to another process: "
                    f"{error}; create what is used inside the function, or pass its name in a "
                    f"file: 'my_{file}.py:NAME'"
                ) from None
            self._texts[f"{file}.py"] = FILE.format(
                names=", ".join(stored),
                paths=list(filter(None, sys.path)),
                digest=_digest(pickled),
                pickled=base64.b64encode(pickled).decode(),
            )
        return value

    @contextmanager
    def stored(self, config: Config, folder: Path) -> Iterator[Config]:
        """Write the files into `folder`, and yield the config with their paths. In the end, remove
        what is new if nothing else was written to it: the folder, or the files in it."""
        is_new = not folder.exists()
        had_inputs = (folder / INPUTS).exists()
        folder = folder.absolute()
        config = change_config(config, {"output.dir": str(folder)})
        try:
            if self:
                config = self._write(config, folder)
            yield config
        except OSError as error:
            raise ConfigError(f"output.dir (output): cannot write '{folder}': {error}") from None
        finally:
            if not had_inputs and has_only_inputs(folder):
                shutil.rmtree(folder if is_new else folder / INPUTS, ignore_errors=True)

    def _write(self, config: Config, folder: Path) -> Config:
        """Write the files; return the config in which their names have the path of their folder."""
        home = folder / INPUTS
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        home.mkdir(exist_ok=True)
        for name, text in self._texts.items():
            if not _has_content(home / name, text):
                (home / name).write_text(text, encoding="utf-8")
        changes = {}
        for key in (*DATASETS, *CODE):
            value = attrgetter(key)(config)
            stored = _stored_in(home, value)
            if stored != value:
                changes[key] = stored
        return change_config(config, changes)

    def check_unchanged(self, folder: Path) -> None:
        """Raise ConfigError if these are others than those of the run in `folder`."""
        for name, text in self._texts.items():
            file = folder / INPUTS / name
            if not _has_content(file, text):
                raise ConfigError(
                    f"runtime.resume: expected the rows and functions that the run in '{folder}' "
                    f"started with, got others than in {file}; for a new run, use another "
                    "output.dir (output)"
                )

    def __bool__(self) -> bool:
        return bool(self._texts)


def _stored_in(home: Path, value: Any) -> Any:
    """Return the value of a key with the path of the files' folder instead of HERE: a text, a list
    or a mapping of texts, or None."""
    if isinstance(value, dict):
        return {name: _stored_in(home, each) for name, each in value.items()}
    if isinstance(value, list):
        return [_stored_in(home, each) for each in value]
    if isinstance(value, str) and value.startswith(f"{HERE}/"):
        return f"{home}{value.removeprefix(HERE)}"
    return value


def _has_content(file: Path, text: str) -> bool:
    """Return whether the file has the content of `text`. Pickles of the same code may differ: their
    digests are compared."""
    if not file.is_file():
        return False
    before = file.read_text(encoding="utf-8")
    digest_line = CONTENT_DIGEST.search(text)
    return before == text if digest_line is None else digest_line[0] in before


def _open_table(dataset: Any) -> Table:
    """Open a `datasets.Dataset`, with pictures as the files that it has."""
    table = Table(dataset)
    table.keep_files(
        [name for name in table.column_names if "Image(" in str(dataset.features[name])]
    )
    return table


def _to_json(value: Any) -> Any:
    """Return JSON for a value of a row that is not of JSON: an array, or a picture or its file as a
    `data:` address. Raises TypeError or AttributeError for others."""
    if isinstance(value, bytes) or hasattr(value, "getpalette"):
        return data_address(read_picture(value))
    return value.tolist()


def _unusable_row(key: str, number: int, error: Exception) -> ConfigError:
    return ConfigError(f"{key}: row {number}: expected a dict of text, numbers and lists: {error}")


def _digest(pickled: bytes) -> str:
    """Digest a pickle, but not what differs between processes that pickle the same code: numbers of
    the memo, the order of sets, and the ids that cloudpickle gives to classes."""
    varying = re.compile(r"\w*GET \d+|SHORT_BINUNICODE [0-9a-f]{32}")
    operations = [""]
    for operation, value, _ in pickletools.genops(pickled):
        if operation.name in ("ADDITEMS", "FROZENSET"):  # they follow a mark and the set's items
            first_item = _last_index(operations, "MARK None")
            operations[first_item:] = sorted(operations[first_item:])
        operations.append(varying.sub("", f"{operation.name} {value}"))
    return hashlib.sha256("\n".join(operations).encode()).hexdigest()


def _last_index(texts: Sequence[str], text: str) -> int:
    return len(texts) - 1 - texts[::-1].index(text)


def _is_names(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and bool(value)
    return isinstance(value, str) or (is_list and all(isinstance(each, str) for each in value))
