"""The benchmarks on small sizes: they measure what their figures' names say."""

import json
from unittest.mock import Mock

import pytest
import torch
import transformers

import kernel_counts
from benchmarks import performance_model, ring
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
from easyrl import events
from easyrl.bench import harness, loop, peer
from easyrl.bench.harness import run_suite
from easyrl.data import picture_sums
from easyrl.data.pictures import PictureSize
from easyrl.model.pictures import tower_parameters
from easyrl.model.processor import load_processor
from easyrl.runtime.supervisor import WorkerFailure
from runs import easyrl


def test_a_suite_prints_a_table_and_writes_json(tmp_path, monkeypatch):
    rows = [{"what": "ring", "gb_per_second": 3.14159}, {"what": "queue", "times": 15}]
    monkeypatch.setattr(ring, "run", lambda: rows)
    file = tmp_path / "ring.json"
    result = easyrl("bench", "ring", "--json", file)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1:] == [["what", "ring", "queue"], ["gb_per_second", "3.14"], ["times", "15"]]
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["suite"] == "ring" and report["results"] == rows
    assert report["machine"]["cores"] >= 1 and report["machine"]["torch"] == torch.__version__
    for wrong in (["--dtype", "bfloat16"], ["--json", str(tmp_path)]):
        assert easyrl("bench", "ring", *wrong).exit_code == 2


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


def test_the_hybrid_of_the_peer_suite_has_the_layers_of_the_built_in_one_and_8_million_weights():
    work = peer.ROWS["hybrid"]
    with torch.device("meta"):
        model = work.make_model(work.size)
    layer_types = model.config.layer_types
    assert layer_types.count("linear_attention") == 3 * layer_types.count("full_attention")
    assert model.num_parameters() == pytest.approx(8e6, rel=0.01)
    for name, each in peer.ROWS.items():
        assert each.num_completions % each.micro_batch == 0, name


def test_the_pictures_of_the_peer_suite_are_576_tokens_before_7_million_weights(tmp_path):
    work = peer.ROWS["pictures"]
    with torch.device("meta"):
        model = work.make_model(work.size)
    num_seeing = sum(weight.numel() for weight in tower_parameters(model))
    assert model.num_parameters() - num_seeing == pytest.approx(7e6, rel=0.05)
    assert num_seeing == pytest.approx(5e6, rel=0.05)
    path = harness.write_picture_model(tmp_path, work.make_model(work.size), "float32")
    processor = load_processor(path, max_image_pixels=2**20)
    of_a_prompt = PictureSize(picture_sums.SIZE, picture_sums.SIZE)
    assert processor.num_tokens(of_a_prompt) == 576


def test_means_of_an_iteration_are_of_the_measured_ones(monkeypatch):
    def run(config, observers):
        for number in range(1, 4):  # of more that were asked for
            metrics = {
                "perf/iteration_seconds": 2.0 * number,
                "num_completion_tokens": 100 * number**2,
            }
            event = Mock(spec=events.IterationFinished, time=10.0 * number, metrics=metrics)
            for observe in observers:
                observe(event)
        return events.RunEnded(0, "")

    monkeypatch.setattr(harness, "run", run)
    figures = harness.record("run", {}, iterations=5)
    assert figures == {"iteration_seconds": 5.0, "completion_tokens": 400.0, "seconds": 10.0}
    result = easyrl("bench", "loop", "train.iterations=10")
    assert result.exit_code == 2 and "--iterations" in result.output


@pytest.mark.long
def test_loop_measures_both_schedules():
    (row,) = loop.run("cpu", "cpu", iterations=1)
    assert row["model"] == "small" and row["mfu"] is None
    assert 0.0 < row["both_busy"] <= min(row["infer_busy"], row["train_busy"]) <= 1.0
    assert row["tokens_per_second"] > 0 and row["weight_gigabytes_per_second"] > 0


def test_measured_speed_is_shown_beside_expected_speed(tmp_path):
    loop_row = {"model": "1.7B", "mfu": 0.12345, "infer_devices": "0", "train_devices": "1"}
    engine_row = {"load": "equal lengths", "engine_tokens_per_second": 12345.0}
    for suite, row in {"engine": engine_row, "loop": loop_row}.items():
        file = tmp_path / f"gpu-{suite}.json"
        run_suite(suite, [row | {"device": "NVIDIA H100 80GB HBM3"}], file)
        (line,) = performance_model.compare(file)
        assert ("12,345" in line or "12%" in line) and "expected" in line


def at_zero_layers(two, four):
    """Return what a layer adds, and what there is besides, from figures of two and four layers."""
    return (four - two) / 2, 2 * two - four


@pytest.mark.skipif(
    not (torch.__version__.startswith("2.13.") and transformers.__version__.startswith("5.24.")),
    reason="the figures are those of these versions",
)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_performance_model_counts_the_work_of_the_code(model):
    """Kernels exactly; bytes within 3 % of a decode step, and 10 % of training."""

    def total(per_layer, besides):
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
