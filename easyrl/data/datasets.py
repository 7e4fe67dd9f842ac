"""Open `data.dataset` as a stream of prompts.

    task of a preset           ─► TaskRows ────────────────────────────┐
    .jsonl, .csv (.gz)         ─► read here: an error names its line ──┼► DataSet ─► PromptStream
    .parquet                   ─┐                                      │
    save_to_disk folder        ─┼─► Hugging Face `datasets`, on disk ──┘
    hub id, a preset's rows    ─┘

Errors in the data are found when it is opened, before a process is started: ConfigError, within
seconds also where the hub does not answer.
"""

from __future__ import annotations

import csv
import gzip
import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from easyrl.config import Config, ConfigError
from easyrl.config.data import DataConfig
from easyrl.data.hub import offline_unless_reachable
from easyrl.data.presets import PRESETS, TRAINED, hint, preset_of
from easyrl.data.streams import KEY, DataSet, PromptStream, RowForm, Source, TaskRows

NumberedRows = Iterator[tuple[int, dict[str, Any]]]
FORMS = (
    f"{', '.join(TRAINED)}, a .jsonl, .csv or .parquet file, a folder of save_to_disk, or a hub id "
    "(owner/name:subset:split)"
)
HUB_ID = r"[\w.-]+/[\w.-]+(:[^:]*)?(:[^:]+)?"


def open_prompts(config: Config, *, is_trained: bool = True) -> PromptStream:
    """Open `data.dataset`. Raises ConfigError where it cannot be used.

    A preset for evaluations is opened as its problems, in their own order; so is a preset with
    held-out problems on the hub where nothing `is_trained`, so that the training rows need not be
    fetched.
    """
    data, names = config.data, config.data.datasets
    if data.preset is not None and set(names) <= set(PRESETS):
        raise ConfigError(
            f"data.preset: expected null, because '{data.shown}' is a preset itself, got "
            f"'{data.preset}'; use it with rows of your own as data.dataset (--dataset)"
        )
    is_trained = is_trained or len(names) > 1
    stream = PromptStream(
        {name: _open(name, config, is_trained=is_trained) for name in names},
        data.weights or [1.0] * len(names),
    )
    stream.examples()  # raises ConfigError for a row without a prompt
    return stream


def check_trainable(data: DataConfig) -> None:
    """Raise ConfigError for a preset that is for evaluations only."""
    for name in data.datasets:
        if name in PRESETS and name not in TRAINED:
            raise ConfigError(
                f"{KEY}: '{name}' is for evaluations, not for training; expected {FORMS}"
            )


def _open(name: str, config: Config, *, is_trained: bool) -> DataSet:
    data = config.data
    form = RowForm(data, preset_of(name, data))
    seed = config.runtime.seed if data.shuffle else None
    preset = PRESETS.get(name)
    if preset is None:
        return DataSet(_open_source(name), form, seed)
    if preset.task:
        task = pkgutil.resolve_name(preset.task)
        rows = TaskRows(task, config.runtime.seed, form.prompt_column)
        held_out = Source(name, rows.held_out(), lambda row: f"held-out problem {row} of '{name}'")
        source = Source(name, rows, lambda row: f"problem {row} of '{name}'")
        return DataSet(source, form, None, DataSet(held_out, form, None))
    assert preset.held_out is not None
    try:
        if preset.rows is None or not is_trained:
            return DataSet(open_hub(preset.held_out), form, None)
        measured = None
        if data.num_held_out != 0:
            measured = DataSet(open_hub(preset.held_out), form, None)
        return DataSet(open_hub(preset.rows), form, seed, measured)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. With such rows in a file: --dataset FILE data.preset={name}"
        ) from error


def _open_source(name: str) -> Source:
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
    if re.fullmatch(HUB_ID, name) and not path.exists():
        return open_hub(name)
    raise ConfigError(f"{KEY}: expected {FORMS}, got '{name}'{hint(name)}")


def open_hub(name: str) -> Source:
    """Open a split of a data set on the hub."""
    repository, subset, split = (*name.split(":"), "", "")[:3]
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
