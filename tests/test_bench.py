"""The benchmarks measure what they say, on small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from easyrl.bench import engine, pipeline, report, ring


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


def test_bench_pipeline_does_the_same_work_in_every_mode() -> None:
    timings = {
        mode: pipeline._measure(pipeline.Setting(mode, 2, 1), size=4, iterations=1)
        for mode in pipeline.MODES
    }
    assert len({timing.completion_tokens for timing in timings.values()}) == 1
    for timing in timings.values():
        assert 0 < timing.infer_seconds < timing.iteration_seconds
        assert 0 < timing.train_seconds < timing.iteration_seconds


def test_results_are_written_with_the_machine_they_come_from(tmp_path: Path) -> None:
    report.write_json(tmp_path / "ring.json", "ring", [{"speedup": 2.0}])
    written = json.loads((tmp_path / "ring.json").read_text())
    assert written["suite"] == "ring" and written["results"] == [{"speedup": 2.0}]
    assert {"cpu", "cores", "torch", "python"} <= written["machine"].keys()
