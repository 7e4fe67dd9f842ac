"""Both engines of this process: the tokens of `generate`, samples that depend only on their key.

The embedded engine serves models that can attend in packed rows; `GenerateEngine` all others.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, TopKLogitsWarper, TopPLogitsWarper

from benchmarks.measuring import peak_bytes
from easyrl.engines import embedded, kv_cache, sampling
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.generate import GenerateEngine
from easyrl.engines.sampling import uniform_stream
from easyrl.model import shared_prompt
from easyrl.model.attention import ATTENTION_NAME, PackedGroups, register_attention
from easyrl.model.policy import Policy
from easyrl.model.shared_prompt import AttentionSettings
from easyrl.types import WeightPiece
from tiny_models import SPREAD, UNSHARED, VOCABULARY, WINDOW, tiny_model

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
SAMPLING = SamplingSettings(
    max_prompt_length=MAX_PROMPT, max_completion_length=MAX_COMPLETION, seed=7
)


def make_policy(name, seed=1):
    if name in EMBEDDED:
        return Policy(tiny_model(name, ATTENTION_NAME, seed=seed), torch.device("cpu"))
    model = tiny_model(name, None, SPREAD, seed, **GENERATE[name])
    return Policy(model, torch.device("cpu"), no_packing_reason="layer 0 is of another type")


policy_of = cache(make_policy)


@cache
def reference_of(name):
    return tiny_model(name, "eager") if name in EMBEDDED else policy_of(name).model


def make_engine(
    name="qwen3", policy=None, *, num_rows=4, tokenizer=None, ignore_eos=False, **changes
):
    """`changes` of the sampling settings; rows and `ignore_eos` of the embedded engine."""
    policy, settings = policy or policy_of(name), replace(SAMPLING, **changes)
    if name not in EMBEDDED:
        return GenerateEngine(policy, settings, tokenizer=tokenizer)
    return EmbeddedEngine(
        policy, settings, num_rows=num_rows, tokenizer=tokenizer, ignore_eos=ignore_eos
    )


def draw_prompts(number, seed=3):
    """Prompts of ragged lengths, with the shortest and the longest."""
    rng = np.random.default_rng(seed)
    lengths = [1, MAX_PROMPT, *rng.integers(1, MAX_PROMPT + 1, number)][:number]
    return [rng.integers(3, VOCABULARY, length).tolist() for length in lengths]


def requests(prompts, num_generations=1, lengths=None):
    return [
        GroupRequest((index,), prompt, num_generations, None if lengths is None else lengths[index])
        for index, prompt in enumerate(prompts)
    ]


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


# -- what is generated ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EMBEDDED, "qwen3_next", "mamba", "gpt_oss"])
@pytest.mark.parametrize("num_generations", [1, 3])
def test_greedy_tokens_equal_those_of_generate(name, num_generations):
    """More sequences than rows, prompts of ragged lengths."""
    prompts = draw_prompts(7)
    got = tokens_of(run(make_engine(name, temperature=0.0), requests(prompts, num_generations)))
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        output = reference_of(name).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_COMPLETION,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert got[(index,)] == [output[0, len(prompt) :].tolist()] * num_generations


@pytest.mark.parametrize(
    ("name", "temperature", "prompts_are"),
    [(name, temperature, "copied") for name in MODELS for temperature in (1.0, 0.6)]
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
    prompts = draw_prompts(6)
    num_narrow = 0
    for key, group in run(make_engine(name, temperature=temperature), requests(prompts, 3)).items():
        prompt = prompts[key[0]]
        for sample, completion in enumerate(group):
            ids = torch.tensor([prompt + completion.token_ids.tolist()])
            with torch.no_grad():
                logits = reference_of(name)(input_ids=ids, use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
            expected = logprobs.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
            tolerance = 1e-5 if name in EMBEDDED else 1e-4
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=tolerance)
            assert completion.logprobs.dtype == np.float32
            assert completion.token_ids.dtype == np.int32
            numbers = uniform_stream(7, (*key, sample), MAX_COMPLETION)
            cumulative = logprobs.double().exp().cumsum(-1).numpy()
            for position, token in enumerate(completion.token_ids):
                bounds = np.append(0.0, cumulative[position])
                assert bounds[token] - 1e-5 <= numbers[position] <= bounds[token + 1] + 1e-5
                num_narrow += bounds[token + 1] - bounds[token] < 0.5
    assert num_narrow > 50  # intervals narrow enough to tell numbers apart


@pytest.mark.parametrize("name", ["qwen3", "bloom"])
def test_completion_ends_with_the_end_token_or_at_its_limit(name):
    completions = run(make_engine(name), requests(draw_prompts(10), 8))
    reasons = Counter()
    for completion in (c for group in completions.values() for c in group):
        tokens = completion.token_ids.tolist()
        assert EOS not in tokens[:-1]
        assert completion.finish_reason == ("stop" if tokens[-1] == EOS else "length")
        assert tokens[-1] == EOS or len(tokens) == MAX_COMPLETION
        reasons[completion.finish_reason] += 1
    assert min(reasons["stop"], reasons["length"]) > 5


@BOTH
def test_larger_group_begins_with_the_samples_of_a_smaller_one(name):
    small, large = (tokens_of(run(make_engine(name), requests(draw_prompts(6), n))) for n in (2, 4))
    assert {key: samples[:2] for key, samples in large.items()} == small


@pytest.fixture(scope="module")
def sampled():
    """Samples of 21 prompts x 3 through a single row: without neighbours."""
    return tokens_of(run(make_engine(num_rows=1), requests(draw_prompts(21), 3)))


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 70), st.randoms(use_true_random=False), st.integers(0, 20))
def test_samples_do_not_depend_on_rows_order_or_neighbours(sampled, num_rows, random, left_out):
    submitted = requests(draw_prompts(21), 3)[left_out:]
    random.shuffle(submitted)
    got = tokens_of(run(make_engine(num_rows=num_rows), submitted))
    assert got == {key: sampled[key] for key in got}


def test_groups_that_arrive_while_others_run_change_no_sample(sampled):
    engine = make_engine(num_rows=7)
    waiting = requests(draw_prompts(21), 3)
    finished = []
    while waiting or engine.has_work:
        if waiting:
            engine.submit(waiting.pop(0))
        finished += engine.step()
    assert tokens_of({request.key: completions for request, completions in finished}) == sampled


def test_random_numbers_depend_on_seed_key_sample_and_position(sampled):
    prompts = draw_prompts(21)
    assert tokens_of(run(make_engine(seed=8), requests(prompts, 3))) != sampled
    moved = [GroupRequest((index + 1,), p, 3) for index, p in enumerate(prompts)]
    assert list(tokens_of(run(make_engine(), moved)).values()) != list(sampled.values())
    streams = [
        uniform_stream(seed, (a, b, sample_index), 4)
        for seed in (0, 1)
        for a in (0, 1)
        for b in (0, 1, 2**40)
        for sample_index in (0, 1)
    ]
    assert len({number for stream in streams for number in stream}) == 4 * len(streams)


def test_new_and_used_engines_give_the_same_bits_in_the_same_order():
    """Rows, caches and counters keep nothing of an iteration."""
    used, submitted = make_engine(num_rows=6), requests(draw_prompts(15), 4)
    run(used, requests(draw_prompts(9, seed=99), 5))
    one, other, again = (
        bits_of(run(engine, submitted))
        for engine in (make_engine(num_rows=6), make_engine(num_rows=6), used)
    )
    assert one == other and sorted(again) == sorted(one)


# -- how the embedded engine computes it ----------------------------------------------------------


class Watch:
    """Counts the rows of every forward of an engine: decode tokens and prompts."""

    def __init__(self, monkeypatch, **options):
        self.decode_rows, self.prompts = [], []
        self.engine = make_engine(policy=make_policy("qwen3"), **options)
        original = self.engine._run_model

        def forward(input_ids, position_ids, layout, logits_at):
            lengths = layout.prompt_lengths
            num_decode = len(input_ids) - sum(lengths)
            self.decode_rows.append(num_decode)
            for prompt in torch.split(input_ids[num_decode:], lengths) if lengths else ():
                self.prompts.append(tuple(prompt.tolist()))
            return original(input_ids, position_ids, layout, logits_at)

        monkeypatch.setattr(self.engine, "_run_model", forward)


def test_finished_rows_are_refilled_and_cost_no_forward(monkeypatch):
    """Every row of every forward gives a token that is kept, and rows are refilled."""
    lengths = np.random.default_rng(0).integers(1, MAX_COMPLETION + 1, (30, 2)).tolist()
    watch = Watch(monkeypatch, num_rows=8, ignore_eos=True)
    run(watch.engine, requests(draw_prompts(30), 2, lengths))
    # A sequence's first token comes from its prompt's forward, each further one from a row.
    assert sum(watch.decode_rows) == sum(length - 1 for group in lengths for length in group)
    assert max(watch.decode_rows) == 8
    last_full = max(step for step, rows in enumerate(watch.decode_rows) if rows == 8)
    refilled, tail = watch.decode_rows[1:last_full], watch.decode_rows[last_full:]
    assert np.mean(refilled) >= 7.5  # a row that ends before the next prompt is ready waits a step
    assert tail == sorted(tail, reverse=True)  # then rows are only compacted


def test_prompts_are_prefilled_in_order_and_once_for_a_whole_group(monkeypatch):
    prompts = draw_prompts(13)
    watch = Watch(monkeypatch, num_rows=4)
    run(watch.engine, requests(prompts, 6))  # more completions than rows
    assert watch.prompts == list(map(tuple, prompts))


@pytest.mark.parametrize("bound", [15, 5], ids=["some prompts", "less than the longest"])
def test_prompts_of_one_step_stay_under_the_token_bound(monkeypatch, bound):
    """A prompt that is longer than the bound is prefilled alone."""
    monkeypatch.setattr(embedded, "MAX_PREFILL_TOKENS", bound)
    watch, prompts = Watch(monkeypatch, num_rows=16), draw_prompts(40)
    for request in requests(prompts):
        watch.engine.submit(request)
    while watch.engine.has_work:
        before = len(watch.prompts)
        watch.engine.step()
        new = watch.prompts[before:]
        assert len(new) <= 1 or sum(map(len, new)) <= bound
    assert Counter(watch.prompts) == Counter(map(tuple, prompts))


def test_memory_of_prompts_is_used_again_when_their_groups_have_finished():
    engine = make_engine(num_rows=4, ignore_eos=True)
    run(engine, requests(draw_prompts(30), 3))
    assert len(engine.cache.prompt_lengths) <= 6  # groups with rows or about to start
    assert not engine.cache.prompt_lengths.any()


def test_memory_of_an_evaluations_prompts_is_freed_for_training():
    """The next weights free it if no prompt has needed it since the last ones. No bit changes."""
    engine = make_engine(policy=make_policy("qwen3"), num_rows=8)
    training, evaluation = requests(draw_prompts(6), 8), requests(draw_prompts(30))
    expected, size = bits_of(run(engine, training)), engine.cache.prompts_size
    run(engine, evaluation)
    assert engine.cache.prompts_size[0] > 2 * size[0]
    for _ in range(2):
        engine.load_weights(pieces_of(make_policy("qwen3")))
        assert bits_of(run(engine, training)) == expected
    assert engine.cache.prompts_size == size
    assert engine.cache.prompts[0][0].shape[0] == size[0]
    engine.load_weights(pieces_of(make_policy("qwen3")))
    assert engine.cache.prompts_size == size  # training needs as much again


@pytest.mark.parametrize("prompt", [0, 128])
def test_decoding_as_on_accelerators_copies_no_keys(monkeypatch, prompt):
    monkeypatch.setattr(shared_prompt, "is_fused", lambda block, settings: False)
    num_rows, cells, heads, size = 16, 128, 4, 64
    cpu, one = torch.device("cpu"), torch.zeros(1, heads, size)
    kv = kv_cache.KVCache(num_rows, prompt, cells)
    slots = kv.claim_slots([prompt] * 8)
    kv.allocate(one, one)
    rows = np.zeros(num_rows, dtype=[(name, np.int64) for name in ("cell", "position", "slot")])
    rows["cell"], rows["position"], rows["slot"] = cells - 1, prompt + cells - 1, slots * 2
    new = one.expand(num_rows, -1, -1)
    layout = kv_cache.StepLayout(kv, rows, [], cpu)
    layer = AttentionSettings(layer=0, scaling=1.0, sliding_window=None, softcap=None)

    with torch.inference_mode():
        peak = peak_bytes(lambda: layout.attend(new, new, new, layer), cpu)

    assert peak < kv.num_bytes / 8


@pytest.mark.parametrize("name", EMBEDDED)
def test_layers_of_llamas_kind_are_decoded_with_fused_operations(name):
    engine = make_engine(name)
    assert (engine._run_model is engine._decoder) == (name != "gemma2")


def test_fused_operations_are_checked_with_each_new_set_of_weights():
    """A difference may be hidden by the first weights: here what follows it is multiplied by 0."""
    policy, new = make_policy("qwen3"), make_policy("qwen3", seed=2)
    attention = policy.model.model.layers[1].self_attn
    attention.q_norm.register_forward_hook(lambda *a: 2 * a[2])
    with torch.no_grad():
        attention.o_proj.weight.zero_()
    engine = make_engine(policy=policy)
    assert engine._run_model is engine._decoder
    engine.load_weights(pieces_of(new))
    assert engine._run_model == policy.forward


# -- how `GenerateEngine` computes it -------------------------------------------------------------


def test_generation_config_of_the_model_is_ignored():
    """Penalties and minimum lengths would change the distribution."""
    submitted = requests(draw_prompts(4), 3)
    plain = tokens_of(run(make_engine("mamba"), submitted))
    policy = make_policy("mamba")
    policy.model.generation_config = changed = GenerationConfig(
        repetition_penalty=9.0, min_new_tokens=11, do_sample=True, top_k=1, num_beams=2
    )
    assert tokens_of(run(make_engine("mamba", policy), submitted)) == plain
    assert policy.model.generation_config is changed


def test_group_is_generated_without_a_cache_if_the_cache_is_inexact(monkeypatch):
    """RecurrentGemma's cache is, beyond its window."""
    used = []
    complete = GenerateEngine._complete

    def watched(self, request, *, use_cache):
        used.append(use_cache)
        return complete(self, request, use_cache=use_cache)

    monkeypatch.setattr(GenerateEngine, "_complete", watched)
    run(make_engine("mamba"), requests(draw_prompts(4)))
    assert used == [True] * 4
    used.clear()
    monkeypatch.setattr(GenerateEngine, "_is_exact", lambda *_: False)
    run(make_engine("mamba"), requests(draw_prompts(4)))
    assert used == [True, False] * 4


# -- groups, ends and limits ----------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.lists(st.integers(1, MAX_COMPLETION), min_size=1, max_size=5), max_size=12),
)
def test_given_lengths_are_generated_exactly_and_in_sample_order(num_rows, lengths):
    submitted = [
        GroupRequest((index,), draw_prompts(12)[index], len(sizes), sizes)
        for index, sizes in enumerate(lengths)
    ]
    got = run(make_engine(num_rows=num_rows, ignore_eos=True), submitted)
    for index, sizes in enumerate(lengths):
        assert [len(completion.token_ids) for completion in got[(index,)]] == sizes
        assert {completion.finish_reason for completion in got[(index,)]} == {"length"}


@BOTH
def test_every_completion_has_its_own_limit(name):
    limits = [1, 4, 2]
    for group in run(make_engine(name), requests(draw_prompts(5), 3, [limits] * 5)).values():
        assert all(len(c.token_ids) <= n for c, n in zip(group, limits, strict=True))


def test_model_may_have_several_end_tokens_or_none():
    policy = make_policy("qwen3")
    policy.eos_token_ids = [EOS, 3, 4]
    ends = Counter(
        completion.token_ids.tolist()[-1]
        for group in run(make_engine(policy=policy), requests(draw_prompts(12), 8)).values()
        for completion in group
        if completion.finish_reason == "stop"
    )
    assert set(ends) == {EOS, 3, 4}
    for end_tokens, length in (([], MAX_COMPLETION), (range(VOCABULARY), 1)):
        policy.eos_token_ids = [*end_tokens]
        for group in run(make_engine(policy=policy), requests(draw_prompts(3), 5)).values():
            assert {len(completion.token_ids) for completion in group} == {length}


@BOTH
@pytest.mark.parametrize("prompt_length", [0, MAX_PROMPT + 1])
def test_impossible_prompt_is_refused(name, prompt_length):
    engine = make_engine(name)
    with pytest.raises(ValueError, match=r"data\.max_prompt_length"):
        engine.submit(GroupRequest((0,), [5] * prompt_length, 2))
    assert not engine.has_work and engine.step() == []


# -- new weights ----------------------------------------------------------------------------------


def pieces_of(policy, piece_size=100):
    for name, tensor in policy.named_weights():
        flat = tensor.detach().reshape(-1)
        for start in range(0, len(flat), piece_size):
            yield WeightPiece(name, start, flat[start : start + piece_size].clone())


@BOTH
def test_new_weights_are_refused_while_a_group_waits_or_is_in_flight(name):
    engine, other = make_engine(name, make_policy(name)), make_policy(name, seed=2)
    before = engine.policy.weights_sha256()
    engine.submit(requests(draw_prompts(1), 2)[0])
    while engine.has_work:
        with pytest.raises(RuntimeError, match="in flight"):
            engine.load_weights(pieces_of(other))
        engine.step()
    assert engine.policy.weights_sha256() == before


@pytest.mark.parametrize("name", ["qwen3", "llama", "mamba"])
def test_new_weights_replace_the_old_ones_completely(name):
    """Tied and untied heads: the same bits as an engine that never saw the old weights."""
    engine, new = make_engine(name, make_policy(name)), make_policy(name, seed=2)
    submitted = requests(draw_prompts(9), 3)
    old = run(engine, submitted)
    engine.load_weights(pieces_of(new))
    assert engine.policy.weights_sha256() == new.weights_sha256()
    got, expected = run(engine, submitted), run(make_engine(name, new), submitted)
    assert sorted(bits_of(got)) == sorted(bits_of(expected))
    assert tokens_of(got) != tokens_of(old)


def test_engine_leaves_its_model_trainable():
    """Sampling under inference mode must leave no inference tensor where autograd needs one."""
    policy = make_policy("gemma2")
    run(make_engine(policy=policy), requests(draw_prompts(3), 2))
    logits = policy.forward(
        torch.tensor([4, 5, 6]), torch.arange(3), PackedGroups.of_sequences([3]), torch.arange(3)
    )
    logits.sum().backward()
    assert all(p.grad is not None for p in policy.model.parameters())


# -- the sampling distribution --------------------------------------------------------------------


def sample(logits, uniforms, temperature, **settings):
    settings = SamplingSettings(
        max_prompt_length=1, max_completion_length=1, temperature=temperature, **settings
    )
    return sampling.sample(logits, uniforms, settings)


def test_inverse_transform_is_exact_at_every_boundary():
    logits = torch.tensor([[0.0, 0.1, 0.2, 0.0, 0.7]]).log()  # tokens 0 and 3 are impossible
    cases = {0.0: 1, 0.0999: 1, 0.1001: 2, 0.2999: 2, 0.3001: 4, 0.9999: 4, 1 - 2**-53: 4}
    tokens, logprobs = sample(
        logits.expand(len(cases), -1), torch.tensor(list(cases), dtype=torch.float64), 1.0
    )
    assert tokens.tolist() == list(cases.values())
    expected = logits[0].exp()[tokens]
    np.testing.assert_allclose(logprobs.exp(), expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drawing_a_token_takes_4_passes_over_the_vocabulary_and_none_in_float64(temperature):
    """Maximum, difference, exponential and sum; one more for a temperature. It took 9, of which 2
    were in float64."""
    num_rows, vocabulary = 4, 151_936
    passes, float64 = [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            used = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            float64.extend(x.shape[-1] for x in used if x.dtype == torch.float64)
            is_free = func.is_view or func is torch.ops.aten.gather.default  # reads what it returns
            if not is_free and max(x.numel() for x in used) >= num_rows * vocabulary:
                passes.append(str(func))
            return result

    logits = torch.randn(num_rows, vocabulary).bfloat16()
    with Watch():
        sample(logits, torch.rand(num_rows, dtype=torch.float64), temperature)
    assert len(passes) == 4 + (temperature != 1.0), passes
    assert max(float64) <= 1200


@pytest.mark.parametrize("vocabulary", [1, 2, 5, 50, 128, 129, 1000])
def test_frequencies_are_the_probabilities(vocabulary):
    """Evenly spaced numbers draw each token in proportion; rounding moves the ends of a share."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 2 * torch.randn(1, vocabulary, generator=generator)
    logits[0, vocabulary // 2 + 1 :: 3] = -torch.inf
    number = 200 * vocabulary
    uniforms = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    tokens, logprobs = sample(logits.expand(number, -1), uniforms, 0.8)
    expected = (logits[0].double() / 0.8).softmax(-1)
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert (counts - number * expected).abs().max() <= 1.01
    np.testing.assert_allclose(logprobs, expected.log()[tokens], rtol=0, atol=2e-6)


def test_impossible_tokens_are_never_drawn():
    """At the ends and at the bounds of every share, where sums are rounded."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5000, generator=generator)
    logits[0, torch.rand(5000, generator=generator) < 0.9] = -torch.inf
    bounds = logits[0].double().softmax(-1).cumsum(-1)
    uniforms = torch.cat([bounds + shift for shift in (-1e-8, 0.0, 1e-8)]).clamp(0, 1 - 2**-53)
    tokens, _ = sample(logits.expand(len(uniforms), -1), uniforms, 1.0)
    assert logits[0, tokens].isfinite().all()
    assert len(tokens.unique()) == logits.isfinite().sum()


@pytest.mark.parametrize("vocabulary", [99, 300])
def test_logits_that_are_no_numbers_give_a_token_without_log_probability(vocabulary):
    """The run reports it then."""
    logits = torch.full((1, vocabulary), torch.nan)
    token, logprob = sample(logits, torch.tensor([0.5], dtype=torch.float64), 1.0)
    assert 0 <= int(token) < vocabulary and logprob.isnan()


def test_temperature_sharpens_and_reported_logprobs_follow():
    logits = torch.tensor([[0.0, 1.0]])
    _, at_half = sample(logits, torch.tensor([0.99], dtype=torch.float64), 0.5)
    assert float(at_half) == pytest.approx(-np.log1p(np.exp(-2.0)), abs=1e-6)
    _, greedy = sample(logits, torch.tensor([0.0], dtype=torch.float64), 0.0)
    assert float(greedy) == pytest.approx(-np.log1p(np.exp(-1.0)), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), st.sampled_from([1.0, 0.95, 0.5, 0.05]))
def test_top_k_and_top_p_equal_transformers_and_logprobs_are_of_the_whole_distribution(
    seed, top_k, top_p
):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(1, 9, generator=generator)
    kept = logits / 0.7
    if top_k:
        kept = TopKLogitsWarper(top_k)(None, kept)
    if top_p < 1.0:
        kept = TopPLogitsWarper(top_p)(None, kept)
    probabilities = kept[0].double().softmax(-1)
    ends = probabilities.cumsum(0)
    # The middle of every token's share, and a number beside each end.
    wanted = probabilities.nonzero().flatten()
    middles = (ends - probabilities / 2)[wanted]
    uniforms = torch.cat([middles, middles.new_tensor([0.0, 1 - 2**-53])])
    tokens, logprobs = sample(
        logits.expand(len(uniforms), -1), uniforms, 0.7, top_k=top_k, top_p=top_p
    )
    assert tokens.tolist() == [*wanted.tolist(), int(wanted[0]), int(wanted[-1])]
    torch.testing.assert_close(logprobs, (logits / 0.7).log_softmax(-1)[0, tokens])


def test_top_k_keeps_the_first_of_equally_likely_tokens():
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.99], dtype=torch.float64)
    tokens, _ = sample(torch.zeros(4, 5), uniforms, 1.0, top_k=2)
    assert tokens.tolist() == [0, 0, 1, 1]


def test_engine_samples_from_the_likeliest_tokens_only():
    submitted = requests(draw_prompts(5), 2)
    drawn, greedy = make_engine(top_k=1), make_engine(temperature=0.0)
    assert tokens_of(run(drawn, submitted)) == tokens_of(run(greedy, submitted))
