"""What only an NVIDIA GPU can show: compiled FlexAttention, half precision, a shared device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_attention import FAMILIES, largest_gradient_gap, tiny_model

from easyrl.bench import attention as bench
from easyrl.model.attention import ATTENTION_NAME, PackedGroups, register_attention
from easyrl.model.attention_kernels import AttentionSettings
from easyrl.model.flex_shared_prompt import FlexSharedPrompt
from easyrl.model.policy import Policy
from easyrl.model.shared_prompt import SharedPrompt
from runs import finish, summary_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

GROUPS = [(70, [33, 200, 1]), (300, [5, 128]), (3, [9])]
NUM_TOKENS = sum(prompt + sum(completions) for prompt, completions in GROUPS)


def tensors(dtype, heads=(4, 2, 2), head_size=64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(NUM_TOKENS, n, head_size, generator=generator)
        .to("cuda", dtype)
        .requires_grad_()
        for n in heads
    ]


def outputs_and_gradients(layout, inputs, settings):
    output = layout.attend(*inputs, settings)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("window", [None, 50, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_equals_the_blocks_in_float64(window, dtype):
    settings = AttentionSettings(0, 0.2, window, None)
    device = torch.device("cuda")
    inputs = tensors(dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = outputs_and_gradients(SharedPrompt(GROUPS, device), wide, settings)
    got = outputs_and_gradients(FlexSharedPrompt(GROUPS, device), inputs, settings)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for a, b in zip(got, expected, strict=True):
        assert float((a.double() - b).norm() / b.norm()) <= bound


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_row_equals_each_sequence_alone_in_float32(family):
    register_attention()
    reference = tiny_model(family).to("cuda").double()
    policy = Policy(tiny_model(family, ATTENTION_NAME).to("cuda"), torch.device("cuda"))
    shape = bench.Shape(prompt_len=20, shortest=2, longest=30, num_generations=5)
    group = bench._Group(shape, 61, policy.device)
    expected = group.each_alone(Policy(reference, policy.device))
    got = bench._Row(group, policy, shares_prompts=True)()
    assert float((got.logprobs.double() - expected.logprobs).abs().max()) <= 1e-5
    gap = largest_gradient_gap(
        {name: g.double() for name, g in got.gradients.items()}, expected.gradients, floor=1e-4
    )
    assert gap <= 1e-5


def test_bfloat16_shares_as_exactly_as_it_repeats():
    """Against float64. What bfloat16 itself costs is what the repeated row shows."""
    size = bench.QWEN3_06B | {"num_hidden_layers": 4, "vocab_size": 1000}
    row = bench._compare(bench.Shape(200, 30, 90, 6), size, torch.bfloat16, "cuda", 1)
    for error in ("max_logprob_error", "max_grad_error"):
        assert row[error] <= 1.5 * row[f"{error}_repeated"]


@pytest.mark.parametrize("schedule", ["sync", "periodic"])
def test_a_run_on_one_shared_gpu_is_deterministic(schedule, tmp_path: Path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, how in zip(folders, (schedule, "sync"), strict=True):
        code, out, err = finish(
            "--infer-devices", "0", "--train-devices", "0", "--no-live", "--iterations", "3",
            "--schedule", how, "--output", str(folder),
            "runtime.deterministic=true", "data.num_held_out=16",
            "train.prompts_per_iteration=6", "rollout.max_completion_length=100",
        )  # fmt: skip
        assert code == 0, out + err
        summary = summary_of(folder)
        assert summary["groups_off_policy"] == 0 and summary["groups_trained"] == 18
    assert len({summary_of(folder)["weights_sha256"] for folder in folders}) == 1


def test_on_one_gpu_weights_cross_in_its_memory_and_each_group_has_its_part(tmp_path: Path):
    segments = set(Path("/dev/shm").iterdir())
    words = ("--infer-devices", "0", "--train-devices", "0", "--no-live", "--iterations", "2")
    code, out, err = finish(
        *words, "--output", str(tmp_path / "run"), "devices.infer_memory_fraction=0.3",
        "data.num_held_out=16", "train.prompts_per_iteration=4",
    )  # fmt: skip
    assert code == 0, out + err
    assert "30% of its memory for the rollout worker" in out
    assert "weights cross through the CPU" not in out + err
    assert set(Path("/dev/shm").iterdir()) <= segments
    code, out, err = finish(*words, "--output", str(tmp_path / "small"),
        "devices.infer_memory_fraction=0.00001")  # fmt: skip
    assert code == 2 and "devices.infer_memory_fraction" in err


def test_a_worker_knows_its_gpu_as_the_first_and_messages_as_the_users():
    last = torch.cuda.device_count() - 1
    script = """
import sys
from easyrl.config import load_config
from easyrl.runtime import launch
from easyrl.workers.settings import WorkerSettings
settings = WorkerSettings(
    name="rollout-0", owner_id=0, device="cuda:0", weights_cross_on_cpu=False, num_threads=1,
    config=load_config(), max_concurrent_groups=1, store_path="", log_file=None,
    device_indices=(int(sys.argv[1]),), memory_fraction=0.01,
)
launch._set_up_environment(settings)
import torch
print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)
try:
    torch.empty(torch.cuda.get_device_properties(0).total_memory // 50, device="cuda:0",
                dtype=torch.uint8)
except torch.OutOfMemoryError as error:
    print(launch._describe(error, settings).message.splitlines()[-1])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(last)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"1 {torch.cuda.get_device_properties(last).uuid}"
    assert lines[1] == f"(on cuda:{last}, which the worker sees as cuda:0)"


def test_flex_attention_is_what_half_precision_trains_with():
    layout = PackedGroups(GROUPS, "cuda")
    settings = AttentionSettings(0, 0.2, None, None)
    layout.attend(*tensors(torch.bfloat16), settings)
    assert "_flex" in vars(layout) and "_blocks" not in vars(layout)
    layout = PackedGroups(GROUPS, "cuda")
    layout.attend(*tensors(torch.float32), settings)
    assert "_blocks" in vars(layout) and "_flex" not in vars(layout)
