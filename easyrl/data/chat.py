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
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.data.problems import Problems
from easyrl.data.streams import PromptStream
from easyrl.types import Messages

NONE: Mapping[str, Any] = MappingProxyType({})
MAX_CHECKED = 50_000
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
    limit, variables = data.max_prompt_length, data.chat_template_kwargs
    numbers: Sequence[int] = range(len(contents))
    if len(contents) > MAX_CHECKED:
        numbers = sorted(heapq.nlargest(MAX_CHECKED, numbers, lambda n: _num_chars(contents[n])))
    lengths = {}
    for number in numbers:
        content = contents[number]
        try:
            if not _surely_fits(content, tokenizer, variables, limit):
                lengths[number] = len(render_prompt(content, tokenizer, variables))
        except ValueError as error:
            raise ConfigError(f"{prompts.location(number)}: {error}") from error
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
    if variables and all(isinstance(content, str) for content in contents):
        raise ConfigError(
            f"data.chat_template_kwargs: expected {{}}, because the prompts of "
            f"'{config.data.shown}' are strings, which go through no chat template, got {variables}"
        )
    template = getattr(tokenizer, "chat_template", None)
    words = set(re.findall(r"\w+", str(template)))
    if template and (unknown := [name for name in variables if name not in words]):
        raise ConfigError(
            f"data.chat_template_kwargs: expected variables of the chat template of "
            f"{config.model.path}, got {', '.join(unknown)}, which it does not contain"
        )


def _surely_fits(
    content: str | Messages, tokenizer: Any, variables: Mapping[str, Any], limit: int
) -> bool:
    text = content
    if not isinstance(text, str):
        text = str(_apply_template(text, tokenizer, variables, tokenize=False))
    return text.isascii() and not text.isspace() and 0 < len(text) <= limit - NUM_SPECIAL_TOKENS


def _num_chars(content: str | Messages) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(str(message["content"])) for message in content)
