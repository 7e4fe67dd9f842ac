"""Packed rows give what each sequence gives alone through transformers' own attention; models that
cannot attend so are detected, reported and trained exactly."""

import copy
import math
from functools import cache
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.measuring import peak_bytes
from easyrl import devices
from easyrl.config import ConfigError
from easyrl.layout.tree import TokenTree
from easyrl.model import exactness
from easyrl.model.exactness import choose_attention
from easyrl.model.files import max_positions
from easyrl.model.inputs import ModelInputs
from easyrl.model.loading import load_policy
from easyrl.model.logprobs import token_logprobs
from easyrl.model.mixers import flex, sdpa
from easyrl.model.mixers.attention import ATTENTION_NAME, register_attention
from easyrl.model.mixers.flex import FlexAttention
from easyrl.model.mixers.interface import LayerSettings
from easyrl.model.mixers.packed_row import (
    SMALLEST_FLEX_HEAD_SIZE,
    AttentionKernels,
    LayerShape,
    PackedRow,
)
from easyrl.model.mixers.sdpa import Block, SdpaAttention, attend_block
from easyrl.model.policy import Policy
from exact_trees import InFloat64, assert_tree_is_exact
from tiny_models import (
    FAMILIES,
    LENGTHS,
    SPREAD,
    UNSHARED,
    VOCABULARY,
    WITH_SINKS,
    assert_same_as_alone,
    dense_mask,
    draw_sequences,
    gradients,
    largest_gradient_gap,
    lay_out,
    packed_logits,
    separate_logits,
    tiny_model,
    tree_of,
)

CPU = torch.device("cpu")
register_attention()


@cache
def reference_and_policy(family):
    reference = tiny_model(family).double()
    return reference, Policy(tiny_model(family, ATTENTION_NAME).double(), torch.device("cpu"))


def assert_shared_same_as_alone(reference, policy, shapes, seed=2):
    """Compare logits that predict completion tokens, and every gradient."""
    sequences = lay_out(shapes)
    tree = tree_of(shapes)
    (tokens,) = draw_sequences([tree.num_tokens], seed)
    completions = [length for _, lengths in shapes for length in lengths]
    logits_at, alone_at, targets, start = [], [], [], 0
    for sequence, length in zip(sequences, completions, strict=True):
        logits_at.append(sequence[-length - 1 : -1])
        targets.append(tokens[sequence[-length:]])
        start += len(sequence)
        alone_at.append(torch.arange(start - length - 1, start - 1))
    targets = torch.cat(targets)

    def loss(logits):
        weights = torch.randn(len(logits), generator=torch.Generator().manual_seed(3))
        return (-F.cross_entropy(logits, targets, reduction="none") * weights).sum()

    reference.zero_grad()
    expected = separate_logits(reference, [tokens[sequence] for sequence in sequences])
    expected = expected[torch.cat(alone_at)]
    loss(expected).backward()
    policy.model.zero_grad()
    got = policy.forward(ModelInputs.of_row(tokens, tree, torch.cat(logits_at)))
    loss(got).backward()
    assert float((got - expected).detach().abs().max()) <= 1e-5
    gap = largest_gradient_gap(
        {name: p.grad for name, p in policy.model.named_parameters()},
        {name: p.grad for name, p in reference.named_parameters()},
    )
    assert gap <= 1e-5


@pytest.mark.parametrize("family", WITH_SINKS)
def test_a_tree_with_sinks_gives_the_log_probabilities_and_gradients_of_its_sequences(family):
    model = tiny_model(family, "eager").double()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_(1.0, 2.0)  # some outweigh all keys, others none
    tree = tree_of([(9, [4, 13, 1]), (3, [6]), (5, [3, 1, 2, 7], [0, 1, 1, 3])])
    assert_tree_is_exact(model, tree)
    assert all(weight.grad.all() for name, weight in model.named_parameters() if "sinks" in name)


SHARED_SHAPES = [(9, [4, 13, 1]), (3, [6]), (12, [2, 2, 17, 5])]


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_model_computes_shared_prompts_as_each_sequence_alone(family, tmp_path):
    reference = tiny_model(family)
    reference.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), attention="shared_prompt")
    assert policy.no_packing_reason is None and policy.shares_prompts
    assert policy.eos_token_ids == [2]
    assert not load_policy(str(tmp_path), attention="repeated").shares_prompts
    for model in (reference, policy.model):
        model.double()  # rounding in float32 differs from one processor to another
        model.set_experts_implementation("eager")  # the fused one has no float64
    with InFloat64():  # Flint's scores and routers ask for float32
        assert_shared_same_as_alone(reference, policy, SHARED_SHAPES)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 2**31),
    st.sampled_from(("mistral", "qwen3", "olmo2", "gpt_neox")),
)
def test_any_shared_row_equals_its_sequences_alone(shapes, seed, family):
    # Gradients of queries and keys that cancel (those of `(1, [1])` alone are 0) are rounding.
    reference, policy = reference_and_policy(family)
    assert_shared_same_as_alone(reference, policy, shapes, seed)


@pytest.mark.parametrize("window", [None, 40])
def test_whole_sequences_are_attended_without_stored_scores(monkeypatch, window):
    """Prompts of the embedded engine. The result is that of the trainer's attention."""
    lengths, heads = (300, 300, 170, 5), 6
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(sum(lengths), heads, 16, generator=generator)
    key, value = torch.randn(2, sum(lengths), 2, 16, generator=generator)
    layout = SdpaAttention(TokenTree.of_sequences(lengths), CPU)
    layer = LayerSettings(layer=0, scaling=0.3, sliding_window=window, softcap=None)
    expected = layout.attend(query, key, value, layer)
    monkeypatch.setattr(sdpa, "is_fused", lambda block, settings: False)
    outputs = []
    peak = peak_bytes(
        lambda: outputs.append(layout.attend_sequences(query, key, value, layer)), CPU
    )
    assert torch.equal(outputs[0], expected)
    assert peak < heads * max(lengths) ** 2 * 4  # of one sequence alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_are_float32_without_a_fused_kernel(monkeypatch, dtype):
    """Rounded to bfloat16 they gave an error of 0.8 % instead of 0.2 %."""
    monkeypatch.setattr(sdpa, "is_fused", lambda block, settings: False)
    query, *others = torch.randn(3, 2, 4, 99, 64, generator=torch.Generator().manual_seed(0))
    tensors = [x.to(dtype) for x in (8 * query, *others)]
    block = Block(*tensors, is_causal=True, bias=None)
    output, _ = attend_block(block, LayerSettings(0, 64**-0.5, None, None))
    expected = F.scaled_dot_product_attention(*(x.double() for x in tensors), is_causal=True)
    assert (output - expected).norm() < 0.003 * expected.norm()


@st.composite
def drawn_tree(draw):
    """In depth-first order, a segment continues the one before it or one above that."""
    lengths, above, parents = draw(st.lists(st.integers(1, 6), max_size=5)), [0], []
    for number in range(len(lengths)):
        above = above[: draw(st.integers(1, len(above)))]
        parents.append(above[-1])
        above.append(number + 1)
    return draw(st.integers(1, 7)), lengths, parents


PLAIN = st.tuples(st.integers(1, 7), st.lists(st.integers(1, 6), max_size=4))
GROUPS = st.lists(PLAIN | drawn_tree(), min_size=1, max_size=4)
WINDOWS = st.none() | st.integers(1, 14)


@settings(max_examples=60)
@given(GROUPS, WINDOWS, st.sampled_from([None, 1.5]), st.sampled_from([1, 3]), st.booleans())
def test_attention_with_that_mask_equals_the_blocks(
    groups, window, softcap, num_queries, has_sinks
):
    tree = tree_of(groups)
    mask = dense_mask(tree, window)
    generator = torch.Generator().manual_seed(len(mask))

    def draw(heads):
        return torch.randn(
            len(mask), heads, 4, dtype=torch.float64, generator=generator, requires_grad=True
        )

    query, key, value = draw(2 * num_queries), draw(2), draw(2)
    weights = torch.randn(query.shape, dtype=torch.float64, generator=generator)
    inputs = [query, key, value]
    sinks = None
    if has_sinks:
        sinks = draw(2 * num_queries)[0, :, 0].detach().requires_grad_()
        inputs.append(sinks)

    def gradients(output):
        return torch.autograd.grad((output * weights).sum(), inputs)

    attention_settings = LayerSettings(0, 0.7, window, softcap)
    got = SdpaAttention(tree, CPU).attend(query, key, value, attention_settings, sinks)
    keys, values = (x.repeat_interleave(num_queries, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * 0.7
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if has_sinks:  # one more key, whose value is 0
        of_sinks = sinks[:, None, None].expand(-1, len(mask), 1)
        scores = torch.cat([scores, of_sinks], dim=-1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    probabilities = scores.softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", probabilities, values)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    for ours, dense in zip(gradients(got), gradients(expected), strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-11)


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """FlexAttention by torch's plain operations. On GPUs `test_gpu` compares the kernels."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # refuses gradients
    monkeypatch.setattr(flex, "_compiled", lambda function: function)
    monkeypatch.setattr(flex, "_kernel_options", lambda query: {})


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("window", [None, 5])
def test_flex_attention_with_sinks_equals_the_blocks(window):
    tree = tree_of([(9, [4, 13, 1]), (5, [3, 1, 2, 7], [0, 1, 1, 3])])
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        drawn = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return drawn.requires_grad_()

    query, sinks = draw(tree.num_tokens, 6, SIZE), draw(6)
    key, value = draw(tree.num_tokens, 2, SIZE), draw(tree.num_tokens, 2, SIZE)
    weights = draw(*query.shape).detach()
    attention = LayerSettings(0, 0.7, window, None)
    results = []
    for layout in (FlexAttention(tree, CPU), SdpaAttention(tree, CPU)):
        output = layout.attend(query, key, value, attention, sinks)
        loss = (output * weights).sum()
        results.append([output, *torch.autograd.grad(loss, (query, key, value, sinks))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


SIZE = SMALLEST_FLEX_HEAD_SIZE
GROUP = TokenTree.of_group(2, [2, 1])


def test_it_is_chosen_where_it_can_train(monkeypatch):
    def is_chosen(trains_flex=True, head_size=SIZE, softcap=None, dtype=torch.bfloat16):
        monkeypatch.setattr(devices, "trains_flex_attention", lambda device: trains_flex)
        row = torch.zeros(5, 2, head_size, dtype=dtype)
        attention = LayerSettings(0, 1.0, None, softcap)
        return PackedRow(GROUP).attend(row, row, row, attention) is None

    monkeypatch.setattr(FlexAttention, "attend", lambda *_: None)
    monkeypatch.setattr(flex, "failure", lambda *_: None)
    assert is_chosen()
    assert not is_chosen(trains_flex=False) and not is_chosen(head_size=SIZE - 1)
    assert not is_chosen(softcap=30.0) and not is_chosen(dtype=torch.float32)


def test_blocks_take_over_with_a_note_where_flex_attention_cannot_train(monkeypatch):
    fail = Mock(side_effect=RuntimeError("no C compiler\nmore"))
    monkeypatch.setattr(devices, "trains_flex_attention", lambda device: True)
    monkeypatch.setattr(flex, "_compiled", fail)
    kernels = AttentionKernels()
    kernels.report = Mock()
    query = torch.randn(5, 4, SIZE).bfloat16()
    key, settings = query[:, :2], LayerSettings(0, 1.0, None, None)
    with torch.no_grad():
        for _ in range(2):
            got = PackedRow(GROUP, kernels=kernels).attend(query, key, key, settings)
    assert torch.equal(got, SdpaAttention(GROUP, CPU).attend(query, key, key, settings))
    ((note,), _) = kernels.report.call_args
    assert note.endswith("FlexAttention, exact but slower: no C compiler")
    assert kernels.report.call_count == fail.call_count == 1


@pytest.mark.usefixtures("flex_on_cpu")
def test_a_kernel_whose_log_sum_exp_is_wrong_is_found_before_it_is_used(monkeypatch):
    correct = flex.flex_attention

    def in_powers_of_two(*inputs, **options):
        output, auxiliary = correct(*inputs, **options)
        return output, auxiliary._replace(lse=auxiliary.lse / math.log(2))

    def without_gradient(*inputs, **options):
        output, auxiliary = correct(*inputs, **options)
        return output, auxiliary._replace(lse=auxiliary.lse.detach())

    heads = torch.Size((4, SIZE))
    layer = LayerShape(CPU, torch.bfloat16, heads, heads, sliding_window=1, has_sinks=True)
    assert flex.failure(layer) is None
    assert flex.failure(layer._replace(has_sinks=False)) is None
    for wrong in (in_powers_of_two, without_gradient):
        monkeypatch.setattr(flex, "flex_attention", wrong)
        assert flex.failure(layer) == "its kernels give other results"


def test_layers_are_recomputed_although_the_first_has_tried_the_kernels(monkeypatch):
    monkeypatch.setattr(devices, "trains_flex_attention", lambda device: True)
    monkeypatch.setattr(flex, "FlexAttention", SdpaAttention)
    row = torch.randn(5, 2, SIZE).bfloat16().requires_grad_()
    settings, kernels = LayerSettings(0, 1.0, None, None), AttentionKernels()

    def layer(x):
        return PackedRow(GROUP, kernels=kernels).attend(x, x, x, settings)

    output = checkpoint(layer, row, use_reentrant=False)
    (got,) = torch.autograd.grad(output.square().sum(), row)
    assert [*kernels._can_train.values()] == [True]
    (expected,) = torch.autograd.grad(layer(row).square().sum(), row)
    assert torch.equal(got, expected) and got.any()


def test_recomputed_layers_see_the_row_of_their_forward_after_another_row_has_run():
    rows = [draw_sequences(lengths) for lengths in (LENGTHS, [7, 2, 9, 4, 3])]
    policy = Policy(tiny_model("qwen3", ATTENTION_NAME), CPU)
    expected = [gradients(policy.model, packed_logits(policy, row), row) for row in rows]
    policy.checkpoint_activations()
    logits = [packed_logits(policy, row) for row in rows]
    for row, of_row, ours in zip(rows, logits, expected, strict=True):
        got = gradients(policy.model, of_row, row)
        assert got.keys() == ours.keys()
        assert all(torch.equal(got[name], gradient) for name, gradient in ours.items())


def test_digest_depends_on_every_weight_and_nothing_else(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    one, other = (load_policy(str(tmp_path)) for _ in range(2))
    names = [name for name, _ in one.named_weights()]
    assert names == sorted(set(names))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert one.weights_sha256() == other.weights_sha256()
    with torch.no_grad():
        weight = other.model.model.norm.weight
        weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    assert one.weights_sha256() != other.weights_sha256()


# -- models that cannot attend in packed rows ------------------------------------------------------


@cache
def policy_of(model_type):
    model = tiny_model(model_type, None, SPREAD, **UNSHARED[model_type][0])
    return Policy(model, torch.device("cpu"), no_packing_reason=choose_attention(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_check_of_a_model_in_bfloat16_needs_no_wide_copy_of_its_vocabulary(
    family, tmp_path, monkeypatch
):
    """That would be a third of a small model's host memory. The weights stay as they are stored."""
    monkeypatch.setattr(exactness, "CHECKED_WORDS", 20)
    model = tiny_model(family, None, pad_token_id=VOCABULARY - 1).bfloat16()
    model.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), dtype=None)
    assert policy.no_packing_reason == choose_attention(tiny_model(family, None))
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
        ("modernbert-decoder", {}, "last hidden states alone"),
        ("rwkv", {"attention_hidden_size": 32, "context_length": 64}, "changes its weights"),
    ],
)
def test_what_cannot_be_trained_or_not_with_shared_prompts_is_refused(
    model_type, changes, reason, tmp_path
):
    tiny_model(model_type, None, **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"model\.(attention|path).*{reason}"):
        load_policy(str(tmp_path), attention="shared_prompt")


def test_fast_kernel_that_gives_other_results_is_replaced_by_eager(monkeypatch):
    """transformers 5.17 gave Gemma 2 one without soft-capping."""
    for gap, expected in ((exactness._gap_to_eager, "sdpa"), (lambda *_: "wrong", "eager")):
        model = policy_of("qwen2_moe").model
        model.set_attn_implementation("sdpa")
        monkeypatch.setattr(exactness, "_gap_to_eager", gap)
        assert choose_attention(model) is not None
        assert model.config._attn_implementation == expected


@pytest.mark.parametrize(("no_rope", "scale"), [([1, 0, 1], 4), ([1, 0, 1], 8192), ([1, 1, 1], 4)])
def test_rule_by_a_tokens_place_in_the_row_is_found_before_it_applies(no_rope, scale, tmp_path):
    """Llama 4 scales the queries of layers without RoPE, from place `floor_scale` on."""
    changes = UNSHARED["llama4_text"][0] | {"layer_types": ["full_attention"] * 3}
    changes |= {"no_rope_layers": no_rope, "floor_scale": scale, "attn_scale": 0.5}
    reference = tiny_model("llama4_text", "eager", SPREAD, **changes)
    reference.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
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
        return choose_attention(model)

    monkeypatch.setattr("easyrl.model.loading.choose_attention", check)
    with pytest.raises(ConfigError, match="cannot run"):
        load_policy(folder)
    one, other = (load_policy(folder, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert one.shares_prompts is other.shares_prompts is (family == "qwen3")
    assert one.no_packing_reason == other.no_packing_reason and len(checked) == 2
    assert one.model.config._attn_implementation == other.model.config._attn_implementation
    next(model.parameters()).data += 1.0
    model.save_pretrained(folder)
    load_policy(folder)
    for entry in (tmp_path / "cache/easyrl/checked").iterdir():
        entry.write_text("[nul")  # its process was killed while it wrote
    load_policy(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # no cache
    load_policy(folder)
    assert len(checked) == 5


def test_wrong_result_is_reported(monkeypatch):
    """Layer 1 attends to neighbours too: visible in the numbers alone."""
    attend = PackedRow.attend

    def wrong(self, query, key, value, settings, *sinks):
        if settings.layer == 1:
            value = value.mean(0, keepdim=True).expand_as(value)
        return attend(self, query, key, value, settings, *sinks)

    model = tiny_model("llama", None)
    monkeypatch.setattr(PackedRow, "attend", wrong)
    assert choose_attention(model).startswith("a packed row gives other results")
    model.forward = Mock(side_effect=RuntimeError("no such kernel"))  # nor can transformers alone
    with pytest.raises(ConfigError, match=r"model\.path(.|\n)*no such kernel"):
        choose_attention(model)


@pytest.mark.parametrize("model_type", UNSHARED)
def test_unsupported_layer_is_named_and_trained_as_in_separate_sequences(model_type):
    """Gradients are computed in float64."""
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
    assert largest_gradient_gap(of_row, of_alone) <= 1e-5


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
    policy = load_policy(str(tmp_path))
    assert policy.shares_prompts
    assert_same_as_alone(reference, policy, draw_sequences([16, 3, 9]))
    # With a longer sequence beside it is not, so such lengths are refused.
    assert max_positions(reference.config.to_dict()) == 16
