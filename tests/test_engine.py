"""Both engines of this process: tokens of a plain forward, samples that depend only on their key.

The embedded engine serves models that can attend in packed rows; `GenerateEngine` all others.
Completions of several turns alternate sampled and inserted tokens. Decode steps are replayed as
graphs: `recorded_graphs` stands in for CUDA; `test_gpu.py` has a test with real ones.
"""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, TopKLogitsWarper, TopPLogitsWarper

import recorded_graphs
from easyrl.config.model import LoraConfig
from easyrl.engines import (
    MAX_PREFIXES,
    embedded,
    fused_decoder,
    fused_delta_rule,
    prefixes,
    sampling,
    step_graphs,
)
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.cache import attention as cache_attention
from easyrl.engines.cache import cache as node_cache
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.fused_delta_rule import DeltaStep
from easyrl.engines.generate import GenerateEngine
from easyrl.engines.prefixes import PromptPrefixes
from easyrl.engines.sampling import StopStrings, uniform_stream
from easyrl.model.mixers.attention import ATTENTION_NAME, register_attention
from easyrl.model.mixers.recurrent import find_layers
from easyrl.model.policy import Policy
from tiny_models import (
    EXPERTS,
    GROUPED,
    SPREAD,
    UNSHARED,
    VOCABULARY,
    WINDOW,
    WITH_SINKS,
    WITH_STATES,
    packed_logits,
    pieces_of,
    tiny_model,
)
from tiny_models import FAMILIES as ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore")
register_attention()

EOS = 2
MAX_PROMPT, MAX_COMPLETION = 12, 16
WITHOUT_STATES = ("qwen3", "llama", "mistral", "gemma2", "gpt_oss")
HYBRIDS = ("qwen3_5_text", "lfm2", "granitemoehybrid", "falcon_h1", "zamba2", "mamba2")
EMBEDDED = (*WITHOUT_STATES, *HYBRIDS)
GENERATE = {
    "qwen3_next": WITH_STATES["qwen3_next"],
    **{name: UNSHARED[name][0] for name in ("mamba", "bloom")},
    "recurrent_gemma": {"num_key_value_heads": 1, "lru_width": 32, "attention_window_size": WINDOW},
    # Their caches need the positions of the new tokens.
    "bamba": {
        "num_key_value_heads": 2,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "minimax": {
        **(GROUPED | EXPERTS),
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 8,
    },
}
MODELS = (*EMBEDDED, *GENERATE)
INEXACT = {
    "deepseek_v32": {
        **ARCHITECTURES["deepseek_v3"],
        "index_topk": 4,
        "index_n_heads": 2,
        "index_head_dim": 16,
    }
}
BOTH = pytest.mark.parametrize("name", ["qwen3", "mamba"])
STOPS = ["é", "éé", " a", "a b", "cd", "\n", "abcabc", "è a", "ab é"]
SAMPLING = SamplingSettings(
    max_prompt_length=MAX_PROMPT, max_completion_length=MAX_COMPLETION, seed=7
)


def make_policy(name, seed=1):
    if name in EMBEDDED:
        changes = WITH_STATES.get(name, {})
        model = tiny_model(name, ATTENTION_NAME, seed=seed, **changes)
        return Policy(model, torch.device("cpu"))
    changes = (GENERATE | INEXACT)[name]
    model = tiny_model(name, None, SPREAD, seed, **changes)
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


ALIKE = {"behind a node": 0, "behind a node, copied": 5, "copied with it": 64}
"""Ways to store prompts that begin alike, with the longest rest that is copied to rows."""


def draw_prompts_that_begin_alike():
    """Beginnings within beginnings, a prompt that is the beginning of another one, equal prompts,
    and one that has nothing in common with others."""
    rng = np.random.default_rng(5)
    every = rng.integers(3, VOCABULARY, 4).tolist()
    some = [*every, *rng.integers(3, VOCABULARY, 3).tolist()]
    own = [rng.integers(3, VOCABULARY, length).tolist() for length in (1, 5, 3, 2, 8)]
    other = [every[0] % (VOCABULARY - 3) + 4, *own[4]]
    return [some + own[0], every + own[1], some + own[1], some, other, every + own[4], some]


def share_short_beginnings(monkeypatch, copied_tokens=0):
    monkeypatch.setattr(prefixes, "COPIED_TOKENS", copied_tokens)
    monkeypatch.setattr(node_cache, "COPIED_TOKENS", copied_tokens)
    monkeypatch.setattr(prefixes, "MIN_PREFIX_TOKENS", 2)
    monkeypatch.setattr(prefixes, "MIN_TOKENS_OF_LEVEL", 2)


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
    [(name, temperature, "copied") for name in MODELS for temperature in (1.0, 0.0)]
    + [(name, 0.6, "copied") for name in ("qwen3", "mamba")]
    + [(name, 1.0, stored) for name in EMBEDDED for stored in ("shared", "either", *ALIKE)],
)
def test_samples_and_logprobs_are_those_of_a_plain_forward(
    monkeypatch, name, temperature, prompts_are
):
    """Each token is drawn with the random number of its position. Rows of a group are not adjacent,
    and sliding windows leave the prompt behind."""
    copied_tokens = {"shared": 0, "either": 5, **ALIKE}.get(prompts_are, 64)
    monkeypatch.setattr(node_cache, "COPIED_TOKENS", copied_tokens)
    monkeypatch.setattr(cache_attention, "BUCKET_STEP", 4)
    monkeypatch.setattr(cache_attention, "BUCKET_NUMBERS", 0)
    if prompts_are == "shared":
        monkeypatch.setattr(fused_decoder, "SMALL", 0)  # all products are oneDNN's
    prompts, num_narrow = draw_prompts(6), 0
    if prompts_are in ALIKE:
        share_short_beginnings(monkeypatch, copied_tokens)
        prompts = draw_prompts_that_begin_alike()
    reference = policy_of(name).model
    if name in EMBEDDED:
        reference = tiny_model(name, "eager", **WITH_STATES.get(name, {}))
    for key, group in run(make_engine(name, temperature=temperature), requests(prompts, 3)).items():
        prompt = prompts[key[0]]
        for sample, completion in enumerate(group):
            ids = torch.tensor([prompt + completion.token_ids.tolist()])
            with torch.no_grad():
                logits = reference(input_ids=ids, use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)[len(prompt) - 1 : -1]
            expected = logprobs.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
            tolerance = 1e-5 if name in WITHOUT_STATES else 1e-4
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


@pytest.mark.parametrize("copied_tokens", ALIKE.values())
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3_5_text", "lfm2"])
def test_what_prompts_begin_with_is_computed_once_with_the_same_bits_in_every_engine(
    name, copied_tokens, monkeypatch
):
    share_short_beginnings(monkeypatch, copied_tokens)
    prompts = draw_prompts_that_begin_alike()
    num_tokens = sum(map(len, prompts))
    before_last = [(index, tuple(ids[:-1])) for index, ids in enumerate(prompts)]
    saved_at = Counter()  # tokens that are not computed again behind each beginning
    for index, cuts in common_beginnings(before_last).items():
        for before, cut in pairwise([0, *cuts]):
            saved_at[tuple(prompts[index][:cut])] += cut - before
    for beginning, number in saved_at.items():
        num_users = sum(tuple(prompt[: len(beginning)]) == beginning for prompt in prompts)
        num_tokens -= number - number // num_users
    assert sum(map(len, prompts)) - num_tokens >= 20
    fresh = make_engine(name, num_rows=2)
    expected = bits_of(run(fresh, requests(prompts, 3)))
    assert fresh.num_prompt_tokens == num_tokens
    assert not fresh.cache.tree.nodes
    # An engine that has served others, and one that replaces it, begin with the same list.
    used = make_engine(name, num_rows=2)
    run(used, requests([prompt[::-1] for prompt in prompts], 2))
    assert bits_of(run(used, requests(prompts, 3))) == expected
    # What the first requests of a list compute serves those that come later.
    before = used.num_prompt_tokens
    late = [*prompts[0][:-1], 3]
    for request in requests([*prompts[:2], late], 3):
        used.submit(request)
        used.step()
    while used.has_work:
        used.step()
    num_computed = used.num_prompt_tokens - before
    assert num_computed == sum(map(len, [*prompts[:2], late])) - 4


def test_few_beginnings_are_stored_at_a_time(monkeypatch):
    share_short_beginnings(monkeypatch)
    rng = np.random.default_rng(0)
    beginnings = rng.permuted(np.tile(np.arange(3, VOCABULARY), (9, 1)), axis=1)[:, :6].tolist()
    prompts = [[*beginnings[number % 9], *draw_prompts(30)[number][:5]] for number in range(27)]
    engine = make_engine(num_rows=4)
    num_stored = []
    submitted = requests(prompts, 2)
    for request in submitted:
        engine.submit(request)
    got = {}
    while engine.has_work:
        got |= {request.key: completions for request, completions in engine.step()}
        num_stored.append(len(engine.cache.tree.prefixes()))
    assert max(num_stored) == MAX_PREFIXES
    monkeypatch.setattr(prefixes, "MIN_PREFIX_TOKENS", 100)
    monkeypatch.setattr(prefixes, "MIN_TOKENS_OF_LEVEL", 100)
    assert tokens_of(got) == tokens_of(run(make_engine(num_rows=4), submitted))


def test_prompts_that_begin_alike_by_chance_are_computed_as_others(monkeypatch):
    prompts = [[5, 6, *prompt[2:]] for prompt in draw_prompts(12)]
    engine = make_engine()
    expected = run(engine, requests(prompts, 2))
    assert engine.num_prompt_tokens == sum(map(len, prompts))
    monkeypatch.setattr(prefixes.PromptPrefixes, "cuts_of", lambda *_: [])
    assert bits_of(run(make_engine(), requests(prompts, 2))) == bits_of(expected)


def common_beginnings(prompts, cut=0):
    """By the definition: {index of a prompt: lengths}. `prompts`: pairs of index and ids."""
    if len(prompts) < 2:
        return {}
    ids = [prompt for _, prompt in prompts]
    shortest = min(map(len, ids))
    length = max(n for n in range(shortest + 1) if len({prompt[:n] for prompt in ids}) == 1)
    found = {index: [] for index, _ in prompts}
    if length - cut >= 2:
        cut = length
        found = {index: [length] for index, _ in prompts}
    for token in {prompt[length] for prompt in ids if len(prompt) > length}:
        behind = [each for each in prompts if len(each[1]) > length and each[1][length] == token]
        for index, more in common_beginnings(behind, cut).items():
            found[index] += more
    return found


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8))
def test_prompts_are_cut_behind_what_they_have_in_common(drawn):
    before_last = [(index, tuple(ids[:-1])) for index, ids in enumerate(drawn)]
    expected = common_beginnings(before_last)
    with pytest.MonkeyPatch.context() as monkeypatch:
        share_short_beginnings(monkeypatch)
        monkeypatch.setattr(prefixes, "MAX_LEVELS", 100)
        one_by_one, together = PromptPrefixes(), PromptPrefixes()
        prompts = [np.array(ids, np.int32) for ids in drawn]
        together.add(prompts)
        for prompt in prompts:
            one_by_one.add([prompt])
        for index, prompt in enumerate(prompts):
            assert together.cuts_of(prompt) == expected.get(index, [])
            assert one_by_one.cuts_of(prompt) == together.cuts_of(prompt)


@pytest.mark.parametrize("small", [0, fused_decoder.SMALL])  # oneDNN's products, torch's own
def test_fused_operations_serve_llamas_kind_where_the_first_weights_hide_nothing(
    small, monkeypatch
):
    monkeypatch.setattr(fused_decoder, "SMALL", small)

    def is_fused(engine):
        return engine._run_model is engine._decoder is not None

    # Gemma 2 and gpt-oss are of other kinds.
    fused = [is_fused(make_engine(name)) for name in WITHOUT_STATES]
    assert fused == [True, True, True, False, False]
    _, product, norm, extra = policies = [make_policy("qwen3") for _ in range(4)]
    for policy in policies[:3]:
        attention = policy.model.model.layers[1].self_attn
        attention.q_norm.register_forward_hook(lambda *a: 2 * a[2])
    with torch.no_grad():
        product.model.model.layers[1].self_attn.o_proj.weight.zero_()
        norm.model.model.layers[1].input_layernorm.weight.zero_()
    extra.model.model.layers[0].other_norm = torch.nn.LayerNorm(8)
    assert not any(is_fused(make_engine(policy=policy)) for policy in policies)
    policy = make_policy("qwen3")
    engine = make_engine(policy=policy)
    assert is_fused(engine)
    moved = policy.model.model.layers[1].self_attn.v_proj.weight
    moved.data = moved.data * 2  # no longer a part of the tensor of q, k and v
    head = policy.model.lm_head.weight
    head.data = head.data * 2
    engine.load_weights([])
    assert is_fused(engine)
    policy.model.model.layers[1].self_attn.q_norm.register_forward_hook(lambda *a: 2 * a[2])
    engine.load_weights(pieces_of(policy.weights()))  # each new set is checked
    assert not is_fused(engine)


def test_products_of_any_number_of_rows_are_torchs(monkeypatch):
    monkeypatch.setattr(fused_decoder, "SMALL", 0)
    weight = torch.randn(96, 48)
    reordered = fused_decoder._reordered(weight)
    bias = torch.randn(96)
    for num_rows in (*range(68), 128, 130, 200):
        x = torch.randn(num_rows, 48)
        got = fused_decoder._product(x, reordered, bias)
        torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, bias))
    used = {fused_decoder._padded_rows(number) for number in range(1, 65)}
    assert sorted(used) == [2, 4, 6, 12, 18, 24, 30, 36, 42, 48, 54, 60, 64]


def make_hybrid(name="qwen3_5_text", spread=0.2, **changes):
    changes = WITH_STATES[name] | changes
    return Policy(tiny_model(name, ATTENTION_NAME, spread, **changes), torch.device("cpu"))


def has_steps(policy):
    """Of each layer with a state, whether an engine computes single tokens by fused operations."""
    make_engine("qwen3_5_text", policy)
    return [layer.forward.step is not None for layer in find_layers(policy.model)]


def test_fused_steps_serve_qwens_gated_delta_rule_in_float32():
    served = {name for name in WITH_STATES if all(has_steps(make_hybrid(name)))}
    assert served == {"qwen3_5_text", "qwen3_5_moe_text"}
    assert not any(has_steps(make_hybrid(hidden_act="gelu")))  # behind the convolution

    policy = make_hybrid()
    before = policy.weights_sha256()
    assert has_steps(policy) == [True, True]
    assert policy.weights_sha256() == before  # random weights were there for the check alone
    policy.model.double()
    assert has_steps(policy) == [False, False]


def times(factor, function):
    return lambda *inputs: factor * function(*inputs)


def token_with(**wrong):
    """A change of a step: it takes another value for a part of the token, given the token."""
    right = DeltaStep._token

    def token(self, *inputs):
        found = right(self, *inputs)
        return found._replace(**{name: change(found) for name, change in wrong.items()})

    return DeltaStep, "_token", token


def then(function, spoil):
    """A change of a step: what a function has updated in place is spoiled behind it."""
    right = getattr(fused_delta_rule, function)

    def called(*inputs):
        output = right(*inputs)
        spoil(*inputs)
        return output

    return fused_delta_rule, function, called


SLIGHTLY = 1.0001
WRONG_STEPS = {
    "query": lambda: token_with(query=lambda token: SLIGHTLY * token.query),
    "key": lambda: token_with(key=lambda token: SLIGHTLY * token.key),
    "value": lambda: token_with(value=lambda token: SLIGHTLY * token.value),
    "decay": lambda: token_with(decay=lambda token: SLIGHTLY * token.decay),
    "beta": lambda: token_with(beta=lambda token: SLIGHTLY * token.beta),
    "rows": lambda: token_with(decay=lambda token: token.decay.flip(0)),
    "heads": lambda: token_with(decay=lambda token: token.decay.flip(1)),
    "heads of keys": lambda: token_with(key=lambda token: token.key[:, [0, 2, 1, 3]]),
    "eps": lambda: (fused_delta_rule, "EPS", 1e-5),
    "no eps": lambda: (fused_delta_rule, "EPS", 0.0),
    "output": lambda: (fused_delta_rule, "_update", times(SLIGHTLY, fused_delta_rule._update)),
    "state": lambda: then("_update", lambda state, token: state.mul_(SLIGHTLY)),
    "state's update": lambda: then(
        "_update", lambda state, token: state.sub_(token.key[..., None] @ token.value[..., None, :])
    ),
    "convolution": lambda: (
        fused_delta_rule,
        "_convolve",
        times(SLIGHTLY, fused_delta_rule._convolve),
    ),
    "inputs of the convolution": lambda: then(
        "_convolve", lambda newest, inputs, weight: inputs[..., 1].zero_()
    ),
}
HIDDEN_BY = {
    "nothing": lambda layer: None,
    "an output of zeros": lambda layer: layer.out_proj.weight.zero_(),
    "a state that decays at once": lambda layer: layer.A_log.fill_(5.0),
    "a state that never decays": lambda layer: layer.A_log.fill_(-50.0),
    "keys of zeros": lambda layer: layer.in_proj_qkv.weight[:32].zero_(),
}


@pytest.mark.parametrize("hidden_by", HIDDEN_BY)
def test_a_wrong_fused_step_is_found_whatever_the_first_weights_hide(hidden_by, monkeypatch):
    """Relative errors of 1e-4, each in a part of its own. The right step is used all the same."""
    policy = make_hybrid(linear_num_value_heads=4)
    with torch.no_grad():
        for layer in find_layers(policy.model):
            HIDDEN_BY[hidden_by](layer)
    assert has_steps(policy) == [True, True]
    not_found = []
    for name, wrong in WRONG_STEPS.items():
        with monkeypatch.context() as changed:
            changed.setattr(*wrong())
            if any(has_steps(policy)):
                not_found.append(name)
    assert not not_found


def test_a_layer_whose_own_code_is_another_is_found():
    """One that gives other outputs, has another weight, or fails."""
    policy = make_hybrid()
    first, second = find_layers(policy.model)
    own_forward = first.forward.own_forward
    first.forward.own_forward = lambda **inputs: SLIGHTLY * own_forward(**inputs)
    assert has_steps(policy) == [False, True]
    first.forward.own_forward = own_forward
    assert has_steps(policy) == [True, True]

    second.bias = torch.nn.Parameter(torch.zeros(32))  # as its first value it changes nothing
    forward_of_second = second.forward.own_forward
    second.forward.own_forward = lambda **inputs: forward_of_second(**inputs) + second.bias
    assert has_steps(policy) == [True, False]
    del first.in_proj_a
    assert has_steps(policy) == [False, False]


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"])
def test_states_give_the_trainers_logprobs_across_chunks_and_with_each_adapter(family):
    """Prompts of one token, and around the ends of chunks of 64 tokens; beginnings that prompts
    share, continued twice; then the same with two updates of LoRA adapters."""
    trainer = make_hybrid(family, spread=SPREAD)
    served = make_hybrid(family, spread=SPREAD)
    trainer.add_adapter(LoraConfig(rank=4), path="tiny", seed=0)
    engine = make_engine(policy=served, max_prompt_length=140, max_completion_length=70)
    assert engine.cache.states is not None
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, VOCABULARY, 100).tolist()
    prompts = [rng.integers(3, VOCABULARY, n).tolist() for n in (1, 2, 63, 64, 65, 129)]
    prompts += [[*shared, 5], [*shared, 6, 7], shared, [*shared[:70], 8]]
    for update in range(3):
        pieces = pieces_of(trainer.weights(only_trained=update > 0, merge=False))
        engine.load_weights(pieces)
        completions = run(engine, requests(prompts, 3))
        for key, group in completions.items():
            prompt = prompts[key[0]]
            for completion in group:
                ids = torch.tensor([*prompt, *completion.token_ids.tolist()])
                with torch.no_grad():
                    logits = packed_logits(trainer, [ids])[:-1]
                every = torch.log_softmax(logits, dim=-1)
                expected = every.gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
                np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)
        with torch.no_grad():
            for weight in trainer.trained_parameters():
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)


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
    expected, size = bits_of(run(engine, training)), engine.cache.keys_values.nodes[0][0].shape
    run(engine, evaluation)
    assert engine.cache.keys_values.nodes[0][0].shape[0] > 2 * size[0]
    for _ in range(2):
        engine.load_weights(pieces_of(make_policy("qwen3").weights()))
        assert bits_of(run(engine, training)) == expected
    engine.load_weights(pieces_of(make_policy("qwen3").weights()))
    assert engine.cache.keys_values.nodes[0][0].shape == size  # training needs as much again


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


def watched(engine):
    """Return what the engine will report, and for each generation whether it had a cache."""
    notes, ways, generate = [], [], engine._generate

    def recorded(request, *, use_cache):
        ways.append(use_cache)
        return generate(request, use_cache=use_cache)

    engine.report, engine._generate = notes.append, recorded
    return notes, ways


@pytest.mark.parametrize("name", ["mamba", "bloom", "bamba", "minimax"])
def test_a_group_is_generated_once_with_the_models_cache(name):
    engine = make_engine(name)
    notes, ways = watched(engine)
    run(engine, requests(draw_prompts(3), 2))
    assert ways == [True] * 3 and not notes


def test_a_cache_that_places_tokens_wrongly_is_noticed_and_replaced_by_whole_rows(monkeypatch):
    """Bamba numbers the tokens behind its cache from 0 if nobody gives their positions."""
    submitted = requests(draw_prompts(3), 2)
    expected = run(make_engine("bamba"), submitted)
    engine = make_engine("bamba")
    notes, ways = watched(engine)
    accept = engine.policy.layers_accept
    monkeypatch.setattr(
        engine.policy, "layers_accept", lambda name: name != "position_ids" and accept(name)
    )
    got = run(engine, submitted)
    assert ways == [True, False] * 3 and len(notes) == 1
    assert tokens_of(got) == tokens_of(expected)
    for key, group in expected.items():
        for a, b in zip(got[key], group, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


FAILURE = ValueError("no cache\nmore")
METRIC = "sampling/sampling_logp_difference/max"


@pytest.mark.parametrize(
    ("with_cache", "without_cache", "kept", "in_note"),
    [
        (1e-6, None, True, None),  # exact: there is no second way
        (0.5, 1e-6, False, ["5.0e-01", "1.0e-06"]),
        (FAILURE, 1e-6, False, ["ValueError", "no cache", "1.0e-06"]),
        (0.5, 0.25, False, [METRIC, "5.0e-01", "2.5e-01"]),
        (0.25, 0.5, True, [METRIC, "2.5e-01", "5.0e-01"]),
        (np.inf, np.inf, False, [METRIC, "inf"]),
        (FAILURE, 0.5, False, [METRIC, "no cache", "5.0e-01"]),
    ],
)
def test_exactness_is_measured_in_each_way_and_reported_once(
    with_cache, without_cache, kept, in_note, monkeypatch
):
    engine, submitted = make_engine("mamba"), requests(draw_prompts(2), 2)
    notes, ways = watched(engine)
    ends = iter(ways)  # the way of each measurement, in the order of the generations
    differences = {True: with_cache, False: without_cache}
    measured = {}

    def difference(_, completions):
        way = next(ends)
        measured[way] = completions
        if isinstance(differences[way], Exception):
            raise differences[way]
        return differences[way]

    monkeypatch.setattr(engine, "_difference", difference)
    for request in submitted:
        engine.submit(request)
        assert engine.step()[0][1] is measured[kept]
    assert ways == ([True] if without_cache is None else [True, False]) * 2
    if in_note is None:
        assert not notes
        return
    assert len(notes) == 1
    assert all(words in notes[0] for words in in_note)
    assert (METRIC in notes[0]) == (METRIC in in_note)


def test_a_model_that_is_exact_in_no_way_is_reported_with_what_was_measured():
    """Of equal scores, those of keys that no head of the indexer wants, the sparse attention of
    DeepSeek V3.2 takes other ones in a row of another length."""
    engine, submitted = make_engine("deepseek_v32"), requests(draw_prompts(3), 3)
    notes, _ = watched(engine)
    assert not any(np.isnan(c.logprobs).any() for g in run(engine, submitted).values() for c in g)
    (note,) = [note for note in notes if METRIC in note]
    *_, without_cache = (float(figure) for figure in re.findall(r"\d\.\de[+-]\d\d", note))
    assert 0.01 < without_cache < 10.0


@torch.inference_mode()
def test_the_difference_is_the_largest_of_any_token():
    engine = make_engine("mamba")
    (request,) = requests([[5, 6, 7]], 3)
    completions = engine._generate(request, use_cache=False)
    assert engine._difference(request, completions) < 1e-5
    completions[1].logprobs[-1] -= 0.375
    assert engine._difference(request, completions) == pytest.approx(0.375, abs=1e-5)
    completions[2].logprobs[0] = np.nan
    assert engine._difference(request, completions) == np.inf


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


# -- turns -----------------------------------------------------------------------------------------

NUM_GENERATIONS = 3
ENDS = range(2, 14)  # so many tokens end a turn that there are several
TURNS = SamplingSettings(max_prompt_length=9, max_completion_length=40, seed=5)
FAMILIES = ["qwen3", "llama", "mistral", "gemma2", "qwen2_window", "phi3", *WITH_SINKS]
IN_ALL_WAYS = ("qwen3", "mistral")
"""Families that are tested with each way of storing prompts, copied to a group's rows or shared."""


def test_a_turn_is_ended_by_its_own_text_alone():
    """Neither by the text of an earlier turn nor by that of inserted tokens."""
    tokenizer = bytes_tokenizer()
    policy = Policy(tiny_model("qwen3", ATTENTION_NAME), torch.device("cpu"))
    engine = EmbeddedEngine(policy, replace(TURNS, stop=["ab"]), num_rows=8, tokenizer=tokenizer)
    inserted = tokenizer.convert_tokens_to_ids(["c", "ab"])
    engine.submit(GroupRequest((0,), [5, 6], 64, has_turns=True, first_tokens=[inserted] * 64))
    num_ended = 0
    while engine.has_work:
        engine.step()
        for turn in engine.take_turns():
            is_end = turn.token_ids[-1] in engine.end_tokens
            assert is_end or "ab" in tokenizer.decode(turn.token_ids)
            num_ended += 1
            engine.end(turn, "stop")
    assert num_ended > 0


def test_a_special_token_may_be_a_stop_string():
    tokenizer = bytes_tokenizer()
    letter, special = 4, tokenizer.bos_token_id
    finder = StopStrings(tokenizer, ["<bos>", "zz"])
    assert finder.is_complete(np.array([letter, special], dtype=np.int32))
    assert not finder.is_complete(np.array([special, letter], dtype=np.int32))
    assert not StopStrings(tokenizer, ["bos"]).is_complete(np.array([special], dtype=np.int32))


def make_turns_engine(family="qwen3", num_rows=4, **changes):
    policy = Policy(tiny_model(family, ATTENTION_NAME), torch.device("cpu"))
    for token in ENDS:
        policy.stop_at(token)
    return EmbeddedEngine(policy, replace(TURNS, **changes), num_rows=num_rows)


def draw_requests(number=4, has_first_tokens=False):
    rng, drawn = np.random.default_rng(1), []

    def tokens(length):
        return rng.integers(14, VOCABULARY, length).tolist()

    for index in range(number):
        prompt = tokens(rng.integers(1, 10))
        first = [tokens(n + 1) for n in range(NUM_GENERATIONS)] if has_first_tokens else None
        more = {"has_turns": True, "first_tokens": first}
        drawn.append(GroupRequest((index,), prompt, NUM_GENERATIONS, **more))
    return drawn


def play(engine, submitted, delay=0):
    """Return groups by key. A turn is answered `delay` steps after it ended, or when the engine has
    nothing else to do. The answer depends on the turn alone."""
    for request in submitted:
        engine.submit(request)
    groups, waiting, step = {}, [], 0
    while engine.has_work:
        if engine.can_step:
            groups |= {request.key: completions for request, completions in engine.step()}
        waiting += [(step, turn) for turn in engine.take_turns()]
        ready = [each for each in waiting if each[0] + delay <= step or not engine.can_step]
        waiting = [each for each in waiting if each not in ready]
        for _, turn in ready:
            rng = np.random.default_rng([*turn.key, turn.sample_index, *turn.token_ids])
            tokens = rng.integers(14, VOCABULARY, rng.integers(1, 7)).tolist()
            if rng.random() < 0.1:  # the episode is over
                engine.end(turn, "stop")
            elif len(tokens) >= turn.num_left:
                engine.end(turn, "length")
            else:
                engine.resume(turn, tokens)
        step += 1
    return groups


def assert_exact(family, submitted, groups):
    """Log-probabilities equal those of each conversation alone, by transformers' own attention."""
    reference = tiny_model(family)
    num_inserted = 0
    for request in submitted:
        first = request.first_tokens or [[]] * NUM_GENERATIONS
        for completion, start in zip(groups[request.key], first, strict=True):
            tokens = completion.token_ids.tolist()
            assert tokens[: len(start)] == start
            ids = torch.tensor([[*request.prompt_ids, *tokens]])
            with torch.no_grad():
                logits = reference(input_ids=ids, use_cache=False).logits[0]
            expected = torch.log_softmax(logits, -1)[len(request.prompt_ids) - 1 : -1]
            expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
            mask = completion.is_sampled
            np.testing.assert_allclose(completion.logprobs[mask], expected[mask], atol=2e-5)
            assert not completion.logprobs[~mask].any()
            assert not mask[: len(start)].any()
            num_inserted += int((~mask).sum())
    assert num_inserted > 20


@pytest.mark.parametrize(
    ("family", "copied_tokens", "has_first_tokens"),
    [
        case
        for case in product(FAMILIES, (0, 4, 64), (False, True))
        if case[0] in IN_ALL_WAYS or case[1:] == (4, True)
    ],
)
def test_a_conversation_has_the_logprobs_of_itself_alone(
    family, copied_tokens, has_first_tokens, many_sizes, monkeypatch
):
    """Also with graphs, whose unused rows write to no others."""
    monkeypatch.setattr(node_cache, "COPIED_TOKENS", copied_tokens)
    drawn = draw_requests(has_first_tokens=has_first_tokens)
    assert_exact(family, drawn, play(make_turns_engine(family), drawn, delay=2))
    recorded_graphs.install(monkeypatch)
    engine = make_turns_engine(family)
    assert_exact(family, drawn, play(engine, drawn, delay=2))
    assert engine.graphs.num_replays >= 3


@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("delay", [0, 5])
def test_tokens_do_not_depend_on_rows_or_on_how_long_answers_take(num_rows, delay):
    drawn = draw_requests()
    expected = play(make_turns_engine(num_rows=4), drawn)
    got = play(make_turns_engine(num_rows=num_rows), drawn, delay)
    for key, completions in expected.items():
        for a, b in zip(completions, got[key], strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.is_sampled.tolist() == b.is_sampled.tolist()
            assert a.finish_reason == b.finish_reason


def test_many_inserted_tokens_are_divided_into_steps(monkeypatch):
    monkeypatch.setattr(embedded, "MAX_PREFILL_TOKENS", 9)
    drawn = draw_requests()
    assert_exact("qwen3", drawn, play(make_turns_engine(num_rows=16), drawn, delay=100))


def test_waiting_conversations_do_not_stop_others():
    engine = make_turns_engine(num_rows=4)
    first, second = draw_requests(2)
    finished = []
    for request in (first, GroupRequest(second.key, second.prompt_ids, 1)):
        engine.submit(request)
        while engine.can_step:
            finished += engine.step()
        assert engine.has_work
        engine.take_turns()
    assert [request.key for request, _ in finished] == [second.key]


def test_the_last_turn_is_reported_even_if_no_token_is_left():
    prompt, is_reported = draw_requests(1)[0].prompt_ids, False
    for limit in range(1, 40):
        engine = make_turns_engine(num_rows=1, max_completion_length=limit)
        engine.submit(GroupRequest((limit,), prompt, 1, has_turns=True))
        while engine.can_step:
            engine.step()
        for turn in engine.take_turns():
            is_reported |= turn.num_left == 0
            engine.end(turn, "stop")
        engine.step()
        assert not engine.has_work
    assert is_reported


# -- decode steps as graphs: what is replayed equals what would have been computed -----------------

SETTINGS = [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}]


@pytest.fixture
def many_sizes(monkeypatch):
    for name, step in {"ROW": 3, "CELL": 4, "SLOT": 2}.items():
        monkeypatch.setattr(step_graphs, f"{name}_STEP", step)
    monkeypatch.setattr(embedded, "SLOT_STEP", 2)
    monkeypatch.setattr(step_graphs, "CAPTURED_AT", 2)


@pytest.mark.usefixtures("many_sizes")
@pytest.mark.parametrize(
    ("name", "changes", "copied_tokens"),
    [(name, SETTINGS[0], 5) for name in ("llama", "gemma2", "gpt_oss")]
    + [(name, SETTINGS[0], copied) for name in IN_ALL_WAYS for copied in (0, 5, 64)]
    + [("qwen3", changes, 5) for changes in SETTINGS[1:]],
)
def test_replayed_steps_give_the_samples_of_plain_ones(name, changes, copied_tokens, monkeypatch):
    monkeypatch.setattr(node_cache, "COPIED_TOKENS", copied_tokens)
    submitted = requests(draw_prompts(12), 3)
    expected = run(make_engine(name, num_rows=8, **changes), submitted)
    recorded_graphs.install(monkeypatch)
    engine = make_engine(name, num_rows=8, **changes)
    got = run(engine, submitted)
    assert tokens_of(got) == tokens_of(expected)
    for key, completions in expected.items():
        for a, b in zip(got[key], completions, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
    assert engine.graphs.num_replays > engine.num_steps / 4


@pytest.mark.usefixtures("many_sizes")
@pytest.mark.parametrize("copied_tokens", ALIKE.values())
def test_replayed_steps_behind_shared_beginnings_give_the_samples_of_plain_ones(
    copied_tokens, monkeypatch
):
    share_short_beginnings(monkeypatch, copied_tokens)
    submitted = requests(draw_prompts_that_begin_alike(), 3)
    expected = run(make_engine(num_rows=8), submitted)
    recorded_graphs.install(monkeypatch)
    engine = make_engine(num_rows=8)
    assert tokens_of(run(engine, submitted)) == tokens_of(expected)
    assert engine.graphs.num_replays >= 3


@pytest.mark.usefixtures("many_sizes")
@pytest.mark.parametrize(
    "copied_tokens", [5, *(pytest.param(number, marks=pytest.mark.long) for number in (0, 64))]
)
def test_bits_do_not_depend_on_what_was_captured_before(copied_tokens, monkeypatch):
    monkeypatch.setattr(node_cache, "COPIED_TOKENS", copied_tokens)
    recorded_graphs.install(monkeypatch)
    used, submitted = make_engine(num_rows=8), requests(draw_prompts(15), 4)
    run(used, requests(draw_prompts(9, seed=99), 5))
    first = run(used, submitted)
    before = used.graphs.num_replays
    again = run(used, submitted)
    assert used.graphs.num_replays > before
    assert bits_of(run(make_engine(num_rows=8), submitted)) == bits_of(first) == bits_of(again)
    for name, value in (("MAX_GRAPHS", 2), ("CAPTURED_AT", 10**9)):
        monkeypatch.setattr(step_graphs, name, value)
        engine = make_engine(num_rows=8)
        assert bits_of(run(engine, submitted)) == bits_of(first)
        assert len(engine.graphs._graphs) <= 2


@pytest.mark.usefixtures("many_sizes")
def test_graphs_read_new_weights_and_no_prompts_that_were_freed(monkeypatch):
    """Weights arrive in place. The next prompts may need as much memory again, or more."""
    monkeypatch.setattr(node_cache, "COPIED_TOKENS", 0)
    new = make_policy("qwen3", seed=2)
    first, second = (requests([[n + m] * 9 for m in range(4)], 2) for n in (5, 20))
    longer = requests(draw_prompts(15), 4)
    expected = [tokens_of(run(make_engine(policy=new), each)) for each in (second, longer)]
    recorded_graphs.install(monkeypatch)
    engine = make_engine(policy=make_policy("qwen3"), num_rows=8)
    run(engine, first)
    size = engine.cache.keys_values.nodes[0][0].shape
    for _ in range(2):  # nothing was needed in between
        engine.load_weights(pieces_of(new.weights()))
    assert engine.cache.keys_values.nodes[0][0].numel() == 0
    assert tokens_of(run(engine, second)) == expected[0]
    assert engine.cache.keys_values.nodes[0][0].shape == size
    assert tokens_of(run(engine, longer)) == expected[1]


def fails(function, _):
    try:
        raise RuntimeError("out of memory\nmore")
    finally:
        raise RuntimeError("failed due to a previous error")


def gives_other_bits(function, _):
    drawn = function()
    return lambda: drawn[1].mul_(1.0001), drawn


@pytest.mark.usefixtures("many_sizes")
@pytest.mark.parametrize(
    ("capture", "reason"), [(fails, "out of memory"), (gives_other_bits, "differs")]
)
def test_failed_captures_change_no_bit(capture, reason, monkeypatch):
    submitted = requests(draw_prompts(12), 3)
    recorded_graphs.install(monkeypatch)
    expected = run(make_engine(num_rows=8), submitted)
    recorded_graphs.install(monkeypatch, capture)
    engine = make_engine(num_rows=8)
    with pytest.warns(UserWarning, match=f"without CUDA graphs: .*{reason}") as warned:
        assert bits_of(run(engine, submitted)) == bits_of(expected)
    assert len(warned) == 1 and engine.graphs.num_replays == 0
