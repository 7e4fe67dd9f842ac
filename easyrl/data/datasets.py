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
from typing import Any

from easyrl.config import Config, ConfigError, by_name, change_config, keys_marked
from easyrl.config.algorithm import TEACHER_PROMPT_KEY
from easyrl.config.hints import did_you_mean, similar_file
from easyrl.config.section import PROMPT_FORM
from easyrl.data.hub import HubUnreachable, reach_hub
from easyrl.data.presets import PRESETS, TRAINED, named_preset, preset_of
from easyrl.data.streams import KEY, DataSet, PromptStream, RowForm, content_of
from easyrl.data.tables import Table
from easyrl.formatting import require
from easyrl.processes import allow_long_integers
from easyrl.types import Prompt

NumberedRows = Iterator[tuple[int, dict[str, Any]]]
FORMS = (
    f"{', '.join(TRAINED)}, a .jsonl, .csv or .parquet file, a folder of such or of save_to_disk, "
    "a hub id (owner/name:subset:split), or reasoning_gym:NAME"
)
FILE = re.compile(r"\.((jsonl|csv)(\.gz)?|parquet)$", re.IGNORECASE)
HUB_ID = r"[\w.-]+/[\w.-]+(:[^:]*)?(:[^:]+)?"
ID_DIGITS = 16


def open_prompts(config: Config, *, is_trained: bool = True) -> PromptStream:
    """Open `data.dataset`; unless `is_trained`, of a preset on the hub the held-out problems alone.
    Raises ConfigError where it cannot be used."""
    data, names = config.data, config.data.datasets
    if data.preset is not None and all(named_preset(name, data) for name in names):
        raise ConfigError(
            f"data.preset: expected null, because '{data.shown}' is a preset itself, got "
            f"'{data.preset}'; use it with rows of your own as data.dataset (--dataset)"
        )
    is_trained = is_trained or len(names) > 1
    stream = PromptStream(
        {
            name: _with_teacher(_open(name, config, k, is_trained=is_trained), config, k)
            for k, name in enumerate(names)
        },
        data.weights or [1.0] * len(names),
    )
    stream.examples()  # raises ConfigError for a row without a prompt
    return stream


def _with_teacher(dataset: DataSet, config: Config, number: int) -> DataSet:
    if (given := config.algorithm.teacher_prompt) is None:
        return dataset
    keys = "prompt_template", "prompt_column"
    own = dict.fromkeys(keys) | {keys["{" not in given]: given, "chat": dataset.form.is_chat}
    data = config.data.model_copy(update=own)
    form = RowForm(data, None, number=number, key=TEACHER_PROMPT_KEY)
    return replace(dataset, teacher_form=form)


def _open(name: str, config: Config, number: int, *, is_trained: bool) -> DataSet:
    rollout = config.rollout
    environments = rollout.environments if rollout.has_environments else ()
    form = RowForm(config.data, preset_of(name, config.data), environments, number)
    seed = config.runtime.seed if config.data.shuffle else None
    preset = named_preset(name, config.data)
    if preset is None:
        return _open_rows(name, form, seed)
    if preset.task:
        kept = preset.task.held_out_rows()
        held_out = DataSet(f"{name}, held out", kept, form) if kept else None
        rows = partial(preset.task.train_row, config.runtime.seed)
        return DataSet(name, rows, form, held_out=held_out)
    assert preset.held_out is not None
    if is_trained and preset.rows is None:
        raise ConfigError(f"{KEY}: expected {FORMS}, got '{name}', which is for evaluations only")
    held_out = DataSet(preset.held_out, open_hub(preset.held_out), form)
    if not is_trained or preset.rows is None:
        return held_out
    return DataSet(preset.rows, open_hub(preset.rows), form, seed, held_out=held_out)


def _open_rows(name: str, form: RowForm, seed: int | None) -> DataSet:
    path = Path(name).expanduser()
    saved = path / "train" if (path / "dataset_dict.json").is_file() else path
    if saved != path or (path / "state.json").is_file():
        loaded = _load(name, lambda datasets: datasets.load_from_disk(str(saved)))
    elif path.is_dir() or FILE.search(name):
        files = _files_of(path)
        if files[0].suffix.lower() != ".parquet":
            numbered = [(f"{file}:{line}", row) for file in files for line, row in _read(file)]
            blank = dict.fromkeys(column for _, row in numbered for column in row)
            rows = [blank | row for _, row in numbered]  # each has every column that any row has
            return DataSet(name, rows, form, seed, [location for location, _ in numbered])
        options = {"data_files": [glob.escape(str(file)) for file in files], "split": "train"}
        loaded = _load(name, lambda datasets: datasets.load_dataset("parquet", **options))
    elif re.fullmatch(HUB_ID, name) and not path.exists():
        loaded = open_hub(name)
    else:
        raise ConfigError(f"{KEY}: expected {FORMS}, got '{name}'{did_you_mean(name, PRESETS)}")
    return DataSet(name, loaded, form, seed)


def _files_of(path: Path) -> list[Path]:
    """Return a file, or a folder's files of rows; of several splits, those of `train`."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{KEY}: there is no file '{path}'{similar_file(path)}")
    found = [each for each in sorted(path.glob("[!._]*")) if FILE.search(each.name)]
    splits = {each: re.findall("train|test|val|dev", each.name.lower())[:1] for each in found}
    files = [each for each in found if splits[each] == ["train"]] or found
    if len({(*splits[each], each.suffix) for each in files}) != 1:
        raise ConfigError(
            f"{KEY}: expected a folder of save_to_disk, or .parquet, .jsonl or .csv files of one "
            f"kind and split (or `train`) in '{path}', got {[each.name for each in found[:9]]}"
        )
    return files


def open_hub(name: str) -> Table:
    """Open a split of a data set on the hub."""
    repository, _, rest = name.partition(":")
    subset, _, split = rest.partition(":")
    return _load(
        name,
        lambda datasets: datasets.load_dataset(repository, subset or None, split=split or "train"),
        is_on_hub=True,
    )


def _load(name: str, load: Callable[[Any], Any], *, is_on_hub: bool = False) -> Table:
    """Load rows; from the cache if the hub cannot be reached: clients would retry half a minute."""
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
        why = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        advice = "" if is_reachable else " Check name and network (HF_ENDPOINT names a mirror)"
        kind = HubUnreachable if advice else ConfigError
        raise kind(f"{KEY}: '{name}' cannot be loaded: {why}.{advice}") from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        if had_bars:  # of the caller's process
            datasets.enable_progress_bars()


def _read(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read the rows of a text file, gzipped or not, and the numbers of their lines."""
    allow_long_integers()
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            lines = (line.removeprefix("\ufeff") for line in file)  # of joined files, too
            return list(_csv_rows(lines) if ".csv" in path.name.lower()[-7:] else _json_rows(lines))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}:{error}") from None
    except (OSError, EOFError) as error:
        raise ConfigError(f"{KEY}: '{path}' cannot be read: {error}") from None


def _json_rows(lines: Iterable[str]) -> NumberedRows:
    for line, text in enumerate(lines, start=1):
        if text.strip():
            try:
                row = json.loads(text)
                if not isinstance(row, dict):
                    raise ValueError(f"got {text.strip():.40}")
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", error)  # json's own position counts other lines
                raise ValueError(f"{line}: expected a JSON object: {reason}") from None
            yield line, row


def _csv_rows(lines: Iterable[str]) -> NumberedRows:
    """Yield line numbers and rows, without columns that have no name, empty rows and the headers of
    files that were joined. An empty cell is None, every other value stays text: 007 is not 7."""
    csv.field_size_limit(2**31)  # of the whole process
    reader = csv.DictReader(lines, restkey="", strict=True)
    try:
        names = reader.fieldnames or []
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise ValueError(f"{reader.line_num}: expected column '{twice[0]}' only once")
        for row in reader:
            surplus = row.pop("", "")
            if None in row.values() or (isinstance(surplus, list) and any(surplus)):
                raise ValueError(f"{reader.line_num}: expected as many values as in the header")
            if any(row.values()) and [*row] != [*row.values()]:
                yield reader.line_num, {name: text or None for name, text in row.items()}
    except csv.Error as error:
        raise ValueError(f"{reader.reader.line_num}: {error}") from None


def with_eval_data(config: Config) -> Config:
    """Return the config with `data` set to the evaluated problems, in the data's own order. A
    preset that `eval.dataset` names has its own prompts; others have those of `data`."""
    changes: dict[str, Any] = {"data.shuffle": False, TEACHER_PROMPT_KEY: None}
    if config.eval.dataset is not None:
        changes |= {"data.dataset": config.eval.dataset, "data.weights": None, "data.options": {}}
        if isinstance(config.data.columns, list):
            own = dict(zip(config.data.datasets, config.data.columns, strict=True))
            changes["data.columns"] = [own.get(config.eval.dataset, {})]
        if config.eval.dataset in PRESETS:
            defaults = by_name(Config().model_dump(include={"data"}))
            changes |= {key: defaults[key] for key in keys_marked(PROMPT_FORM)}
    return change_config(config, changes)


def problems_of(stream: PromptStream, config: Config) -> dict[str, Prompt]:
    """Return at most `data.num_held_out` problems, by their locations: the held-out ones if there
    are any, else every row. Raises ConfigError if there are none."""
    data = config.data
    if data.num_held_out == 0:
        raise ConfigError("data.num_held_out: expected 1 or more problems to evaluate, got 0")
    if held_out := stream.held_out()[: data.num_held_out]:
        return {f"held-out problem {k} of '{data.shown}'": p for k, p in enumerate(held_out)}
    if stream.epoch_length is None or len(data.datasets) > 1:
        raise ConfigError(
            "eval.dataset, data.dataset (--dataset): expected a data set with held-out problems, "
            f"or a single one with rows, got '{data.shown}'"
        )
    chosen = islice(stream.examples(), data.num_held_out)
    return {location: stream.prompt(row) for row, location in enumerate(chosen)}


def identity_of(problems: Sequence[str]) -> str:
    """Digest the ids of a set of problems, in any order."""
    return hashlib.sha256("\n".join(sorted(problems)).encode()).hexdigest()[:ID_DIGITS]


def problem_ids(problems: Sequence[Prompt]) -> list[str]:
    """Digest prompt and columns of each problem. The second of two equal ones is called `…-2`."""
    seen: Counter[str] = Counter()
    ids = []
    for problem in problems:
        values = [problem.content, dict(problem.columns)]
        row = json.dumps(values, sort_keys=True, default=content_of)
        name = hashlib.sha256(row.encode(errors="backslashreplace")).hexdigest()[:ID_DIGITS]
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids
