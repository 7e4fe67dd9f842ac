"""Data sets: every source gives the same kind of prompts, and every mistake is named."""

import gzip
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from easyrl.config import ConfigError, load_config
from easyrl.data import sources, streams
from easyrl.data.chat import render_prompt
from easyrl.data.datasets import open_prompts
from easyrl.data.presets import HubRows
from easyrl.data.streams import PromptStream

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


# The stream.


def test_task_is_an_endless_stream_with_held_out_prompts() -> None:
    stream = opened("arithmetic")
    assert stream.epoch_length is None
    assert stream.prompt(10**9).index == 10**9
    assert stream.prompt(5) == opened("arithmetic").prompt(5)
    assert stream.prompt(5) != opened("arithmetic", "runtime.seed=1").prompt(5)
    held_out = {str(prompt.content) for prompt in stream.held_out()}
    assert len(held_out) >= 500
    assert not held_out & {str(stream.prompt(index).content) for index in range(2000)}


def test_jsonl_rows_in_file_order_without_shuffle(tmp_path: Path) -> None:
    stream = opened(jsonl(tmp_path, *ROWS), "data.shuffle=false")
    assert stream.epoch_length == 20
    assert stream.held_out() == []
    prompts = [stream.prompt(index) for index in range(25)]
    assert [prompt.index for prompt in prompts] == list(range(25))
    assert [prompt.content for prompt in prompts[:20]] == [row["prompt"] for row in ROWS]
    assert prompts[23].columns == {"answer": "4", "level": 3}
    assert "prompt" not in prompts[0].columns


def test_every_epoch_is_the_whole_data_set_in_an_order_of_its_own(tmp_path: Path) -> None:
    file = jsonl(tmp_path, *ROWS)
    stream = opened(file)
    epochs = [[stream.prompt(20 * e + i).content for i in range(20)] for e in range(3)]
    assert all(sorted(map(str, epoch)) == sorted(map(str, epochs[0])) for epoch in epochs)
    assert all(one != other for one, other in pairwise(epochs))
    assert [opened(file).prompt(45).content for _ in range(2)] == [epochs[2][5]] * 2
    seeded = opened(file, "runtime.seed=1")
    assert [seeded.prompt(i).content for i in range(20)] != epochs[0]


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    file = jsonl(tmp_path, "\ufeff" + json.dumps(ROWS[0]), "", "   ", ROWS[1], "")
    assert opened(file).epoch_length == 2


def test_column_that_only_some_lines_have_is_none_elsewhere(tmp_path: Path) -> None:
    file = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b", "answer": 1})
    stream = opened(file, "data.shuffle=false")
    assert [stream.prompt(index).columns for index in range(2)] == [{"answer": None}, {"answer": 1}]


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    from_parquet, from_jsonl = opened(parquet(tmp_path, **columns)), opened(jsonl(tmp_path, *ROWS))
    assert from_parquet.epoch_length == 20
    assert from_parquet.held_out() == []
    assert [from_parquet.prompt(i) for i in range(40)] == [from_jsonl.prompt(i) for i in range(40)]


def test_a_packed_file_gives_what_it_gave_unpacked(tmp_path: Path) -> None:
    plain = jsonl(tmp_path, *ROWS)
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert [opened(packed).prompt(i) for i in range(40)] == [
        opened(plain).prompt(i) for i in range(40)
    ]
    packed.write_bytes(gzip.compress(plain.read_bytes())[:-20])
    assert str(packed) in error_of(packed)
    packed.write_bytes(plain.read_bytes())
    assert str(packed) in error_of(packed)


def test_values_of_a_csv_file_are_the_texts_they_are(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    file.write_text('\ufeffprompt,answer\r\n"1,000+1=",007\r\n\r\n"two\nlines",NA\r\n', "utf-8")
    stream = opened(file, "data.shuffle=false")
    assert [(stream.prompt(i).content, stream.prompt(i).columns) for i in range(2)] == [
        ("1,000+1=", {"answer": "007"}),
        ("two\nlines", {"answer": "NA"}),
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("prompt,answer\na,b\nc\n", 3),
        ("prompt,answer\na,b\nc,d,e\n", 3),
        ('prompt,answer\na,b\n"c"d,e\n', 3),
        ("prompt,prompt\na,b\n", 1),
        ("prompt,answer\na,b\n,d\n", 3),
    ],
)
def test_broken_line_of_a_csv_file_is_named(text: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    file.write_text(text)
    assert error_of(file).startswith(f"{file}:{line}: ")


def saved_to_disk(folder: Path) -> Path:
    import datasets

    parts = {"train": ROWS, "test": ROWS[:3]}
    tables = {split: datasets.Dataset.from_list(rows) for split, rows in parts.items()}
    datasets.DatasetDict(tables).save_to_disk(str(folder / "splits"))
    # Saved after a choice of rows: what is read is what was chosen.
    tables["train"].select([5, 3]).save_to_disk(str(folder / "one"))
    return folder


def test_folders_of_save_to_disk_are_data_sets(tmp_path: Path) -> None:
    folder = saved_to_disk(tmp_path)
    from_jsonl = opened(jsonl(tmp_path, *ROWS))
    assert [opened(folder / "splits").prompt(i) for i in range(40)] == [
        from_jsonl.prompt(i) for i in range(40)
    ]
    assert opened(folder / "splits").fingerprint() == from_jsonl.fingerprint()
    assert opened(folder / "splits" / "test").epoch_length == 3
    one = opened(folder / "one", "data.shuffle=false")
    assert [one.prompt(i).content for i in range(2)] == ["5+1=", "3+1="]
    assert one.examples() == ["5+1=", "3+1="]
    (folder / "one" / "state.json").write_text("{}")
    assert str(folder / "one") in error_of(folder / "one")
    (folder / "splits" / "train").rename(folder / "elsewhere")
    assert str(folder / "splits" / "test") in error_of(folder / "splits")


def test_a_fingerprint_is_of_the_rows_and_of_nothing_else(tmp_path: Path) -> None:
    fingerprint = opened(jsonl(tmp_path, *ROWS)).fingerprint()
    columns = {name: [row[name] for row in ROWS] for name in reversed(ROWS[0])}
    assert opened(parquet(tmp_path, **columns)).fingerprint() == fingerprint
    assert opened(jsonl(tmp_path, "", *ROWS), "runtime.seed=1").fingerprint() == fingerprint
    assert opened("arithmetic").fingerprint() is None
    other_answer = {**ROWS[7], "answer": "another"}
    changed = {
        "an answer": [*ROWS[:7], other_answer, *ROWS[8:]],
        "the order": [*ROWS[1:], ROWS[0]],
        "the number": ROWS[:-1],
        "a column": [{**row, "more": None} for row in ROWS],
    }
    prints = {opened(jsonl(tmp_path, *rows)).fingerprint() for rows in changed.values()}
    assert len({fingerprint, *prints}) == 1 + len(changed)
    assert opened(jsonl(tmp_path, *ROWS)).without([3]).fingerprint() != fingerprint


def test_of_many_rows_a_fingerprint_looks_at_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "NUM_DIGESTED", 5)
    monkeypatch.setattr(streams, "ROWS_AT_A_TIME", 2)
    fingerprint = opened(jsonl(tmp_path, *ROWS)).fingerprint()
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    assert opened(parquet(tmp_path, **columns)).fingerprint() == fingerprint
    for place, is_seen in ((4, True), (5, False), (16, True)):
        rows = [*ROWS[:place], {**ROWS[place], "answer": "another"}, *ROWS[place + 1 :]]
        assert (opened(jsonl(tmp_path, *rows)).fingerprint() != fingerprint) == is_seen


def test_chat_messages_are_prompts_too(tmp_path: Path) -> None:
    assert (
        opened(jsonl(tmp_path, {"question": CHAT}), "data.prompt_column=question").prompt(0).content
        == CHAT
    )
    assert opened(parquet(tmp_path, prompt=[CHAT])).prompt(0).content == CHAT


# Mistakes.


@pytest.mark.parametrize(
    "name", ["none.jsonl", "none.jsonl.gz", "none.csv", "none.parquet", "train.tsv", ""]
)
def test_missing_or_unknown_file_is_named(name: str, tmp_path: Path) -> None:
    message = error_of(tmp_path / name)
    assert message.startswith("data.dataset") and str(tmp_path / name) in message


def test_missing_prompt_column_lists_those_there_are(tmp_path: Path) -> None:
    for file in (jsonl(tmp_path, {"q": "a"}), parquet(tmp_path, q=["a"])):
        assert error_of(file).startswith("data.prompt_column") and " q" in error_of(file)


def test_empty_data_set_is_refused(tmp_path: Path) -> None:
    import pyarrow

    empty: Any = pyarrow.array([], pyarrow.string())
    for file in (jsonl(tmp_path, "", "  "), parquet(tmp_path, prompt=empty)):
        assert error_of(file).startswith("data.dataset")


@pytest.mark.parametrize(
    "line", ['{"prompt": "a"', "prompt: a", '["a"]', '"a"', '{"prompt": ' + "1" * 5000 + "}"]
)
def test_broken_line_is_named(line: str, tmp_path: Path) -> None:
    file = jsonl(tmp_path, {"prompt": "a"}, "", line)
    assert error_of(file).startswith(f"{file}:3: ")


def test_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert error_of(file).startswith(f"{file}:2: ")


@pytest.mark.parametrize(
    "content", [None, 3, "", [], ["a"], {"role": "user"}, [{"role": "user"}], [{"content": "a"}]]
)
def test_prompt_that_is_neither_string_nor_messages_is_named(content: Any, tmp_path: Path) -> None:
    message = error_of(jsonl(tmp_path, {"prompt": "a"}, {"prompt": content}))
    assert message.startswith(f"{tmp_path / 'data.jsonl'}:2: column 'prompt'")


def test_column_named_like_an_argument_is_refused(tmp_path: Path) -> None:
    message = error_of(jsonl(tmp_path, {"prompt": "a", "completions": "b"}))
    assert "column 'completions'" in message
    stream = opened(jsonl(tmp_path, {"prompts": "a"}), "data.prompt_column=prompts")
    assert stream.prompt(0).content == "a"


def test_one_string_among_chats_is_named(tmp_path: Path) -> None:
    message = error_of(jsonl(tmp_path, {"prompt": CHAT}, "", {"prompt": "1+1="}))
    file = tmp_path / "data.jsonl"
    assert message.startswith(f"{file}:3: ") and "data.chat=true" in message
    assert opened(file, "data.chat=true").epoch_length == 2
    parts = {"prompt": "1+1="}, {"prompt": CHAT}
    assert error_of(jsonl(tmp_path, *parts)).startswith(f"{file}:2: ")


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("a/b", HubRows("a/b")),
        ("a/b:main", HubRows("a/b", "main")),
        ("a/b:main:test", HubRows("a/b", "main", "test")),
        ("a/b::test", HubRows("a/b", None, "test")),
    ],
)
def test_hub_id_may_name_subset_and_split(
    name: str, rows: HubRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_rows: list[HubRows] = []
    monkeypatch.setattr(sources, "open_hub", opened_rows.append)
    sources.open_source(name)
    assert opened_rows == [rows]


@pytest.mark.alone
def test_unreachable_hub_ends_soon_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    import datasets  # noqa: F401  its import is not what is timed

    began = time.monotonic()
    message = error_of("easyrl-no-such-owner/no-such-data")
    assert time.monotonic() - began < 5
    assert "cannot be reached" in message
    assert "HF_ENDPOINT" in message


# Tokens.


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = {character: i for i, character in enumerate("<>0123456789+=?")}
    backend = Tokenizer(models.WordLevel(characters, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(
        single="< $A", special_tokens=[("<", characters["<"])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")


def test_string_is_tokenised_as_the_tokenizer_does_it(tokenizer: Any) -> None:
    assert render_prompt("1+2=", tokenizer) == [0, 3, 12, 4, 13]  # its own "<" in front


def test_messages_go_through_the_chat_template(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    try:
        ids = render_prompt([{"role": "user", "content": "1+2="}], tokenizer)
    finally:
        tokenizer.chat_template = None
    assert ids == [3, 12, 4, 13, 1]
    assert all(type(token) is int for token in ids)


def test_messages_without_a_chat_template_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        render_prompt(CHAT, tokenizer)
