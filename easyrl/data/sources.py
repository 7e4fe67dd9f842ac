"""Open the rows of a data set.

    .jsonl, .csv (.gz)   ─► read here: an error names its line
    .parquet             ─┐
    save_to_disk folder  ─┼─► Hugging Face `datasets`, memory-mapped
    hub id               ─┘   owner/name, owner/name:subset or owner/name:subset:split

Raises ConfigError for what cannot be read, within seconds also where the hub does not answer.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from easyrl.config import ConfigError
from easyrl.data.hub import offline_unless_reachable
from easyrl.data.presets import TRAINED, hint

NumberedRows = Iterator[tuple[int, dict[str, Any]]]
KEY = "data.dataset (--dataset)"
FORMS = (
    f"{', '.join(TRAINED)}, a .jsonl, .csv or .parquet file, a folder of save_to_disk, or a hub id "
    "(owner/name:subset:split)"
)
HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([^:]*))?(?::([^:]+))?")


@dataclass(frozen=True, slots=True)
class Source:
    name: str
    rows: Any
    """A list, a `datasets.Dataset`, or `TaskRows`."""
    location: Callable[[int], str]
    """Where a row is, for errors."""


def open_source(name: str) -> Source:
    """Open a file, a folder or a hub id."""
    path = Path(name).expanduser()
    if match := re.search(r"\.(jsonl|csv)(\.gz)?$|\.parquet$", name):
        if not path.is_file():
            raise ConfigError(f"{KEY}: there is no file '{name}'")
        if match[1] is None:
            files = {"data_files": str(path), "split": "train"}
            return _load(name, lambda datasets: datasets.load_dataset("parquet", **files))
        rows, lines = _read_lines(path, _csv_rows if match[1] == "csv" else _json_rows)
        return Source(name, rows, lambda row: f"{path}:{lines[row]}")
    if path.is_dir():
        split = path / "train" if (path / "dataset_dict.json").is_file() else path
        return _load(name, lambda datasets: datasets.load_from_disk(str(split)))
    if HUB_ID.fullmatch(name) and not path.exists():
        return open_hub(name)
    raise ConfigError(f"{KEY}: expected {FORMS}, got '{name}'{hint(name)}")


def open_hub(name: str) -> Source:
    """Open a split of a data set on the hub."""
    match = HUB_ID.fullmatch(name)
    assert match
    repository, subset, split = match.groups()
    with offline_unless_reachable():
        return _load(
            name,
            lambda datasets: datasets.load_dataset(
                repository, subset or None, split=split or "train"
            ),
            " Check the name and the network (HF_ENDPOINT names a mirror)",
        )


def _load(name: str, load: Callable[[Any], Any], advice: str = "") -> Source:
    """Load rows with `datasets`, without progress bars."""
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = load(datasets)
    except Exception as error:  # datasets and pyarrow raise many kinds
        cause = error if isinstance(error, ConnectionError) else error.__cause__ or error
        why = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(f"{KEY}: '{name}' cannot be loaded: {why}.{advice}") from error
    return Source(name, rows, lambda row: f"{name}, row {row} (counted from 0)")


def _read_lines(
    path: Path, parse: Callable[[TextIO], NumberedRows]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Read the rows of a text file, gzipped or not, and the numbers of their lines.

    Every row gets every column that any row has; None where its line does not have it.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            numbered = list(parse(file))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}:{error}") from None
    except (OSError, EOFError) as error:
        raise ConfigError(f"{KEY}: '{path}' cannot be read: {error}") from None
    blank = dict.fromkeys(name for _, row in numbered for name in row)
    return [blank | row for _, row in numbered], [line for line, _ in numbered]


def _json_rows(file: TextIO) -> NumberedRows:
    """Yield line numbers and rows; skip blank lines. An error begins with its line's number."""
    for line, text in enumerate(file, start=1):
        if text.strip():
            try:
                row = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{line}: expected JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{line}: expected a JSON object, got {text.strip():.40}")
            yield line, row


def _csv_rows(file: TextIO) -> NumberedRows:
    """As `_json_rows`. Every value stays the text that it is: an answer of 007 is not 7."""
    reader = csv.reader(file, strict=True)
    try:
        names = next(reader, [])
        for values in filter(None, reader):
            if len(values) != len(names):
                raise ValueError(
                    f"{reader.line_num}: expected {len(names)} values as in the header, got "
                    f"{len(values)}"
                )
            yield reader.line_num, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise ValueError(f"{reader.line_num}: {error}") from None
