#!/usr/bin/env bash
# transformers 5.24.0 (tokenizers 0.23.3), Python 3.11, November 2026.
#
# A tokenizer is loaded differently when the config.json of a model lies beside it. Its own
# tokenizer_config.json names the general class (TokenizersBackend) and its tokenizer.json has a
# complete pipeline, here one token for each character. With a config.json of the model type qwen2 in
# the folder, AutoTokenizer takes Qwen2Tokenizer instead, which puts its own byte-level splitting in the
# place of that in the file. Nothing is printed; texts lose every character that the new splitting
# renames, such as the space. With model type llama the same files load as they are.
#
# Why it matters here: a tokenizer that is saved beside a model of another family counts, trains and
# writes other texts than the same tokenizer alone.
#
# Output seen:
#     alone: TokenizersBackend 'a b'
#     beside llama: TokenizersBackend 'a b'
#     beside qwen2: Qwen2Tokenizer 'ab'
# Exits with 1 if the library behaves otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.24.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 venv/bin/python - <<'END' 2>/dev/null
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

characters = {character: number for number, character in enumerate("ab ?")}
pipeline = Tokenizer(models.WordLevel(characters, unk_token="?"))
pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
pipeline.decoder = decoders.Fuse()
own = PreTrainedTokenizerFast(tokenizer_object=pipeline, unk_token="?")

found = []
for kind in (None, "llama", "qwen2"):
    place = Path(kind or "alone")
    own.save_pretrained(place)
    if kind is not None:
        (place / "config.json").write_text(json.dumps({"model_type": kind}))
    loaded = AutoTokenizer.from_pretrained(place)
    ids = loaded("a b", add_special_tokens=False)["input_ids"]
    text = loaded.decode([number for number in ids if number != characters["?"]])
    found.append((type(loaded).__name__, text))
    print(f"{'alone' if kind is None else 'beside ' + kind}: {type(loaded).__name__} {text!r}")
expected = [("TokenizersBackend", "a b"), ("TokenizersBackend", "a b"), ("Qwen2Tokenizer", "ab")]
sys.exit(found != expected)
END
