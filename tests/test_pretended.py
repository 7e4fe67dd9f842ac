"""Whole runs on a pretended accelerator (`make test-pretended`): see `pretended/device.cpp`.

It computes with the CPU's kernels. So a run on it must end in the bits of the same run on the CPU,
if the CPU leaves out its fused kernels, which accelerators do not have (`altered_run.py`).
"""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from test_memory_estimate import HASHED, write_task
from test_reward_model import make_model as make_reward_model

from runs import HARDER, SMALL, bits_of, lines_of, succeed, summary_of

TESTS = Path(__file__).parent
LIBRARY = os.environ.get("PRETENDED", "")  # the folder of the compiled device.cpp
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, (TESTS / "pretended", LIBRARY, TESTS.parent))),
    "PLAIN_KERNELS": "1",
}
TEACHER = "algorithm.teacher=tiny-guess", "algorithm.teacher_divergence=0.5"
WORDS = (*SMALL, "--no-live", "runtime.deterministic=true", "train.lr_scheduler_type=constant")

pytestmark = [
    pytest.mark.pretended,
    pytest.mark.skipif(not LIBRARY, reason="make test-pretended; needs a C++ compiler"),
]


@pytest.fixture(autouse=True)
def reward(tmp_path):
    (tmp_path / "own.py").write_text(HASHED)


def run(*words, **environment):
    return succeed(*words, altered=True, **ENVIRONMENT, **environment)


def on(infer, train, folder):
    where = ("--infer-devices", infer, "--train-devices", train, "--output", str(folder))
    return *where, f"reward.functions=[{folder.parent}/own.py:hashed]", *WORDS


def log_of(folder, worker):
    return (folder / f"logs/{worker}.log").read_text()


def test_two_engines_and_two_trainers_resumed_with_workers_killed(tmp_path):
    """FSDP2 and the weight channel over HCCL; a worker dies in a broadcast, one as it generates."""
    cpu, npu = tmp_path / "cpu", tmp_path / "npu"
    words = (*HARDER, "train.prompts_per_iteration=6")
    run(*on("cpu:2", "cpu:2", cpu), *words, "--iterations", "4", "--schedule", "sync")
    run(*on("0-1", "2-3", npu), *words, "--iterations", "2", "--schedule", "periodic")
    lost = "rollout-0@weights:6,rollout-1@iteration:3"
    out = run("--resume", str(npu), "--iterations", "4", "--no-live", LOSE=lost)
    assert "rollout-1: npu:1" in out and "train-1: npu:3" in out
    assert summary_of(npu)["worker_restarts"] == 2
    assert bits_of(npu) == bits_of(cpu)


def test_a_shared_device_with_offloading_and_recorded_steps(tmp_path):
    """Weights cross in memory of the device that both processes open."""
    for device in ("0", "cpu"):
        folder = tmp_path / device
        words = (*HARDER, "train.offload=[optimizer,reference,old]", "--iterations", "3")
        out = run(*on(device, device, folder), *words, GRAPHS="1")
        assert "copied through the CPU" not in out
        assert "captured a decode step" in log_of(folder, "rollout-0")
        assert "without CUDA graphs" not in log_of(folder, "rollout-0")
    assert bits_of(tmp_path / "0") == bits_of(tmp_path / "cpu")


@pytest.mark.parametrize(
    ("infer", "train", "words"),
    [
        ("0", "1", ("model.lora.rank=4", "algorithm.beta=0.05")),
        ("0", "1-2", TEACHER),
        ("cpu", "0", ("model.dtype=bfloat16", "train.activation_checkpointing=true", *TEACHER)),
        ("0", "1", ("model.path=tiny-hybrid",)),
    ],
    ids=["LoRA", "teacher", "bfloat16, engine on the CPU", "layers with a state"],
)
def test_other_models_and_devices(tmp_path, infer, train, words):
    of_cpu = "cpu", "cpu:2" if train == "1-2" else "cpu"
    for name, where in (("npu", (infer, train)), ("cpu", of_cpu)):
        run(*on(*where, tmp_path / name), *words, "--iterations", "3")
    assert bits_of(tmp_path / "npu") == bits_of(tmp_path / "cpu")


ESTIMATE = """
import sys
from easyrl.config import load_config
from easyrl.runtime.memory_estimate import estimate_memory
from easyrl.runtime.memory_fit import use_memory
from easyrl.runtime.placement import resolve_placement
from easyrl.runtime.checks.engine import measure_model
from easyrl.runtime.resolve import ResolvedRun
run = ResolvedRun.of(load_config(words=sys.argv[1:]))
placement = resolve_placement(run.spec)
size = measure_model(run.spec.model).size
run = use_memory(run, placement, size)
for part in estimate_memory(run.spec, placement, size):
    if part.memory.name != "cpu" and part.need.what != "driver, communication":
        print(part.process, part.need.num_bytes)
"""


@pytest.mark.long
@pytest.mark.parametrize(("infer", "train", "words"), [
    ("0", "1", ""),
    ("0", "0", ""),
    ("0", "1", "model.lora.rank=8"),
    ("0", "1-2", ""),
    ("0", "1", "rollout.max_completion_length=240"),
    ("0", "1", "train.updates_per_iteration=2 algorithm.beta=0.1"),
])  # fmt: skip
def test_estimates_equal_the_peaks_of_the_allocator(tmp_path, infer, train, words):
    """Of each role's largest worker, without what is not the allocator's: the driver's context and
    HCCL's buffers. The device records no steps, so there are no CUDA graphs on either side."""
    every = (
        *write_task(tmp_path, (384, 1152, 4, 6, 2, 8000), is_tied=False),  # 13 million weights
        # Micro-batches of 4 completions of 120 tokens, or 2 of 240, with their prompt.
        *("train.prompts_per_iteration=2", "train.max_tokens_per_micro_batch=544"),
        *(f"devices.infer={infer}", f"devices.train={train}", f"output.dir={tmp_path}/run"),
        *words.split(),
    )
    run(*every, "--no-live", PRETENDED_COUNTERS=str(tmp_path))
    command, env = (sys.executable, "-c", ESTIMATE, *every), {**os.environ, **ENVIRONMENT}
    parts = subprocess.check_output(command, env=env, text=True).splitlines()
    for role in ("rollout", "train"):
        peaks = [struct.unpack("qq", each.read_bytes())[1] for each in tmp_path.glob(f"{role}-*")]
        estimate = sum(int(part.split()[-1]) for part in parts if part.startswith(role))
        assert estimate == pytest.approx(max(peaks), rel=0.1), role


def test_reward_models_score_on_a_device_of_their_own_or_a_train_device(tmp_path):
    reward = make_reward_model(tmp_path / "one")
    rewards = []
    for name, infer, train, own in (
        ("cpu", "cpu", "cpu", "cpu"),
        ("own", "0", "1", "3"),
        ("shared", "0", "1", "1"),
        ("apart", "cpu", "cpu", "0"),
    ):
        words = (*on(infer, train, tmp_path / name), f"reward.functions=[{reward}]")
        out = run(*words, f"reward.model_device={own}", "--iterations", "1")
        assert (f"reward models: npu:{own}" in out) == (name != "cpu")
        lines = lines_of(tmp_path / name / "metrics.jsonl")
        rewards.append([line["reward"] for line in lines])
    assert all(each == pytest.approx(rewards[0], abs=1e-4) for each in rewards)
