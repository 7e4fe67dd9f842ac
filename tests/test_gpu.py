"""Tests that need an NVIDIA GPU: compiled FlexAttention, half precision, a shared device, NCCL.

Run `make test-gpu`. For figures: `easyrl bench loop`, `engine`, `weights` and `attention`.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import attention as bench
from benchmarks import weights as bench_weights
from benchmarks.engine import RaggedRequest
from easyrl.bench.harness import QWEN3_06B
from easyrl.channels.weights import WeightChannel, WeightEndpoint
from easyrl.engines import step_graphs
from easyrl.engines.base import SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.model.mixers.attention import ATTENTION_NAME, register_attention
from easyrl.model.mixers.flex import FlexAttention
from easyrl.model.mixers.interface import LayerSettings
from easyrl.model.mixers.sdpa import SdpaAttention
from easyrl.model.policy import Policy
from easyrl.runtime.self_test_part import draw_rollouts, each_alone, packed
from easyrl.types import Weight, WeightPiece
from runs import SMALL, finish, lines_of, summary_of
from tiny_models import (
    FAMILIES,
    SPREAD,
    WITH_STATES,
    largest_gradient_gap,
    tiny_model,
    tree_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
ANSWERS = (*SMALL, "rollout.max_completion_length=100")
"""Long enough that some answers are right; otherwise nothing is trained."""
SHARED = ("--infer-devices", "0", "--train-devices", "0")
FEW_LAYERS = QWEN3_06B | {"num_hidden_layers": 3, "vocab_size": 30_000}
"""78 million weights: norms that share a bucket, matrices that need none, one in several pieces."""
TREE = (40, [90, 130, 7, 60, 1, 33], [0, 1, 2, 1, 0, 5])
TREES = tree_of([(70, [33, 200, 1]), (300, [5, 128]), TREE, (3, [9])])


def run(folder: Path, *words: str, timeout: float = 240) -> str:
    code, out, err = finish("--output", str(folder), "--no-live", *words, timeout=timeout)
    assert code == 0, out + err
    return out + err


def tensors(dtype, heads=(4, 2, 2), head_size=64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(TREES.num_tokens, n, head_size, generator=generator)
        .to("cuda", dtype)
        .requires_grad_()
        for n in heads
    ]


def outputs_and_gradients(layout, inputs, settings):
    """`inputs`: query, key, value and, at the end, maybe sinks."""
    output = layout.attend(*inputs[:3], settings, *inputs[3:])
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 50, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_equals_the_blocks_in_float64(window, dtype, has_sinks):
    settings = LayerSettings(0, 0.2, window, None)
    device = torch.device("cuda")
    inputs = tensors(dtype)
    if has_sinks:
        inputs.append(torch.tensor([-2.0, 0.0, 1.0, 4.0], dtype=dtype, device=device))
        inputs[-1].requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = outputs_and_gradients(SdpaAttention(TREES, device), wide, settings)
    got = outputs_and_gradients(FlexAttention(TREES, device), inputs, settings)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for a, b in zip(got, expected, strict=True):
        assert float((a.double() - b).norm() / b.norm()) <= bound


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_row_equals_each_sequence_alone_in_float32(family):
    register_attention()
    reference = tiny_model(family).to("cuda").double()
    reference.set_experts_implementation("eager")  # the other has no float64 on GPUs
    policy = Policy(tiny_model(family, ATTENTION_NAME).to("cuda"), torch.device("cuda"))
    group = draw_rollouts(20, [2, 30, 17, 9, 24], 61)
    expected = each_alone(group, Policy(reference, policy.device))
    got = packed(group, policy)()
    assert float((got.logprobs.double() - expected.logprobs).abs().max()) <= 1e-5
    gap = largest_gradient_gap(
        {name: g.double() for name, g in got.gradients.items()}, expected.gradients, floor=1e-4
    )
    assert gap <= 1e-5


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_shared_row_of_layers_with_a_state_equals_each_sequence_alone(family):
    """With the kernels that transformers finds for them, which round more than attention's."""
    register_attention()
    changes = WITH_STATES[family]
    reference = tiny_model(family, "eager", SPREAD, **changes).to("cuda").double()
    reference.set_experts_implementation("eager")
    model = tiny_model(family, ATTENTION_NAME, SPREAD, **changes).to("cuda")
    policy = Policy(model, torch.device("cuda"))
    group = draw_rollouts(70, [2, 80, 1, 9, 24], 61)
    expected = each_alone(group, Policy(reference, policy.device))
    got = packed(group, policy)()
    assert float((got.logprobs.double() - expected.logprobs).abs().max()) <= 1e-3
    gap = largest_gradient_gap(
        {name: g.double() for name, g in got.gradients.items()}, expected.gradients, floor=1e-4
    )
    assert gap <= 1e-2


def test_bfloat16_with_shared_prompts_is_as_exact_as_with_repeated_ones():
    """Compared with float64. The row with repeated prompts shows the error of bfloat16 itself."""
    size = QWEN3_06B | {"num_hidden_layers": 4, "vocab_size": 1000}
    row = bench.compare(bench.Shape(200, 30, 90, 6), size, torch.bfloat16, "cuda", 1)
    for error in ("max_logprob_error", "max_grad_error"):
        assert row[error] <= 1.5 * row[f"{error}_repeated"]


def make_engine(policy, prompts, lengths, **sampling) -> EmbeddedEngine:
    settings = SamplingSettings(
        max_prompt_length=max(map(len, prompts)),
        max_completion_length=int(lengths.max()),
        seed=1,
        **sampling,
    )
    return EmbeddedEngine(policy, settings, num_rows=30)


def generate(engine, prompts, lengths) -> list:
    for number, prompt in enumerate(prompts):
        engine.submit(RaggedRequest((number,), prompt, 4, lengths=lengths[number].tolist()))
    finished = []
    while engine.has_work:
        finished += engine.step()
    completions = [completion for _, group in finished for completion in group]
    return [(c.token_ids.tobytes(), c.logprobs.tobytes()) for c in completions]


def draw_inputs(prompt_lengths) -> tuple[list[list[int]], np.ndarray]:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 60, length).tolist() for length in prompt_lengths * 6]
    return prompts, generator.integers(1, 200, (len(prompts), 4))


def tiny_policy(family, dtype, seed=1) -> Policy:
    register_attention()
    model = tiny_model(family, ATTENTION_NAME, seed=seed, max_position_embeddings=512)
    policy = Policy(model.to("cuda", dtype), torch.device("cuda"))
    policy.eos_token_ids.clear()
    return policy


@pytest.mark.parametrize("prompt_lengths", [(3, 9, 5), (200, 70, 10)], ids=["copied", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2", "gemma3_text"])
def test_replayed_decode_steps_give_the_bits_of_plain_ones(
    family, dtype, prompt_lengths, monkeypatch
):
    policy, new = (tiny_policy(family, dtype, seed) for seed in (1, 2))
    inputs = draw_inputs(prompt_lengths)
    engines = {}
    for name, settings in {
        "plain": {"CAPTURED_AT": 10**9},
        "replayed": {"CAPTURED_AT": 2},
        "few": {"CAPTURED_AT": 2, "MAX_GRAPHS": 2},
    }.items():
        with monkeypatch.context() as patched:
            for setting, value in settings.items():
                patched.setattr(step_graphs, setting, value)
            engine = engines[name] = make_engine(policy, *inputs)
            first = [(key, v.detach().flatten().clone()) for key, v in policy.named_weights()]
            bits = [generate(engine, *inputs) for _ in range(2)]
            pieces = (WeightPiece(key, 0, v.detach().flatten()) for key, v in new.named_weights())
            engine.load_weights(pieces)
            bits.append(generate(engine, *inputs))
            engine.load_weights(WeightPiece(key, 0, v) for key, v in first)  # for the next engine
        if name == "plain":
            expected = bits
        assert bits == expected
    assert engines["replayed"].graphs.num_replays > engines["replayed"].num_steps / 2


def test_long_rows_and_deterministic_sampling_of_the_likeliest(monkeypatch):
    """Some steps have too much padding. `scatter_` has another kernel in deterministic mode."""
    inputs = draw_inputs((200, 70, 10))
    policy = tiny_policy("qwen3", torch.float32)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        monkeypatch.setattr(step_graphs, "MAX_PADDING", 2000 * 16)  # cells
        engine = make_engine(policy, *inputs, top_k=5, top_p=0.9)
        assert generate(engine, *inputs) == generate(engine, *inputs)
        assert 0 < engine.graphs.num_replays < engine.num_steps / 2
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_model_that_cannot_be_captured_leaves_the_gpu_usable():
    policy, inputs = tiny_policy("qwen3", torch.float32), draw_inputs((3, 9, 5))
    expected = generate(make_engine(policy, *inputs), *inputs)
    hook = policy.model.model.layers[0].register_forward_hook(lambda *a: a[2].max().item() and None)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        engine = make_engine(policy, *inputs)
        generate(engine, *inputs)
    assert engine.graphs.num_replays == 0
    hook.remove()
    torch.cuda.empty_cache()
    torch.rand(1000, device="cuda")
    engine = make_engine(policy, *inputs)
    assert generate(engine, *inputs) == expected
    assert engine.graphs.num_replays > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("train", "size"), [("0", FEW_LAYERS), pytest.param("1", QWEN3_06B, marks=TWO_GPUS)]
)
def test_every_bit_of_the_weights_arrives_on_a_gpu(train, size, dtype):
    """The benchmark compares every bit. Between two GPUs over NCCL; processes see one GPU each."""
    (row,) = bench_weights.run("0", train, dtype, repetitions=3, size=size)
    print(f"{dtype}: {row['gigabytes_per_second']:.1f} GB/s")
    assert row["peak_extra_bytes"] <= 3 * row["bucket_bytes"]
    if train == "0":
        assert row["unsupported_reason"] is None
    else:
        assert row["share_of_bare"] >= 0.7, row  # the goal in docs/benchmarks.md


def trainer_channel(size: int, timeout_seconds: float) -> WeightChannel:
    store = f"/proc/{os.getpid()}/fd/{os.memfd_create('test-store')}"
    return WeightChannel(
        WeightEndpoint(store, 0, size, "train-0", "cuda:0", timeout_seconds, bucket_bytes=2**22)
    )


def test_the_channel_broadcasts_over_nccl():
    """NCCL supports one rank per GPU. Weights in buckets, direct, cast, repeated."""
    channel = trainer_channel(1, 10.0)
    big = torch.randn(3 * 2**20, device="cuda")
    tensors = {"big": big, "half": big[:999].bfloat16(), "scalar": torch.tensor(1.0).cuda()}
    every = [Weight.stored(*each, is_trained=True) for each in tensors.items()]
    sizes = sum(tensor.nbytes for tensor in tensors.values())
    assert channel.send(0, every) == channel.send(1, every) == sizes
    num_elements = sum(tensor.numel() for tensor in tensors.values())
    assert channel.send(2, every, dtype=torch.bfloat16) == 2 * num_elements
    started = time.monotonic()
    del channel
    assert time.monotonic() - started < 2.0


def test_missing_nccl_rank_is_waited_for_until_the_timeout():
    with pytest.raises(TimeoutError, match=r"train-0 \(rank 0 of 2\), making the process group"):
        trainer_channel(2, 1.0)


@pytest.mark.parametrize(
    "words",
    [
        ("--schedule", "sync", "model.dtype=bfloat16"),
        ("--schedule", "periodic", "model.dtype=bfloat16"),
        pytest.param(("rollout.engine=vllm", "model.dtype=bfloat16"), marks=NEEDS_VLLM),
        pytest.param(("rollout.engine=vllm", "model.dtype=float32"), marks=NEEDS_VLLM),
    ],
    ids=" ".join,
)
def test_rollout_and_trainer_share_a_gpu(words, tmp_path: Path):
    """The trainer's weights are float32. In bfloat16 a layer at a time is gathered as bfloat16."""
    segments = set(Path("/dev/shm").iterdir())
    more = ("--iterations", "3", *ANSWERS, "rollout.memory_fraction=0.4", *words)
    printed = run(tmp_path / "run", *SHARED, *more, timeout=600)
    assert set(Path("/dev/shm").iterdir()) <= segments
    assert "40% of its memory for the rollout worker" in printed
    assert "weights cross through the CPU" not in printed
    for line in lines_of(tmp_path / "run" / "metrics.jsonl"):
        assert line["sampling/sampling_logp_difference/mean"] < 0.02
        assert 0 < line["perf/train_seconds"] < line["perf/iteration_seconds"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_does_not_change_training(dtype, tmp_path: Path):
    """The reference and the old policy are loaded into the policy's weights. If the policy's were
    restored too early, the second update would have no KL."""
    lines = []
    for number, offload in enumerate(("[]", "[optimizer, reference, old]")):
        folder = tmp_path / str(number)
        run(
            folder, *SHARED, "--iterations", "1", *ANSWERS, f"model.dtype={dtype}",
            "runtime.deterministic=true", "algorithm.beta=0.1", "train.updates_per_iteration=2",
            "train.learning_rate=0.001", "train.lr_scheduler_type=constant",
            f"train.offload={offload}",
        )  # fmt: skip
        lines += lines_of(folder / "metrics.jsonl")
    here, there = lines
    assert here["kl"] > 0 and here["grad_norm"] > 0
    for name in ("kl", "clip_ratio/high_mean", "grad_norm"):
        assert there[name] == pytest.approx(here[name], rel=0.02, abs=1e-6), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_schedules_and_a_resumed_run_end_in_the_same_bits(dtype, tmp_path: Path):
    words = (*SHARED, *ANSWERS, f"model.dtype={dtype}", "runtime.deterministic=true")
    words += ("train.lr_scheduler_type=constant", "data.num_held_out=16")
    whole, other, parted = (tmp_path / name for name in ("whole", "other", "parted"))
    run(whole, "--iterations", "4", "--schedule", "sync", *words)
    run(other, "--iterations", "4", "--schedule", "periodic", *words)
    run(parted, "--iterations", "2", *words)
    code, out, err = finish("--resume", str(parted), "--iterations", "4", "--no-live")
    assert code == 0, out + err
    assert len({summary_of(folder)["weights_sha256"] for folder in (whole, other, parted)}) == 1


@pytest.mark.parametrize(
    ("infer", "train"),
    [
        ("0", "cpu"),
        ("cpu", "0"),
        pytest.param("0", "1", marks=TWO_GPUS),
        pytest.param("cpu", "0-1", marks=TWO_GPUS),
    ],
)
def test_a_run_with_devices_for_each_role(infer, train, tmp_path: Path):
    where = ("--infer-devices", infer, "--train-devices", train)
    run(tmp_path / "run", *where, "--iterations", "3", *ANSWERS)
    summary = summary_of(tmp_path / "run")
    assert summary["groups_trained"] == 12
