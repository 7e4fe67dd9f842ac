"""FlexAttention gives the same attention: its mask and when it is chosen (checked on the CPU)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl import devices
from easyrl.model.attention import SMALLEST_FLEX_HEAD_SIZE, PackedGroups
from easyrl.model.attention_kernels import AttentionSettings
from easyrl.model.flex_shared_prompt import FlexSharedPrompt
from easyrl.model.shared_prompt import SharedPrompt

torch.set_num_threads(1)

CPU = torch.device("cpu")
GROUPS = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(1, 6), max_size=4)), min_size=1, max_size=4
)
WINDOWS = st.none() | st.integers(1, 14)


def dense_mask(groups, window):
    """FlexAttention's mask of the row, evaluated for every pair: [T, T]."""
    num_tokens = sum(prompt + sum(completions) for prompt, completions in groups)
    indices = torch.arange(num_tokens)
    visible = FlexSharedPrompt(groups, CPU).visible(window)
    return visible(None, None, indices[:, None], indices[None, :])


def mask_by_definition(groups, window):
    """The mask token by token, from each one's group, completion (0: the prompt) and position."""
    tokens = [
        (group, segment, position)
        for group, (prompt, completions) in enumerate(groups)
        for segment, start, length in (
            (0, 0, prompt),
            *((i, prompt, length) for i, length in enumerate(completions, start=1)),
        )
        for position in range(start, start + length)
    ]
    return torch.tensor(
        [
            [
                q_group == k_group
                and k_segment in (0, q_segment)
                and k_position <= q_position
                and (window is None or q_position - k_position < window)
                for k_group, k_segment, k_position in tokens
            ]
            for q_group, q_segment, q_position in tokens
        ]
    )


@settings(max_examples=100)
@given(GROUPS, WINDOWS)
def test_mask_is_that_of_the_definition(groups, window):
    assert torch.equal(dense_mask(groups, window), mask_by_definition(groups, window))


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

    attention_settings = AttentionSettings(0, 0.7, window, softcap)
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


class Chosen(Exception):
    pass


@pytest.mark.parametrize(
    ("how", "dtype", "is_chosen"),
    [
        ((True, SMALLEST_FLEX_HEAD_SIZE, None), torch.bfloat16, True),
        ((True, SMALLEST_FLEX_HEAD_SIZE, None), torch.float16, True),
        ((True, SMALLEST_FLEX_HEAD_SIZE - 1, None), torch.bfloat16, False),
        ((True, SMALLEST_FLEX_HEAD_SIZE, None), torch.float32, False),
        ((True, SMALLEST_FLEX_HEAD_SIZE, 30.0), torch.bfloat16, False),
        ((False, SMALLEST_FLEX_HEAD_SIZE, None), torch.bfloat16, False),
    ],
)
def test_it_is_chosen_where_it_can_train(monkeypatch, how, dtype, is_chosen):
    def attend(*_):
        raise Chosen

    trains_flex, head_size, softcap = how
    monkeypatch.setattr(devices, "trains_flex_attention", lambda device: trains_flex)
    monkeypatch.setattr(FlexSharedPrompt, "attend", attend)
    row = torch.zeros(5, 2, head_size, dtype=dtype)
    layout = PackedGroups([(2, [2, 1])])
    asked = AttentionSettings(0, 1.0, None, softcap)
    if is_chosen:
        with pytest.raises(Chosen):
            layout.attend(row, row, row, asked)
    else:
        assert layout.attend(row, row, row, asked).shape == row.shape


def test_only_cuda_trains_it():
    kinds = {kind: devices.trains_flex_attention(torch.device(kind)) for kind in ("cpu", "cuda")}
    assert kinds == {"cpu": False, "cuda": True}
