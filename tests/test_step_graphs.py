"""Decode steps as graphs: what is replayed equals what would have been computed.

`recorded_graphs` stands in for CUDA; `test_gpu.py` has a test with real graphs.
"""

import numpy as np
import pytest
from test_engine import (
    EMBEDDED,
    bits_of,
    draw_prompts,
    make_engine,
    make_policy,
    requests,
    run,
    tokens_of,
)
from test_turns import FAMILIES, assert_exact, draw_requests, play
from test_turns import make_engine as make_turns_engine

import recorded_graphs
from easyrl.engines import embedded, kv_cache, step_graphs
from tiny_models import pieces_of

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = pytest.mark.parametrize("copied_tokens", [0, 5, 64], ids=["shared", "either", "copied"])
SETTINGS = [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}]


@pytest.fixture(autouse=True)
def many_sizes(monkeypatch):
    for name, step in {"ROW": 3, "CELL": 4, "SLOT": 2}.items():
        monkeypatch.setattr(step_graphs, f"{name}_STEP", step)
    monkeypatch.setattr(embedded, "SLOT_STEP", 2)
    monkeypatch.setattr(step_graphs, "CAPTURED_AT", 2)


@PROMPTS
@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, SETTINGS[0]) for name in EMBEDDED), *(("qwen3", each) for each in SETTINGS[1:])],
)
def test_replayed_steps_give_the_samples_of_plain_ones(name, changes, copied_tokens, monkeypatch):
    monkeypatch.setattr(kv_cache, "COPIED_TOKENS", copied_tokens)
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


@pytest.mark.parametrize("copied_tokens", [0, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_suspended_rows_keep_their_tokens(family, copied_tokens, monkeypatch):
    """Rows that only fill a graph's size must not write to those behind the active ones."""
    monkeypatch.setattr(kv_cache, "COPIED_TOKENS", copied_tokens)
    recorded_graphs.install(monkeypatch)
    drawn = draw_requests()
    engine = make_turns_engine(family)
    assert_exact(family, drawn, play(engine, drawn, delay=2))
    assert engine.graphs.num_replays >= 3


@PROMPTS
def test_bits_do_not_depend_on_what_was_captured_before(copied_tokens, monkeypatch):
    monkeypatch.setattr(kv_cache, "COPIED_TOKENS", copied_tokens)
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


def test_graphs_read_new_weights_and_longer_prompts(monkeypatch):
    """Weights arrive in place. The prompts' memory is another one when it grows."""
    monkeypatch.setattr(kv_cache, "COPIED_TOKENS", 0)
    recorded_graphs.install(monkeypatch)
    engine = make_engine(policy=make_policy("qwen3"), num_rows=8)
    run(engine, requests([prompt[:3] for prompt in draw_prompts(9)], 4))
    new = make_policy("qwen3", seed=2)
    engine.load_weights(pieces_of(new.weights()))
    submitted = requests(draw_prompts(15), 4)
    assert bits_of(run(engine, submitted)) == bits_of(
        run(make_engine(policy=new, num_rows=8), submitted)
    )


def test_graphs_do_not_read_prompts_that_were_freed(monkeypatch):
    """The new ones may need as much memory again."""
    monkeypatch.setattr(kv_cache, "COPIED_TOKENS", 0)
    first, second = (requests([[n + m] * 9 for m in range(4)], 2) for n in (5, 20))
    expected = tokens_of(run(make_engine(num_rows=8), second))
    recorded_graphs.install(monkeypatch)
    engine = make_engine(num_rows=8)
    run(engine, first)
    size = engine.cache.prompts_size
    for _ in range(2):  # nothing was needed in between
        engine.load_weights(pieces_of(make_policy("qwen3").weights()))
    assert engine.cache.prompts_size == (0, 0)
    assert tokens_of(run(engine, second)) == expected
    assert engine.cache.prompts_size == size


def fails(function, _):
    try:
        raise RuntimeError("out of memory\nmore")
    finally:
        raise RuntimeError("failed due to a previous error")


def gives_other_bits(function, _):
    drawn = function()
    return lambda: drawn[1].mul_(1.0001), drawn


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
