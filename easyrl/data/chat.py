"""Turn prompts (strings or chat messages) into tokens, and check all of them before a run.

    prompts ──► through the chat template ──► surely short enough? else as tokens ──► too long?
                no template, or it refuses: an error           no tokens: an error    stop | skip

An ASCII text has no more tokens than characters, so most prompts need not be tokenised: a few
thousand rows take a fraction of a second. Of more than MAX_CHECKED prompts those with the most
characters are checked; another one that is too long ends the run when its turn comes. The tokenizer
comes from the caller.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from easyrl.config import Config, ConfigError
from easyrl.data.streams import PromptStream
from easyrl.types import Messages

T = TypeVar("T")
NONE: Mapping[str, Any] = MappingProxyType({})
MAX_CHECKED = 50_000
BATCH_SIZE = 500
NUM_SPECIAL_TOKENS = 8
"""More tokens than a tokenizer puts around a text."""


def render_prompt(
    content: str | Messages, tokenizer: Any, variables: Mapping[str, Any] = NONE
) -> list[int]:
    """Tokenize a prompt, up to where the completion begins.

    A string is tokenized as it is, with the tokenizer's own special tokens. Messages go through the
    model's chat template with `variables`, up to the beginning of the answer. Raises ValueError
    where there is no template, it refuses the messages, or no token is left.
    """
    return render_prompts([content], tokenizer, variables)[0]


def render_prompts(
    contents: Sequence[str | Messages], tokenizer: Any, variables: Mapping[str, Any] = NONE
) -> list[list[int]]:
    """`render_prompt` for prompts that are all strings or all messages: faster than one by one."""
    if isinstance(contents[0], str):
        try:
            ids: list[list[int]] = tokenizer(list(contents))["input_ids"]
        except Exception as error:  # text that is not Unicode, such as half of a surrogate pair
            raise ValueError(f"the tokenizer refuses the prompt: {error}") from error
    else:
        ids = _apply_template(contents, tokenizer, variables, tokenize=True)
    for content, prompt_ids in zip(contents, ids, strict=True):
        if not prompt_ids:
            raise ValueError(f"the prompt {content!r:.200} has no tokens")
    return ids


def _apply_template(
    contents: Sequence[Any], tokenizer: Any, variables: Mapping[str, Any], *, tokenize: bool
) -> Any:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the prompts are chat messages, but the model's tokenizer has no chat template: use a "
            "chat model (model.path), strings as they are (data.chat=false), or a column with "
            "strings (data.prompt_column)"
        )
    try:
        return tokenizer.apply_chat_template(
            list(contents),
            add_generation_prompt=True,
            tokenize=tokenize,
            return_dict=False,  # transformers 5 would return a BatchEncoding
            **variables,
        )
    except Exception as error:  # a template is a program and may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ValueError(
            f"the chat template of the model (model.path) refuses the prompt: {reason}"
        ) from error


@dataclass(frozen=True, slots=True)
class CheckedPrompts:
    stream: PromptStream
    """Without the rows that are skipped."""
    num_skipped: int


def check_variables_are_used(stream: PromptStream, config: Config) -> None:
    """Raise ConfigError for variables of a chat template that no prompt goes through."""
    variables = config.data.chat_template_kwargs
    if variables and all(isinstance(content, str) for content in stream.examples()):
        raise ConfigError(
            "data.chat_template_kwargs: expected {}, because the prompts of "
            f"'{config.data.shown}' are strings, which go through no chat template, got {variables}"
        )


def check_prompts(stream: PromptStream, tokenizer: Any, config: Config) -> CheckedPrompts:
    """Check every prompt; skip those that are too long if `data.long_prompts` says so.

    Raises ConfigError, which names the row, for a prompt that the run could not use.
    """
    contents, variables = stream.examples(), config.data.chat_template_kwargs
    limit = config.data.max_prompt_length
    template = getattr(tokenizer, "chat_template", None)
    words = set(re.findall(r"\w+", str(template)))
    if template and (unknown := [name for name in variables if name not in words]):
        raise ConfigError(
            f"data.chat_template_kwargs: expected variables of the chat template of "
            f"{config.model.path}, got {', '.join(unknown)}, which it does not contain"
        )
    lengths = dict(_lengths(stream, contents, tokenizer, variables, limit))
    too_long = {number: length for number, length in lengths.items() if length > limit}
    if too_long and config.data.long_prompts == "stop":
        first, longest = min(too_long), max(too_long.values())
        raise ConfigError(
            f"{stream.location(first)}: expected at most {limit} tokens (data.max_prompt_length), "
            f"got {too_long[first]}; {len(too_long)} of {len(contents)} prompts are too long. Use "
            f"data.max_prompt_length={longest}, or data.long_prompts=skip to leave them out"
        )
    if len(too_long) == len(contents):
        raise ConfigError(
            f"data.max_prompt_length: expected at least {min(lengths.values())}, because every "
            f"prompt of '{config.data.shown}' is longer than {limit} tokens"
        )
    kept = stream.without(too_long) if too_long else stream
    return CheckedPrompts(kept, num_skipped=len(too_long))


def _lengths(
    stream: PromptStream,
    contents: Sequence[str | Messages],
    tokenizer: Any,
    variables: Mapping[str, Any],
    limit: int,
) -> Iterator[tuple[int, int]]:
    """Yield number and token count of every prompt that may be too long."""

    def as_texts(batch: list[Any]) -> Sequence[str]:
        if isinstance(batch[0], str):
            return batch
        texts: list[str] = _apply_template(batch, tokenizer, variables, tokenize=False)
        return texts

    def as_tokens(batch: list[Any]) -> Sequence[list[int]]:
        return render_prompts(batch, tokenizer, variables)

    numbers: Sequence[int] = range(len(contents))
    if len(contents) > MAX_CHECKED:
        numbers = sorted(heapq.nlargest(MAX_CHECKED, numbers, lambda n: _num_chars(contents[n])))
    texts = dict(_in_batches(stream, contents, numbers, as_texts))
    unsure = [number for number in numbers if not _surely_fits(texts[number], limit)]
    for number, ids in _in_batches(stream, contents, unsure, as_tokens):
        yield number, len(ids)


def _surely_fits(text: str, limit: int) -> bool:
    return text.isascii() and not text.isspace() and 0 < len(text) <= limit - NUM_SPECIAL_TOKENS


def _in_batches(
    stream: PromptStream,
    contents: Sequence[str | Messages],
    numbers: Sequence[int],
    function: Callable[[list[str | Messages]], Sequence[T]],
) -> Iterator[tuple[int, T]]:
    """Apply `function` to batches of prompts, which are all strings or all messages; an error names
    the prompt it is about."""
    for start in range(0, len(numbers), BATCH_SIZE):
        batch = numbers[start : start + BATCH_SIZE]
        try:
            results = function([contents[number] for number in batch])
        except ValueError:
            results = [_one(function, contents[n], stream.location(n)) for n in batch]
        yield from zip(batch, results, strict=True)


def _one(
    function: Callable[[list[str | Messages]], Sequence[T]], content: str | Messages, location: str
) -> T:
    try:
        return function([content])[0]
    except ValueError as error:
        raise ConfigError(f"{location}: {error}") from error


def _num_chars(content: str | Messages) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(str(message["content"])) for message in content)
