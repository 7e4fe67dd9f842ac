"""Read figures from what the commands of the steps print and write, also if they were ended."""

import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.first_gpu.results import Figures
from easyrl import events
from easyrl.formatting import ConfigError
from easyrl.observe.run_files import RunFiles

SELF_TEST_LINE = re.compile(r"^(ok|failed) +(\w+) +(.*) \(\d+ s\)$", re.MULTILINE)
"""`easyrl doctor --test` prints lines like "ok attention passed (7 s)"."""
OUTCOME = re.compile(r"\b(PASSED|FAILED|SKIPPED|ERROR)\b")
"""A line of pytest's verbose output has the outcome of a test."""
GAP = "sampling/sampling_logp_difference"
SUITE_FIGURES = (
    *("tokens_per_second", "mfu", "infer_busy", "train_busy", "both_busy"),
    *("weight_gigabytes_per_second", "gigabytes_per_second", "seconds_per_update"),
    *("ratio", "peer", "easyrl_tokens_per_second", "peer_tokens_per_second"),
    *("engine_tokens_per_second", "generate_tokens_per_second", "speedup", "efficiency"),
    *("max_logprob_error", "max_grad_error", "unsupported_reason"),
)
"""Figures of a suite's rows that are kept."""


def read_learning(run: Path, output: str) -> Figures:
    """Return curves of a run: rewards of its iterations, and held-out accuracies."""
    lines = _metrics(run)
    figures: Figures = {"iterations": len(lines), "reward": [line["reward"] for line in lines]}
    evaluations = _evaluations(run)
    if evaluations:
        figures["held_out_accuracy"] = [each.accuracy for each in evaluations]
        figures["standard_error"] = evaluations[-1].standard_error
    trained = [line for line in lines if line.get("grad_norm")]
    figures["iterations_with_a_gradient"] = len(trained)
    if lines:
        seconds = sum(line["perf/iteration_seconds"] for line in lines)
        figures["seconds_per_iteration"] = seconds / len(lines)
        figures["tokens_per_second"] = lines[-1]["num_generated_tokens"] / seconds
    return figures | _gaps(lines)


def read_schedule(run: Path, other: Path | None, output: str) -> Figures:
    """Return the gap of engine and trainer. `other`: the run of the other schedule, whose weights
    are compared, or None."""
    lines = _metrics(run)
    figures: Figures = {"iterations": len(lines), **_gaps(lines)}
    figures["iterations_with_a_gradient"] = len([line for line in lines if line.get("grad_norm")])
    digest = _digest(run)
    if other is not None and digest is not None and _digest(other) is not None:
        figures["same_bits_as_sync"] = digest == _digest(other)
    return figures


def _gaps(lines: list[dict[str, Any]]) -> Figures:
    """Return how much engine and trainer differ, in nats."""
    # An iteration without a gradient has none.
    trained = [line for line in lines if line.get(f"{GAP}/mean") is not None]
    if not trained:
        return {}
    mean = sum(line[f"{GAP}/mean"] for line in trained) / len(trained)
    return {"gap_mean": mean, "gap_max": max(line[f"{GAP}/max"] for line in trained)}


def _digest(run: Path) -> str | None:
    summary = run / "summary.json"
    if not summary.exists():
        return None
    return str(json.loads(summary.read_text())["weights_sha256"])


def _evaluations(run: Path) -> list[events.Evaluated]:
    found = []
    with suppress(ConfigError):  # the run has not begun
        for event in RunFiles(run).read():
            if isinstance(event, events.Evaluated):
                found.append(event)
    return found


def _metrics(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_self_test(output: str) -> Figures:
    """Return the outcome of each part of `easyrl doctor --test`."""
    figures: Figures = {}
    for status, part, text in SELF_TEST_LINE.findall(output):
        figures[part] = "passed" if status == "ok" else text
    return figures


def read_suite(file: Path, output: str) -> Figures:
    """Return the figures of a suite of `easyrl bench`; of several rows with the row's name."""
    if not file.exists():
        return {}
    found = json.loads(file.read_text())["results"]
    rows = list(found.values()) if isinstance(found, dict) else found
    figures: Figures = {}
    for row in rows:
        name = row.get("model") or row.get("load") or row.get("row")
        prefix = f"{name}: " if name and len(rows) > 1 else ""
        for key in SUITE_FIGURES:
            if row.get(key) is not None:
                figures[prefix + key] = row[key]
    return figures


def read_lines(output: str) -> Figures:
    """Return lines like "0.6B: MFU 20%, expected 25%", by what is before the colon."""
    figures: Figures = {}
    for line in output.splitlines():
        name, colon, text = line.partition(": ")
        if colon:
            figures[name] = text
    return figures


def read_tests(output: str) -> Figures:
    """Return the number of tests of each outcome."""
    outcomes: Counter[str] = Counter()
    for line in output.splitlines():
        found = OUTCOME.search(line)
        if found is not None and "::" in line and not line.startswith(("FAILED", "ERROR")):
            outcomes[found[1].lower()] += 1
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", output, re.MULTILINE)
    figures: Figures = dict(outcomes)
    if failed:
        figures["tests_that_failed"] = ", ".join(failed)
    return figures
