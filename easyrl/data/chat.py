"""Turn prompts (strings or chat messages) into tokens, and check all of them before a run.

    prompts ──► through the chat template ──► surely short enough? else as tokens ──► too long?
                no template, or it refuses: an error           no tokens: an error    stop | skip

An ASCII text has no more tokens than characters, so most prompts need not be tokenized. Of more
than MAX_CHECKED prompts those with the most characters are checked; another one that is too long
ends the run when its turn comes. The tokenizer comes from the caller.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.data.problems import Problems
from easyrl.data.streams import PromptStream
from easyrl.types import Messages

NONE: Mapping[str, Any] = MappingProxyType({})
MAX_CHECKED, TEXTS_AT_A_TIME = 50_000, 1000
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
    if isinstance(content, str):
        try:
            ids: list[int] = tokenizer(content)["input_ids"]
        except Exception as error:  # text that is not Unicode, such as half of a surrogate pair
            raise ValueError(f"the tokenizer refuses the prompt: {error}") from error
    else:
        ids = _apply_template(content, tokenizer, variables, tokenize=True)
    if not ids:
        raise ValueError(f"the prompt {content!r:.200} has no tokens")
    return ids


def _apply_template(
    content: Messages, tokenizer: Any, variables: Mapping[str, Any], *, tokenize: bool
) -> Any:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the prompts are chat messages, but the model's tokenizer has no chat template: use a "
            "chat model (model.path), strings as they are (data.chat=false), or a column with "
            "strings (data.prompt_column)"
        )
    try:
        return tokenizer.apply_chat_template(
            content,
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


def check_prompts(prompts: PromptStream | Problems, tokenizer: Any, config: Config) -> list[int]:
    """Check every prompt; return the examples to skip, because they are too long.

    Raises ConfigError, which names the row, for a prompt that the run could not use.
    """
    contents, data = prompts.examples(), config.data
    _check_variables(contents, tokenizer, config)
    limit, kwargs = data.max_prompt_length, data.chat_template_kwargs
    is_chat = not isinstance(contents[0], str)
    numbers: Sequence[int] = range(len(contents))
    if len(contents) > MAX_CHECKED:
        numbers = sorted(heapq.nlargest(MAX_CHECKED, numbers, lambda n: _num_chars(contents[n])))
    texts: dict[int, str] = {}  # that may be too long, or have no tokens
    for number in numbers:
        content: Any = contents[number]
        try:
            if is_chat:
                content = str(_apply_template(content, tokenizer, kwargs, tokenize=False))
            content.encode()  # raises for half of a surrogate pair
        except ValueError as error:
            raise ConfigError(f"{prompts.location(number)}: {error}") from error
        surely_fits = content.isascii() and len(content) <= limit - NUM_SPECIAL_TOKENS
        if not surely_fits or not content.strip():
            texts[number] = content
    lengths: dict[int, int] = {}
    unsure = list(texts)
    for start in range(0, len(unsure), TEXTS_AT_A_TIME):
        chosen = unsure[start : start + TEXTS_AT_A_TIME]
        ids = tokenizer([texts[n] for n in chosen], add_special_tokens=not is_chat)["input_ids"]
        lengths |= dict(zip(chosen, map(len, ids), strict=True))
    for number in unsure:
        if lengths[number] == 0:
            raise ConfigError(f"{prompts.location(number)}: the prompt has no tokens")
    too_long = [number for number, length in lengths.items() if length > limit]
    if too_long and data.long_prompts == "stop":
        raise ConfigError(
            f"{prompts.location(too_long[0])}: expected at most {limit} tokens "
            f"(data.max_prompt_length), got {lengths[too_long[0]]}; {len(too_long)} of "
            f"{len(contents)} prompts are too long. Use data.max_prompt_length="
            f"{max(lengths.values())}, or data.long_prompts=skip to leave them out"
        )
    if len(too_long) == len(contents):
        raise ConfigError(
            f"data.max_prompt_length: expected at least {min(lengths.values())}, because every "
            f"prompt of '{data.shown}' is longer than {limit} tokens"
        )
    return too_long


def _check_variables(contents: Sequence[str | Messages], tokenizer: Any, config: Config) -> None:
    """Raise ConfigError for variables that no chat template uses."""
    variables = config.data.chat_template_kwargs
    is_chat = not isinstance(contents[0], str)  # a string goes through no template
    template = str(getattr(tokenizer, "chat_template", "")) if is_chat else ""
    words = re.findall(r"\w+", template)
    if unknown := [name for name in variables if name not in words]:
        raise ConfigError(
            "data.chat_template_kwargs: expected variables of the chat template, got "
            f"{', '.join(unknown)}, which it does not contain, or the prompts are strings, which "
            "go through none"
        )


def _num_chars(content: str | Messages) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(str(message["content"])) for message in content)
