"""The benchmarks measure what they say, on small sizes."""

from __future__ import annotations

import json
import mmap
import signal
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from easyrl import events, records
from easyrl.bench import attention, engine, loop, pipeline, random_load, report, ring, weights
from easyrl.bench.peak_memory import peak_bytes, peak_resident_bytes
from easyrl.cli import app
from easyrl.config import load_config
from easyrl.model.files import read_model_files
from easyrl.model.pretrained import load_eos_token_ids, load_model_config
from easyrl.runtime.preflight import check_run
from easyrl.runtime.supervisor import Interrupted, WorkerFailure


def test_bench_ring_compares_both_ways_of_carrying_a_group() -> None:
    (row,) = ring.run(group_bytes=(65536,), repetitions=1, num_wakeups=20)[:1]
    assert row["group_bytes"] >= 65536 * 0.9
    assert row["speedup"] == pytest.approx(
        row["ring_groups_per_second"] / row["queue_groups_per_second"], rel=0.5
    )


def test_bench_engine_generates_the_lengths_it_was_given() -> None:
    baseline = engine._Generate()
    tokenizer = engine.load_tokenizer("tiny")
    prompts = [engine.render_prompt(text, tokenizer) for text in ("12+34=", "5+6+7=", "8+9=")]
    row = engine._compare("ragged", prompts, [3, 9, 1], baseline, repetitions=1)
    assert row["completion_tokens"] == 13 and row["speedup"] > 0
    assert engine._check_greedy(prompts, baseline)["greedy_mismatches"] == 0


def test_bench_attention_compares_the_same_work() -> None:
    size = attention.SMALL | {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 50}
    shape = attention.Shape(prompt_len=40, shortest=3, longest=12, num_generations=4)
    row = attention._compare(shape, size, torch.float32, "cpu", repetitions=1)
    num_completion = sum(shape.completion_lengths)
    assert row["token_ratio"] == (4 * 40 + num_completion) / (40 + num_completion)
    assert row["memory_ratio"] > 1.5 and row["speedup"] > 0
    for error in ("max_logprob_error", "max_grad_error"):
        assert 0 < row[error] < 1e-5 and 0 < row[f"{error}_repeated"] < 1e-5


def test_peak_memory_counts_what_lives_at_the_same_time() -> None:
    def one_after_another() -> None:
        for _ in range(3):
            torch.zeros(1000)

    def together() -> torch.Tensor:
        first = torch.zeros(1000)
        first.add_(1.0)
        return first + first[:500].repeat(2)  # a copy and a sum beside it

    cpu = torch.device("cpu")
    assert peak_bytes(one_after_another, cpu) == 4000
    assert peak_bytes(together, cpu) == 12000


def test_peak_memory_of_a_process_counts_what_any_code_takes() -> None:
    def action() -> None:
        with mmap.mmap(-1, 64 * 2**20) as pages:  # written, and given back, whatever malloc keeps
            for place in range(0, len(pages), mmap.PAGESIZE):
                pages[place] = 1

    peak_resident_bytes(action)
    assert 63 * 2**20 <= peak_resident_bytes(action) < 80 * 2**20
    assert peak_resident_bytes(lambda: None) < 8 * 2**20


def test_bench_weights_brings_every_bit_and_counts_the_bytes() -> None:
    """A cast on the way. That each engine has the trainer's bits it looks at by itself."""
    size = attention.SMALL | {"num_hidden_layers": 2, "vocab_size": 40_000}
    (row,) = weights.run("cpu", "cpu", "bfloat16", repetitions=1, size=size)
    embedding, head = 40_000 * 256, 40_000 * 256
    layer = 256 * (256 + 2 * 128 + 256 + 3 * 768) + 2 * 256 + 2 * 64
    assert row["weight_bytes"] == 2 * (embedding + head + 2 * layer + 256)
    assert row["gigabytes_per_second"] == pytest.approx(
        row["weight_bytes"] / 1e9 / row["seconds_per_update"]
    )
    assert row["share_of_bare"] == pytest.approx(
        row["gigabytes_per_second"] / row["bare_broadcast_gigabytes_per_second"]
    )
    assert 2**20 <= row["peak_extra_bytes"] <= 3 * row["bucket_bytes"]


def test_bench_weights_has_one_process_that_sends() -> None:
    with pytest.raises(ValueError, match=r"devices\.train.*one device"):
        weights.run("cpu", "cpu:2")


@pytest.mark.long
def test_bench_pipeline_does_the_same_work_in_every_mode() -> None:
    timings = {
        mode: pipeline._measure(pipeline.Setting(mode, 2, 1), size=4, iterations=1)
        for mode in pipeline.MODES
    }
    assert len({round(timing.completion_tokens) for timing in timings.values()}) == 1
    for timing in timings.values():
        assert 0 < timing.infer_seconds < timing.iteration_seconds
        assert 0 < timing.train_seconds < timing.iteration_seconds


def test_the_tuner_takes_the_setting_with_the_lowest_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {16: [1.0, 3.0], 8: [1.1, 1.2], 4: [1.3], 2: [0.9, 1.9]}
    measured: list[int] = []

    def measure(setting: pipeline.Setting, size: int, iterations: int) -> pipeline.Timing:
        if setting.mode != "apart":
            return pipeline.Timing(1.0, 1.0, 1.0, 1.0, 1.0)
        measured.append(setting.groups_in_flight)
        took = seconds[setting.groups_in_flight].pop(0)
        return pipeline.Timing(took, 1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(pipeline, "_measure", measure)
    assert pipeline._tune(16)["apart"].groups_in_flight == 2  # 1.4 on average
    assert sorted(measured) == [2, 2, 4, 8, 16, 16]  # the better half twice


@pytest.mark.parametrize(("words", "sizes"), [([], [16, 64]), (["--prompts", "4"], [4])])
def test_bench_pipeline_measures_the_sizes_that_are_asked_for(
    words: list[str], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(pipeline, "_compare", lambda size, rounds: measured.append(size) or [])
    assert CliRunner().invoke(app, ["bench", "pipeline", *words]).exit_code == 0
    assert measured == sizes


@pytest.mark.parametrize("suite", [attention, engine, loop, pipeline, ring, weights])
def test_the_table_fits_a_terminal_of_80_columns(
    suite: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = dict.fromkeys(suite.COLUMNS, 1234.5)
    if suite is pipeline:
        row |= {"mode": "colocated"}  # type: ignore[dict-item]
    report.print_table("suite", [row], suite.COLUMNS)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert all(word in shown for heading in suite.COLUMNS.values() for word in heading.split())
    assert suite is not pipeline or "colocated" in shown


@pytest.mark.parametrize(
    ("error", "exit_code", "told"),
    [
        (KeyboardInterrupt(), 130, ""),
        (Interrupted(signal.SIGTERM), 143, ""),
        (WorkerFailure("train-0 was killed by SIGKILL"), 1, "train-0 was killed by SIGKILL"),
    ],
)
def test_a_benchmark_that_is_broken_off_ends_without_a_traceback(
    error: BaseException, exit_code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        raise error

    monkeypatch.setattr(ring, "run", run)
    result = CliRunner().invoke(app, ["bench", "ring"])
    assert result.exit_code == exit_code
    assert "Traceback" not in result.output and told in result.output


def test_results_are_written_with_the_machine_they_come_from(tmp_path: Path) -> None:
    report.write_json(tmp_path / "ring.json", "ring", [{"speedup": 2.0}])
    written = json.loads((tmp_path / "ring.json").read_text())
    assert written["suite"] == "ring" and written["results"] == [{"speedup": 2.0}]
    assert {"cpu", "cores", "torch", "python"} <= written["machine"].keys()


def activity(*spans: tuple[str, float, float]) -> events.Activity:
    return events.Activity(tuple(events.Span(*span) for span in spans), 0, 0)  # type: ignore[arg-type]


def test_bench_loop_counts_the_time_in_which_both_groups_were_busy() -> None:
    """Two engines are one group, the first iteration warms up, waits are no work."""
    watch = loop.Watch()
    for number, start in enumerate((0.0, 10.0)):
        first = ("prefill", start, start + 1), ("generate", start + 1, start + 4)
        watch(records.IterationStarted(start, number))
        watch(records.WorkerActive("rollout-0", activity(*first)))
        watch(records.WorkerActive("rollout-1", activity(("generate", start + 3, start + 6))))
        watch(
            records.WorkerActive(
                "train-0", activity(("wait", start, start + 5), ("train", start + 5, start + 12))
            )
        )
        metrics = {"iteration": number, "perf/tokens_per_second": 3.0 + number}
        watch(records.IterationFinished(start + 8, metrics))
    assert watch.windows == [(10.0, 18.0)] and watch.median("perf/tokens_per_second") == 4.0
    # Of the training that had begun in the first iteration two seconds are in the second one.
    assert watch.busy() == (6 / 8, 5 / 8, 3 / 8)


def test_bench_loop_makes_a_run_that_passes_every_check(tmp_path: Path) -> None:
    load = random_load.Load(20, 5, 12, 4, 4, 2, 200)
    size = random_load.SIZES["small"] | {"num_hidden_layers": 1}
    num_weights = random_load.write_model(tmp_path / "model", size, load, "bfloat16")
    flags = {"devices.infer": "cpu", "devices.train": "cpu", "model.dtype": "bfloat16"}
    config = random_load.config_of(tmp_path, flags, ["train.learning_rate=0.1"], 2, load)
    assert config.train.learning_rate == 0.1 and config.train.iterations == 3
    files = read_model_files(config.model.path)
    assert files.num_weights == num_weights
    preflight = check_run(config)
    assert preflight.prompts.epoch_length == 3 * load.prompts
    ends = load_eos_token_ids(config.model.path, load_model_config(config.model.path))
    assert len(ends) == 256 // 5 and max(ends) < 256


def test_bench_loop_tells_arithmetic_against_the_makers_promise() -> None:
    """By the usual rule: 6 operations a weight and token, and attention's."""
    size = random_load.SIZES["1.7B"]
    words = ["train.prompts_per_iteration=32", "rollout.num_generations=16"]
    flops = loop._iteration_flops(size, load_config(None, {}, words), 256, 300 * 32 * 16)
    tokens = 32 * (256 + 300 * 16)
    of_layers = 28 * (2048 * 128 * (2 * 16 + 2 * 8) + 3 * 2048 * 6144)
    assert 6 * of_layers * tokens < flops < 8 * 1.72e9 * tokens
    assert loop._peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert loop._peak_flops("NVIDIA H100 PCIe") == 756e12
    assert loop._peak_flops("some other") is None and loop._peak_flops(None) is None


@pytest.mark.long
def test_bench_loop_measures_both_schedules() -> None:
    (row,) = loop.run("cpu", "cpu", iterations=1)
    assert row["model"] == "small" and row["mfu"] is None and row["peak_memory_bytes"] is None
    assert 0.0 < row["both_busy"] <= min(row["infer_busy"], row["train_busy"]) <= 1.0
    for rate in ("tokens_per_second", "sync_tokens_per_second", "train_flops_per_second"):
        assert row[rate] > 0
