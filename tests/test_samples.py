"""`easyrl samples`: what it shows, and for which folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from easyrl import cli, events
from easyrl.observe.samples import columns_of
from easyrl.runtime.run_folder import sample_line

SAMPLES = [
    {
        "iteration": iteration,
        "prompt_index": 4 * iteration + place,
        "prompt": f"prompt {iteration}-{place}",
        "completion": f"completion {iteration}-{place}-{number} [bold]\x1b[2J",
        "reward": None if iteration == 2 else number / 2,
        "advantage": float(number - 1),
    }
    for iteration in range(3)
    for place in range(2)
    for number in range(3)
]


def write(folder: Path, lines: list[dict[str, Any]], rest: str = "") -> Path:
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "samples.jsonl").write_text(text + rest)
    return folder


def call(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["samples", *map(str, words)])


def completions(output: str) -> list[str]:
    return re.findall(r"completion (\S+)", output)


def test_shows_each_prompt_once_before_its_completions(tmp_path: Path) -> None:
    shown = call(write(tmp_path / "run", SAMPLES)).output
    assert [shown.count(f"prompt {n}-{k}\n") for n in range(3) for k in range(2)] == [1] * 6
    assert len(completions(shown)) == 18
    title = "iteration 2  prompt_index 5  reward 0.5  advantage 0"
    assert title in shown and "reward None" in shown
    place = shown.index("prompt 1-1\n")
    assert shown.index("completion 1-0-2") < place < shown.index("completion 1-1-0")
    assert "\x1b" not in shown and "[bold]" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--min-reward 0.5 --max-reward 0.5", ["0-0-1", "0-1-1", "1-0-1", "1-1-1"]),
        ("--iteration 2 --min-reward 1", ["1-0-2", "1-1-2"]),
        ("--iteration 2-3 --limit 4", ["1-0-0", "1-0-1", "1-0-2", "1-1-0"]),
    ],
)
def test_options_select_samples(tmp_path: Path, words: str, expected: list[str]) -> None:
    run = write(tmp_path / "run", SAMPLES)
    assert completions(call(run, *words.split()).output) == expected


def test_shows_sample_numbers_and_lengths_of_an_evaluation(tmp_path: Path) -> None:
    line = {"problem": "a", "prompt_index": 3, "sample": 1, "prompt": "p", "completion": "c"}
    line |= {"reward": 1.0, "length": 7, "truncated": True, "answer": "42"}
    shown = call(write(tmp_path / "ev", [line])).output
    assert "prompt_index 3  sample 2  reward 1  length 7  truncated True  answer 42" in shown


def test_names_and_values_of_columns_do_not_reach_the_terminal_as_escapes(tmp_path: Path) -> None:
    line = SAMPLES[0] | {"\x1b]0;evil\x07\n": "\x9b2J \u202e", "[/x]": ":cat:"}
    shown = call(write(tmp_path / "run", [line])).output
    assert "]0;evil" in shown and "[/x] :cat:" in " ".join(shown.split())
    assert all(c.isprintable() for c in shown.replace("\n", ""))


def test_equal_completions_of_a_prompt_are_folded(tmp_path: Path) -> None:
    line = {"iteration": 0, "prompt_index": 0, "prompt": "p", "completion": "c", "reward": 1.0}
    line |= {"rewards": {"right": 1.0, "brief": 0.5}, "truncated": False, "answer": "x" * 99 + "7"}
    other = [line | {"completion": "d"}, line | {"rewards": {"right": 1.0, "brief": 0.25}}]
    run = write(tmp_path / "run", [line, *other, line, line | {"prompt_index": 1}, line])
    titles = [row for row in call(run).output.splitlines() if row.startswith("iteration")]
    assert len(titles) == 5 and len(call(run, "--limit", "2").output) < len(call(run).output)
    shown = " ".join(call(run).output.split())
    assert shown.count("right 1 brief 0.5 x2") == 1 and "x3" not in shown
    assert "truncated" not in shown and "xx7" in shown  # the end of a long answer


TAKEN = ("sample", "problem", "iteration", "rewards", "length", "truncated", "reward", "prompt")


def test_columns_may_have_any_name(tmp_path: Path) -> None:
    """Those of the data and of rewards; of an older version they replaced keys of the line."""
    columns = dict.fromkeys(TAKEN, "text")
    sample = events.Sample("c", 1.0, 0.5, {"rewards": 7, "x": 8}, {"f": 1.0, "g": 0.0}, 3)
    group = events.GroupScored(0, 0, 5, [1.0], [[1.0]], [3], 0, 0.0, prompt="p", columns=columns)
    line = sample_line(group, sample)
    assert [line[name] for name in ("iteration", "reward", "length")] == [0, 1.0, 3]
    assert line["column/sample"] == "text" and line["column/rewards"] == 7 and line["x"] == 8
    shown = " ".join(call(write(tmp_path / "run", [line])).output.split())
    assert "iteration 1 prompt_index 5 reward 1" in shown and "column/problem text" in shown
    older = line | {"sample": "text", "rewards": 7, "problem": 8}
    assert "sample text" in call(write(tmp_path / "older", [older])).output
    assert columns_of(older | {"iteration": "text"}, 40)[0] == "iteration text"


def test_line_that_is_being_written_is_not_shown(tmp_path: Path) -> None:
    run = write(tmp_path / "run", SAMPLES[:2], rest=json.dumps(SAMPLES[4])[:40])
    assert completions(call(run).output) == ["0-0-0", "0-0-1"]


def test_mistakes_are_user_errors(tmp_path: Path) -> None:
    write(tmp_path / "run", SAMPLES)
    write(tmp_path / "empty", [])
    (tmp_path / "plain").mkdir()
    for (folder, *words), text in {
        ("nothing",): "samples.jsonl",
        ("plain",): "samples.jsonl",
        ("empty",): "no such sample",
        ("run", "--min-reward", "7"): "--min-reward",
        ("run", "--iteration", "0"): "--iteration",
        ("run", "--iteration", "5-3"): "--iteration",
        ("run", "--limit", "0"): "'--limit'",
    }.items():
        refused = call(tmp_path / folder, *words)
        assert refused.exit_code == 2 and text in " ".join(refused.output.split()), refused.output
