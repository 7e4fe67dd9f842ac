"""What a machine has: cores under a container's quota, and the CPU's maker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from easyrl import devices
from easyrl.device_sets import count_devices


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["200000 100000"], 2),
        (["150000 100000"], 2),  # a part of a core is a core that threads can use
        (["max 100000"], 8),
        (["1600000 100000"], 8),  # more than there is
        (["-1", "100000"], 8),  # version 1: no quota
        (["100000", "100000"], 1),
        (["not a number"], 8),
    ],
)
def test_a_containers_quota_counts(
    lines: list[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / str(number) for number in range(len(lines))]
    for file, line in zip(files, lines, strict=True):
        file.write_text(line + "\n")
    quotas = (("/no/such/file",), tuple(map(str, files)))
    monkeypatch.setattr(devices, "CPU_QUOTAS", quotas)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert devices.num_cores() == expected


def test_the_cpu_counts_once_per_worker_and_a_shared_device_once() -> None:
    assert count_devices(["cpu", "cpu", "cpu"]) == 3
    assert count_devices(["cuda:0", "cuda:1", "cuda:0", "cpu"]) == 3
