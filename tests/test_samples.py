"""`easyrl samples`: which ones it shows, and of which folders.

How it shows them is in tests/golden (test_screens.py).
"""

import json
import re

import pytest
from typer.testing import CliRunner

from easyrl import cli, events
from easyrl.runtime.run_folder import sample_line

SAMPLES = [
    {
        "iteration": iteration,
        "prompt_index": 4 * iteration + place,
        "prompt": f"prompt {iteration}-{place}",
        "completion": f"completion {iteration}-{place}-{number}",
        "reward": None if iteration == 3 else number / 2,
        "advantage": float(number - 1),
    }
    for iteration in (1, 2, 3)
    for place in range(2)
    for number in range(3)
]


def write(folder, lines, rest=""):
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "samples.jsonl").write_text(text + rest)
    return folder


def call(*words):
    return CliRunner().invoke(cli.app, ["samples", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--min-reward 0.5 --max-reward 0.5", ["1-0-1", "1-1-1", "2-0-1", "2-1-1"]),
        ("--iteration 2 --min-reward 1", ["2-0-2", "2-1-2"]),
        ("--iteration 2-3 --limit 4", ["2-0-0", "2-0-1", "2-0-2", "2-1-0"]),
        ("--limit 18 --iteration 1", ["1-0-0", "1-0-1", "1-0-2", "1-1-0", "1-1-1", "1-1-2"]),
    ],
)
def test_options_select_samples(tmp_path, words, expected):
    run = write(tmp_path / "run", SAMPLES, rest=json.dumps(SAMPLES[4])[:40])
    old = [{**line, "iteration": line["iteration"] - 1} for line in SAMPLES]  # of version 0.2
    for folder in (run, write(tmp_path / "old", old)):
        found = re.findall(r"completion (\S+)", call(folder, *words.split()).output)
        assert found == expected


def test_columns_may_have_any_name(tmp_path):
    """Those of the data and of rewards."""
    columns = dict.fromkeys(("sample", "problem", "iteration", "rewards", "reward", "prompt"), "x")
    sample = events.Sample("c", 1.0, 0.5, {"rewards": 7, "y": 8}, {"f": 1.0, "g": 0.0}, 3)
    group = events.GroupScored(1, 0, 5, [1.0], [[1.0]], [3], 0, 0.0, prompt="p", columns=columns)
    line = sample_line(group, sample)
    assert [line[name] for name in ("iteration", "reward", "length", "y")] == [1, 1.0, 3, 8]
    assert line["column/sample"] == "x" and line["column/rewards"] == 7
    shown = " ".join(call(write(tmp_path / "run", [line])).output.split())
    assert "iteration 1 prompt_index 5 reward 1" in shown and "column/problem x" in shown


def test_raw_samples_are_what_the_model_sees(tmp_path):
    raw = [f"<user>{SAMPLES[0]['prompt']}<assistant>", f"{SAMPLES[0]['completion']}<end>"]
    run = write(tmp_path / "run", [SAMPLES[0] | {"raw": raw}])
    assert all(text in call(run, "--raw").output for text in raw)
    assert "<end>" not in call(run).output


def test_mistakes_are_user_errors(tmp_path):
    write(tmp_path / "run", SAMPLES)
    write(tmp_path / "empty", [])
    for (folder, *words), text in {
        ("nothing",): "samples.jsonl",
        ("empty",): "no such sample",
        ("run", "--min-reward", "7"): "--min-reward",
        ("run", "--iteration", "0"): "--iteration",
        ("run", "--limit", "0"): "'--limit'",
    }.items():
        refused = call(tmp_path / folder, *words)
        assert refused.exit_code == 2 and text in " ".join(refused.output.split()), refused.output
