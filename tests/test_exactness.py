"""Models that cannot attend in packed rows are detected, reported and trained exactly."""

import copy
from functools import cache
from unittest.mock import Mock

import pytest
import torch

from easyrl.config import ConfigError
from easyrl.model import exactness
from easyrl.model import policy as policy_module
from easyrl.model.attention import PackedGroups, register_attention
from easyrl.model.exactness import attend_packed
from easyrl.model.files import max_positions
from easyrl.model.logprobs import token_logprobs
from easyrl.model.policy import Policy
from tiny_models import (
    FAMILIES,
    LENGTHS,
    SPREAD,
    UNSHARED,
    VOCABULARY,
    assert_same_as_alone,
    draw_sequences,
    gradients,
    largest_gradient_gap,
    packed_logits,
    separate_logits,
    tiny_model,
)

pytestmark = pytest.mark.filterwarnings("ignore")
torch.set_num_threads(1)
register_attention()


@cache
def policy_of(model_type):
    model = tiny_model(model_type, None, SPREAD, **UNSHARED[model_type][0])
    return Policy(model, torch.device("cpu"), no_packing_reason=attend_packed(model))


def load(tmp_path, model_type, changes, **options):
    tiny_model(model_type, None, **changes).save_pretrained(tmp_path)
    return Policy.load(str(tmp_path), **options)


@pytest.mark.parametrize(("attention", "shares"), [("auto", True), ("repeated", False)])
def test_prompts_are_shared_unless_repeated_ones_are_asked_for(attention, shares, tmp_path):
    policy = load(tmp_path, "qwen3", {}, attention=attention)
    assert policy.no_packing_reason is None and policy.shares_prompts is shares


@pytest.mark.parametrize("family", FAMILIES)
def test_check_of_a_model_in_bfloat16_needs_no_wide_copy_of_its_vocabulary(
    family, tmp_path, monkeypatch
):
    """That would be a third of a small model's host memory. The weights stay as they are stored."""
    monkeypatch.setattr(policy_module, "CHECKED_WORDS", 20)
    model = tiny_model(family, None, pad_token_id=VOCABULARY - 1).bfloat16()
    model.save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), dtype=None)
    assert policy.no_packing_reason == attend_packed(tiny_model(family, None))
    expected = dict(model.named_parameters())
    for name, weight in policy.model.named_parameters():
        assert torch.equal(weight, expected[name].to(weight.dtype)), name
    embeddings = [each.get_input_embeddings() for each in (policy.model, model)]
    assert embeddings[0].padding_idx == embeddings[1].padding_idx


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        *((name, *UNSHARED[name]) for name in ("mamba", "bloom")),
        ("bert", {}, "no causal language model"),
        ("rwkv", {"attention_hidden_size": 32, "context_length": 64}, "changes its weights"),
    ],
)
def test_what_cannot_be_trained_or_not_with_shared_prompts_is_refused(
    model_type, changes, reason, tmp_path
):
    with pytest.raises(ValueError, match=rf"model\.(attention|path).*{reason}"):
        load(tmp_path, model_type, changes, attention="shared_prompt")


def test_fast_kernel_that_gives_other_results_is_replaced_by_eager(monkeypatch):
    """transformers 5.17 gave Gemma 2 one without soft-capping."""
    for gap, expected in ((exactness._gap_to_eager, "sdpa"), (lambda *_: "wrong", "eager")):
        model = policy_of("qwen2_moe").model
        model.set_attn_implementation("sdpa")
        monkeypatch.setattr(exactness, "_gap_to_eager", gap)
        assert attend_packed(model) is not None
        assert model.config._attn_implementation == expected


@pytest.mark.parametrize(("no_rope", "scale"), [([1, 0, 1], 4), ([1, 0, 1], 8192), ([1, 1, 1], 4)])
def test_rule_by_a_tokens_place_in_the_row_is_found_before_it_applies(no_rope, scale, tmp_path):
    """Llama 4 scales the queries of layers without RoPE, from place `floor_scale` on."""
    changes = UNSHARED["llama4_text"][0] | {"layer_types": ["full_attention"] * 3}
    changes |= {"no_rope_layers": no_rope, "floor_scale": scale, "attn_scale": 0.5}
    reference = tiny_model("llama4_text", "eager", SPREAD, **changes)
    reference.save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path))
    assert policy.shares_prompts is all(no_rope)
    assert policy.shares_prompts or "index in the row" in policy.no_packing_reason
    assert_same_as_alone(reference, policy, draw_sequences(LENGTHS))


@pytest.mark.parametrize("family", ["qwen3", "bloom"])
def test_model_is_checked_once_unless_the_check_failed_or_weights_differ(
    family, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changes = UNSHARED[family][0] if family in UNSHARED else {}
    folder, model, checked = str(tmp_path / "model"), tiny_model(family, None, **changes), []
    model.save_pretrained(folder)

    def check(model):
        checked.append(model)
        if len(checked) == 1:
            raise ConfigError("transformers cannot run it")
        return attend_packed(model)

    monkeypatch.setattr("easyrl.model.policy.attend_packed", check)
    with pytest.raises(ConfigError, match="cannot run"):
        Policy.load(folder)
    one, other = (Policy.load(folder, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert one.shares_prompts is other.shares_prompts is (family == "qwen3")
    assert one.no_packing_reason == other.no_packing_reason and len(checked) == 2
    assert one.model.config._attn_implementation == other.model.config._attn_implementation
    next(model.parameters()).data += 1.0
    model.save_pretrained(folder)
    Policy.load(folder)
    for entry in (tmp_path / "cache/easyrl/checked").iterdir():
        entry.write_text("[nul")  # its process was killed while it wrote
    Policy.load(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # no cache
    Policy.load(folder)
    assert len(checked) == 5


def test_wrong_result_is_reported(monkeypatch):
    """Layer 1 attends to neighbours too: visible in the numbers alone."""
    attend = PackedGroups.attend

    def wrong(self, query, key, value, settings):
        if settings.layer == 1:
            value = value.mean(0, keepdim=True).expand_as(value)
        return attend(self, query, key, value, settings)

    model = tiny_model("llama", None)
    monkeypatch.setattr(PackedGroups, "attend", wrong)
    assert attend_packed(model).startswith("a packed row gives other results")
    model.forward = Mock(side_effect=RuntimeError("no such kernel"))  # nor can transformers alone
    with pytest.raises(ConfigError, match=r"model\.path(.|\n)*no such kernel"):
        attend_packed(model)


@pytest.mark.parametrize("model_type", UNSHARED)
def test_unsupported_layer_is_named_and_trained_as_in_separate_sequences(model_type):
    """Gradients are computed in float64 (the gated delta rule in float32)."""
    policy, sequences = policy_of(model_type), draw_sequences(LENGTHS)
    assert UNSHARED[model_type][1] in policy.no_packing_reason and not policy.shares_prompts
    targets = torch.cat([sequence.roll(-1) for sequence in sequences])
    with torch.no_grad():
        reference = tiny_model(model_type, "eager", SPREAD, **UNSHARED[model_type][0])
        expected = separate_logits(reference, sequences)
        for as_trained in (False, True):
            logits = packed_logits(policy, sequences, as_trained=as_trained)
            got, _ = token_logprobs(logits, targets, 0.8)
            gap = got - token_logprobs(expected, targets, 0.8)[0]
            assert float(gap.abs().max()) <= 1e-5
    model = copy.deepcopy(policy.model).double()
    model.set_experts_implementation("eager")  # the fused one has no float64
    policy = Policy(model, policy.device, no_packing_reason=policy.no_packing_reason)
    of_alone = gradients(model, separate_logits(model, sequences), sequences)
    of_row = gradients(model, packed_logits(policy, sequences, as_trained=True), sequences)
    floor = 1e-3 if model_type == "qwen3_next" else 1e-4
    assert largest_gradient_gap(of_row, of_alone, floor) <= 1e-5


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
CHANGING = {
    "longrope": {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 16}},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
}
"""Settings with which RoPE is constant up to 16 tokens."""


@pytest.mark.parametrize("kind", CHANGING)
def test_rope_is_exact_up_to_the_length_at_which_it_changes(kind, tmp_path):
    reference = tiny_model("llama", None, **CHANGING[kind])
    reference.save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path))
    assert policy.shares_prompts
    assert_same_as_alone(reference, policy, draw_sequences([16, 3, 9]))
    # With a longer sequence beside it is not, so such lengths are refused.
    assert max_positions(reference.config.to_dict()) == 16
