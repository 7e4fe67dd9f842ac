"""Whole runs on a pretended accelerator (`make test-pretended`): see `pretended/device.cpp`.

It computes with the CPU's kernels. So a run on it must end in the bits of the same run on the CPU,
if the CPU leaves out its fused kernels, which accelerators do not have (`altered_run.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_lost_workers import bits_of
from test_runs import HARDER

from runs import SMALL, finish, summary_of

TESTS = Path(__file__).parent
LIBRARY = os.environ.get("PRETENDED", "")  # the folder of the compiled device.cpp
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, (TESTS / "pretended", LIBRARY, TESTS.parent))),
    "PLAIN_KERNELS": "1",
}
WORDS = (*SMALL, "--no-live", "runtime.deterministic=true", "train.lr_scheduler_type=constant")

pytestmark = [
    pytest.mark.pretended,
    pytest.mark.skipif(not LIBRARY, reason="make test-pretended, with a C++ compiler"),
]


def run(*words: str, **environment: str) -> str:
    code, out, err = finish(*words, altered=True, **ENVIRONMENT, **environment)
    assert (code, err) == (0, "")
    return out


def on(infer: str, train: str) -> tuple[str, ...]:
    return "--infer-devices", infer, "--train-devices", train


def log_of(folder: Path, worker: str) -> str:
    return (folder / f"logs/{worker}.log").read_text()


def test_a_tensor_of_the_cpu_and_too_much_memory_are_refused() -> None:
    script = """
import torch, torch_npu
weight = torch.ones(4, 4, device="npu")
for operation in (lambda x: weight @ x, lambda x: weight.add_(x), lambda x: x.copy_(weight) + weight):
    try:
        operation(torch.ones(4, 4))
    except RuntimeError as error:
        print("refused" if "device" in str(error) else error)
print((weight + torch.tensor(1.0)).sum().item(), torch.npu.memory_allocated())
del weight
print(torch.npu.memory_allocated(), torch.npu.max_memory_allocated())
try:
    torch.empty(2**40, device="npu")
except torch.OutOfMemoryError:
    print("out of memory")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    expected = ["refused"] * 3 + ["32.0 64", "0 132", "out of memory"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_two_engines_and_two_trainers_resumed_with_workers_killed(tmp_path: Path) -> None:
    """FSDP2 and the weight channel over HCCL, a reference, an old policy, checkpoints; both
    schedules; one worker dies in a broadcast and one while it generates."""
    words = (*WORDS, *HARDER, "train.prompts_per_iteration=6")
    run("--output", f"{tmp_path}/cpu", *on("cpu:2", "cpu:2"), *words, "--iterations", "4")
    npu = tmp_path / "npu"
    where = (*on("0-1", "2-3"), "--schedule", "periodic")
    run("--output", str(npu), *where, *words, "--iterations", "2")
    lost = "rollout-0@weights:6,rollout-1@iteration:3"
    out = run("--resume", str(npu), "--iterations", "4", "--no-live", LOSE=lost)
    assert "rollout-1: npu:1" in out and "train-1: npu:3" in out
    assert summary_of(npu)["worker_restarts"] == 2
    assert bits_of(npu) == bits_of(tmp_path / "cpu")


def test_a_shared_device_with_offloading_and_recorded_steps(tmp_path: Path) -> None:
    """Weights cross in memory of the device that both processes open."""
    words = (*WORDS, *HARDER, "train.offload=[optimizer,reference,old]", "--iterations", "3")
    ends: list[Any] = []
    for folder, where in ((tmp_path / "npu", on("0", "0")), (tmp_path / "cpu", on("cpu", "cpu"))):
        out = run("--output", str(folder), *where, *words, GRAPHS="1")
        assert "copied through the CPU" not in out
        assert "captured a decode step" in log_of(folder, "rollout-0")
        assert "without CUDA graphs" not in log_of(folder, "rollout-0")
        ends.append(bits_of(folder))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("infer", "train", "words"),
    [
        ("0", "1", ("model.lora.rank=4", "algorithm.beta=0.05")),
        ("cpu", "0", ("model.dtype=bfloat16", "train.activation_checkpointing=true")),
    ],
    ids=["LoRA", "bfloat16, engine on the CPU"],
)
def test_other_models_and_devices(
    tmp_path: Path, infer: str, train: str, words: tuple[str, ...]
) -> None:
    ends: list[Any] = []
    for folder, where in ((tmp_path / "npu", on(infer, train)), (tmp_path / "cpu", on("cpu", "cpu"))):
        run("--output", str(folder), *where, *WORDS, *words, "--iterations", "3")
        ends.append(bits_of(folder))
    assert ends[0] == ends[1]
