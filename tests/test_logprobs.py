"""Log-probabilities in chunks: the same numbers and gradients, without all logits at once."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.measuring import peak_bytes
from easyrl.engines.base import SamplingSettings
from easyrl.engines.sampling import sample
from easyrl.layout.tree import TokenTree
from easyrl.model.inputs import ModelInputs
from easyrl.model.loading import check_head
from easyrl.model.logprobs import chunked_token_logprobs, token_logprobs
from easyrl.model.mixers.attention import ATTENTION_NAME, register_attention
from easyrl.model.policy import Policy
from tiny_models import largest_gradient_gap, plain_logprobs, tiny_model

VOCABULARY = 37
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma2": {"final_logit_softcapping": 0.5},  # small enough to matter
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "gemma4_text": {  # reads the shape of the tokens
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": 0.5,
    },
    "gpt_neox": {},
    "qwen3_moe": {"output_router_logits": True},
}


def make_policy(family):
    register_attention()
    ends = {"bos_token_id": 0, "eos_token_id": 0, "num_key_value_heads": 2}
    model = tiny_model(family, ATTENTION_NAME, 0.3, 0, **(SIZES | ends | HEADS[family]))
    return Policy(model, torch.device("cpu"))


def head_alone(head, vocabulary_size, weights):
    return SimpleNamespace(
        head=head, vocabulary_size=vocabulary_size, trained_parameters=lambda: weights
    )


def gap(got, expected):
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


@settings(max_examples=40)
@given(
    num_tokens=st.integers(1, 23),
    rows_per_chunk=st.integers(1, 30),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    bonus=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**31),
)
def test_chunks_change_neither_numbers_nor_gradients(
    num_tokens, rows_per_chunk, temperature, bonus, seed
):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 8, generator=generator).requires_grad_()
    weight = torch.randn(41, 8, generator=generator).requires_grad_()
    targets = torch.randint(41, (num_tokens,), generator=generator)
    wanted = torch.randn(num_tokens, generator=generator)  # the loss's weight of each token

    expected = plain_logprobs(hidden @ weight.T, targets, temperature)
    # If all targets are nearly certain, their gradient is the small difference 1 - p: float32
    # rounding is then large relative to it, in any implementation.
    assume(float(expected[0].detach().exp().min()) < 0.9)
    loss = (expected[0] * wanted).sum() + bonus * (expected[1] * wanted.flip(0)).sum()
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("easyrl.model.logprobs.CPU_CHUNK_BYTES", rows_per_chunk * 41 * 4)
        got = chunked_token_logprobs(
            head_alone(lambda rows: rows @ weight.T, 41, [weight]),
            hidden,
            targets,
            temperature,
            entropy_gradient=bonus > 0,
        )
    assert got[1].requires_grad == (bonus > 0)
    loss = (got[0] * wanted).sum() + bonus * (got[1] * wanted.flip(0)).sum()
    loss.backward()
    torch.testing.assert_close(got[0].double(), expected[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-5, atol=2e-6)
    assert gap(hidden.grad, of_hidden) <= 2e-6
    assert gap(weight.grad, of_weight) <= 2e-6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_in_bfloat16_are_reduced_in_float32(temperature):
    logits = (torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    logits.requires_grad_()
    before = logits.detach().clone()
    targets = torch.arange(5)
    logprobs, entropy = token_logprobs(logits, targets, temperature)
    logprobs.sum().backward()
    expected = plain_logprobs(logits.detach(), targets, temperature)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-6)
    assert logits.grad.dtype == torch.bfloat16
    assert torch.equal(logits.detach(), before)  # the model's own tensor is unchanged


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tail_of_262144_words_is_not_lost(temperature):
    """torch.log_softmax in float32 is off by 1e-5 and 3e-5 here, its gradient by 5e-6."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(4, 2**18, generator=generator)).requires_grad_()
    uniforms = torch.rand(4, generator=generator, dtype=torch.float64)
    how = SamplingSettings(max_prompt_length=1, max_completion_length=1, temperature=temperature)
    tokens, of_engine = sample(logits.detach(), uniforms, how)
    got, expected = (f(logits, tokens, temperature) for f in (token_logprobs, plain_logprobs))
    assert torch.equal(of_engine, got[0])
    torch.testing.assert_close(got[0].double(), expected[0], rtol=0.0, atol=3e-6)
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-6, atol=0.0)
    sums = ((each[0] * torch.tensor([1.0, -0.5, 0.3, -1.0])).sum() for each in (got, expected))
    assert gap(*(torch.autograd.grad(each, logits)[0] for each in sums)) <= 5e-7


def test_head_of_qwen3_is_read_10_times_per_16384_tokens():
    """Qwen3-1.7B on an accelerator, where nothing is computed here."""
    with torch.device("meta"):
        hidden = torch.empty(16_384, 2048, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(151_936, 2048, dtype=torch.bfloat16, requires_grad=True)
        targets, chunks = torch.empty(16_384, dtype=torch.int64), []
    head = head_alone(lambda x: chunks.append(x) or x @ weight.T, 151_936, [weight])
    logprobs, _ = chunked_token_logprobs(head, hidden, targets, 1.0)
    assert len(chunks) == 10  # of at most a gibibyte
    logprobs.sum().backward()
    assert len(chunks) == 20  # and each one's gradient reads it once more


@pytest.mark.parametrize("num_kept", [2, 5, 9])
def test_kept_logits_change_no_bit_and_are_not_computed_again(num_kept, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=generator).requires_grad_()
    weight = torch.randn(41, 8, generator=generator).requires_grad_()
    targets = torch.randint(41, (23,), generator=generator)
    chunk_bytes = 5 * 41 * 4
    monkeypatch.setattr("easyrl.model.logprobs.CPU_CHUNK_BYTES", chunk_bytes)

    def numbers_of(kept_bytes):
        monkeypatch.setattr("easyrl.model.logprobs.CPU_KEPT_BYTES", kept_bytes)
        calls = []
        head = head_alone(lambda rows: calls.append(len(rows)) or rows @ weight.T, 41, [weight])
        logprobs, entropies = chunked_token_logprobs(
            head, hidden, targets, 0.7, entropy_gradient=True
        )
        loss = logprobs.cumsum(0).sum() + 0.3 * entropies.sum()
        num_in_forward = len(calls)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        return num_in_forward, [logprobs, entropies, *gradients], calls

    num_forward, expected, calls = numbers_of(kept_bytes=0)
    assert (num_forward, len(calls)) == (5, 10)
    num_forward, got, calls = numbers_of(kept_bytes=num_kept * chunk_bytes)
    assert (num_forward, len(calls)) == (5, 10 - min(num_kept, 5))
    assert all(map(torch.equal, got, expected))


def test_many_chunks_add_the_gradient_of_a_bfloat16_head_without_rounding(monkeypatch):
    """Autograd's own sum over 149 chunks is four times as far off."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(149 * 8, 64, generator=generator).bfloat16()
    weights = (torch.randn(512, 64, generator=generator) / 8).bfloat16()
    targets = torch.randint(512, (149 * 8,), generator=generator)
    wanted, gradients = torch.randn(149 * 8, generator=generator), []
    for num_rows, weight in ((8, weights), (149 * 8, weights.float())):
        monkeypatch.setattr("easyrl.model.logprobs.CPU_CHUNK_BYTES", num_rows * 512 * 4)
        head = head_alone(lambda x, w=weight: x.to(w.dtype) @ w.T, 512, [weight.requires_grad_()])
        (chunked_token_logprobs(head, hidden, targets, 1.0)[0] * wanted).sum().backward()
        gradients.append(weight.grad.double())
    assert gap(*gradients) <= 0.004


@pytest.mark.parametrize("family", HEADS)
def test_chunks_run_the_whole_head_of_the_model(family, monkeypatch):
    policy = make_policy(family)
    check_head(policy, family)
    ids = torch.randint(VOCABULARY, (17,), generator=torch.Generator().manual_seed(3))
    chosen = torch.tensor([3, *range(4, 9), 3, *range(10, 16)])
    row = ModelInputs.of_row(ids, TokenTree.of_group(4, [6, 7]), chosen)
    targets = ids[4:]

    logits = policy.forward(row)
    expected, _ = plain_logprobs(logits, targets, 0.8)
    expected.cumsum(0).sum().backward()
    of_weights = {name: p.grad.clone() for name, p in policy.named_weights() if p.grad is not None}
    policy.model.zero_grad()

    monkeypatch.setattr("easyrl.model.logprobs.CPU_CHUNK_BYTES", 5 * VOCABULARY * 4)
    hidden = policy.hidden_states(row)
    got, _ = chunked_token_logprobs(policy, hidden, targets, 0.8)
    got.cumsum(0).sum().backward()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    got_weights = {n: p.grad for n, p in policy.named_weights() if n in of_weights}
    assert largest_gradient_gap(got_weights, of_weights) <= 1e-5


def test_a_model_whose_logits_need_more_than_hidden_states_is_refused():
    policy = make_policy("llama")
    model = policy.model
    forward = model.forward

    def also_the_tokens(input_ids=None, **rest):
        output = forward(input_ids=input_ids, **rest)
        output.logits += 0.0 if input_ids is None else input_ids.sum()
        return output

    model.forward = also_the_tokens
    with pytest.raises(ValueError, match=r"model\.path: the logits of LlamaForCausalLM \(mine\)"):
        check_head(policy, "mine")


def test_vocabulary_of_151936_trains_within_half_a_gibibyte():
    vocabulary, num_tokens = 151_936, 2048
    hidden = torch.randn(num_tokens, 16, requires_grad=True)
    weight = torch.randn(vocabulary, 16, requires_grad=True)
    targets = torch.randint(vocabulary, (num_tokens,))
    head = head_alone(lambda rows: rows @ weight.T, vocabulary, [weight])

    def train():
        chunked_token_logprobs(head, hidden, targets, 0.9)[0].sum().backward()

    assert peak_bytes(train, torch.device("cpu")) <= 2**29 < num_tokens * vocabulary * 4
