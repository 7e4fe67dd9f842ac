"""Several data sets as one stream: exact parts, own epochs, and the same prompt for an index."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.config import ConfigError, load_config
from easyrl.data.datasets import open_prompts
from easyrl.data.streams import BLOCK, DataSet, PromptStream, RowForm

LONG = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(30)]
SHORT = [{"prompt": f"{i}*1=", "level": i} for i in range(7)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, rows in (("long", LONG), ("short", SHORT)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("long", "short")}


def opened(files: dict[str, str], *words: str) -> PromptStream:
    return open_prompts(load_config(None, {"data.dataset": list(files.values())}, words))


def test_each_data_set_has_its_part_and_its_own_epochs(files: dict[str, str]) -> None:
    stream = opened(files, "data.weights=[3, 1]")
    prompts = [stream.prompt(index) for index in range(2 * BLOCK)]
    assert [prompt.index for prompt in prompts] == list(range(2 * BLOCK))
    for name, part in (("long", 3), ("short", 1)):
        own = [p.content for p in prompts if p.columns["data_source"] == files[name]]
        assert len(own) == 2 * BLOCK * part // 4
        alone = open_prompts(load_config(None, {"data.dataset": files[name]}))
        assert own == [alone.prompt(index).content for index in range(len(own))]


def test_columns_are_those_of_all_data_sets(files: dict[str, str]) -> None:
    stream = opened(files)
    kinds = {frozenset(stream.prompt(index).columns.items()) for index in range(BLOCK)}
    assert all({name for name, _ in kind} == {"data_source", "answer", "level"} for kind in kinds)
    assert {dict(kind)["answer"] is None for kind in kinds} == {True, False}
    assert stream.epoch_length == 37


def test_a_mixture_is_the_same_in_any_order_of_access(files: dict[str, str]) -> None:
    stream, again = opened(files), opened(files)
    backwards = [again.prompt(index) for index in reversed(range(300))]
    assert [stream.prompt(index) for index in range(300)] == backwards[::-1]
    assert stream.prompt(10**9).index == 10**9
    assert stream.fingerprint() == again.fingerprint()
    Path(files["short"]).write_text(json.dumps(SHORT[0]))
    assert opened(files).fingerprint() != stream.fingerprint()


def test_a_data_set_that_names_its_own_sources_keeps_them(
    tmp_path: Path, files: dict[str, str]
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "a", "data_source": "theirs"}\n{"prompt": "b"}\n')
    stream = opened({"own": str(own), **files})
    sources = {p.content: p.columns["data_source"] for p in map(stream.prompt, range(20))}
    assert sources["a"] == "theirs" and sources["b"] == str(own)


@given(st.lists(st.floats(min_value=0.01, max_value=1), min_size=2, max_size=6))
@settings(deadline=None, max_examples=50)
def test_no_data_set_is_ever_far_from_its_part(weights: list[float]) -> None:
    form = RowForm(load_config().data, None)
    rows = [{"prompt": str(row)} for row in range(BLOCK)]
    sets = {str(n): DataSet(str(n), rows, form) for n in range(len(weights))}
    mixture = PromptStream(sets, weights)
    counts: Counter[str] = Counter()
    for index in range(BLOCK):
        prompt = mixture.prompt(index)
        name = prompt.columns["data_source"]
        assert prompt.content == str(counts[name])  # its next one, none left out
        counts[name] += 1
        for number, weight in enumerate(weights):
            part = weight / sum(weights)
            assert abs(counts[str(number)] - part * (index + 1)) <= 2 + BLOCK * 1e-3


def test_generated_problems_can_be_part_of_a_mixture(files: dict[str, str]) -> None:
    stream = opened({"task": "arithmetic", **files}, "data.shuffle=false")
    alone = open_prompts(load_config())
    prompts = [stream.prompt(index) for index in range(30)]
    own = [p for p in prompts if p.columns["data_source"] == "arithmetic"]
    assert [p.content for p in own] == [alone.prompt(i).content for i in range(10)]
    assert stream.epoch_length is None and stream.fingerprint() is not None
    held_out = stream.held_out()
    assert [prompt.index for prompt in held_out] == list(range(512))
    assert held_out[3].columns["data_source"] == "arithmetic"


def test_rows_are_named_by_and_left_out_of_their_own_data_set(files: dict[str, str]) -> None:
    stream = opened(files)
    locations = list(stream.examples())
    assert len(locations) == 37
    assert locations[29:31] == [f"{files['long']}:30", f"{files['short']}:1"]
    fewer = stream.without({locations[0], *locations[30:32]})
    assert fewer.epoch_length == 34
    contents = {fewer.prompt(index).content for index in range(2 * BLOCK)}
    assert contents == {row["prompt"] for row in [*LONG[1:], *SHORT[2:]]}
    with pytest.raises(ConfigError, match=r"data\.long_prompts: .*short\.jsonl"):
        stream.without(locations[30:])
