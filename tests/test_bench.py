"""The benchmarks on small sizes: they measure what their figures' names say."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import kernel_counts
from benchmarks import attention, engine, performance_model, pipeline, ring
from benchmarks.performance_model import (
    CARDS,
    COPYING_KERNELS,
    KERNELS,
    MODELS,
    TRAIN_HIDDEN_BYTES,
    TRAIN_KERNELS,
    TRAIN_LOGIT_BYTES,
    Load,
)
from easyrl.bench import loop, peer
from easyrl.bench.harness import run_suite
from easyrl.cli import app
from easyrl.config import load_config
from easyrl.runtime.self_test_part import SMALL
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
    def suite() -> Iterator[dict[str, Any]]:
        yield {"row": "first", "ratio": 2.0}
        raise error

    assert run_suite("peer", suite(), file := tmp_path / "rows.json") == exit_code
    assert json.loads(file.read_text())["results"]["first"]["ratio"] == 2.0
    assert str(error) in capsys.readouterr().err


def test_ring_compares_both_ways_to_send_a_group():
    (row,) = ring.run(group_bytes=(65536,), repetitions=1, num_wakeups=20)
    rates = row["ring_groups_per_second"], row["queue_groups_per_second"]
    assert row["speedup"] == pytest.approx(rates[0] / rates[1])
    assert 0 < row["wakeup_p50_seconds"] <= row["wakeup_p99_seconds"] < 1


def test_engine_generates_the_given_lengths():
    row = engine.compare(
        "ragged", [[5, 6, 7], [8, 9], [10]], [3, 9, 1], repetitions=1, device=torch.device("cpu")
    )
    assert row["completion_tokens"] == 13
    rates = row["engine_tokens_per_second"], row["generate_tokens_per_second"]
    assert row["speedup"] == pytest.approx(rates[0] / rates[1])


def test_attention_compares_the_same_work():
    size = SMALL | {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 50}
    shape = attention.Shape(prompt_len=40, shortest=7, longest=7, num_generations=4)
    row = attention.compare(shape, size, torch.float32, "cpu", repetitions=1)
    assert row["token_ratio"] == 4 * (40 + 7) / (40 + 4 * 7)
    assert row["memory_ratio"] > 1.5 and row["speedup"] > 0
    for error in ("max_logprob_error", "max_grad_error"):
        assert 0 < row[error] < 1e-5 and 0 < row[f"{error}_repeated"] < 1e-5


@pytest.mark.long
def test_pipeline_does_the_same_work_in_every_mode():
    runs = [pipeline.measure(mode, prompts=4, iterations=1) for mode in pipeline.MODES]
    assert len({run["completion_tokens"] for run in runs}) == 1
    for run in runs:
        for phase in ("infer", "train"):
            assert 0 < run[f"{phase}_seconds"] < run["iteration_seconds"]


def test_loop_counts_six_operations_per_weight_and_token():
    """The operations of attention are added."""
    words = ["train.prompts_per_iteration=32", "rollout.num_generations=16"]
    config = load_config(None, {"data.max_prompt_length": 256}, words)
    flops = loop.training_flops(loop.SIZES["1.7B"], 1_720_000_000, config, 300 * 32 * 16)
    tokens = 32 * (256 + 300 * 16)
    of_layers = 28 * (2048 * 128 * (2 * 16 + 2 * 8) + 3 * 2048 * 6144)
    assert 6 * of_layers * tokens < flops < 8 * 1.72e9 * tokens


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


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs easyrl-train[peer]")
def test_peer_samples_the_same_lengths_on_both_sides(tmp_path, monkeypatch):
    work = dataclasses.replace(peer.ROWS["tiny_short"], iterations=2)
    monkeypatch.setattr(peer, "ROWS", {"tiny_short": work})
    file = tmp_path / "peer.json"
    assert run_suite("peer", peer.run(rounds=1), file) == 0
    row = json.loads(file.read_text())["results"]["tiny_short"]
    rates = row["easyrl_tokens_per_second"], row["peer_tokens_per_second"]
    assert row["ratio"] == pytest.approx(rates[0] / rates[1]) and row["ratio"] > 0
    # 99 tokens, one of which ends a completion, and 256 of them at most: 92 on average.
    for side in ("easyrl", "peer"):
        assert 75 < row[f"{side}_mean_length"] < 110, row


# The performance model (docs/devices.md, Expected speed).


def at_zero_layers(two: float, four: float) -> tuple[float, float]:
    """Return what a layer adds, and what there is besides, from figures of two and four layers."""
    return (four - two) / 2, 2 * two - four


@pytest.mark.skipif(
    not (torch.__version__.startswith("2.13.") and transformers.__version__.startswith("5.24.")),
    reason="the figures are those of these versions",
)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_performance_model_counts_the_work_of_the_code(model):
    """Kernels exactly; bytes within 3 % of a decode step, and 10 % of training."""

    def total(per_layer: float, besides: float) -> float:
        return per_layer * model.layers + besides

    for load, kernels in ((Load(256), KERNELS), (Load(1024), KERNELS), (Load(40), COPYING_KERNELS)):
        for rows, cells in ((64, 512), (256, 1024)):
            two, four = (
                kernel_counts.count_decode_step(model, layers, rows, load.prompt, cells)
                for layers in (2, 4)
            )
            counted = at_zero_layers(two.num_kernels, four.num_kernels)
            assert counted == kernels[model.family]
            step = performance_model.decode(
                model, CARDS["H100"], "embedded", rows, cells=cells, load=load
            )
            assert step.num_kernels == total(*counted)
            num_bytes = total(*at_zero_layers(two.num_bytes, four.num_bytes))
            assert step.num_bytes == pytest.approx(num_bytes, rel=0.03)
    if performance_model.train(model, CARDS["H100"]) is None:
        return  # it needs several devices
    tokens = 8448
    two, four = (kernel_counts.count_training(model, layers, tokens) for layers in (2, 4))
    counted = at_zero_layers(two.num_kernels, four.num_kernels)
    assert counted == TRAIN_KERNELS[model.family]
    moved = (each.num_bytes - each.product_bytes for each in (two, four))
    of_layer, of_head = at_zero_layers(*moved)
    expected = TRAIN_HIDDEN_BYTES[model.family] * model.hidden * tokens
    assert of_layer == pytest.approx(expected, rel=0.1)
    assert of_head == pytest.approx(TRAIN_LOGIT_BYTES * model.vocabulary * tokens, rel=0.1)
