"""vLLM's engines on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_vllm_runs import START_SECONDS, VLLM, assert_on_policy

from ray_clusters import cluster_of
from runs import SMALL, finish, lines_of, summary_of, without_timing

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm` installs it and runs these")
pytest.importorskip("ray", reason="needs Ray: pip install 'easyrl-train[ray]'")
pytestmark = [pytest.mark.vllm, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(*[{"num_cpus": 1}] * 3) as cluster:
        yield cluster


def run(folder: Path, infer: str, train: str, *words: str) -> tuple[Any, ...]:
    """The bits of a run."""
    devices = ("--infer-devices", infer, "--train-devices", train, "devices.threads=1")
    code, out, err = finish(
        *("--output", str(folder), "--iterations", "3", *devices, *SMALL, *VLLM, *words),
        timeout=START_SECONDS,
    )
    assert (code, err) == (0, "")
    assert "engine of the rollout workers: vllm" in out
    assert_on_policy(folder)
    metrics = [without_timing(line) for line in lines_of(folder / "metrics.jsonl")]
    return summary_of(folder)["weights_sha256"], metrics


def test_two_engines_on_two_nodes_end_in_the_same_bits_as_without_ray(
    cluster: Any, tmp_path: Path
) -> None:
    same = ("runtime.deterministic=true",)
    here = run(tmp_path / "here", "cpu:2", "cpu", *same)
    there = ("ray:cpu:2", "ray:cpu:1", "--ray-address", cluster.address)
    assert run(tmp_path / "there", *there, *same) == here
