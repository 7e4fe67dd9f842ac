"""Stop strings in both engines of this process."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import BOTH, EOS, draw_prompts, make_engine, requests, run
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from easyrl.engines.sampling import StopStrings
from tiny_models import VOCABULARY

pytestmark = pytest.mark.filterwarnings("ignore")
torch.set_num_threads(1)


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


@settings(max_examples=300)
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


# -- both engines --------------------------------------------------------------------------------


@BOTH
def test_completion_ends_with_the_token_that_completes_a_stop_string(name):
    stops, tokenizer = ["a", "é", "cd", "\n", "j", "p"], bytes_tokenizer()
    submitted = requests(draw_prompts(5), 6)
    whole = run(make_engine(name), submitted)
    num_stopped, lengths = 0, set()
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
            lengths.add(length)
    assert num_stopped > 5 and 1 in lengths
