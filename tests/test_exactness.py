"""Models that cannot attend in packed rows: found out, told, and trained exactly all the same."""

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from easyrl.model import exactness
from easyrl.model.attention import ATTENTION_NAME, PackedGroups, register_attention
from easyrl.model.exactness import attend_packed
from easyrl.model.files import check_rope, longest_exact
from easyrl.model.logprobs import token_logprobs
from easyrl.model.policy import PaddedRows, Policy
from tiny_models import (
    FAMILIES,
    GROUPED,
    LENGTHS,
    SPREAD,
    UNSHARED,
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
def reference_of(model_type):
    return tiny_model(model_type, "eager", SPREAD, **UNSHARED[model_type][0])


@cache
def policy_of(model_type):
    model = tiny_model(model_type, None, SPREAD, **UNSHARED[model_type][0])
    return Policy(model, torch.device("cpu"), unsupported_reason=attend_packed(model))


def load(tmp_path, model_type, changes, **options):
    tiny_model(model_type, None, **changes).save_pretrained(tmp_path)
    return Policy.load(str(tmp_path), **options)


# -- what is found out ----------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", UNSHARED)
def test_unsupported_layer_is_named_with_its_reason(model_type):
    policy = policy_of(model_type)
    assert UNSHARED[model_type][1] in policy.unsupported_reason
    assert not policy.shares_prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_no_capable_family_is_taken_for_another(family, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    for attention, shares in (("auto", True), ("shared_prompt", True), ("repeated", False)):
        policy = Policy.load(str(tmp_path), attention=attention)
        assert policy.unsupported_reason is None and policy.shares_prompts is shares


@pytest.mark.parametrize("model_type", ["mamba", "bloom", "gpt_oss", "roberta"])
def test_shared_prompt_is_refused_for_an_unsupported_model(model_type, tmp_path):
    changes, told = UNSHARED[model_type]
    with pytest.raises(ValueError, match=r"model\.attention") as error:
        load(tmp_path, model_type, changes, attention="shared_prompt")
    assert told in str(error.value)


@pytest.mark.parametrize("model_type", ["roberta", "bert"])
def test_encoder_is_refused_as_not_causal(model_type, tmp_path):
    with pytest.raises(ValueError, match=r"model\.path.*no causal language model"):
        load(tmp_path, model_type, {})


def test_a_model_that_changes_its_own_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path.*changes its weights"):
        load(tmp_path, "rwkv", {"attention_hidden_size": 32, "context_length": 64})


@pytest.mark.parametrize("family", ["qwen3", "roberta"])
def test_a_model_is_left_as_it_was_or_attends_through_easyrl(family):
    model = reference_of("roberta") if family == "roberta" else tiny_model(family, None)
    before = model.config._attn_implementation
    weights = [parameter.clone() for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    obstacle = attend_packed(model)
    expected = ATTENTION_NAME if obstacle is None else before
    assert model.config._attn_implementation == model.base_model.config._attn_implementation
    assert model.config._attn_implementation == expected
    assert all(map(torch.equal, model.parameters(), weights))
    assert modes == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_kernel_that_leaves_something_out_is_not_taken(monkeypatch):
    """transformers 5.17 gave Gemma 2 one without soft-capping."""
    gap = exactness._gap_to_eager
    asked = []

    def wrong(model, tokens):
        asked.append(model.config._attn_implementation)
        return gap(model, tokens) or "its kernel gives another result"

    for difference, expected in ((gap, "sdpa"), (wrong, "eager")):
        model = policy_of("phimoe").model
        model.set_attn_implementation("sdpa")
        monkeypatch.setattr(exactness, "_gap_to_eager", difference)
        assert attend_packed(model) is not None
        assert model.config._attn_implementation == expected
    assert asked == ["sdpa"] * exactness.NUM_DRAWS


def test_a_wrong_result_is_told_by_its_first_layer(monkeypatch):
    """Nothing but the numbers tells: one layer looks at the neighbours too."""
    attend = PackedGroups.attend

    def wrong(self, query, key, value, settings):
        if settings.layer == 1:
            value = value.mean(0, keepdim=True).expand_as(value)
        return attend(self, query, key, value, settings)

    monkeypatch.setattr(PackedGroups, "attend", wrong)
    assert attend_packed(tiny_model("llama", None)).startswith("layer 1 gives other results")


def test_an_expert_chosen_otherwise_in_one_row_is_no_reason(monkeypatch):
    """Of a near tie between experts the last bit decides; another row has none."""
    model, rows = tiny_model("llama", None), []

    def difference(_, tokens):
        rows.append(tokens.tolist())
        return "layer 0 gives another result" if len(rows) == 1 else None

    monkeypatch.setattr(exactness, "_difference", difference)
    assert attend_packed(model) is None
    assert len(rows) == 2 and rows[0] != rows[1]


# -- trained exactly ------------------------------------------------------------------------------


def row_logits(policy, sequences):
    """As the trainer has them: the head on the hidden states of the packed row."""
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    layout = PackedGroups.of_sequences(lengths)
    every = torch.arange(sum(lengths))
    return policy.head(policy.hidden_states(torch.cat(sequences), positions, layout, at=every))


@pytest.mark.parametrize("model_type", UNSHARED)
def test_logprobs_equal_those_of_separate_sequences(model_type):
    policy, sequences = policy_of(model_type), draw_sequences(LENGTHS)
    targets = torch.cat([sequence.roll(-1) for sequence in sequences])
    with torch.no_grad():
        expected = separate_logits(reference_of(model_type), sequences)
        for logits in (row_logits(policy, sequences), packed_logits(policy, sequences)):
            got, _ = token_logprobs(logits, targets, 0.8)
            gap = got - token_logprobs(expected, targets, 0.8)[0]
            assert float(gap.abs().max()) <= 1e-5


@pytest.mark.parametrize("model_type", UNSHARED)
def test_gradients_equal_those_of_separate_sequences(model_type):
    """In float64. (The gated delta rule is float32 inside all the same, and so are its smallest
    gradients.)"""
    policy, sequences = policy_of(model_type), draw_sequences(LENGTHS)
    model = copy.deepcopy(policy.model).double()
    model.set_experts_implementation("eager")  # the fused one has no float64
    policy = Policy(model, policy.device, unsupported_reason=policy.unsupported_reason)
    of_alone = gradients(model, separate_logits(model, sequences), sequences)
    of_row = gradients(model, row_logits(policy, sequences), sequences)
    floor = 1e-3 if model_type == "qwen3_next" else 1e-4
    assert largest_gradient_gap(of_row, of_alone, floor) <= 1e-5


def test_padded_rows_hold_every_token_at_its_place():
    rows = PaddedRows(torch.tensor([0, 1, 2, 0, 0, 1]))
    tokens = torch.tensor([5, 6, 7, 8, 9, 4])
    assert rows.spread(tokens).tolist() == [[5, 6, 7], [8, 0, 0], [9, 4, 0]]
    assert torch.equal(rows.gather(rows.spread(tokens)), tokens)
    assert rows.gather(torch.zeros(3, 3, 2)).shape == (6, 2)


def test_a_shared_row_is_never_taken_for_whole_sequences():
    with pytest.raises(AssertionError):
        PaddedRows(torch.tensor([0, 1, 2, 3, 2, 3]))  # [P | R1 | R2]


# -- RoPE that depends on the longest position ----------------------------------------------------

ROPES = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


def changing(kind, length=16):
    """A model whose RoPE is the same up to so many tokens."""
    if kind == "longrope":
        changes = {"rope_parameters": ROPES[kind] | {"original_max_position_embeddings": length}}
    else:
        changes = {"rope_parameters": ROPES[kind], "max_position_embeddings": length}
    return tiny_model("llama", None, **GROUPED, **changes)


@pytest.mark.parametrize("kind", ROPES)
def test_rope_is_exact_up_to_the_length_at_which_it_changes(kind, tmp_path):
    reference = changing(kind)
    reference.save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path))
    assert policy.shares_prompts
    assert_same_as_alone(reference, policy, draw_sequences([16, 3, 9]))
    with pytest.raises(ValueError, match=rf"data\.max_prompt_length.*17.*{kind}"):
        packed_logits(policy, draw_sequences([17, 3]))


@pytest.mark.parametrize("kind", ROPES)
def test_rope_would_be_wrong_beyond_that_length(kind):
    """Otherwise the test above would refuse what is right."""
    model = changing(kind)
    long, short = draw_sequences([17, 5])
    with torch.no_grad():
        alone = model(input_ids=short[None], use_cache=False).logits[0]
        batch = torch.stack([long, torch.cat([short, long[5:]])])
        beside = model(input_ids=batch, use_cache=False).logits[1, :5]
    assert float((beside - alone).abs().max()) >= 1e-3


@pytest.mark.parametrize("kind", ROPES)
def test_lengths_that_rope_does_not_allow_are_told_by_their_keys(kind):
    config = changing(kind).config
    assert longest_exact(config) == (16, kind)
    check_rope("m", config, max_prompt_length=10, max_completion_length=6)
    told = r"data\.max_prompt_length \+ rollout\.max_completion_length.*10 \+ 7"
    with pytest.raises(ValueError, match=told) as error:
        check_rope("m", config, max_prompt_length=10, max_completion_length=7)
    assert "at most 16" in str(error.value) and kind in str(error.value)


def test_phi3_tells_its_first_length_outside_its_rope():
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=64,
        original_max_position_embeddings=24,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )
    assert longest_exact(config) == (24, "longrope")


def test_rope_of_a_kind_of_layer_counts():
    config = SimpleNamespace(
        rope_parameters={
            "full_attention": ROPES["longrope"] | {"original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "dynamic", "rope_theta": 1e4},
        },
        max_position_embeddings=48,
    )
    config.get_text_config = lambda: config
    assert longest_exact(config) == (32, "longrope")


def test_rope_that_stays_is_exact(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    reference = tiny_model("llama", rope_parameters=rope)
    assert longest_exact(reference.config) is None
    reference.save_pretrained(tmp_path)
    assert_same_as_alone(reference, Policy.load(str(tmp_path)), draw_sequences(LENGTHS))
