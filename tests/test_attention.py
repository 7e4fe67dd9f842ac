"""Packed rows give what each sequence gives alone through transformers' own attention."""

import warnings
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from easyrl.model.attention import ATTENTION_NAME, PackedGroups
from easyrl.model.attention_kernels import AttentionSettings
from easyrl.model.policy import Policy

torch.set_num_threads(1)

VOCABULARY = 61
WINDOW = 5  # shorter than the longest sequence
LENGTHS = [3, 13, 1, 8]

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "qwen2": {"num_key_value_heads": 2},
    "qwen2_window": {
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {**GROUPED, "tie_word_embeddings": True},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": WINDOW},
    # A query scaling that is not head_dim ** -0.5, and soft-capping strong enough to be felt.
    "gemma2": {
        **GROUPED,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 3,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**GROUPED, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "gpt_neox": {"rotary_pct": 0.5},
    "phi3": {"num_key_value_heads": 2, "sliding_window": WINDOW},
    "olmo2": {"num_key_value_heads": 2},
    "qwen3_moe": {
        **GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    # Multi-head latent attention: values are smaller than queries and keys.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 3,
    },
}


def tiny_model(family, attention="eager", **changes):
    """A random float32 model, the same every time."""
    model_type = family.removesuffix("_window")
    config = AutoConfig.for_model(model_type, **(SIZES | FAMILIES.get(family, {}) | changes))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that a wrong mask shows in the first digit.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


@cache
def reference_and_policy(family):
    reference = tiny_model(family)
    policy = Policy(tiny_model(family, ATTENTION_NAME), torch.device("cpu"))
    return reference, policy


@pytest.fixture(autouse=True, scope="module")
def _registered(tmp_path_factory):
    """Loading a policy registers the attention function."""
    folder = tmp_path_factory.mktemp("any")
    tiny_model("llama").save_pretrained(folder)
    Policy.load(str(folder))


def draw_sequences(lengths, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def packed_logits(policy, sequences):
    """Logits of all tokens [T, V]."""
    lengths = [len(sequence) for sequence in sequences]
    return policy.forward(
        torch.cat(sequences),
        torch.cat([torch.arange(length) for length in lengths]),
        PackedGroups.of_sequences(lengths),
        logits_at=torch.arange(sum(lengths)),
    )


def separate_logits(reference, sequences):
    return torch.cat([reference(input_ids=s[None], use_cache=False).logits[0] for s in sequences])


def gradients(model, logits, sequences):
    """Of a random weighted sum of all log-probabilities of the next tokens."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(len(logits), generator=generator)
    targets = torch.cat([sequence.roll(-1) for sequence in sequences])
    model.zero_grad()
    (-F.cross_entropy(logits, targets, reduction="none") * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def largest_gradient_gap(got, expected, floor):
    """Largest over tensors of |difference| / max(|g|, floor |all g|) (DESIGN.md, invariant 4)."""
    assert got.keys() == expected.keys()
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    return max(
        float((got[name] - g).norm() / max(g.norm(), floor * total)) for name, g in expected.items()
    )


def assert_same_as_alone(reference, policy, sequences, floor=1e-4):
    expected, got = separate_logits(reference, sequences), packed_logits(policy, sequences)
    assert float((got - expected).detach().abs().max()) <= 1e-5
    gradients_got = gradients(policy.model, got, sequences)
    gradients_expected = gradients(reference, expected, sequences)
    assert largest_gradient_gap(gradients_got, gradients_expected, floor) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_equal_each_sequence_alone(family):
    reference, policy = reference_and_policy(family)
    assert_same_as_alone(reference, policy, draw_sequences(LENGTHS))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "phi3"])
def test_packed_sequences_equal_transformers_sdpa(family):
    _, policy = reference_and_policy(family)
    assert_same_as_alone(tiny_model(family, "sdpa"), policy, draw_sequences(LENGTHS))


@pytest.mark.parametrize("family", ["qwen2_window", "mistral", "gemma2", "gemma3_text", "phi3"])
def test_the_window_of_these_models_is_felt(family):
    """Otherwise the tests above could not see a window that is ignored."""
    unbounded = {"use_sliding_window": False} if "qwen" in family else {"sliding_window": 64}
    reference, _ = reference_and_policy(family)
    sequences = draw_sequences([13])
    with torch.no_grad():
        bounded = separate_logits(reference, sequences)
        gap = bounded - separate_logits(tiny_model(family, **unbounded), sequences)
    assert float(gap[:WINDOW].abs().max()) <= 1e-5
    assert float(gap[WINDOW:].abs().max()) >= 1e-2


def test_soft_capping_of_this_model_is_felt():
    reference, _ = reference_and_policy("gemma2")
    sequences = draw_sequences([13])
    with torch.no_grad():
        gap = separate_logits(reference, sequences) - separate_logits(
            tiny_model("gemma2", attn_logit_softcapping=None), sequences
        )
    assert float(gap.abs().max()) >= 1e-2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 2**31))
def test_any_ragged_row_equals_its_sequences_alone(lengths, seed):
    reference, policy = reference_and_policy("mistral")
    # In a row of two or three tokens a gradient can cancel down to float32's rounding.
    assert_same_as_alone(reference, policy, draw_sequences(lengths, seed), floor=1e-2)


def draw_groups(shapes, seed=2):
    """Of each (P, [R, ...]): a prompt and its completions."""
    pieces = draw_sequences([n for prompt, rs in shapes for n in (prompt, *rs)], seed)
    groups = []
    for _, completions in shapes:
        prompt = pieces.pop(0)
        groups.append((prompt, [pieces.pop(0) for _ in completions]))
    return groups


def assert_shared_same_as_alone(reference, policy, shapes, seed=2, floor=1e-4):
    """Logits that predict completion tokens, and every gradient, of `[P | R1 | R2 ...]` rows."""
    groups = draw_groups(shapes, seed)
    row, positions, places, sequences, alone_at = [], [], [], [], []
    for prompt, completions in groups:
        last_of_prompt = sum(map(len, row)) + len(prompt) - 1
        row.append(prompt)
        positions.append(torch.arange(len(prompt)))
        for completion in completions:
            start = sum(map(len, row))
            row.append(completion)
            positions.append(len(prompt) + torch.arange(len(completion)))
            places += [last_of_prompt, *range(start, start + len(completion) - 1)]
            begin = sum(map(len, sequences)) + len(prompt) - 1
            alone_at += range(begin, begin + len(completion))
            sequences.append(torch.cat([prompt, completion]))
    targets = torch.cat([c for _, completions in groups for c in completions])

    def loss(logits):
        weights = torch.randn(len(logits), generator=torch.Generator().manual_seed(3))
        return (-F.cross_entropy(logits, targets, reduction="none") * weights).sum()

    reference.zero_grad()
    expected = separate_logits(reference, sequences)[alone_at]
    loss(expected).backward()
    policy.model.zero_grad()
    got = policy.forward(
        torch.cat(row),
        torch.cat(positions),
        PackedGroups([(len(p), [len(c) for c in cs]) for p, cs in groups]),
        logits_at=torch.tensor(places),
    )
    loss(got).backward()
    assert float((got - expected).detach().abs().max()) <= 1e-5
    gap = largest_gradient_gap(
        {name: p.grad for name, p in policy.model.named_parameters()},
        {name: p.grad for name, p in reference.named_parameters()},
        floor,
    )
    assert gap <= 1e-5


SHARED_SHAPES = [(9, [4, 13, 1]), (3, [6]), (12, [2, 2, 17, 5])]


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_that_share_a_prompt_equal_each_sequence_alone(family):
    reference, policy = reference_and_policy(family)
    assert_shared_same_as_alone(reference, policy, SHARED_SHAPES)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 2**31),
)
def test_any_shared_row_equals_its_sequences_alone(shapes, seed):
    reference, policy = reference_and_policy("mistral")
    assert_shared_same_as_alone(reference, policy, shapes, seed, floor=1e-2)


def test_a_neighbour_changes_nothing_of_a_sequence():
    _, policy = reference_and_policy("gemma2")
    first, second, other = draw_sequences([7, 4, 11])
    with torch.no_grad():
        beside_second = packed_logits(policy, [first, second])[:7]
        beside_other = packed_logits(policy, [first, other])[:7]
    torch.testing.assert_close(beside_second, beside_other, rtol=0, atol=1e-5)


def test_a_loss_of_one_sequence_sends_no_gradient_to_the_others():
    """Padding repeats the row's first token; nothing of it may flow back."""
    layout = PackedGroups.of_sequences([2, 5, 1])
    query, key, value = (
        torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(i), requires_grad=True)
        for i in range(3)
    )
    attention = AttentionSettings(layer=0, scaling=0.5, sliding_window=None, softcap=None)
    layout.attend(query, key, value, attention)[2:7].square().sum().backward()
    for tensor in (query, key, value):
        assert torch.equal(tensor.grad[:2], torch.zeros(2, 2, 4))
        assert torch.equal(tensor.grad[7:], torch.zeros(1, 2, 4))
        assert tensor.grad[2:7].abs().sum() > 0


def test_attention_gradients_agree_with_finite_differences():
    """In float64, through padding, a window and shared key heads."""
    layout = PackedGroups.of_sequences([3, 1, 4])
    attention = AttentionSettings(layer=0, scaling=0.7, sliding_window=2, softcap=None)
    shapes = [(8, 4, 3), (8, 2, 3), (8, 2, 3)]
    inputs = [
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i, shape in enumerate(shapes)
    ]
    assert torch.autograd.gradcheck(
        lambda q, k, v: layout.attend(q, k, v, attention),
        [tensor.requires_grad_() for tensor in inputs],
    )


def test_heads_whose_elements_are_not_adjacent_are_attended_the_same():
    layout = PackedGroups([(3, [2, 4]), (1, [1])])
    attention = AttentionSettings(layer=0, scaling=0.5, sliding_window=None, softcap=None)
    generator = torch.Generator().manual_seed(0)
    adjacent = [torch.randn(11, 2, 8, generator=generator) for _ in range(3)]
    scattered = [x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in adjacent]
    assert torch.equal(layout.attend(*adjacent, attention), layout.attend(*scattered, attention))


def test_gradients_of_a_ragged_row_in_bfloat16_with_soft_capping():
    layout = PackedGroups([(9, [8, 10]), (3, [1])])
    attention = AttentionSettings(layer=0, scaling=0.5, sliding_window=None, softcap=2.0)
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(31, 2, 8, generator=generator).bfloat16().float() for _ in range(3)]
    rough = [x.bfloat16() for x in exact]
    for inputs in (exact, rough):
        layout.attend(*(x.requires_grad_() for x in inputs), attention).square().sum().backward()
    for x, y in zip(exact, rough, strict=True):
        assert (y.grad.float() - x.grad).norm() <= 0.02 * x.grad.norm()


def test_logits_come_back_for_the_places_asked_for_only():
    _, policy = reference_and_policy("gemma2")
    sequences = draw_sequences(LENGTHS)
    places = torch.tensor([24, 0, 7, 7])
    with torch.no_grad():
        every = packed_logits(policy, sequences)
        some = policy.forward(
            torch.cat(sequences),
            torch.cat([torch.arange(length) for length in LENGTHS]),
            PackedGroups.of_sequences(LENGTHS),
            logits_at=places,
        )
    torch.testing.assert_close(some, every[places], rtol=0, atol=1e-5)


# -- loading and saving ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_and_computes_the_same(family, tmp_path):
    reference, _ = reference_and_policy(family)
    reference.save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path))
    sequences = draw_sequences(LENGTHS)
    with torch.no_grad():
        gap = packed_logits(policy, sequences) - separate_logits(reference, sequences)
    assert float(gap.abs().max()) <= 1e-5
    assert policy.eos_token_ids == [2]


def test_a_model_saved_in_bfloat16_is_loaded_in_float32(tmp_path):
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path))
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}


def test_a_loaded_model_has_no_dropout(tmp_path):
    tiny_model("llama", attention_dropout=0.5).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path))
    sequences = draw_sequences(LENGTHS)
    with torch.no_grad():
        assert torch.equal(packed_logits(policy, sequences), packed_logits(policy, sequences))


def test_weights_come_in_name_order_and_tied_ones_once(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    names = [name for name, _ in Policy.load(str(tmp_path)).named_weights()]
    assert names == sorted(set(names))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_the_digest_tells_weights_apart_and_nothing_else(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    one, other = Policy.load(str(tmp_path)), Policy.load(str(tmp_path))
    assert one.weights_sha256() == other.weights_sha256()
    with torch.no_grad():
        weight = other.model.model.norm.weight
        weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    assert one.weights_sha256() != other.weights_sha256()


def test_the_digest_takes_weights_without_dimensions(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path))
    before = policy.weights_sha256()
    policy.model.register_parameter("logit_scale", torch.nn.Parameter(torch.tensor(1.0)))
    assert policy.weights_sha256() != before


# -- refusals -------------------------------------------------------------------------------------


def refusal(tmp_path, model_type, **changes):
    """The error of loading (and running) a model of this type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(model_type, **changes)
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"model\.path") as error:
            packed_logits(Policy.load(str(tmp_path)), draw_sequences(LENGTHS))
    return str(error.value)


def test_linear_attention_is_refused(tmp_path):
    config = AutoConfig.for_model("qwen3_next")
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.path: layer 0 of .* is of type linear_attention"):
        Policy.load(str(tmp_path))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_longest_neighbour_is_refused(kind, tmp_path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= factors | {"original_max_position_embeddings": 8}
    message = refusal(tmp_path, "llama", rope_parameters=rope)
    assert f"{kind} RoPE" in message and "rope_type" in message


def test_rope_that_stays_is_exact(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    reference = tiny_model("llama", rope_parameters=rope)
    reference.save_pretrained(tmp_path)
    assert_same_as_alone(reference, Policy.load(str(tmp_path)), draw_sequences(LENGTHS))


@pytest.mark.parametrize("model_type", ["bloom", "gptj", "falcon"])
def test_a_model_outside_the_attention_interface_is_refused(model_type, tmp_path):
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_dim": 4, "n_positions": 64}
    message = refusal(tmp_path, model_type, **sizes)
    assert "attention interface" in message


def test_attention_sinks_are_refused(tmp_path):
    message = refusal(tmp_path, "gpt_oss", **GROUPED, num_local_experts=2, num_experts_per_tok=1)
    assert "attention sinks" in message


def test_a_model_with_a_mask_of_its_own_is_refused(tmp_path):
    """Doge learns which keys to look at; its mask would be lost without a word."""
    message = refusal(tmp_path, "doge", num_key_value_heads=2, keep_window_size=4)
    assert "mask of its own" in message


def test_an_encoder_is_refused(tmp_path):
    """Its tokens look ahead; causally it would be another model than the one that was given."""
    assert "look ahead" in refusal(tmp_path, "bert")


def test_a_model_that_keeps_the_layout_from_its_layers_is_refused(tmp_path):
    assert "which tokens belong together" in refusal(tmp_path, "nemotron", **GROUPED)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": WINDOW}),
        ("phimoe", {"sliding_window": WINDOW}),
    ],
)
def test_a_window_that_only_transformers_mask_knows_is_refused(model_type, changes, tmp_path):
    experts = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    message = refusal(tmp_path, model_type, num_key_value_heads=2, **experts, **changes)
    assert "sliding window" in message


def test_a_layer_that_attends_twice_is_refused(tmp_path):
    """Differential attention: the engine keeps one set of keys and values per layer."""
    message = refusal(tmp_path, "diffllama", num_key_value_heads=2)
    assert "each layer's once" in message
