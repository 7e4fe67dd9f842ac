"""Every prompt as tokens, once, before a process is started: does the model take it?

    prompts ──tokenizer──► too long? `data.long_prompts`: stop | skip
                       └─► no chat template, a template that refuses, no token: an error

An error names the row's place in the data. Up to MAX_RENDERED prompts are rendered (some seconds
at most); of a larger data set those with the most characters, for a short text is hardly ever a
long prompt. One of the others that is too long after all ends the run when its turn comes, under
`skip` too.

Floor 1: the tokenizer comes from the caller.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.data.chat import render_prompts
from easyrl.data.datasets import PromptStream
from easyrl.types import Messages

MAX_RENDERED = 50_000
AT_A_TIME = 500


@dataclass(frozen=True, slots=True)
class CheckedPrompts:
    stream: PromptStream
    """Without the rows that are skipped."""
    num_skipped: int
    longest: int
    """No prompt of the stream has more tokens."""


def check_prompts(stream: PromptStream, tokenizer: Any, config: Config) -> CheckedPrompts:
    """Raise ConfigError for a prompt that the run could not use and may not skip."""
    contents = stream.examples()
    limit = config.data.max_prompt_length
    lengths = dict(_lengths(contents, tokenizer, stream))  # of each that is rendered, its tokens
    too_long = {place: length for place, length in lengths.items() if length > limit}
    if too_long and config.data.long_prompts == "stop":
        first, longest = min(too_long), max(too_long.values())
        raise ConfigError(
            f"{stream.place_of(first)}: the prompt has {too_long[first]} tokens, but "
            f"data.max_prompt_length is {limit}. So it is with {len(too_long)} of "
            f"{len(contents)} prompts; the longest has {longest} tokens. Accepted: "
            f"data.max_prompt_length={longest}, or data.long_prompts=skip to leave them out"
        )
    if len(too_long) == len(contents):
        raise ConfigError(
            f"data.max_prompt_length: all {len(contents)} prompts of '{config.data.dataset}' have "
            f"more than {limit} tokens, so data.long_prompts=skip leaves none; accepted: at least "
            f"{min(lengths.values())}"
        )
    are_all_known = len(lengths) == len(contents) and stream.epoch_length is not None
    kept = [length for length in lengths.values() if length <= limit]
    return CheckedPrompts(
        stream.without(too_long) if too_long else stream,
        num_skipped=len(too_long),
        longest=max(kept) if are_all_known else limit,
    )


def _lengths(
    contents: Sequence[str | Messages], tokenizer: Any, stream: PromptStream
) -> Iterator[tuple[int, int]]:
    """(place, tokens) of every prompt that is rendered."""
    places: Sequence[int] = range(len(contents))
    if len(contents) > MAX_RENDERED:
        places = sorted(heapq.nlargest(MAX_RENDERED, places, lambda place: _size(contents[place])))
    for start in range(0, len(places), AT_A_TIME):
        batch = places[start : start + AT_A_TIME]
        for _, of_a_kind in groupby(batch, lambda place: isinstance(contents[place], str)):
            some = list(of_a_kind)
            try:
                ids = render_prompts([contents[place] for place in some], tokenizer)
            except ValueError:
                ids = [
                    _render(contents[place], tokenizer, stream.place_of(place)) for place in some
                ]
            yield from zip(some, map(len, ids), strict=True)


def _render(content: str | Messages, tokenizer: Any, place: str) -> list[int]:
    try:
        return render_prompts([content], tokenizer)[0]
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error


def _size(content: str | Messages) -> int:
    """Characters."""
    if isinstance(content, str):
        return len(content)
    return sum(len(str(message["content"])) for message in content)
