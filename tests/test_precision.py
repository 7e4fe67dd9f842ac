"""Compute in bfloat16 over float32 weights, activation checkpointing, and compiled layers."""

import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.utils import cpp_extension
from transformers import AutoModelForCausalLM

import own_training
from easyrl.config import ConfigError
from easyrl.model.loading import load_policy
from own_training import HARDER, model, ranks, train
from runs import SMALL, lines_of, succeed, summary_of
from tiny_models import FAMILIES, SPREAD, UNSHARED, WITH_STATES, largest_gradient_gap, tiny_model

__all__ = ["model", "ranks"]  # fixtures

BFLOAT16 = "model.dtype=bfloat16"
SAME_LOSS = "algorithm.importance_sampling_correction=none"  # as in float32
# Between engine and trainer, in nats. bfloat16 has 8 bits: a logit of 10 has an error up to 0.02.
LARGEST_GAP, MEAN_GAP = 0.5, 0.01
LORA = ("model.lora.rank=3",)
COMPILE = "train.compile=true"
OTHER_FAMILIES = {*FAMILIES, *UNSHARED, "qwen3_next"}
NOT_COMPILED = {"mamba"}  # an error of torch 2.13's compiler on some machines
NOT_TRAINED = {"roberta"}


@pytest.mark.parametrize("words", [(), HARDER], ids=["plain", "two updates, a reference"])
def test_activation_checkpointing_changes_no_bit_of_the_gradient(words):
    plain, checkpointed = train(*words), train(*words, "train.activation_checkpointing=true")
    for got, expected in zip(checkpointed.gradients, plain.gradients, strict=True):
        assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize(
    ("lora", "more"), [((), ()), ((), ("train.activation_checkpointing=true",)), (LORA, ())]
)
def test_in_bfloat16_gradients_are_float32_sums_close_to_the_exact_ones(ranks, lora, more):
    exact = train(*HARDER, *lora).gradients[0]
    float32 = ranks.train(*HARDER, *lora)
    outcomes = ranks.train(*HARDER, *lora, BFLOAT16, SAME_LOSS, *more)
    for outcome, other in zip(outcomes, float32, strict=True):
        got = outcome.gradients[0]
        assert outcome.owned_bytes == other.owned_bytes  # nothing that is kept is smaller
        if lora:  # frozen weights are never updated
            assert outcome.all_bytes < 0.6 * other.all_bytes
        else:
            assert outcome.all_bytes == other.all_bytes
        assert all(gradient.dtype == torch.float32 for gradient in got.values())
        assert 1e-4 < largest_gradient_gap(got, exact) < 0.3
        # A sum of the ranks' bfloat16 gradients is no bfloat16 number.
        sums = outcome.after_one_step.values()
        assert any(not torch.equal(gradient, gradient.bfloat16().float()) for gradient in sums)
    # With other micro-batches only the rounding differs; the sums lose nothing.
    words = (*HARDER, *lora, BFLOAT16, SAME_LOSS, "train.max_tokens_per_micro_batch=21")
    small = ranks.train(*words)[0].gradients[0]
    assert largest_gradient_gap(small, outcomes[0].gradients[0]) < 0.1


@pytest.mark.long
@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_a_run_in_bfloat16(tmp_path, devices):
    folder = tmp_path / "run"
    succeed(
        *("--output", str(folder), "--iterations", "4", "--train-devices", devices, *SMALL),
        *(BFLOAT16, "algorithm.beta=0.05", "train.activation_checkpointing=true"),
        "rollout.max_completion_length=48",
    )
    assert 0.0 < summary_of(folder)["sampling_logp_difference_max"] < LARGEST_GAP
    lines = [line for line in lines_of(folder / "metrics.jsonl") if line["kl"] is not None]
    assert lines and all(line["num_updates_not_finite"] == 0 for line in lines)
    for line in lines:
        assert 0.0 < line["sampling/sampling_logp_difference/mean"] < MEAN_GAP
        assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=0.02)
        assert math.isfinite(line["grad_norm"]) and line["grad_norm"] > 0.0
    saved = load_file(folder / "model/model.safetensors")
    assert all(weight.dtype == torch.float32 for weight in saved.values())
    assert any(not torch.equal(w, w.bfloat16().float()) for w in saved.values())


def test_weights_are_loaded_in_their_final_dtype_and_are_the_pages_of_their_file(
    tmp_path, monkeypatch
):
    """All processes then share them, and the host never holds the model in another dtype."""
    load = Mock(wraps=AutoModelForCausalLM.from_pretrained)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    tiny_model("qwen3", None).bfloat16().save_pretrained(tmp_path)
    for dtype in (None, "bfloat16"):
        policy = load_policy(str(tmp_path), dtype=dtype)
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        ours = [words[0] for words in maps if words[-1] == str(tmp_path / "model.safetensors")]
        mapped = [[int(end, 16) for end in place.split("-")] for place in ours]
        for name, weight in policy.model.named_parameters():
            assert weight.dtype == torch.bfloat16
            assert any(start <= weight.data_ptr() < end for start, end in mapped), name
    assert next(load_policy(str(tmp_path)).model.parameters()).dtype == torch.float32
    dtypes = [call.kwargs["dtype"] for call in load.call_args_list]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_constant_that_a_narrow_dtype_rounds_stays_exact_in_the_trainer(tmp_path):
    """Gemma multiplies embeddings by the root of their size."""
    tiny_model("gemma3_text", None).bfloat16().save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), dtype=None)
    scale = policy.model.model.embed_tokens.embed_scale
    assert scale.dtype == torch.float32 and scale != scale.bfloat16()


def assert_same_gradients(*words, bound=1e-5):
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = train(*words), train(*words, COMPILE)
    assert counters["stats"]["unique_graphs"] > 0
    for got, expected in zip(compiled.gradients, plain.gradients, strict=True):
        assert largest_gradient_gap(got, expected) <= bound


@pytest.fixture(autouse=True)
def _libraries_without_a_space_in_their_path(tmp_path, monkeypatch):
    """torch.compile gives the C++ compiler the path of torch's libraries without quotes, so that
    it fails in an environment below a folder with a space."""
    link = tmp_path / "torch"
    link.symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(link))
    with inductor_config.patch(compile_threads=1):  # else in other processes
        yield


@pytest.mark.parametrize(
    "words",
    [
        ("runtime.schedule=sync",),  # one micro-batch
        pytest.param((*HARDER, "train.activation_checkpointing=true"), marks=pytest.mark.long),
    ],
    ids=["one update", "two updates, checkpointing"],
)
def test_compiled_layers_give_the_gradient_of_plain_ones(words):
    assert_same_gradients(*words)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(OTHER_FAMILIES - NOT_COMPILED - NOT_TRAINED))
def test_other_models(family, tmp_path, monkeypatch):
    changes = UNSHARED[family][0] if family in UNSHARED else WITH_STATES.get(family, {})
    tiny_model(family, spread=SPREAD, **changes).save_pretrained(tmp_path)
    monkeypatch.setattr(own_training, "MODEL", str(tmp_path))
    # Recurrences, routers and learned masks amplify rounding.
    assert_same_gradients(bound=1e-5 if family in FAMILIES else 1e-4)


def test_a_model_that_cannot_be_compiled_is_named():
    torch._dynamo.reset()
    fails = inductor_config.patch({"cpp.cxx": ("false",), "force_disable_caches": True})
    with fails, pytest.raises(ConfigError, match=r"train\.compile"):
        train(COMPILE)
