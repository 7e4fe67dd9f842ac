"""Data sets, presets, mixtures, generated tasks: every source gives prompts of the same kind, and
errors name file and line."""

import datetime
import gzip
import json
import random
import sys
from collections import Counter
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.api.inputs import Inputs
from easyrl.config import ConfigError, load_config
from easyrl.data import datasets as own_datasets
from easyrl.data.datasets import open_prompts, problem_ids, problems_of
from easyrl.data.presets import PRESETS, TRAINED, eval_sampling
from easyrl.data.row_form import RowForm
from easyrl.data.streams import BLOCK, DataSet, PromptStream
from easyrl.data.tasks import ARITHMETIC, COUNTDOWN, COUNTDOWN_SMALL, score
from easyrl.data.values import answers_of
from easyrl.processes import allow_long_integers
from easyrl.rewards.functions import exact_match
from easyrl.rewards.loading import check_given
from easyrl.runtime.resolve import resolve, with_eval_data
from easyrl.types import Prompt
from examples import make_tiny
from hub_rows import GSM8K, put_in_place_of_the_hub
from runs import succeed, summary_of, write_rows

CHAT = [{"role": "user", "content": "What is 1+1?"}]
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(20)]
TWO = [("1+1=", {"answer": "2"}), ("2+2=", {"answer": "4"})]


def opened(dataset, *words):
    name = dataset if isinstance(dataset, list) else str(dataset)
    return open_prompts(resolve(load_config(None, {"data.dataset": name}, words)).data)


def error_of(dataset, *words):
    with pytest.raises(ConfigError) as caught:
        opened(dataset, *words)
    return str(caught.value)


def jsonl(folder, *lines, name="data.jsonl"):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / name).write_text("\n".join(texts), encoding="utf-8")
    return folder / name


def contents(stream, start, stop):
    return [stream.prompt(index).content for index in range(start, stop)]


def rows_of(path):
    """The prompts and columns of an epoch, in the data's own order."""
    stream = opened(path, "data.shuffle=false")
    prompts = [stream.prompt(i) for i in range(stream.epoch_length or 0)]
    return [(prompt.content, prompt.columns) for prompt in prompts]


def test_every_epoch_is_the_whole_data_set_in_an_order_of_its_own(tmp_path):
    file = jsonl(tmp_path, *ROWS)
    stream = opened(file)
    epochs = [contents(stream, 20 * e, 20 * e + 20) for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert all(one != other for one, other in pairwise(epochs))
    assert [opened(file).prompt(45).content for _ in range(2)] == [epochs[2][5]] * 2
    assert contents(opened(file, "runtime.seed=1"), 0, 20) != epochs[0]
    in_order = opened(file, "data.shuffle=false")
    assert contents(in_order, 0, 40) == [row["prompt"] for row in ROWS] * 2
    assert in_order.prompt(23) == Prompt(23, "3+1=", {"answer": "4", "level": 3})


@pytest.mark.parametrize("name", ["data.parquet", "data.jsonl.gz", "splits"])
def test_the_same_rows_are_the_same_prompts_in_every_format(name, tmp_path):
    import datasets

    file, plain = tmp_path / name, opened(jsonl(tmp_path, *ROWS))
    train, test = (datasets.Dataset.from_list(rows) for rows in (ROWS, ROWS[:3]))
    if name == "splits":
        datasets.DatasetDict(train=train, test=test).save_to_disk(str(file))
        train.select([5, 3]).save_to_disk(str(tmp_path / "chosen"))
        assert [content for content, _ in rows_of(tmp_path / "chosen")] == ["5+1=", "3+1="]
        datasets.DatasetDict(test=test).save_to_disk(str(tmp_path / "only"))
        assert "only/train" in error_of(tmp_path / "only")
        assert opened(file / "test").epoch_length == 3
    elif name == "data.parquet":
        train.to_parquet(file)
    else:
        file.write_bytes(gzip.compress((tmp_path / "data.jsonl").read_bytes()))
    stream = opened(file)
    assert stream.epoch_length == 20 and stream.held_out() == []
    assert [stream.prompt(i) for i in range(40)] == [plain.prompt(i) for i in range(40)]
    assert [*stream.examples().values()] == [*plain.examples().values()]
    assert stream.fingerprint() == plain.fingerprint()


FORMS = [
    ("jsonl", '\ufeff{"prompt": "1+1=", "answer": "2"}\n\n \n{"prompt": "2+2=", "answer": "4"}'),
    ("csv", ",prompt,answer\n0,1+1=,2\n1,2+2=,4\n"),  # DataFrame.to_csv
    ("csv", "prompt,answer,,\n1+1=,2,,\n,,,\n2+2=,4,,\n"),
    ("csv", "\ufeffprompt,answer\r\n1+1=,2\r\n\r\n\ufeffprompt,answer\r\n2+2=,4"),  # joined files
]


@pytest.mark.parametrize(("kind", "text"), FORMS, ids=range(len(FORMS)))
def test_files_of_pandas_and_spreadsheets(kind, text, tmp_path):
    (tmp_path / f"data.{kind}").write_text(text, "utf-8", newline="")
    assert rows_of(tmp_path / f"data.{kind}") == TWO


def make_frame(values):
    import pandas

    return pandas.DataFrame(values)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_missing_values_are_none_in_every_form_of_data(kind, tmp_path):
    values = {"prompt": ["a", "b"], "answer": ["x", None], "level": [1.0, None], "hint": ["y", ""]}
    frame, file = make_frame(values), tmp_path / f"data.{kind}"
    if kind == "jsonl":
        jsonl(tmp_path, *frame.to_dict("records"))
    elif kind == "csv":
        frame.to_csv(file, index=False)
    else:
        frame.to_parquet(file)
    hint = None if kind == "csv" else ""  # elsewhere an empty text may be meant
    (_, first), (_, second) = rows_of(file)
    assert first["answer"] == "x" and second == {"answer": None, "level": None, "hint": hint}
    assert "'answer'" in error_of(file, "data.prompt_template={prompt}{answer}")


UTC = datetime.UTC
MORNING = datetime.datetime(2024, 1, 2, 10, 30)
MIDNIGHT = datetime.datetime(2024, 1, 2)
NOON_IN_INDIA = datetime.datetime(2024, 1, 2, 12, tzinfo=ZoneInfo("Asia/Kolkata"))
OF_PARQUET = [
    # (the type of a column, its values, the texts in rows)
    ("date32", [MIDNIGHT.date(), None], ["2024-01-02", None]),
    ("date64", [MIDNIGHT.date()], ["2024-01-02"]),
    ("timestamp[s]", [MIDNIGHT], ["2024-01-02"]),  # a column of days
    ("timestamp[us]", [MIDNIGHT, None], ["2024-01-02", None]),
    ("timestamp[us]", [MIDNIGHT, MORNING], ["2024-01-02T00:00:00", "2024-01-02T10:30:00"]),
    ("timestamp[ns]", [MORNING], ["2024-01-02T10:30:00"]),
    ("timestamp[us, tz=UTC]", [MIDNIGHT.replace(tzinfo=UTC)], ["2024-01-02"]),
    ("timestamp[us, tz=Asia/Kolkata]", [NOON_IN_INDIA], ["2024-01-02T12:00:00+05:30"]),
    ("time64[us]", [MORNING.time()], ["10:30:00"]),
    ("duration[us]", [datetime.timedelta(hours=1, seconds=2)], ["1:00:02"]),
    ("list<date32>", [[MIDNIGHT.date(), None], []], [["2024-01-02", None], []]),
    ("struct<date32>", [{"x": MIDNIGHT.date()}], [{"x": "2024-01-02"}]),
    ("list<timestamp[s]>", [[MIDNIGHT, MORNING]], [["2024-01-02T00:00:00", "2024-01-02T10:30:00"]]),
    ("struct<timestamp[s]>", [{"x": MIDNIGHT}], [{"x": "2024-01-02"}]),
    ("decimal", [Decimal("1.50")], [Decimal("1.50")]),
    ("string", ["2024-01-02 00:00"], ["2024-01-02 00:00"]),
    ("dictionary", ["b", "a"], ["b", "a"]),
]


def arrow_type(name):
    kind, _, inner = name.partition("<")
    unit, _, zone = name.removesuffix("]").partition("[")[2].partition(", tz=")
    if kind == "list":
        return pyarrow.list_(arrow_type(inner[:-1]))
    if kind == "struct":
        return pyarrow.struct({"x": arrow_type(inner[:-1])})
    if kind.startswith("timestamp"):
        return pyarrow.timestamp(unit, zone or None)
    if kind == "decimal":
        return pyarrow.decimal128(3, 2)
    if kind == "dictionary":
        return pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    return pyarrow.type_for_alias(kind)


@pytest.mark.parametrize(("kind", "values", "texts"), OF_PARQUET)
def test_dates_and_times_of_a_parquet_file_are_text(kind, values, texts, tmp_path):
    columns = {
        "prompt": [f"{number}" for number in range(len(values))],
        "answer": pyarrow.array(values, arrow_type(kind)),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "data.parquet")
    rows = rows_of(tmp_path / "data.parquet")
    assert [columns["answer"] for _, columns in rows] == texts
    if None not in values:
        stream = opened(tmp_path / "data.parquet", "data.prompt_template=On {answer}:")
        assert {*stream.examples().values()} == {f"On {text}:" for text in texts}


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_numbers_of_any_width_are_those_that_were_written(kind, tmp_path):
    answers = np.array([0.1, -2.5, np.nan, 7], dtype=kind)
    make_frame({"prompt": ["q"] * 4, "answer": answers}).to_parquet(tmp_path / "data.parquet")
    found = [columns["answer"] for _, columns in rows_of(tmp_path / "data.parquet")]
    assert found == [0.1, -2.5, None, 7.0]
    assert exact_match(["0.1"], [found[0]]) == [1] and exact_match(["7"], [found[3]]) == [1]


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas", "arrow"])
def test_the_format_of_a_saved_data_set_does_not_matter(kind, tmp_path):
    import datasets

    days = [datetime.date(2024, 1, day) for day in (1, 2)]
    rows = [{"prompt": "q", "answer": answer, "number": 7} for answer in days]
    datasets.Dataset.from_list(rows).with_format(kind).save_to_disk(str(tmp_path / "saved"))
    expected = [("q", {"answer": f"2024-01-0{day}", "number": 7}) for day in (1, 2)]
    assert rows_of(tmp_path / "saved") == expected


def given_in_python(tmp_path, rows):
    """The columns of rows that a Python program gives."""
    values = {"data.dataset": rows}
    with Inputs(values).stored(load_config(None, values), tmp_path / "run") as config:
        stream = open_prompts(resolve(config).data)
        return [stream.prompt(index).columns for index in range(stream.epoch_length)]


@pytest.mark.parametrize("kind", ["rows", "records", "numpy", "dataset", "torch"])
def test_dates_that_a_python_program_gives_are_text(kind, tmp_path):
    import datasets

    days = [datetime.datetime(2024, 1, day) for day in (1, 2)]
    times = [datetime.datetime(2024, 1, 1, 10, 30), datetime.datetime(2024, 1, 2)]
    rows = [{"prompt": "q", "day": days[n], "time": [times[n]]} for n in range(2)]
    if kind == "records":
        rows = make_frame({name: [row[name] for row in rows] for name in rows[0]})
        rows = rows.to_dict("records")
    elif kind == "numpy":
        for row in rows:
            row["day"] = np.datetime64(row["day"], "ns")
            row["time"] = (np.array(row["time"], dtype="datetime64[ns]")[0],)
    elif kind != "rows":
        others = [{"prompt": "another", "day": times[0], "time": [times[0]]}]
        rows = datasets.Dataset.from_list([*rows, *others]).select(range(2))
        rows = rows.with_format("torch", columns=["prompt"]) if kind == "torch" else rows
    first, second = given_in_python(tmp_path, rows)
    assert first == {"day": "2024-01-01", "time": ["2024-01-01T10:30:00"]}
    assert second == {"day": "2024-01-02", "time": ["2024-01-02T00:00:00"]}


def test_texts_that_the_library_has_lost_are_named_in_python_too(json_repository, tmp_path):
    import datasets

    json_repository({"prompt": "q", "answer": "007"}, {"prompt": "q", "answer": 7})
    with pytest.raises(ConfigError, match="'answer'"):
        given_in_python(tmp_path, datasets.load_dataset("json", split="train"))


@pytest.fixture
def json_repository(monkeypatch, tmp_path):
    """A function that makes a repository of the hub out of rows, as JSON lines."""
    import datasets

    load = datasets.load_dataset

    def make(*rows):
        file = jsonl(tmp_path, *rows)
        options = {"data_files": str(file), "cache_dir": str(tmp_path / "cache")}
        monkeypatch.setattr(
            datasets, "load_dataset", lambda *_, split: load("json", split=split, **options)
        )
        monkeypatch.setattr(own_datasets, "reach_hub", lambda: True)
        return file

    return make


DATES = [
    (["2024-01-02", "2024-01-03"], ["2024-01-02", "2024-01-03"]),
    (["2024-01-02", None], ["2024-01-02", None]),
    (["2024-01-02T00:00:00", "2024-01-03T10:00:00"],) * 2,
    (["2024-01-02", "unknown"],) * 2,
    ([["2024-01-02"], ["2024-01-03", "2024-01-04"]],) * 2,
    ([{"day": "2024-01-02"}, {"day": "2024-01-03"}],) * 2,
    (["10:30", "11:00"],) * 2,
    (["2024", "2025"],) * 2,
]


@pytest.mark.parametrize(("answers", "texts"), DATES)
def test_dates_in_json_lines_of_the_hub_keep_their_text(answers, texts, json_repository, tmp_path):
    import datasets

    file = json_repository(*({"prompt": "q", "answer": answer} for answer in answers))
    saved = tmp_path / "saved"
    datasets.load_dataset("json", split="train").save_to_disk(str(saved))
    found = [[columns["answer"] for _, columns in rows_of(x)] for x in ("a/b", saved, file)]
    assert found == [texts, texts, answers]
    if isinstance(texts[0], str):
        assert exact_match([texts[0]], [found[0][0]]) == [1]
    assert opened("a/b").prompt(0).references() == opened(saved).prompt(0).references() != {}


TIMES = [
    (["2024-01-02 10:30:00", "2024-01-03 11:00:00"], True),
    (["2024-01-02T10:30:00Z", "2024-01-03T11:00:00Z"], True),
    ([["2024-01-02 10:30", "2024-01-03 11:00"], []], True),
    (["2024-01-02", "2024-01-03"], False),
    (["10:30", "11:00"], False),
]


@pytest.mark.parametrize(("answers", "is_told"), TIMES, ids=str)
@pytest.mark.parametrize("is_saved", [False, True])
def test_answers_that_the_library_may_have_written_anew_are_named(
    answers, is_told, is_saved, json_repository, tmp_path
):
    import datasets

    file = json_repository(*({"prompt": "q", "solution": answer} for answer in answers))
    if is_saved:
        datasets.load_dataset("json", split="train").save_to_disk(str(tmp_path / "saved"))
    name = tmp_path / "saved" if is_saved else "a/b"
    found = opened(name, "data.columns={answer: solution}").warnings()
    assert len(found) == is_told and all(f"'{name}'" in text for text in found)
    assert not opened(name).warnings()  # no answer
    assert not opened(file, "data.columns={answer: solution}").warnings()


MIXED = [
    ["007", 7],
    [1, "null"],
    ["yes", True],
    [{"x": "1"}, {"x": 1}],
    ["1", ["1", "2"]],
    [["1"], ["2", 3]],
]


@pytest.mark.parametrize("answers", MIXED, ids=str)
def test_a_column_whose_texts_the_library_has_lost_is_named(answers, json_repository, tmp_path):
    rows = [{"prompt": "q", "answer": answer} for answer in answers]
    file = json_repository(*rows)
    for name in ("a/b", "a/b::train"):
        assert "'answer'" in error_of(name) and name in error_of(name)
    assert rows_of(file) == [("q", {"answer": answer}) for answer in answers]  # our own reader


def test_objects_of_several_forms_are_no_mixed_column(json_repository):
    json_repository(*({"prompt": "q", "tools": [{name: "007"}]} for name in "ab"))
    assert [row["tools"] for _, row in rows_of("a/b")] == [[{"a": "007"}], [{"b": "007"}]]


def test_values_of_a_csv_file_are_the_texts_they_are(tmp_path):
    long = "x" * 140_000
    text = f'prompt,answer\r\n"1,000+1=",007\r\n"two\nlines",NA\r\na,{long}\r\n'
    (tmp_path / "data.csv").write_text(text, newline="")
    values = {"1,000+1=": "007", "two\nlines": "NA", "a": long}
    assert rows_of(tmp_path / "data.csv") == [(k, {"answer": v}) for k, v in values.items()]


class Point:
    def __init__(self, *values):
        self.values = values


def image(kind, color, size=(4, 4), palette=()):
    from PIL import Image

    made = Image.new(kind, size, color)
    if palette:
        made.putpalette(palette)
    return made


VALUES = [
    lambda k: image("RGB", (k, 0, 0)),
    lambda k: {"nested": [image("P", k), b"bytes"]},
    lambda k: np.arange(5000) == 2500 + k,
    lambda k: torch.tensor([1.0, float(k)], dtype=torch.bfloat16),
    lambda k: Point(1, [Point(k)]),
    lambda k: [float("nan"), None, datetime.datetime(2020, 1, k)],
    lambda k: bytes([k, 255]),
    lambda k: [Decimal(k) / 3, datetime.timedelta(seconds=k)],
    lambda k: image("L", 7, (k, 4 // k)),  # the same bytes, another size
    lambda k: np.array([Point(k), None], dtype=object),
    lambda k: image("P", 0, palette=[k, 0, 0]),
]


@pytest.mark.parametrize("make", VALUES, ids=range(len(VALUES)))
def test_identity_is_of_the_content_of_values(make):
    values = [make(k) for k in (1, 1, 2)]  # all have addresses of their own
    first, second, other = (problem_ids([Prompt(0, "p", {"x": v})])[0] for v in values)
    assert first == second != other


def write_two(folder, *names):
    """Write the two rows: one in each file, or both in the only one."""
    folder.mkdir(parents=True, exist_ok=True)
    frame = make_frame({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"]})
    for number, name in enumerate(names):
        part = frame if len(names) == 1 else frame[number % 2 :][:1]
        if ".parquet" in name.lower():
            part.to_parquet(folder / name)
        elif ".csv" in name:
            part.to_csv(folder / name)
        else:
            part.to_json(folder / name, orient="records", lines=True)


SHARDS = [f"train-0000{number}-of-00002.parquet" for number in (0, 1)]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        # Characters of patterns are part of a name.
        *((name, [name]) for name in ("train[1].parquet", "[a]?.csv", "*.jsonl")),
        # Folders of files.
        ("shards", SHARDS),
        ("[all]*", [*SHARDS, "test-00000-of-00001.parquet"]),
        ("jsonl", ["part-0.jsonl", "part-1.jsonl", ".part-1.jsonl", "_README.jsonl"]),
        ("gz", ["latest-0.csv.gz", "latest-1.csv.gz"]),
        ("test", ["test.jsonl"]),
    ],
)
def test_a_path_names_its_file_or_folder(path, names, tmp_path):
    folder = (tmp_path / path).parent if Path(path).name in names else tmp_path / path
    write_two(folder, *names)
    write_two(tmp_path, "all others.parquet")
    (folder / "_SUCCESS").touch()
    assert rows_of(tmp_path / path) == TWO


@pytest.fixture
def default_digits(monkeypatch):
    """Python's own limit of the digits of integers, whatever has run in this process before."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(4300)
    yield
    sys.set_int_max_str_digits(before)


def test_rows_may_have_integers_of_more_digits_than_python_reads(tmp_path, default_digits):
    long = 10**5000 + 1
    rows = [
        {"prompt": "1+1=", "answer": long, "tests": {"inputs": [[long]], "outputs": [-long]}},
        {"prompt": "2+2=", "answer": 4, "tests": {"inputs": [[1]], "outputs": [10**49_999]}},
    ]
    allow_long_integers()
    stream = opened(jsonl(tmp_path, *rows), "data.shuffle=false", "data.prompt_template={answer}?")
    (first, second) = (stream.prompt(index) for index in range(2))
    assert first.content == f"{long}?" and first.columns["tests"] == rows[0]["tests"]
    assert first.columns["answer"] == long and second.columns["tests"] == rows[1]["tests"]
    assert answers_of(long) == [str(long)] and "answer" not in first.references()
    other = [{**rows[0], "answer": long + 1}, rows[1]]
    assert len({*problem_ids([first, second])}) == 2
    again = opened(jsonl(tmp_path, *rows, name="b.jsonl"), "data.prompt_template={answer}?")
    changed = opened(jsonl(tmp_path, *other, name="c.jsonl"), "data.prompt_template={answer}?")
    assert again.fingerprint() == stream.fingerprint() != changed.fingerprint()


@pytest.mark.parametrize("name", ["plain.jsonl", "packed.jsonl.gz"])
def test_long_integers_are_read_in_a_process_with_pythons_limit(name, tmp_path, default_digits):
    content = b'{"prompt": "1+1=", "answer": 1%s}' % (b"0" * 6000)
    data = gzip.compress(content) if name.endswith("gz") else content
    (tmp_path / name).write_bytes(data)
    assert opened(tmp_path / name).prompt(0).columns["answer"] == 10**6000


def test_an_integer_of_too_many_digits_is_named_with_its_line(tmp_path):
    file = jsonl(tmp_path, {"prompt": "1+1="}, '{"prompt": "2+2=", "answer": %s}' % ("9" * 50_001))
    assert f"{file}:2:" in error_of(file) and "50000 digits" in error_of(file)


def test_a_fingerprint_is_of_the_rows_and_of_nothing_else(tmp_path):
    fingerprint = opened(jsonl(tmp_path, *ROWS)).fingerprint()
    assert opened(jsonl(tmp_path, "", *ROWS), "runtime.seed=1").fingerprint() == fingerprint
    for rows in ([{**ROWS[0], "answer": "another"}, *ROWS[1:]], ROWS[::-1], ROWS[:-1]):
        assert opened(jsonl(tmp_path, *rows)).fingerprint() != fingerprint


@pytest.mark.parametrize(
    "name", ["none.jsonl", "train.tsv", "", "empty.parquet", "broken.jsonl.gz", "kinds", "splits"]
)
def test_missing_or_unreadable_file_is_named(name, tmp_path):
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "broken.jsonl.gz").write_bytes(b'{"prompt": "a"}')
    write_two(tmp_path / "kinds", "a.csv", "b.jsonl")
    write_two(tmp_path / "splits", "test.jsonl", "validation.jsonl")
    message = error_of(tmp_path / name)
    assert message.startswith("data.dataset") and str(tmp_path / name) in message


BROKEN = [
    ("jsonl", b'{"prompt": "a"}\n\n{"prompt": "a"', ":3: "),
    ("jsonl", b'{"prompt": "a"}\n["a"]\n', ":2: "),
    ("jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', ": expected UTF-8"),
    ("csv", b"prompt,answer\na,b\nc\n", ":3: "),
    ("csv", b"prompt,answer\na,b\nc,d,e\n", ":3: "),
    ("csv", b"prompt,answer,answer\na,b,c\n", ":1: "),
    ("jsonl", b'{"prompt": "a"}\n{"prompt": null}', ":2: column 'prompt'"),
    ("jsonl", b'{"prompt": "a"}\n{"prompt": [{"role": "user"}]}', ":2: column 'prompt'"),
]


@pytest.mark.parametrize(("kind", "content", "named"), BROKEN, ids=range(len(BROKEN)))
def test_broken_line_is_named(kind, content, named, tmp_path):
    file = tmp_path / "shards" / f"b.{kind}"
    write_two(tmp_path / "shards", f"a.{kind}")
    file.write_bytes(content)
    assert error_of(file).startswith(f"{file}{named}")
    assert error_of(tmp_path / "shards").startswith(f"{file}{named}")


def test_one_string_among_chats_is_named(tmp_path):
    file = jsonl(tmp_path, {"prompt": CHAT}, "", {"prompt": "1+1="})
    assert error_of(file).startswith(f"{file}:3: ") and "data.chat=true" in error_of(file)
    assert opened(file, "data.chat=true").epoch_length == 2
    message = error_of(jsonl(tmp_path, {"q": "a"}))
    assert message.startswith("data.prompt_column") and " q" in message


def test_hub_id_may_name_subset_and_split(monkeypatch):
    import datasets

    loaded = []

    def load(*names, split):
        loaded.append((*names, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(own_datasets, "reach_hub", lambda: True)
    for name in ("a/b", "a/b:main", "a/b::test"):
        assert opened(name).epoch_length == 20
    assert loaded == [("a/b", None, "train"), ("a/b", "main", "train"), ("a/b", None, "test")]


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture
def hub(monkeypatch):
    return put_in_place_of_the_hub(monkeypatch)


@pytest.fixture
def gsm8k_rows(tmp_path):
    return str(jsonl(tmp_path, *GSM8K, name="gsm8k.jsonl"))


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", TRAINED)
def test_every_preset_brings_prompts_and_a_reward(name):
    stream = opened(name, "data.shuffle=false")
    assert stream.held_out() and len(stream.examples()) >= len(stream.held_out())
    rewards = resolve(load_config(None, {"data.dataset": name})).rewards
    assert rewards.functions == (PRESETS[name].reward,)
    if name == "gsm8k":
        question, answer = GSM8K[0].values()
        assert stream.epoch_length == len(GSM8K)
        assert stream.prompt(0).content == [{"role": "user", "content": question + BOXED}]
        assert stream.prompt(0).columns == stream.held_out()[0].columns == {"answer": answer}
        plain = opened(name, "data.prompt_template=Q: {question}", "data.chat=false")
        assert plain.held_out()[0].content == f"Q: {question}"


@pytest.mark.parametrize(("name", "temperature"), [("gsm8k", 0.0), ("math", None), ("aime24", 0.6)])
def test_an_evaluation_opens_what_is_held_out_and_has_its_sampling(name, temperature, hub):
    config = with_eval_data(load_config(None, {"data.dataset": name}))
    assert eval_sampling(config.data).get("temperature") == temperature
    problems = [
        *problems_of(open_prompts(resolve(config).data, is_trained=False), config.data).values()
    ]
    hub.assert_called_once_with(PRESETS[name].held_out)
    assert str(problems[0].content).endswith(repr(BOXED)[1:-1] + "'}]")


@pytest.mark.usefixtures("hub")
def test_rows_of_ones_own_are_asked_and_scored_as_a_presets(gsm8k_rows):
    config = load_config(None, {"data.dataset": gsm8k_rows, "data.preset": "gsm8k"})
    run = resolve(config)
    stream, of_hub = open_prompts(run.data), opened("gsm8k")
    assert [stream.prompt(i) for i in range(8)] == [of_hub.prompt(i) for i in range(8)]
    assert stream.held_out() == [] and run.rewards.functions == ("gsm8k",)


def test_an_unknown_preset_or_one_for_other_rows_is_refused(gsm8k_rows):
    assert "gsm8k" in error_of(gsm8k_rows, "data.preset=gsm8") and "gsm8k?" in error_of("gsm8")
    assert error_of("math", "data.preset=gsm8k").startswith("data.preset")
    assert error_of(gsm8k_rows, "data.preset=math500").startswith("data.prompt_template")


LONG = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(30)]
SHORT = [{"prompt": f"{i}*1=", "level": i} for i in range(7)]


@pytest.fixture
def files(tmp_path):
    return [write_rows(tmp_path / "long.jsonl", LONG), write_rows(tmp_path / "short.jsonl", SHORT)]


def test_each_data_set_has_its_part_and_its_own_epochs(files):
    stream = opened(files, "data.weights=[3, 1]")
    prompts = [stream.prompt(index) for index in range(2 * BLOCK)]
    assert [prompt.index for prompt in prompts] == list(range(2 * BLOCK))
    for file, part in zip(files, (3, 1), strict=True):
        own = [p.content for p in prompts if p.columns["data_source"] == file]
        assert len(own) == 2 * BLOCK * part // 4
        assert own == contents(opened(file), 0, len(own))
    assert all(p.columns.keys() == {"data_source", "answer", "level"} for p in prompts)
    assert {p.columns["answer"] is None for p in prompts} == {True, False}
    again = opened(files, "data.weights=[3, 1]")
    assert [again.prompt(index) for index in reversed(range(300))] == prompts[299::-1]
    assert again.prompt(10**9).index == 10**9
    assert stream.fingerprint() == again.fingerprint()
    Path(files[1]).write_text(json.dumps(SHORT[0]))
    assert opened(files).fingerprint() != stream.fingerprint()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_data_sets_of_a_mixture_may_have_other_columns(files, kind, tmp_path):
    other = tmp_path / f"other.{kind}"
    values = {"problem": ["1-1=", "2-1="], "solution": ["0", "1"], "note": ["x", "y"]}
    if kind == "parquet":
        make_frame(values).to_parquet(other)
    else:
        jsonl(tmp_path, *make_frame(values).to_dict("records"), name=other.name)
    both, own = [files[0], str(other)], "prompt: problem, answer: solution"
    assert error_of(both).startswith("data.prompt_column") and "data.columns=[{}" in error_of(both)
    words = f"data.columns=[{{}}, {{{own}}}]", "data.prompt_template=<{prompt}>"
    stream = opened(both, *words)
    prompts = [stream.prompt(index) for index in range(4)]
    found = [p for p in prompts if p.columns["data_source"] == str(other)]
    assert {(p.content, p.columns["answer"]) for p in found} == {("<1-1=>", "0"), ("<2-1=>", "1")}
    assert {"<1-1=>", "<0+1=>"} < {*stream.examples().values()}
    wrong = {"{prompt: x}": "data.columns.prompt: ", "{prompts: note}": "data.columns: "}
    for columns, start in wrong.items():
        assert error_of(both, f"data.columns=[{{}}, {columns}]").startswith(start)
    assert error_of(both, "data.columns=[{}]").startswith("data.columns: ")
    # An evaluation of one of them has its names; of other rows, their own.
    renamed = {"prompt": "problem", "answer": "solution"}
    for name, expected in ((str(other), renamed), (files[1], {})):
        evaluated = load_config(None, {"data.dataset": both, "eval.dataset": name}, words)
        assert with_eval_data(evaluated).data.columns == [expected]


@settings(max_examples=50)
@given(st.lists(st.floats(min_value=0.01, max_value=1), min_size=2, max_size=6))
def test_no_data_set_is_ever_far_from_its_part(weights):
    form = RowForm(load_config().data, None)
    rows, names = [{"prompt": str(row)} for row in range(BLOCK)], "012345"[: len(weights)]
    mixture = PromptStream({name: DataSet(name, rows, form) for name in names}, weights)
    counts = Counter()
    for index in range(BLOCK):
        prompt = mixture.prompt(index)
        name = prompt.columns["data_source"]
        assert prompt.content == str(counts[name])  # its next one, none left out
        counts[name] += 1
        for each, weight in zip(names, weights, strict=True):
            expected = weight / sum(weights) * (index + 1)
            assert abs(counts[each] - expected) <= 2 + BLOCK * 1e-3


@pytest.mark.usefixtures("hub")
def test_presets_mix_where_their_rewards_agree():
    run = resolve(load_config(None, {"data.dataset": ["math", "gsm8k"]}))
    with pytest.raises(ConfigError, match=r"^reward\.functions"):
        check_given(run.rewards)
    sources = [prompt.columns["data_source"] for prompt in open_prompts(run.data).held_out()]
    assert sources == ["math", "gsm8k"] * 2 + ["math"] * 4
    both = {"data.dataset": ["countdown", "countdown-small"]}
    assert resolve(load_config(None, both)).rewards.functions == ("countdown",)


@pytest.mark.parametrize(
    ("task", "index", "row"),
    [
        (ARITHMETIC, 3, {"prompt": "73+40+16+92=", "answer": "221"}),
        (COUNTDOWN, 3, {"prompt": "36 2 50 27 = 38\n", "nums": [36, 2, 50, 27], "target": 38}),
        (COUNTDOWN_SMALL, 2, {"prompt": "7 9 1 = 17\n", "nums": [7, 9, 1], "target": 17}),
    ],
)
def test_problems_are_the_same_on_every_machine_and_never_held_out_ones(task, index, row):
    def key(row):  # without the order of the numbers
        return (*sorted(row["nums"]), row["target"]) if "nums" in row else row["prompt"]

    assert task.train_row(0, index) == row
    assert sum(task.problem(7, i) == task.problem(8, i) for i in range(200)) < 20
    held_out = task.held_out_rows()
    assert len({row["prompt"] for row in held_out}) == len(held_out) == task.num_held_out
    keys = {key(row) for row in held_out}
    for seed in (0, 1):
        assert keys.isdisjoint(key(task.train_row(seed, index)) for index in range(1000))


def test_arithmetic_rewards_exactly_the_answer():
    working = "17+50=67+8=75\n75+30=105+4=109\n#109"
    assert make_tiny.solution((17, 58, 34), random.Random()) == working
    right = [working, "#75\n#109"]  # only the last answer counts
    wrong = ["#109\n#75", "#0109", "#109 or so", "109"]
    assert score([], right + wrong, [], answer=["109"] * 6) == [1.0] * 2 + [0.0] * 4


@pytest.mark.long
def test_countdown_is_learned_on_the_cpu_within_five_minutes(tmp_path):
    config = Path(__file__).parent.parent / "configs" / "countdown_small.yaml"
    words = ("--config", str(config), "--output", str(tmp_path / "run"))
    succeed(*words, timeout=900)
    summary = summary_of(tmp_path / "run")
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.2
