"""Data sets: every source gives the same kind of prompts, and errors name file and line."""

import csv
import datetime
import gzip
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from easyrl.api.inputs import Inputs
from easyrl.config import ConfigError, load_config
from easyrl.data import datasets as own_datasets
from easyrl.data import streams
from easyrl.data.datasets import open_prompts, problem_ids
from easyrl.data.streams import PromptStream
from easyrl.types import Prompt

CHAT = [{"role": "user", "content": "What is 1+1?"}]
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(20)]


def opened(dataset: object, *words: str) -> PromptStream:
    return open_prompts(load_config(None, {"data.dataset": str(dataset)}, words))


def error_of(dataset: object, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(dataset, *words)
    return str(caught.value)


def jsonl(folder: Path, *lines: Any) -> Path:
    file = folder / "data.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts), encoding="utf-8")
    return file


def parquet(folder: Path, **columns: list[Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    file = folder / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


def test_task_is_endless_and_follows_the_seed() -> None:
    stream = opened("arithmetic")
    assert stream.epoch_length is None and stream.fingerprint() is None
    assert stream.prompt(10**9).index == 10**9
    assert stream.prompt(5) != opened("arithmetic", "runtime.seed=1").prompt(5)


def test_jsonl_rows_in_file_order_without_shuffle(tmp_path: Path) -> None:
    stream = opened(jsonl(tmp_path, *ROWS), "data.shuffle=false")
    assert stream.epoch_length == 20
    prompts = [stream.prompt(index) for index in range(25)]
    assert [prompt.index for prompt in prompts] == list(range(25))
    assert [prompt.content for prompt in prompts[:20]] == [row["prompt"] for row in ROWS]
    assert prompts[23].columns == {"answer": "4", "level": 3}


def test_every_epoch_is_the_whole_data_set_in_an_order_of_its_own(tmp_path: Path) -> None:
    file = jsonl(tmp_path, *ROWS)
    stream = opened(file)
    epochs = [[stream.prompt(20 * e + i).content for i in range(20)] for e in range(3)]
    assert all(sorted(map(str, epoch)) == sorted(map(str, epochs[0])) for epoch in epochs)
    assert all(one != other for one, other in pairwise(epochs))
    assert [opened(file).prompt(45).content for _ in range(2)] == [epochs[2][5]] * 2
    seeded = opened(file, "runtime.seed=1")
    assert [seeded.prompt(i).content for i in range(20)] != epochs[0]


def test_blank_lines_are_skipped_and_missing_columns_are_none(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "\ufeff" + '{"prompt": "a"}', "", "   ", {"prompt": "b", "answer": 1})
    stream = opened(file, "data.shuffle=false")
    assert [stream.prompt(index).columns for index in range(2)] == [{"answer": None}, {"answer": 1}]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "rows"])
def test_missing_values_are_none_in_every_form_of_data(kind: str, tmp_path: Path) -> None:
    values = {"prompt": ["a", "b"], "answer": ["x", None], "level": [1.0, None], "hint": ["y", ""]}
    frame = pandas.DataFrame(values)
    file = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        jsonl(tmp_path, *frame.to_dict("records"))
    elif kind == "csv":
        frame.to_csv(file, index=False)
    elif kind == "parquet":
        frame.to_parquet(file)
    else:
        rows = frame.convert_dtypes().to_dict("records")
        jsonl(tmp_path, *Inputs({"data.dataset": rows})._texts["data.jsonl"].splitlines())
        file = tmp_path / "data.jsonl"
    stream = opened(file, "data.shuffle=false")
    assert stream.prompt(0).columns["answer"] == "x"
    hint = None if kind == "csv" else ""  # elsewhere an empty text may be meant
    assert stream.prompt(1).columns == {"answer": None, "level": None, "hint": hint}
    assert "'answer'" in error_of(file, "data.prompt_template={prompt}{answer}")


def in_parquet(folder: Path) -> Path:
    return parquet(folder, **{name: [row[name] for row in ROWS] for name in ROWS[0]})


def in_gzip(folder: Path) -> Path:
    file = folder / "data.jsonl.gz"
    file.write_bytes(gzip.compress(jsonl(folder, *ROWS).read_bytes()))
    return file


def saved_to_disk(folder: Path) -> Path:
    import datasets

    train, test = (datasets.Dataset.from_list(rows) for rows in (ROWS, ROWS[:3]))
    datasets.DatasetDict(train=train, test=test).save_to_disk(str(folder / "splits"))
    return folder / "splits"


@pytest.mark.parametrize("write", [in_parquet, in_gzip, saved_to_disk])
def test_the_same_rows_are_the_same_prompts_in_every_format(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    stream, plain = opened(write(tmp_path)), opened(jsonl(tmp_path, *ROWS))
    assert stream.epoch_length == 20 and stream.held_out() == []
    assert [stream.prompt(i) for i in range(40)] == [plain.prompt(i) for i in range(40)]
    assert [*stream.examples().values()] == [*plain.examples().values()]
    assert stream.fingerprint() == plain.fingerprint()


def test_folder_of_a_split_and_of_chosen_rows_is_a_data_set(tmp_path: Path) -> None:
    import datasets

    assert opened(saved_to_disk(tmp_path) / "test").epoch_length == 3
    datasets.Dataset.from_list(ROWS).select([5, 3]).save_to_disk(str(tmp_path / "chosen"))
    chosen = opened(tmp_path / "chosen", "data.shuffle=false")
    assert [chosen.prompt(i).content for i in range(2)] == ["5+1=", "3+1="]
    datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "only"))
    assert "only/train" in error_of(tmp_path / "only")


def test_values_of_a_csv_file_are_the_texts_they_are(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    file.write_text('\ufeffprompt,answer\r\n"1,000+1=",007\r\n\r\n"two\nlines",NA\r\n', "utf-8")
    stream = opened(file, "data.shuffle=false")
    assert [(stream.prompt(i).content, stream.prompt(i).columns) for i in range(2)] == [
        ("1,000+1=", {"answer": "007"}),
        ("two\nlines", {"answer": "NA"}),
    ]


TWO = [("1+1=", {"answer": "2"}), ("2+2=", {"answer": "4"})]


def rows_of(path: Path) -> list[tuple[Any, Any]]:
    stream = opened(path, "data.shuffle=false")
    prompts = [stream.prompt(i) for i in range(stream.epoch_length or 0)]
    return [(prompt.content, prompt.columns) for prompt in prompts]


@pytest.mark.parametrize(
    "text",
    [
        ",prompt,answer\n0,1+1=,2\n1,2+2=,4\n",  # DataFrame.to_csv
        ",,prompt,answer\na,0,1+1=,2\na,1,2+2=,4\n",
        "prompt,answer,\n1+1=,2,\n2+2=,4\n",
        "prompt,answer,,\n1+1=,2,,\n,,,\n2+2=,4,,\n",
        "prompt,answer\n1+1=,2,\n2+2=,4,,\n",
        "prompt,answer\n1+1=,2\nprompt,answer\n2+2=,4\n",  # joined files
        ",prompt,answer,\n0,1+1=,2,\n,,,\n,prompt,answer,\n0,2+2=,4,\n",
    ],
)
def test_csv_files_of_pandas_and_spreadsheets(text: str, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text(text)
    assert rows_of(tmp_path / "data.csv") == TWO


def test_a_field_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    (tmp_path / "data.csv").write_text(f"prompt,answer\na,{'x' * 140_000}\n")
    assert rows_of(tmp_path / "data.csv") == [("a", {"answer": "x" * 140_000})]
    assert csv.field_size_limit() == limit


def write_two(folder: Path, *names: str) -> None:
    """Write the two rows: one in each file, or both in the only one."""
    folder.mkdir(parents=True, exist_ok=True)
    frame = pandas.DataFrame({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"]})
    for number, name in enumerate(names):
        part = frame if len(names) == 1 else frame[number % 2 :][:1]
        if ".parquet" in name.lower():
            part.to_parquet(folder / name)
        elif ".csv" in name:
            part.to_csv(folder / name)
        else:
            part.to_json(folder / name, orient="records", lines=True)


@pytest.mark.parametrize(
    "name",
    [
        "train[1].parquet",
        "[set]/train.parquet",
        "all*.parquet",
        "UP.PARQUET",
        "[a]?.csv",
        "*.jsonl",
    ],
)
def test_characters_of_patterns_are_part_of_a_name(name: str, tmp_path: Path) -> None:
    write_two((tmp_path / name).parent, Path(name).name)
    write_two(tmp_path, "all others.parquet")
    assert rows_of(tmp_path / name) == TWO


TRAIN = ("train-00000-of-00002", "train-00001-of-00002")


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("shards", [f"{each}.parquet" for each in TRAIN]),
        ("[all]*", [f"{each}.parquet" for each in (*TRAIN, "test-00000-of-00001")]),
        ("jsonl", ["part-0.jsonl", "part-1.jsonl", ".part-1.jsonl", "_README.jsonl"]),
        ("gz", ["latest-0.csv.gz", "latest-1.csv.gz"]),
        ("spark.parquet", ["part-0.snappy.parquet", "part-1.snappy.parquet", "._x.parquet"]),
        ("test", ["test.jsonl"]),
    ],
)
def test_a_folder_of_files_is_a_data_set(folder: str, names: list[str], tmp_path: Path) -> None:
    write_two(tmp_path / folder, *names)
    (tmp_path / folder / "_SUCCESS").touch()
    assert rows_of(tmp_path / folder) == TWO


@pytest.mark.parametrize(
    "names", [["a.csv", "b.jsonl"], ["test.jsonl", "validation.jsonl"], ["README.md"]]
)
def test_a_folder_of_other_files_is_named(names: list[str], tmp_path: Path) -> None:
    write_two(tmp_path / "folder", *names)
    assert error_of(tmp_path / "folder").startswith("data.dataset")


def test_a_broken_line_of_a_shard_is_named(tmp_path: Path) -> None:
    write_two(tmp_path / "shards", "a.jsonl", "b.jsonl")
    (tmp_path / "shards" / "c.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    assert error_of(tmp_path / "shards").startswith(f"{tmp_path}/shards/c.jsonl:2: ")


def test_a_fingerprint_is_of_the_rows_and_of_nothing_else(tmp_path: Path) -> None:
    fingerprint = opened(jsonl(tmp_path, *ROWS)).fingerprint()
    assert opened(jsonl(tmp_path, "", *ROWS), "runtime.seed=1").fingerprint() == fingerprint
    changed: list[list[Any]] = [
        [*ROWS[:7], {**ROWS[7], "answer": "another"}, *ROWS[8:]],
        [*ROWS[1:], ROWS[0]],
        ROWS[:-1],
        [{**row, "more": None} for row in ROWS],
    ]
    prints = {opened(jsonl(tmp_path, *rows)).fingerprint() for rows in changed}
    assert len({fingerprint, *prints}) == 1 + len(changed)
    fewer = opened(file := jsonl(tmp_path, *ROWS)).without([f"{file}:4"])
    assert fewer.fingerprint() != fingerprint


class Point:
    def __init__(self, *values: Any) -> None:
        self.values = values


@pytest.mark.parametrize(
    "make",
    [
        lambda k: Image.new("RGB", (4, 4), (k, 0, 0)),
        lambda k: Image.new("L", (4 + k, 4)),
        lambda k: {"nested": [Image.new("P", (4, 4), k)]},
        lambda k: np.arange(5000) == 2500 + k,
        lambda k: np.full((2, 1500), 0.5 + k, dtype=np.float16),
        lambda k: torch.tensor([1.0, float(k)], dtype=torch.bfloat16),
        lambda k: Point(1, [Point(k)]),
        lambda k: b"bytes" * k,
        lambda k: [float("nan"), 0.1 + k, None],
        lambda k: datetime.datetime(2020, 1, 1 + k),
        np.int64,
    ],
)
def test_identity_is_of_the_content_of_values(make: Callable[[int], Any]) -> None:
    kept = [[make(k) for k in (1, 1, 2)] for _ in range(2)]  # all have addresses of their own
    for values in kept:
        first, second, other = (problem_ids([Prompt(0, "p", {"x": v})])[0] for v in values)
        assert first == second != other


def test_an_image_does_not_change_the_fingerprint(tmp_path: Path) -> None:
    import datasets

    for folder, colour in (("a", 1), ("b", 1), ("c", 2)):
        rows = [{"prompt": "p", "image": Image.new("RGB", (2, 2), (colour, 0, 0))}]
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / folder))
    first, second, other = (opened(tmp_path / name).fingerprint() for name in "abc")
    assert first == opened(tmp_path / "a").fingerprint() == second != other


def test_fingerprint_of_many_rows_reads_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "NUM_DIGESTED", 5)
    fingerprint = opened(jsonl(tmp_path, *ROWS)).fingerprint()
    assert opened(in_parquet(tmp_path)).fingerprint() == fingerprint
    for number, is_seen in ((4, True), (5, False)):
        rows = [*ROWS[:number], {**ROWS[number], "answer": "another"}, *ROWS[number + 1 :]]
        assert (opened(jsonl(tmp_path, *rows)).fingerprint() != fingerprint) == is_seen


# Mistakes.


@pytest.mark.parametrize(
    "name", ["none.jsonl", "train.tsv", "", "empty.parquet", "empty.csv", "broken.jsonl.gz"]
)
def test_missing_or_unreadable_file_is_named(name: str, tmp_path: Path) -> None:
    for empty in ("empty.parquet", "empty.csv"):
        (tmp_path / empty).touch()
    (tmp_path / "broken.jsonl.gz").write_bytes(b'{"prompt": "a"}')
    message = error_of(tmp_path / name)
    assert message.startswith("data.dataset") and str(tmp_path / name) in message


def test_missing_prompt_column_lists_those_there_are(tmp_path: Path) -> None:
    for file in (jsonl(tmp_path, {"q": "a"}), parquet(tmp_path, q=["a"])):
        assert error_of(file).startswith("data.prompt_column") and " q" in error_of(file)


BROKEN = [
    ("jsonl", b'{"prompt": "a"}\n\n{"prompt": "a"', ":3: "),
    ("jsonl", b'{"prompt": "a"}\n["a"]\n', ":2: "),
    ("jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', ": expected UTF-8"),
    ("jsonl", b'{"prompt": %s}' % (b"[" * 99_999 + b"]" * 99_999), ":1: expected a JSON object"),
    ("csv", b"prompt,answer\na,b\nc\n", ":3: "),
    ("csv", b'prompt,answer\na,b\n"c"d,e\n', ":3: "),
    ("csv", b"prompt,answer\na,b\nc,d,e\n", ":3: "),
    ("csv", b"prompt,answer,answer\na,b,c\n", ":1: "),
    *(
        ("jsonl", b'{"prompt": "a"}\n{"prompt": %s}' % content, ":2: column 'prompt'")
        for content in (b"null", b'""', b"[]", b'[{"role": "user"}]')
    ),
]


@pytest.mark.parametrize(("kind", "content", "named"), BROKEN, ids=range(len(BROKEN)))
def test_broken_line_is_named(kind: str, content: bytes, named: str, tmp_path: Path) -> None:
    file = tmp_path / f"data.{kind}"
    file.write_bytes(content)
    assert error_of(file).startswith(f"{file}{named}")


def test_one_string_among_chats_is_named(tmp_path: Path) -> None:
    message = error_of(jsonl(tmp_path, {"prompt": CHAT}, "", {"prompt": "1+1="}))
    file = tmp_path / "data.jsonl"
    assert message.startswith(f"{file}:3: ") and "data.chat=true" in message
    assert opened(file, "data.chat=true").epoch_length == 2


@pytest.mark.parametrize(
    ("name", "subset", "split"),
    [("a/b", None, "train"), ("a/b:main", "main", "train"), ("a/b::test", None, "test")],
)
def test_hub_id_may_name_subset_and_split(
    name: str, subset: str | None, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def load(*arguments: Any, **options: Any) -> Any:
        assert (arguments, options) == (("a/b", subset), {"split": split})
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(own_datasets, "reach_hub", lambda: True)
    assert opened(name).epoch_length == 20


@pytest.mark.alone
def test_unreachable_hub_ends_soon_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    import datasets  # noqa: F401  its import is not what is timed

    began = time.monotonic()
    message = error_of("easyrl-no-such-owner/no-such-data")
    assert time.monotonic() - began < 5
    assert message.startswith("data.dataset") and "HF_ENDPOINT" in message
