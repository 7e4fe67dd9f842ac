"""Open `data.dataset` as a stream of prompts, and choose the problems of an evaluation.

task of a preset           ─► its function from an index to a row ─┐
.jsonl, .csv (.gz)         ─► read here: an error names its line ──┼► DataSet ─► PromptStream
.parquet                   ─┐                                      │
save_to_disk folder        ─┼─► Hugging Face `datasets`, on disk ──┘
hub id, a preset's rows    ─┘     (tables.py: dates and times as text)
"""

import csv
import glob
import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from easyrl.config import ConfigError, DataConfig
from easyrl.config.algorithm import TEACHER_PROMPT_KEY
from easyrl.config.hints import did_you_mean, similar_file
from easyrl.config.spec import DataSpec
from easyrl.data.hub import HubUnreachable, reach_hub
from easyrl.data.picture_columns import PictureSource, find_column, shows_pictures
from easyrl.data.presets import PRESETS, TRAINED, named_preset, preset_of
from easyrl.data.row_form import RowForm
from easyrl.data.streams import KEY, DataSet, PromptStream, content_of
from easyrl.data.tables import Table
from easyrl.formatting import require
from easyrl.processes import allow_long_integers
from easyrl.types import Prompt

Row = dict[str, Any]


class NumberedRow(NamedTuple):
    line: int  # number of the row's (last) line in its file, from 1
    row: Row


FORMS = (
    f"{', '.join(TRAINED)}, a .jsonl, .csv or .parquet file, a folder of such or of save_to_disk, "
    "a hub id (owner/name:subset:split), or reasoning_gym:NAME"
)
FILE = re.compile(r"\.((jsonl|csv)(\.gz)?|parquet)$", re.IGNORECASE)
HUB_ID = r"[\w.-]+/[\w.-]+(:[^:]*)?(:[^:]+)?"
SPLIT_IN_NAME = "train|test|val|dev"  # as in train-00000-of-00002.parquet
MAX_FILES_NAMED = 9  # in an error
ID_DIGITS = 16


def open_prompts(spec: DataSpec, *, is_trained: bool = True) -> PromptStream:
    """Open `data.dataset`. Raises ConfigError where it cannot be used.

    `is_trained`: False opens the held-out problems alone, if the data set is a preset on the hub.
    """
    data = spec.options
    names = data.datasets
    if data.preset is not None and all(named_preset(name, data) for name in names):
        raise ConfigError(
            f"data.preset: expected null, because '{data.shown}' is a preset itself, got "
            f"'{data.preset}'; use it with rows of your own as data.dataset (--dataset)"
        )
    is_mixture = len(names) > 1
    opened = {}
    for number, name in enumerate(names):
        dataset = _open(name, spec, number, is_trained=is_trained or is_mixture)
        opened[name] = _with_teacher(dataset, spec, number)
    stream = PromptStream(opened, data.weights or [1.0] * len(names))
    examples = stream.examples()  # raises ConfigError for a row without a prompt
    stream.has_pictures = any(map(shows_pictures, examples.values()))
    if stream.has_pictures and spec.teacher_prompt is not None:
        raise ConfigError(
            f"{TEACHER_PROMPT_KEY}: expected null for prompts with pictures, which a prompt of the "
            f"teacher's own cannot show, got {spec.teacher_prompt!r}"
        )
    return stream


def _with_teacher(dataset: DataSet, spec: DataSpec, number: int) -> DataSet:
    """Add the prompts of `algorithm.teacher_prompt`, a template or a column, if it is set."""
    given = spec.teacher_prompt
    if given is None:
        return dataset
    is_template = "{" in given
    own = {
        "prompt_template": given if is_template else None,
        "prompt_column": None if is_template else given,
        "chat": dataset.form.is_chat,
        "answer_from": None,
    }
    data = spec.options.model_copy(update=own)
    form = RowForm(data, None, number=number, key=TEACHER_PROMPT_KEY)
    return replace(dataset, teacher_form=form)


def _open(name: str, spec: DataSpec, number: int, *, is_trained: bool) -> DataSet:
    """Open data set `number` of a mixture, or the only one."""
    data = spec.options
    form = RowForm(
        data,
        preset_of(name, data),
        spec.environments,
        number,
    )
    seed = spec.seed if data.shuffle else None
    preset = named_preset(name, data)
    if preset is None:
        return _with_pictures(_open_rows(name, form, seed), data)
    if preset.task:
        kept = preset.task.held_out_rows()
        held_out = DataSet(f"{name}, held out", kept, form) if kept else None
        rows = partial(preset.task.train_row, spec.seed)
        return _with_pictures(DataSet(name, rows, form, held_out=held_out), data)
    assert preset.held_out is not None
    if is_trained and preset.rows is None:
        raise ConfigError(f"{KEY}: expected {FORMS}, got '{name}', which is for evaluations only")
    held_out = DataSet(preset.held_out, open_hub(preset.held_out), form)
    if not is_trained or preset.rows is None:
        return held_out
    return DataSet(preset.rows, open_hub(preset.rows), form, seed, held_out=held_out)


def _with_pictures(dataset: DataSet, data: DataConfig) -> DataSet:
    """Find the column with the pictures of the prompts, if there is one. Raises ConfigError."""
    rows = dataset.rows
    looked_at = [rows(0)] if callable(rows) else rows
    columns = dataset.columns
    column = find_column(data.image_column, columns, looked_at, dataset.name)
    path = Path(dataset.name).expanduser()
    folder = None
    if path.exists():
        folder = path.parent if path.is_file() else path
    source = PictureSource(column, folder, max_bytes=data.max_image_bytes)
    dataset.form.use_pictures(source)
    if column is not None and isinstance(rows, Table):
        rows.keep_files([column])
    return dataset


def _open_rows(name: str, form: RowForm, seed: int | None) -> DataSet:
    """Open a file, a folder or a data set on the hub."""
    path = Path(name).expanduser()
    saved = _saved_folder(path)
    if saved is not None:
        table = _load(name, lambda datasets: datasets.load_from_disk(str(saved)))
        return DataSet.of_rows(name, table, form, seed)
    if path.is_dir() or FILE.search(name):
        files = _files_of(path)
        is_parquet = files[0].suffix.lower() == ".parquet"
        if is_parquet:
            return DataSet.of_rows(name, _open_parquet(name, files), form, seed)
        return _read_files(name, files, form, seed)
    if re.fullmatch(HUB_ID, name) and not path.exists():
        return DataSet.of_rows(name, open_hub(name), form, seed)
    hint = did_you_mean(name, PRESETS)
    raise ConfigError(f"{KEY}: expected {FORMS}, got '{name}'{hint}")


def _saved_folder(path: Path) -> Path | None:
    """Return the folder that `save_to_disk` has written the rows to; None if it has not."""
    if (path / "dataset_dict.json").is_file():  # of several splits
        return path / "train"
    if (path / "state.json").is_file():
        return path
    return None


def _open_parquet(name: str, files: Sequence[Path]) -> Table:
    # Characters of patterns, such as [, are part of a name here.
    options = {
        "data_files": [glob.escape(str(file)) for file in files],
        "split": "train",
    }
    return _load(name, lambda datasets: datasets.load_dataset("parquet", **options))


def _read_files(name: str, files: Iterable[Path], form: RowForm, seed: int | None) -> DataSet:
    """Read text files. Every row gets all columns that any row has."""
    locations = []
    rows: list[Row] = []
    columns: dict[str, None] = {}  # a set that keeps the order
    for file in files:
        for line, row in _read(file):
            locations.append(f"{file}:{line}")
            rows.append(row)
            columns |= dict.fromkeys(row)
    whole_rows = [columns | row for row in rows]
    return DataSet.of_rows(name, whole_rows, form, seed, locations)


def _files_of(path: Path) -> list[Path]:
    """Return a file, or a folder's files of rows; of several splits, those of `train`."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        about = similar_file(path)
        if "," in path.name:
            about = "; of several data sets each has its own --dataset"
        raise ConfigError(f"{KEY}: there is no file '{path}'{about}")
    visible = sorted(path.glob("[!._]*"))
    found = [each for each in visible if FILE.search(each.name)]
    of_split: dict[str, list[Path]] = {}
    for each in found:
        split = re.search(SPLIT_IN_NAME, each.name.lower())
        of_split.setdefault(split[0] if split else "", []).append(each)
    files = of_split.get("train", found)
    is_one_split = len(of_split) == 1 or "train" in of_split
    suffixes = {each.suffix for each in files}
    if not is_one_split or len(suffixes) != 1:
        names = [each.name for each in found[:MAX_FILES_NAMED]]
        raise ConfigError(
            f"{KEY}: expected a folder of save_to_disk, or .parquet, .jsonl or .csv files of one "
            f"kind and split (or `train`) in '{path}', got {names}"
        )
    return files


def open_hub(name: str) -> Table:
    """Open a split of a data set on the hub."""
    repository, _, rest = name.partition(":")
    subset, _, split = rest.partition(":")

    def load(datasets: Any) -> Any:
        return datasets.load_dataset(
            repository,
            subset or None,
            split=split or "train",
        )

    return _load(name, load, is_on_hub=True)


def _load(name: str, load: Callable[[Any], Any], *, is_on_hub: bool = False) -> Table:
    """Call `load` with the library `datasets`. Raises ConfigError where it fails.

    If the hub does not answer, only the library's cache is tried: its clients would retry for half
    a minute.
    """
    require("datasets", f"{KEY}: '{name}'")
    is_reachable = not is_on_hub or reach_hub()
    import datasets
    from huggingface_hub import constants

    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = was_offline or not is_reachable
    try:
        return Table(load(datasets))
    except Exception as error:  # datasets and pyarrow raise many kinds
        cause = error if isinstance(error, ConnectionError) else error.__cause__ or error
        text = str(cause).strip() or type(cause).__name__
        why = text.splitlines()[0].rstrip(".")
        advice = "" if is_reachable else " Check name and network (HF_ENDPOINT names a mirror)"
        kind = HubUnreachable if advice else ConfigError
        raise kind(f"{KEY}: '{name}' cannot be loaded: {why}.{advice}") from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        if had_bars:  # of the caller's process
            datasets.enable_progress_bars()


def _read(path: Path) -> list[NumberedRow]:
    """Read the rows of a text file, gzipped or not."""
    allow_long_integers()
    name = path.name.lower()
    opener: Any = gzip.open if name.endswith(".gz") else open
    read_rows = _csv_rows if name.endswith((".csv", ".csv.gz")) else _json_rows
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            # Each of several joined files may begin with a byte order mark.
            lines = (line.removeprefix("\ufeff") for line in file)
            return list(read_rows(lines))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}:{error}") from None
    except (OSError, EOFError) as error:
        raise ConfigError(f"{KEY}: '{path}' cannot be read: {error}") from None


def _json_rows(lines: Iterable[str]) -> Iterator[NumberedRow]:
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            if not isinstance(row, dict):
                raise ValueError(f"got {text.strip():.40}")
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)  # json's own position counts other lines
            raise ValueError(f"{line}: expected a JSON object: {reason}") from None
        yield NumberedRow(line, row)


def _csv_rows(lines: Iterable[str]) -> Iterator[NumberedRow]:
    """Yield rows without columns that have no name. Leave out empty rows, and the headers of files
    that were joined. An empty cell is None, every other value stays text: 007 is not 7."""
    csv.field_size_limit(2**31)  # of the whole process
    # All columns without a name, and values beyond the header, have the key "".
    reader = csv.DictReader(lines, restkey="", strict=True)
    try:
        names = reader.fieldnames or []
        for name in names:
            if name and names.count(name) > 1:
                raise ValueError(f"{reader.line_num}: expected column '{name}' only once")
        for row in reader:
            surplus = row.pop("", "")
            texts = list(row.values())
            has_too_few = None in texts
            has_too_many = isinstance(surplus, list) and any(surplus)
            if has_too_few or has_too_many:
                raise ValueError(f"{reader.line_num}: expected as many values as in the header")
            is_header = texts == list(row)
            if any(texts) and not is_header:
                values = {name: text or None for name, text in row.items()}
                yield NumberedRow(reader.line_num, values)
    except csv.Error as error:
        raise ValueError(f"{reader.reader.line_num}: {error}") from None


def problems_of(stream: PromptStream, data: DataConfig) -> dict[str, Prompt]:
    """Return at most `data.num_held_out` problems, by their locations: the held-out ones if there
    are any, else every row. Raises ConfigError if there are none."""
    if data.num_held_out == 0:
        raise ConfigError("data.num_held_out: expected 1 or more problems to evaluate, got 0")
    problems = {}
    for number, problem in enumerate(stream.held_out()[: data.num_held_out]):
        problems[f"held-out problem {number} of '{data.shown}'"] = problem
    if problems:
        return problems
    if stream.epoch_length is None or len(data.datasets) > 1:
        raise ConfigError(
            "eval.dataset, data.dataset (--dataset): expected a data set with held-out problems, "
            f"or a single one with rows, got '{data.shown}'"
        )
    locations = islice(stream.examples(), data.num_held_out)
    for row, location in enumerate(locations):
        problems[location] = stream.prompt(row)
    return problems


def identity_of(problems: Sequence[str]) -> str:
    """Digest the ids of a set of problems, in any order."""
    return _digest("\n".join(sorted(problems)))


def _digest(text: str) -> str:
    # JSON of a row may have half a surrogate pair.
    content = text.encode(errors="backslashreplace")
    return hashlib.sha256(content).hexdigest()[:ID_DIGITS]


def problem_ids(problems: Sequence[Prompt]) -> list[str]:
    """Digest prompt, columns and pictures of each problem. The id of the second of two equal ones
    ends in `-2`."""
    seen: Counter[str] = Counter()
    ids = []
    for problem in problems:
        values = [problem.content, dict(problem.columns)]
        text = json.dumps(values, sort_keys=True, default=content_of)
        for picture in problem.pictures:
            if picture.digest not in text:  # it is in the prompt, not in a column
                text += picture.digest
        name = _digest(text)
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}-{seen[name]}"
        ids.append(name)
    return ids
