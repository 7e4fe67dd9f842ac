"""The benchmarks on small sizes: they measure what their figures' names say."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import ring
from easyrl.bench import loop, peer
from easyrl.bench.harness import run_suite
from easyrl.cli import app
from easyrl.runtime.supervisor import WorkerFailure


def test_a_suite_prints_a_table_and_writes_json(tmp_path, monkeypatch):
    rows = [{"what": "ring", "gb_per_second": 3.14159}, {"what": "queue", "times": 15}]
    monkeypatch.setattr(ring, "run", lambda: rows)
    file = tmp_path / "ring.json"
    result = CliRunner().invoke(app, ["bench", "ring", "--json", str(file)])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1:] == [["what", "ring", "queue"], ["gb_per_second", "3.14"], ["times", "15"]]
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["suite"] == "ring" and report["results"] == rows
    assert report["machine"]["cores"] >= 1 and report["machine"]["torch"] == torch.__version__
    for wrong in (["--dtype", "bfloat16"], ["--json", str(tmp_path)]):
        assert CliRunner().invoke(app, ["bench", "ring", *wrong]).exit_code == 2


@pytest.mark.parametrize(
    ("error", "exit_code"), [(KeyboardInterrupt(), 130), (WorkerFailure("train-0 was killed"), 1)]
)
def test_stopped_benchmark_shows_and_writes_the_rows_before(tmp_path, capsys, error, exit_code):
    def suite():
        yield {"row": "first", "ratio": 2.0}
        raise error

    assert run_suite("peer", suite(), file := tmp_path / "rows.json") == exit_code
    assert json.loads(file.read_text())["results"]["first"]["ratio"] == 2.0
    assert str(error) in capsys.readouterr().err


@pytest.mark.long
def test_loop_measures_both_schedules():
    (row,) = loop.run("cpu", "cpu", iterations=1)
    assert row["model"] == "small" and row["mfu"] is None
    assert 0.0 < row["both_busy"] <= min(row["infer_busy"], row["train_busy"]) <= 1.0
    assert row["tokens_per_second"] > 0 and row["weight_gigabytes_per_second"] > 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rows", "tiny_short, large"], "'large'"),
        (["--rows", "tiny_short,"], "''"),
        (["--infer-devices", "gpu"], "devices.infer"),
        (["--infer-devices", "ray:cpu:1", "--train-devices", "ray:cpu:1"], "ray:cpu:1"),
        (["--model", "no/such/folder/at/all"], "no/such/folder/at/all"),
        ([], "easyrl-train[peer]"),
    ],
)
def test_peer_reports_unusable_input_before_anything_starts(monkeypatch, words, named):
    find_spec = str if words else lambda name: None  # installed or not
    monkeypatch.setattr(peer, "util", SimpleNamespace(find_spec=find_spec))
    result = CliRunner().invoke(app, ["bench", "peer", "--rows", "tiny_short", *words])
    assert result.exit_code == 2 and named in result.stderr, result.output
