"""Runs with vLLM that lose a rollout worker end in the same bits."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from test_clean_ends import log_of
from test_lost_workers import bits_of

from runs import SMALL, finish, start, summary_of, wait_for_line

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm` installs it and runs these")
pytestmark = [pytest.mark.vllm, pytest.mark.long]

WORDS = (
    *SMALL,
    *("--infer-devices", "cpu:2", "--iterations", "5", "--no-live"),
    *("runtime.deterministic=true", "rollout.engine=vllm", "algorithm.beta=0.04"),
    *("rollout.max_concurrent_groups=2", "train.prompts_per_iteration=6"),
)


def test_a_run_that_lost_a_worker_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    code, _, err = finish("--output", str(whole), *WORDS, timeout=900)
    assert (code, err) == (0, "")
    process = start("--output", str(lost), *WORDS, EASYRL_RANDOM_DELAYS="0.1")
    wait_for_line(process, "iteration 1/", timeout=600)
    workers = psutil.Process(process.pid).children()
    next(each for each in workers if log_of(each).stem == "rollout-1").kill()
    _, err = process.communicate(timeout=900)
    assert (process.returncode, err) == (0, "")
    assert summary_of(lost)["worker_restarts"] == 1
    assert bits_of(lost) == bits_of(whole)
