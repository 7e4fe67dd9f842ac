"""Completions of several turns in the embedded engine: sampled and inserted tokens alternate."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from easyrl.engines import embedded, kv_cache
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.model.attention import ATTENTION_NAME, register_attention
from easyrl.model.policy import Policy
from tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")
torch.set_num_threads(1)
register_attention()

NUM_GENERATIONS = 3
ENDS = range(2, 14)  # so many tokens end a turn that there are several
SAMPLING = SamplingSettings(max_prompt_length=9, max_completion_length=40, seed=5)
FAMILIES = ["qwen3", "llama", "mistral", "gemma2", "qwen2_window", "phi3"]


def make_engine(family="qwen3", num_rows=4, **changes):
    policy = Policy(tiny_model(family, ATTENTION_NAME), torch.device("cpu"))
    for token in ENDS:
        policy.stop_at(token)
    return EmbeddedEngine(policy, replace(SAMPLING, **changes), num_rows=num_rows)


def draw_requests(number=4, has_first_tokens=False):
    rng, requests = np.random.default_rng(1), []

    def tokens(length):
        return rng.integers(14, VOCABULARY, length).tolist()

    for index in range(number):
        prompt = tokens(rng.integers(1, 10))
        first = [tokens(n + 1) for n in range(NUM_GENERATIONS)] if has_first_tokens else None
        more = {"has_turns": True, "first_tokens": first}
        requests.append(GroupRequest((index,), prompt, NUM_GENERATIONS, **more))
    return requests


def play(engine, requests, delay=0):
    """Return groups by key. A turn is answered `delay` steps after it ended, or when the engine has
    nothing else to do. The answer depends on the turn alone."""
    for request in requests:
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


def assert_exact(family, requests, groups):
    """Log-probabilities equal those of each conversation alone, by transformers' own attention."""
    reference = tiny_model(family)
    num_inserted = 0
    for request in requests:
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


@pytest.mark.parametrize("has_first_tokens", [False, True])
@pytest.mark.parametrize("copied_tokens", [0, 4, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_has_the_logprobs_of_itself_alone(
    family, copied_tokens, has_first_tokens, monkeypatch
):
    monkeypatch.setattr(kv_cache, "COPIED_TOKENS", copied_tokens)
    requests = draw_requests(has_first_tokens=has_first_tokens)
    assert_exact(family, requests, play(make_engine(family), requests, delay=2))


@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("delay", [0, 5])
def test_tokens_do_not_depend_on_rows_or_on_how_long_answers_take(num_rows, delay):
    requests = draw_requests()
    expected = play(make_engine(num_rows=4), requests)
    got = play(make_engine(num_rows=num_rows), requests, delay)
    for key, completions in expected.items():
        for a, b in zip(completions, got[key], strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.is_sampled.tolist() == b.is_sampled.tolist()
            assert a.finish_reason == b.finish_reason


def test_many_inserted_tokens_are_divided_into_steps(monkeypatch):
    monkeypatch.setattr(embedded, "MAX_PREFILL_TOKENS", 9)
    requests = draw_requests()
    assert_exact("qwen3", requests, play(make_engine(num_rows=16), requests, delay=100))


def test_waiting_conversations_do_not_stop_others():
    engine = make_engine(num_rows=4)
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
        engine = make_engine(num_rows=1, max_completion_length=limit)
        engine.submit(GroupRequest((limit,), prompt, 1, has_turns=True))
        while engine.can_step:
            engine.step()
        for turn in engine.take_turns():
            is_reported |= turn.num_left == 0
            engine.end(turn, "stop")
        engine.step()
        assert not engine.has_work
    assert is_reported
