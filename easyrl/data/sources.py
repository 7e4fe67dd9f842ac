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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError
from easyrl.data.hub import hub_answers
from easyrl.data.presets import HubRows

KEY = "data.dataset (--dataset)"
FILES = "a .jsonl, .csv or .parquet file"
FORMS = f"{FILES}, a folder of save_to_disk, or a hub id (owner/name:subset:split)"
OTHER_FORMATS = {".json", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".zip", ".yaml"}


@dataclass(frozen=True, slots=True)
class Source:
    name: str
    rows: Sequence[dict[str, Any]]
    """A list, or a `datasets.Dataset`."""
    location: Callable[[int], str]
    """Where a row is, for errors."""

    @property
    def column_names(self) -> list[str]:
        return getattr(self.rows, "column_names", None) or list(self.rows[0])  # all have all


def open_source(name: str) -> Source | None:
    """Open a file, a folder or a hub id; None where the name has none of these forms."""
    path = Path(name).expanduser()
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind in (".jsonl", ".csv") or path.suffix == ".parquet":
        if not path.is_file():
            raise ConfigError(f"{KEY}: there is no file '{name}'")
        if path.suffix == ".parquet":
            return _numbered(name, _load_parquet(path))
        rows, lines = read_jsonl(path) if kind == ".jsonl" else read_csv(path)
        return Source(name, rows, lambda row: f"{path}:{lines[row]}")
    if path.is_dir():
        return _numbered(name, _load_folder(path))
    if path.suffix in OTHER_FORMATS or path.exists():
        raise ConfigError(f"{KEY}: expected {FORMS}, got '{name}'")
    if match := re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([^:]*)(?::([^:]+))?)?", name):
        return open_hub(HubRows(match[1], match[2] or None, match[3] or "train"))
    return None


def open_hub(rows: HubRows) -> Source:
    """Open a split of a data set on the hub."""
    found = _load_dataset(rows.name, rows.name, name=rows.subset, split=rows.split)
    return _numbered(rows.name, found)


def _numbered(name: str, rows: Sequence[dict[str, Any]]) -> Source:
    return Source(name, rows, lambda row: f"{name}, row {row} (counted from 0)")


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Read the rows of a JSONL file and their line numbers. Blank lines are skipped.

    Every row gets every column that any row has; None where its line does not have it.
    """
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, text in _lines(path):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:  # not JSON, or an absurd number
            raise ConfigError(f"{path}:{number}: not readable as JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: expected a JSON object, got {text.strip():.40}")
        rows.append(row)
        numbers.append(number)
    blank = dict.fromkeys(name for row in rows for name in row)
    return [blank | row for row in rows], numbers


def read_csv(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Read the rows of a CSV file with a header, and the numbers of the lines where they end.

    Every value stays the text that it is: an answer of 007 is not 7.
    """
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    reader = csv.DictReader((text for _, text in _lines(path)), strict=True)
    try:
        names = reader.fieldnames or ()
        if len(set(names)) < len(names):
            raise ConfigError(f"{path}:1: expected each column name once, got {list(names)}")
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(
                    f"{path}:{reader.line_num}: expected {len(names)} values, as many as the "
                    "header has"
                )
            rows.append(row)
            numbers.append(reader.line_num)
    except csv.Error as error:
        line = reader.reader.line_num
        raise ConfigError(f"{path}:{line}: not readable as CSV: {error}") from None
    return rows, numbers


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file, gzipped or not, with their numbers from 1."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}:{number}: not readable as UTF-8: {error}") from None
    except (OSError, EOFError) as error:
        raise ConfigError(f"{KEY}: '{path}' cannot be read: {_first_line(error)}") from None


def _load_parquet(path: Path) -> Sequence[dict[str, Any]]:
    import pyarrow.parquet

    try:
        num_rows = pyarrow.parquet.read_metadata(path).num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{KEY}: '{path}' is not readable as parquet: {_first_line(error)}"
        ) from error
    if not num_rows:  # `datasets` fails on such a file
        return []
    return _load_dataset(str(path), "parquet", data_files=str(path), split="train")


def _load_folder(path: Path) -> Sequence[dict[str, Any]]:
    """Load what `save_to_disk` wrote: a data set, or the split `train` of several."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(inner.name for inner in path.iterdir() if inner.is_dir())
        if "train" not in splits:
            raise ConfigError(
                f"{KEY}: '{path}' has no split train; use the folder of one of its splits, as in "
                f"{path}/{splits[0] if splits else 'SPLIT'}"
            )
        path /= "train"
    elif not (path / "state.json").is_file():
        raise ConfigError(f"{KEY}: expected {FORMS}, got the folder '{path}'")
    import datasets

    try:
        rows: Sequence[dict[str, Any]] = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets and pyarrow raise many kinds
        raise ConfigError(f"{KEY}: '{path}' cannot be loaded: {_first_line(error)}") from error
    return rows


def _load_dataset(shown: str, source: str, **options: Any) -> Sequence[dict[str, Any]]:
    """Call `datasets.load_dataset` without progress bars and without long retries."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    switches: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in switches]
    # The hub's client retries an unreachable hub for half a minute. Offline it takes what is in the
    # cache and fails at once on what is not.
    if source == shown and not any(before) and not hub_answers():
        for module in switches:
            module.HF_HUB_OFFLINE = True
    try:
        rows: Sequence[dict[str, Any]] = datasets.load_dataset(source, **options)
        return rows
    except (ConnectionError, TimeoutError) as error:
        raise ConfigError(
            f"{KEY}: the hub cannot be reached for '{shown}', and it is not in the cache: "
            f"{_first_line(error)}. Check the network (HF_ENDPOINT names a mirror), or use {FILES}"
        ) from error
    except Exception as error:  # datasets raises another kind for every format
        why = _first_line(error.__cause__ or error)
        raise ConfigError(f"{KEY}: '{shown}' cannot be loaded: {why}") from error
    finally:
        for module, value in zip(switches, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
