"""Tests that need an NVIDIA GPU: compiled FlexAttention, half precision, a shared device, NCCL.

One command on a machine with a GPU: `pytest -m gpu tests/test_gpu.py`. Tests that need two GPUs
are skipped if there is one.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from test_attention import tiny_model

from benchmarks import weights as bench_weights
from easyrl.bench.harness import QWEN3_06B
from easyrl.engines import step_graphs
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.model.attention import ATTENTION_NAME, register_attention
from easyrl.model.flex_shared_prompt import FlexSharedPrompt
from easyrl.model.policy import Policy
from easyrl.model.shared_prompt import AttentionSettings, SharedPrompt
from easyrl.types import WeightPiece
from runs import SMALL, finish, lines_of, summary_of

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
GROUPS = [(70, [33, 200, 1]), (300, [5, 128]), (3, [9])]
NUM_TOKENS = sum(prompt + sum(completions) for prompt, completions in GROUPS)


def run(folder, *words, timeout=240):
    """Run to the end without an error; return what was printed."""
    code, out, err = finish("--output", str(folder), "--no-live", *words, timeout=timeout)
    assert code == 0, out + err
    return out + err


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


def make_engine(policy, prompts, lengths, **sampling):
    settings = SamplingSettings(
        max_prompt_length=max(map(len, prompts)),
        max_completion_length=int(lengths.max()),
        seed=1,
        **sampling,
    )
    return EmbeddedEngine(policy, settings, num_rows=30, ignore_eos=True)


def generate(engine, prompts, lengths):
    """Generate completions of these lengths; return their bits."""
    for number, prompt in enumerate(prompts):
        engine.submit(GroupRequest((number,), prompt, 4, lengths[number].tolist()))
    finished = []
    while engine.has_work:
        finished += engine.step()
    completions = [completion for _, group in finished for completion in group]
    return [(c.token_ids.tobytes(), c.logprobs.tobytes()) for c in completions]


def draw_inputs(prompt_lengths):
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 60, length).tolist() for length in prompt_lengths * 6]
    return prompts, generator.integers(1, 200, (len(prompts), 4))


def tiny_policy(family, dtype, seed=1):
    register_attention()
    model = tiny_model(family, ATTENTION_NAME, seed=seed, max_position_embeddings=512)
    return Policy(model.to("cuda", dtype), torch.device("cuda"))


@pytest.mark.parametrize("prompt_lengths", [(3, 9, 5), (200, 70, 10)], ids=["copied", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2", "gemma3_text"])
def test_replayed_decode_steps_give_the_bits_of_plain_ones(
    family, dtype, prompt_lengths, monkeypatch
):
    """Also after new weights, with few graphs at a time, and without graphs for longer rows."""
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
            first = [(key, values.clone()) for key, values in policy.flat_weights()]
            bits = [generate(engine, *inputs) for _ in range(2)]
            engine.load_weights(WeightPiece(key, 0, v.clone()) for key, v in new.flat_weights())
            bits.append(generate(engine, *inputs))
            engine.load_weights(WeightPiece(key, 0, v) for key, v in first)  # for the next engine
        if name == "plain":
            expected = bits
        assert bits == expected
    assert engines["replayed"].graphs.num_replays > engines["replayed"].num_steps / 2


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


@pytest.mark.parametrize(
    "words",
    [
        ("--schedule", "sync", "model.dtype=bfloat16"),
        ("--schedule", "periodic", "model.dtype=bfloat16"),
        pytest.param(("rollout.engine=vllm", "model.dtype=bfloat16"), marks=NEEDS_VLLM),
    ],
    ids=" ".join,
)
def test_rollout_and_trainer_share_a_gpu(words, tmp_path):
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
def test_both_schedules_and_a_resumed_run_end_in_the_same_bits(dtype, tmp_path):
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
def test_a_run_with_devices_for_each_role(infer, train, tmp_path):
    where = ("--infer-devices", infer, "--train-devices", train)
    run(tmp_path / "run", *where, "--iterations", "3", *ANSWERS)
    summary = summary_of(tmp_path / "run")
    assert summary["groups_trained"] == 12
