"""Stop strings in both engines of this process."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.generate import GenerateEngine
from easyrl.engines.sampling import StopStrings
from easyrl.model.attention import ATTENTION_NAME, register_attention
from easyrl.model.policy import Policy
from tiny_models import SPREAD, UNSHARED, VOCABULARY, draw_sequences, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")
torch.set_num_threads(1)
register_attention()

EOS, LONGEST = 2, 14
SAMPLING = SamplingSettings(max_prompt_length=16, max_completion_length=LONGEST, seed=7)
PROMPTS = [sequence.tolist() for sequence in draw_sequences([3, 9, 1, 5, 16])]


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


@cache
def pieces_tokenizer():
    """Like SentencePiece: words with their space, which the first word loses, and bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in (0xC3, 0xA9, 0xA8))]
    names += [*"abc", "▁", "▁a", "▁b", "ab", "▁▁"]
    vocabulary = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def first_stop(tokenizer, tokens, stops):
    """Number of tokens up to the first one that completes a stop string; None: no string."""
    for length in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:length], skip_special_tokens=True)
        if any(stop in text for stop in stops):
            return length
    return None


STOPS = ["é", "éé", " a", "a b", "cd", "\n", "abcabc", "è a", "ab é"]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([bytes_tokenizer, pieces_tokenizer]),
    st.lists(st.integers(0, 20), min_size=1, max_size=25),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True),
)
def test_stop_string_is_found_with_the_token_that_completes_it(tokenizer, tokens, stops):
    tokens = [token % len(tokenizer()) for token in tokens]
    finder = StopStrings(tokenizer(), stops)
    found = None
    for length in range(1, len(tokens) + 1):
        if finder.is_complete(np.array(tokens[:length], dtype=np.int32)):
            found = length
            break
    assert found == first_stop(tokenizer(), tokens, stops)


def test_special_tokens_do_not_hide_a_stop_string():
    finder = StopStrings(bytes_tokenizer(), ["ab"])
    assert finder.is_complete(np.array([3, *[1] * 40, 4], dtype=np.int32))


def test_most_tokens_are_not_decoded():
    class Counting:
        num_decoded = 0

        def decode(self, token_ids, **options):
            Counting.num_decoded += 1
            return bytes_tokenizer().decode(token_ids, **options)

    finder = StopStrings(Counting(), ["b\n"])
    tokens = np.array([3, 4, 5, 6] * 50, dtype=np.int32)
    for length in range(1, len(tokens) + 1):
        assert not finder.is_complete(tokens[:length])
    assert Counting.num_decoded == 4  # once per token


# -- both engines --------------------------------------------------------------------------------


@cache
def policy_of(kind):
    if kind == "embedded":
        model = tiny_model("qwen3", ATTENTION_NAME, SPREAD, num_key_value_heads=2, head_dim=8)
        return Policy(model, torch.device("cpu"))
    model = tiny_model("mamba", None, SPREAD, **UNSHARED["mamba"][0])
    return Policy(model, torch.device("cpu"), unsupported_reason="layer 0 is of another kind")


def make_engine(kind, **changes):
    sampling = replace(SAMPLING, **changes)
    tokenizer = bytes_tokenizer()
    if kind == "embedded":
        return EmbeddedEngine(policy_of(kind), sampling, num_rows=5, tokenizer=tokenizer)
    return GenerateEngine(policy_of(kind), sampling, tokenizer=tokenizer)


ENGINES = pytest.mark.parametrize("kind", ["embedded", "generate"])


def run(engine, num_generations=6):
    """Completions of each prompt."""
    for index, prompt in enumerate(PROMPTS):
        engine.submit(GroupRequest((index,), prompt, num_generations))
    finished = []
    while engine.has_work:
        finished += engine.step()
    groups = {group.request.key[0]: group.completions for group in finished}
    return [groups[index] for index in range(len(PROMPTS))]


@cache
def plain(kind):
    return run(make_engine(kind))


@ENGINES
def test_completion_ends_with_the_token_that_completes_a_stop_string(kind):
    stops = ["a", "é", "cd", "\n"]
    num_stopped = 0
    for cut, whole in zip(run(make_engine(kind, stop=stops)), plain(kind), strict=True):
        for short, long in zip(cut, whole, strict=True):
            tokens = long.token_ids.tolist()
            length = first_stop(bytes_tokenizer(), tokens, stops)
            expected = tokens[: length or len(tokens)]
            assert short.token_ids.tolist() == expected
            np.testing.assert_allclose(short.logprobs, long.logprobs[: len(expected)], atol=1e-5)
            is_stop = length is not None or expected[-1] == EOS
            assert short.finish_reason == ("stop" if is_stop else "length")
            num_stopped += length is not None
    assert num_stopped > 5


@ENGINES
def test_stop_string_may_be_the_first_token(kind):
    for group in run(make_engine(kind, stop=[chr(0x67 + i) for i in range(30)] + [*"abcdef"])):
        assert any(len(completion.token_ids) == 1 for completion in group)
