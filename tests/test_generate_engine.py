"""The engine for models that the embedded one cannot serve: the same sampling, by `generate`."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.generate import GenerateEngine
from easyrl.engines.sampling import uniform_stream
from easyrl.model.policy import Policy
from easyrl.types import WeightPiece
from tiny_models import SPREAD, UNSHARED, WINDOW, draw_sequences, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")
torch.set_num_threads(1)

EOS = 2
LONGEST = 12
WINDOWED = {"num_key_value_heads": 1, "lru_width": 32, "attention_window_size": WINDOW}
MODELS = {
    **{name: UNSHARED[name][0] for name in ("qwen3_next", "mamba", "gpt_oss", "bloom")},
    "recurrent_gemma": WINDOWED,
}


@cache
def policy_of(model_type):
    model = tiny_model(model_type, None, SPREAD, **MODELS[model_type])
    return Policy(model, torch.device("cpu"), unsupported_reason="layer 0 is of another kind")


def make_engine(model_type="mamba", **changes):
    sampling = SamplingSettings(max_prompt_length=16, max_completion_length=LONGEST, seed=7)
    return GenerateEngine(policy_of(model_type), replace(sampling, **changes))


PROMPTS = [sequence.tolist() for sequence in draw_sequences([3, 9, 1, 5])]


def run(engine, num_generations=3, lengths=None):
    """Completions of each prompt."""
    for index, prompt in enumerate(PROMPTS):
        engine.submit(GroupRequest((index,), prompt, num_generations, lengths))
    finished = []
    while engine.has_work:
        finished += engine.step()
    assert [group.request.key for group in finished] == [(i,) for i in range(len(PROMPTS))]
    return [group.completions for group in finished]


def plain_logprobs(model_type, prompt, completion, temperature):
    """Log-probabilities of the whole vocabulary by one plain forward: [R, V]."""
    ids = torch.tensor([prompt + completion.token_ids.tolist()])
    with torch.no_grad():
        logits = policy_of(model_type).model(input_ids=ids, use_cache=False).logits[0]
    return torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples_and_logprobs_are_those_of_a_plain_forward(model_type, temperature):
    """Each token is drawn with the number of its position."""
    num_close = 0
    for index, group in enumerate(run(make_engine(model_type, temperature=temperature))):
        for sample, completion in enumerate(group):
            every = plain_logprobs(model_type, PROMPTS[index], completion, temperature)
            tokens = torch.from_numpy(completion.token_ids).long()
            expected = every.gather(1, tokens[:, None]).squeeze(1)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)
            assert completion.logprobs.dtype == np.float32
            assert completion.token_ids.dtype == np.int32
            numbers = uniform_stream(7, (index, sample), LONGEST)
            cumulative = every.double().exp().cumsum(-1).numpy()
            for position, token in enumerate(completion.token_ids):
                bounds = np.append(0.0, cumulative[position])
                assert bounds[token] - 1e-5 <= numbers[position] <= bounds[token + 1] + 1e-5
                num_close += bounds[token + 1] - bounds[token] < 0.5
    assert num_close > 50  # intervals narrow enough to tell numbers apart


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba", "gpt_oss"])
def test_greedy_tokens_equal_those_of_generate(model_type):
    for prompt, group in zip(
        PROMPTS, run(make_engine(model_type, temperature=0.0), num_generations=2), strict=True
    ):
        ids = torch.tensor([prompt])
        output = policy_of(model_type).model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=LONGEST,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        expected = output[0, len(prompt) :].tolist()
        assert [completion.token_ids.tolist() for completion in group] == [expected] * 2


def test_completion_ends_with_the_end_token_or_at_its_limit():
    reasons = set()
    for group in run(make_engine("bloom"), num_generations=24):
        for completion in group:
            tokens = completion.token_ids.tolist()
            assert EOS not in tokens[:-1] and len(tokens) <= LONGEST
            assert completion.finish_reason == ("stop" if tokens[-1] == EOS else "length")
            assert tokens[-1] == EOS or len(tokens) == LONGEST
            reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_larger_group_begins_with_the_samples_of_a_smaller_one():
    small, large = run(make_engine(), 2), run(make_engine(), 4)
    for a, b in zip(small, large, strict=True):
        for one, other in zip(a, b, strict=False):
            assert one.token_ids.tolist() == other.token_ids.tolist()


def test_every_completion_has_its_own_limit():
    for group in run(make_engine(), lengths=[1, 4, 2]):
        assert all(len(c.token_ids) <= n for c, n in zip(group, [1, 4, 2], strict=True))


def test_generation_config_of_the_model_is_ignored():
    """Penalties and minimum lengths would change the distribution."""
    plain = run(make_engine())
    model = policy_of("mamba").model
    own = model.generation_config
    model.generation_config = changed = GenerationConfig(
        repetition_penalty=9.0, min_new_tokens=11, do_sample=True, top_k=1, num_beams=2
    )
    try:
        got = run(make_engine())
        assert model.generation_config is changed  # it is restored
    finally:
        model.generation_config = own
    for a, b in zip(plain, got, strict=True):
        assert [c.token_ids.tolist() for c in a] == [c.token_ids.tolist() for c in b]


def test_group_is_generated_without_a_cache_if_the_cache_is_inexact(monkeypatch):
    """RecurrentGemma's cache is, beyond its window."""
    used = []
    complete = GenerateEngine._complete

    def watched(self, request, *, use_cache):
        used.append(use_cache)
        return complete(self, request, use_cache=use_cache)

    monkeypatch.setattr(GenerateEngine, "_complete", watched)
    run(make_engine("mamba"))
    assert used == [True] * len(PROMPTS)
    used.clear()
    monkeypatch.setattr(GenerateEngine, "_is_exact", lambda *_: False)
    run(make_engine("mamba"))
    assert used == [True, False] * len(PROMPTS)


def test_new_weights_are_refused_while_a_group_waits():
    engine = make_engine()
    name, weight = next(policy_of("mamba").named_weights())
    pieces = [WeightPiece(name, 0, weight.detach().flatten().clone())]
    engine.submit(GroupRequest((0,), PROMPTS[0], 2))
    with pytest.raises(RuntimeError, match="in flight"):
        engine.load_weights(pieces)
    engine.step()
    engine.load_weights(pieces)
    assert engine.num_prompt_tokens == len(PROMPTS[0])
