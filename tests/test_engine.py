"""Both engines of this process: tokens of a plain forward, samples that depend only on their key.

The embedded engine serves models that can attend in packed rows; `GenerateEngine` all others.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, TopKLogitsWarper, TopPLogitsWarper

from easyrl.engines import embedded, kv_cache, sampling
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.generate import GenerateEngine
from easyrl.engines.sampling import StopStrings, uniform_stream
from easyrl.model.attention import ATTENTION_NAME, register_attention
from easyrl.model.policy import Policy
from tiny_models import SPREAD, UNSHARED, VOCABULARY, WINDOW, pieces_of, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")
torch.set_num_threads(1)
register_attention()

EOS = 2
MAX_PROMPT, MAX_COMPLETION = 12, 16
EMBEDDED = ("qwen3", "llama", "mistral", "gemma2")
GENERATE = {
    **{name: UNSHARED[name][0] for name in ("qwen3_next", "mamba", "gpt_oss", "bloom")},
    "recurrent_gemma": {"num_key_value_heads": 1, "lru_width": 32, "attention_window_size": WINDOW},
}
MODELS = (*EMBEDDED, *GENERATE)
BOTH = pytest.mark.parametrize("name", ["qwen3", "mamba"])
STOPS = ["é", "éé", " a", "a b", "cd", "\n", "abcabc", "è a", "ab é"]
SAMPLING = SamplingSettings(
    max_prompt_length=MAX_PROMPT, max_completion_length=MAX_COMPLETION, seed=7
)


def make_policy(name, seed=1):
    if name in EMBEDDED:
        return Policy(tiny_model(name, ATTENTION_NAME, seed=seed), torch.device("cpu"))
    model = tiny_model(name, None, SPREAD, seed, **GENERATE[name])
    return Policy(model, torch.device("cpu"), no_packing_reason="layer 0 is of another type")


policy_of = cache(make_policy)


def make_engine(name="qwen3", policy=None, *, num_rows=4, tokenizer=None, **changes):
    """`changes` of the sampling settings; rows of the embedded engine."""
    policy, settings = policy or policy_of(name), replace(SAMPLING, **changes)
    if name not in EMBEDDED:
        return GenerateEngine(policy, settings, tokenizer=tokenizer)
    return EmbeddedEngine(policy, settings, num_rows=num_rows, tokenizer=tokenizer)


def draw_prompts(number, seed=3):
    """Prompts of ragged lengths, with the shortest and the longest."""
    rng = np.random.default_rng(seed)
    lengths = [1, MAX_PROMPT, *rng.integers(1, MAX_PROMPT + 1, number)][:number]
    return [rng.integers(3, VOCABULARY, length).tolist() for length in lengths]


def requests(prompts, num_generations=1):
    return [GroupRequest((n,), prompt, num_generations) for n, prompt in enumerate(prompts)]


def run(engine, submitted):
    """Return completions by key; check that each request is returned once."""
    for request in submitted:
        engine.submit(request)
    finished = []
    while engine.has_work:
        finished += engine.step()
    assert Counter(request.key for request, _ in finished) == Counter(r.key for r in submitted)
    return {request.key: completions for request, completions in finished}


def tokens_of(completions):
    return {key: [c.token_ids.tolist() for c in group] for key, group in completions.items()}


def bits_of(completions):
    return [
        (key, [(c.token_ids.tobytes(), c.logprobs.tobytes()) for c in group])
        for key, group in completions.items()
    ]


@pytest.mark.parametrize(
    ("name", "temperature", "prompts_are"),
    [(name, temperature, "copied") for name in MODELS for temperature in (1.0, 0.6, 0.0)]
    + [(name, 1.0, stored) for name in EMBEDDED for stored in ("shared", "either")],
)
def test_samples_and_logprobs_are_those_of_a_plain_forward(
    monkeypatch, name, temperature, prompts_are
):
    """Each token is drawn with the random number of its position. Rows of a group are not adjacent,
    and sliding windows leave the prompt behind."""
    monkeypatch.setattr(kv_cache, "COPIED_TOKENS", {"shared": 0, "either": 5}.get(prompts_are, 64))
    monkeypatch.setattr(kv_cache, "BUCKET_STEP", 4)
    monkeypatch.setattr(kv_cache, "BUCKET_NUMBERS", 0)
    prompts, num_narrow = draw_prompts(6), 0
    reference = tiny_model(name, "eager") if name in EMBEDDED else policy_of(name).model
    for key, group in run(make_engine(name, temperature=temperature), requests(prompts, 3)).items():
        prompt = prompts[key[0]]
        for sample, completion in enumerate(group):
            ids = torch.tensor([prompt + completion.token_ids.tolist()])
            with torch.no_grad():
                logits = reference(input_ids=ids, use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)[len(prompt) - 1 : -1]
            expected = logprobs.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
            tolerance = 1e-5 if name in EMBEDDED else 1e-4
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=tolerance)
            assert completion.logprobs.dtype == np.float32
            *others, last = completion.token_ids.tolist()
            assert EOS not in others and (last == EOS or len(others) == MAX_COMPLETION - 1)
            assert completion.finish_reason == ("stop" if last == EOS else "length")
            if temperature == 0.0:
                assert completion.token_ids.tolist() == logprobs.argmax(-1).tolist()
                continue
            numbers = uniform_stream(7, (*key, sample), MAX_COMPLETION)
            cumulative = logprobs.double().exp().cumsum(-1).numpy()
            for position, token in enumerate(completion.token_ids):
                bounds = np.append(0.0, cumulative[position])
                assert bounds[token] - 1e-5 <= numbers[position] <= bounds[token + 1] + 1e-5
                num_narrow += bounds[token + 1] - bounds[token] < 0.5
    assert temperature == 0.0 or num_narrow > 50  # intervals narrow enough to tell numbers apart


@pytest.fixture(scope="module")
def sampled():
    """Samples of 21 prompts x 3 through a single row: without neighbours."""
    return tokens_of(run(make_engine(num_rows=1), requests(draw_prompts(21), 3)))


@settings(max_examples=6)
@given(st.integers(1, 70), st.randoms(use_true_random=False), st.integers(0, 20))
def test_samples_do_not_depend_on_rows_order_or_neighbours(sampled, num_rows, random, left_out):
    submitted = requests(draw_prompts(21), 3)[left_out:]
    random.shuffle(submitted)
    engine, got = make_engine(num_rows=num_rows), {}
    while submitted or engine.has_work:  # groups arrive while others run
        if submitted and random.random() < 0.7:
            engine.submit(submitted.pop())
        got |= {request.key: completions for request, completions in engine.step()}
    assert tokens_of(got) == {key: sampled[key] for key in got} and len(got) == 21 - left_out


def test_random_streams_differ_in_seed_key_and_sample():
    keys = product((0, 1), (0, 1), (0, 1, 2**40), (0, 1))
    streams = [uniform_stream(seed, key, 4) for seed, *key in keys]
    assert len({number for stream in streams for number in stream}) == 4 * len(streams)


@pytest.mark.parametrize("bound", [15, 5], ids=["some prompts", "less than the longest"])
def test_prompts_of_one_step_stay_under_the_token_bound(monkeypatch, bound):
    """A prompt that is longer than the bound is prefilled alone. They are served in order."""
    monkeypatch.setattr(embedded, "MAX_PREFILL_TOKENS", bound)
    engine, lengths = make_engine(num_rows=16), [len(prompt) for prompt in draw_prompts(40)]
    for request in requests(draw_prompts(40)):
        engine.submit(request)
    while engine.has_work:
        before, taken = engine.num_prompt_tokens, []
        engine.step()
        while sum(taken) < engine.num_prompt_tokens - before:
            taken.append(lengths.pop(0))
        assert sum(taken) == engine.num_prompt_tokens - before
        assert sum(taken) <= bound or len(taken) == 1
    assert not lengths


def test_fused_operations_of_llamas_kind_are_checked_with_each_new_set_of_weights():
    """A difference may be hidden by the first weights: here what follows it is multiplied by 0."""
    are_fused = [each._run_model is each._decoder for each in map(make_engine, EMBEDDED)]
    assert are_fused == [True, True, True, False]  # Gemma 2 is of another kind
    policy, new = make_policy("qwen3"), make_policy("qwen3", seed=2)
    attention = policy.model.model.layers[1].self_attn
    attention.q_norm.register_forward_hook(lambda *a: 2 * a[2])
    with torch.no_grad():
        attention.o_proj.weight.zero_()
    engine = make_engine(policy=policy)
    assert engine._run_model is engine._decoder
    engine.load_weights(pieces_of(new.weights()))
    assert engine._run_model == policy.forward


@pytest.mark.parametrize("end_tokens", [[EOS, 3, 4], []])
def test_model_may_have_several_end_tokens_or_none(end_tokens):
    policy = make_policy("qwen3")
    policy.eos_token_ids = end_tokens
    groups = run(make_engine(policy=policy), requests(draw_prompts(9), 6)).values()
    stopped = [c for group in groups for c in group if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in stopped} == {*end_tokens}


@BOTH
@pytest.mark.parametrize("prompt_length", [0, MAX_PROMPT + 1])
def test_impossible_prompt_is_refused(name, prompt_length):
    engine = make_engine(name)
    with pytest.raises(ValueError, match=r"data\.max_prompt_length"):
        engine.submit(GroupRequest((0,), [5] * prompt_length, 2))
    assert not engine.has_work and engine.step() == []


@pytest.mark.parametrize("name", ["qwen3", "llama", "mamba"])
def test_new_weights_wait_for_all_groups_and_replace_the_old_ones_completely(name):
    """Tied and untied heads: the same bits as an engine that never saw the old weights."""
    engine, new = make_engine(name, make_policy(name)), make_policy(name, seed=2)
    before, submitted = engine.policy.weights_sha256(), requests(draw_prompts(9), 3)
    old = run(engine, submitted)
    engine.submit(submitted[0])
    while engine.has_work:
        with pytest.raises(RuntimeError, match="in flight"):
            engine.load_weights(pieces_of(new.weights()))
        engine.step()
    assert engine.policy.weights_sha256() == before
    engine.load_weights(pieces_of(new.weights()))
    assert engine.policy.weights_sha256() == new.weights_sha256()
    got, expected = run(engine, submitted), run(make_engine(name, new), submitted)
    assert sorted(bits_of(got)) == sorted(bits_of(expected))
    assert tokens_of(got) != tokens_of(old)


def test_memory_of_an_evaluations_prompts_is_freed_for_training():
    """The next weights free it if no prompt has needed it since the last ones. No bit changes."""
    engine = make_engine(policy=make_policy("qwen3"), num_rows=8)
    training, evaluation = requests(draw_prompts(6), 8), requests(draw_prompts(30))
    expected, size = bits_of(run(engine, training)), engine.cache.prompts_size
    run(engine, evaluation)
    assert engine.cache.prompts_size[0] > 2 * size[0]
    for _ in range(2):
        engine.load_weights(pieces_of(make_policy("qwen3").weights()))
        assert bits_of(run(engine, training)) == expected
    engine.load_weights(pieces_of(make_policy("qwen3").weights()))
    assert engine.cache.prompts_size == size  # training needs as much again
    assert engine.cache.prompts[0][0].shape[0] == size[0]


def sample(logits, uniforms, temperature, **settings):
    settings = SamplingSettings(
        max_prompt_length=1, max_completion_length=1, temperature=temperature, **settings
    )
    return sampling.sample(logits, uniforms, settings)


@pytest.mark.parametrize("vocabulary", [1, 2, 5, 50, 128, 129, 1000])
def test_frequencies_are_the_probabilities(vocabulary):
    """Evenly spaced numbers draw each token in proportion; rounding moves the ends of a share."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 2 * torch.randn(1, vocabulary, generator=generator)
    logits[0, vocabulary // 2 + 1 :: 3] = -torch.inf
    number = 50 * vocabulary
    uniforms = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    tokens, logprobs = sample(logits.expand(number, -1), uniforms, 0.8)
    expected = (logits[0].double() / 0.8).softmax(-1)
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert (counts - number * expected).abs().max() <= 1.01
    np.testing.assert_allclose(logprobs, expected.log()[tokens], rtol=0, atol=2e-6)
    # Logits that are no numbers give a token without a log-probability.
    token, logprob = sample(torch.full((1, vocabulary), torch.nan), torch.ones(1).double() / 2, 1.0)
    assert 0 <= int(token) < vocabulary and logprob.isnan()


def test_greedy_tokens_have_logprobs_at_temperature_1_and_ties_go_to_the_first():
    _, logprob = sample(torch.tensor([[0.0, 1.0]]), torch.zeros(1, dtype=torch.float64), 0.0)
    assert float(logprob) == pytest.approx(-np.log1p(np.exp(-1.0)), abs=1e-6)
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.99], dtype=torch.float64)
    assert sample(torch.zeros(4, 5), uniforms, 1.0, top_k=2)[0].tolist() == [0, 0, 1, 1]


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 12), st.sampled_from([1.0, 0.95, 0.5, 0.05]))
def test_top_k_and_top_p_equal_transformers_and_logprobs_are_of_all_tokens(seed, top_k, top_p):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(1, 9, generator=generator)
    kept = TopKLogitsWarper(top_k)(None, logits / 0.7) if top_k else logits / 0.7
    if top_p < 1.0:
        kept = TopPLogitsWarper(top_p)(None, kept)
    shares = kept[0].double().softmax(-1)
    wanted = shares.nonzero().flatten()
    uniforms = (shares.cumsum(0) - shares / 2)[wanted]  # the middle of every token's share
    settings = {"top_k": top_k, "top_p": top_p}
    tokens, logprobs = sample(logits.expand(len(uniforms), -1), uniforms, 0.7, **settings)
    assert tokens.tolist() == wanted.tolist()
    torch.testing.assert_close(logprobs, (logits / 0.7).log_softmax(-1)[0, tokens])


@cache
def bytes_tokenizer():
    """Letters, spaces, the single bytes of "é" and "è", and tokens across them."""
    pieces = [*"abcdef", "Ġ", "Ã", "©", "¨", "Ċ", "bc", "Ġa", "aÃ", "©b", "ab", "cdef", "©Ã"]
    names = ["<pad>", "<bos>", "<eos>", *pieces]
    names += [chr(number) for number in range(0x67, 0x67 + VOCABULARY - len(names))]
    vocabulary = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def first_stop(tokenizer, tokens, stops):
    """Number of tokens up to the first one that completes a stop string; None: no string."""
    for length in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:length], skip_special_tokens=True)
        if any(stop in text for stop in stops):
            return length
    return None


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=25),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True),
)
def test_stop_string_is_found_with_the_token_that_completes_it(tokens, stops):
    tokens = [3 + token % (len(bytes_tokenizer()) - 3) for token in tokens]  # no special tokens
    finder = StopStrings(bytes_tokenizer(), stops)
    ends = range(1, len(tokens) + 1)
    found = (n for n in ends if finder.is_complete(np.array(tokens[:n], dtype=np.int32)))
    assert next(found, None) == first_stop(bytes_tokenizer(), tokens, stops)


def test_whole_rows_without_a_cache_are_reported_once():
    policy, notes = make_policy("mamba"), []
    run_layers = policy.run_layers

    def fail_with_a_cache(*, use_cache=False, **inputs):
        assert not use_cache
        return run_layers(use_cache=False, **inputs)

    policy.run_layers = fail_with_a_cache
    engine, submitted = make_engine("mamba", policy), requests(draw_prompts(3), 2)
    engine.report = notes.append
    assert tokens_of(run(engine, submitted)) == tokens_of(run(make_engine("mamba"), submitted))
    assert len(notes) == 1


@BOTH
def test_completion_ends_with_the_token_that_completes_a_stop_string(name):
    stops, tokenizer = ["a", "é", "cd", "\n", "j", "p"], bytes_tokenizer()
    submitted = requests(draw_prompts(5), 6)
    whole, num_stopped = run(make_engine(name), submitted), 0
    for key, cut in run(make_engine(name, stop=stops, tokenizer=tokenizer), submitted).items():
        for short, long in zip(cut, whole[key], strict=True):
            tokens = long.token_ids.tolist()
            length = first_stop(tokenizer, tokens, stops)
            expected = tokens[: length or len(tokens)]
            assert short.token_ids.tolist() == expected
            np.testing.assert_allclose(short.logprobs, long.logprobs[: len(expected)], atol=1e-5)
            is_stop = length is not None or expected[-1] == EOS
            assert short.finish_reason == ("stop" if is_stop else "length")
            num_stopped += length is not None
    assert num_stopped > 5
