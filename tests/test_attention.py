"""Packed rows give what each sequence gives alone through transformers' own attention."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from benchmarks.measuring import peak_bytes
from easyrl import devices
from easyrl.model import flex_shared_prompt, shared_prompt
from easyrl.model.attention import (
    ATTENTION_NAME,
    SMALLEST_FLEX_HEAD_SIZE,
    PackedGroups,
    notes,
    register_attention,
)
from easyrl.model.flex_shared_prompt import FlexSharedPrompt
from easyrl.model.policy import Policy
from easyrl.model.shared_prompt import Block, LayerSettings, SharedPrompt, attend_block
from tiny_models import (
    FAMILIES,
    draw_sequences,
    largest_gradient_gap,
    lay_out,
    separate_logits,
    tiny_model,
)

torch.set_num_threads(1)

CPU = torch.device("cpu")


register_attention()


@cache
def reference_and_policy(family):
    """In float64: see `test_any_shared_row_equals_its_sequences_alone`."""
    reference = tiny_model(family).double()
    return reference, Policy(tiny_model(family, ATTENTION_NAME).double(), torch.device("cpu"))


def assert_shared_same_as_alone(reference, policy, shapes, seed=2):
    """Compare logits that predict completion tokens, and every gradient, of `[P | R1 | R2 ...]`
    rows with each sequence alone."""
    positions, sequences = lay_out(shapes)
    (tokens,) = draw_sequences([len(positions)], seed)
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
    got = policy.forward(tokens, positions, PackedGroups(shapes), logits_at=torch.cat(logits_at))
    loss(got).backward()
    assert float((got - expected).detach().abs().max()) <= 1e-5
    gap = largest_gradient_gap(
        {name: p.grad for name, p in policy.model.named_parameters()},
        {name: p.grad for name, p in reference.named_parameters()},
    )
    assert gap <= 1e-5


SHARED_SHAPES = [(9, [4, 13, 1]), (3, [6]), (12, [2, 2, 17, 5])]


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_model_computes_shared_prompts_as_each_sequence_alone(family, tmp_path):
    reference = tiny_model(family)
    reference.save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path), attention="shared_prompt")
    assert policy.no_packing_reason is None and policy.shares_prompts
    assert policy.eos_token_ids == [2]
    if family != "qwen3_moe":  # torch has no product of experts in float64
        for model in (reference, policy.model):
            model.double()  # rounding in float32 differs from one processor to another
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
    layout = SharedPrompt([(length, ()) for length in lengths], CPU)
    layer = LayerSettings(layer=0, scaling=0.3, sliding_window=window, softcap=None)
    expected = layout.attend(query, key, value, layer)
    monkeypatch.setattr(shared_prompt, "is_fused", lambda block, settings: False)
    outputs = []
    peak = peak_bytes(
        lambda: outputs.append(layout.attend_sequences(query, key, value, layer)), CPU
    )
    assert torch.equal(outputs[0], expected)
    assert peak < heads * max(lengths) ** 2 * 4  # of one sequence alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_are_float32_without_a_fused_kernel(monkeypatch, dtype):
    """Rounded to bfloat16 they gave an error of 0.8 % instead of 0.2 %."""
    monkeypatch.setattr(shared_prompt, "is_fused", lambda block, settings: False)
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


def dense_mask(groups, window):
    """FlexAttention's mask of the row, evaluated for every pair: [T, T]."""
    num_tokens = sum(prompt + sum(completions) for prompt, completions, *_ in groups)
    indices = torch.arange(num_tokens)
    visible = FlexSharedPrompt(groups, CPU).visible(window)
    return visible(None, None, indices[:, None], indices[None, :])


@settings(max_examples=60)
@given(GROUPS, WINDOWS, st.sampled_from([None, 1.5]), st.sampled_from([1, 3]))
def test_attention_with_that_mask_equals_the_blocks(groups, window, softcap, num_queries):
    mask = dense_mask(groups, window)
    generator = torch.Generator().manual_seed(len(mask))

    def draw(heads):
        return torch.randn(
            len(mask), heads, 4, dtype=torch.float64, generator=generator, requires_grad=True
        )

    query, key, value = draw(2 * num_queries), draw(2), draw(2)
    weights = torch.randn(query.shape, dtype=torch.float64, generator=generator)

    def gradients(output):
        (output * weights).sum().backward()
        found = [tensor.grad for tensor in (query, key, value)]
        for tensor in (query, key, value):
            tensor.grad = None
        return found

    attention_settings = LayerSettings(0, 0.7, window, softcap)
    got = SharedPrompt(groups, CPU).attend(query, key, value, attention_settings)
    keys, values = (x.repeat_interleave(num_queries, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * 0.7
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    probabilities = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", probabilities, values)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    for ours, dense in zip(gradients(got), gradients(expected), strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-11)


SIZE = SMALLEST_FLEX_HEAD_SIZE


@pytest.mark.parametrize(
    ("trains_flex", "head_size", "softcap", "dtype"),
    [
        (True, SIZE, None, torch.bfloat16),
        (True, SIZE - 1, None, torch.bfloat16),
        (True, SIZE, None, torch.float32),
        (True, SIZE, 30.0, torch.bfloat16),
        (False, SIZE, None, torch.bfloat16),
    ],
)
def test_it_is_chosen_where_it_can_train(monkeypatch, trains_flex, head_size, softcap, dtype):
    """In the first case alone."""
    monkeypatch.setattr(devices, "trains_flex_attention", lambda device: trains_flex)
    monkeypatch.setattr(FlexSharedPrompt, "attend", lambda *_: None)
    monkeypatch.setattr(flex_shared_prompt, "trains", lambda *_: True)
    row = torch.zeros(5, 2, head_size, dtype=dtype)
    attention = LayerSettings(0, 1.0, None, softcap)
    output = PackedGroups([(2, [2, 1])]).attend(row, row, row, attention)
    is_first = (trains_flex, head_size, softcap, dtype) == (True, SIZE, None, torch.bfloat16)
    assert (output is None) == is_first


def test_blocks_take_over_with_a_note_where_flex_attention_cannot_train(monkeypatch):

    def fail(function):
        raise RuntimeError("no C compiler\nmore")

    monkeypatch.setattr(devices, "trains_flex_attention", lambda device: True)
    monkeypatch.setattr(flex_shared_prompt, "_compiled", fail)
    flex_shared_prompt.trains.cache_clear()
    query = torch.randn(5, 4, SIZE).bfloat16()
    key, settings = query[:, :2], LayerSettings(0, 1.0, None, None)
    with torch.no_grad():
        for _ in range(2):
            got = PackedGroups([(2, [2, 1])]).attend(query, key, key, settings)
    assert torch.equal(got, SharedPrompt([(2, [2, 1])], "cpu").attend(query, key, key, settings))
    assert notes.pop().endswith("FlexAttention, exact but slower: no C compiler") and not notes


def test_layers_are_recomputed_although_the_first_has_tried_the_kernels(monkeypatch):
    """`train.activation_checkpointing`."""

    def squares(layout, query, key, value, settings):
        return query**2 + 0 * key.sum()

    monkeypatch.setattr(devices, "trains_flex_attention", lambda device: True)
    monkeypatch.setattr(FlexSharedPrompt, "attend", squares)
    flex_shared_prompt.trains.cache_clear()
    row = torch.randn(5, 2, SIZE).bfloat16().requires_grad_()
    settings = LayerSettings(0, 1.0, None, None)

    def layer(x):
        return PackedGroups([(2, [2, 1])]).attend(x, x, x, settings)

    output = checkpoint(layer, row, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), row), (2 * row,))
    assert not notes
    flex_shared_prompt.trains.cache_clear()


def saved(tmp_path, family, dtype=torch.float32, **changes):
    tiny_model(family, **changes).to(dtype).save_pretrained(tmp_path)
    return str(tmp_path)


def test_digest_depends_on_every_weight_and_nothing_else(tmp_path):
    """Weights are in name order, and tied ones have one name."""
    path = saved(tmp_path, "qwen3")
    one, other = Policy.load(path), Policy.load(path)
    names = [name for name, _ in one.named_weights()]
    assert names == sorted(set(names))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert one.weights_sha256() == other.weights_sha256()
    with torch.no_grad():
        weight = other.model.model.norm.weight
        weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    assert one.weights_sha256() != other.weights_sha256()
