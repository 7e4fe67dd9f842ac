"""Turn prompts (strings or chat messages) into tokens, and check them before a run.

Of more than MAX_CHECKED prompts those with the most characters are checked; another one that is too
long ends the run when its turn comes. The tokenizer comes from the caller.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from easyrl.config import Config, ConfigError, DataConfig
from easyrl.data.presets import preset_of
from easyrl.types import Messages

NONE: Mapping[str, Any] = MappingProxyType({})
MAX_CHECKED = 20_000
NO_CHAT_TEMPLATE = (
    "the prompts are chat messages, but the model's tokenizer has no chat template: use a chat "
    "model (model.path), a column with strings (data.prompt_column), or data.chat_template=FILE."
    "jinja (docs/data.md); the built-in models need 'data.chat_template="
    '{% for message in messages %}{{ message["content"] }}{% endfor %}\''
)


def makes_chats(data: DataConfig) -> bool:
    """Return whether strings of the data become chats: `data.chat=false` would keep them."""
    presets = [preset_of(name, data) for name in data.datasets]
    return data.chat is not False and bool(data.chat or any(each and each.chat for each in presets))


def check_template(
    template: object, examples: Mapping[str, str | Messages], data: DataConfig
) -> None:
    """Raise ConfigError where prompts are chats, and the model has no chat template."""
    location, content = next(iter(examples.items()))
    if not template and not isinstance(content, str):
        strings = "; strings as they are: data.chat=false" if makes_chats(data) else ""
        raise ConfigError(f"{location}: {NO_CHAT_TEMPLATE}{strings}")


def render_prompt(
    content: str | Messages, tokenizer: Any, variables: Mapping[str, Any] = NONE
) -> list[int]:
    """Tokenize a prompt, up to where the completion begins.

    A string is tokenized as it is, with the tokenizer's own special tokens. Messages go through the
    model's chat template with `variables`, up to the beginning of the answer. Raises ConfigError
    where there is no template, it refuses the messages, or no token is left.
    """
    is_chat = not isinstance(content, str)
    if is_chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(NO_CHAT_TEMPLATE)
    try:
        ids: list[int] = (
            tokenizer.apply_chat_template(
                content,
                add_generation_prompt=True,
                return_dict=False,  # transformers 5 would return a BatchEncoding
                **variables,
            )
            if is_chat
            else tokenizer(content)["input_ids"]
        )
    except Exception as error:  # a template is a program and may raise anything
        what = "tokenizer of the model (model.path)"
        if is_chat:
            what = "chat template (data.chat_template, or that of model.path)"
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ConfigError(f"the {what} refuses it: {reason}") from error
    if not ids:
        raise ConfigError(f"the prompt {content!r:.200} has no tokens")
    return ids


def check_prompts(
    examples: Mapping[str, str | Messages],
    tokenizer: Any,
    config: Config,
    tools: Sequence[Mapping[str, Any]] = (),
) -> set[str]:
    """Check prompts by their locations; return the locations of those to skip, as they are too
    long. `tools`: descriptions that all prompts have. Raises ConfigError for a prompt that the run
    could not use."""
    data, limit = config.data, config.data.max_prompt_length
    variables = data.chat_template_kwargs
    is_chat = not isinstance(next(iter(examples.values())), str)
    template = getattr(tokenizer, "chat_template", None)
    check_template(template, examples, data)
    words = re.findall(r"\w+", str(template)) if is_chat else []
    if unknown := [name for name in variables if name not in words]:
        raise ConfigError(
            "data.chat_template_kwargs: expected variables of the chat template, which prompts "
            f"that are strings do not go through, got {', '.join(unknown)}"
        )
    if data.chat_template is not None and not is_chat:
        raise ConfigError(
            "data.chat_template: expected chat messages with it, but the prompts are strings: set "
            "data.chat=true (or data.system_prompt), or data.chat_template=null"
        )
    if tools and "tools" not in words:
        raise ConfigError(
            "data.chat_template: expected a template that shows tools to the model, but that of "
            "the model (model.path) does not use the variable `tools`"
        )
    if tools:
        variables = {**variables, "tools": tools}
    lengths: dict[str, int] = {}
    for location in heapq.nlargest(MAX_CHECKED, examples, lambda k: _num_chars(examples[k])):
        try:
            lengths[location] = len(render_prompt(examples[location], tokenizer, variables))
        except ConfigError as error:
            raise ConfigError(f"{location}: {error}") from error
    too_long = {location for location, length in lengths.items() if length > limit}
    if len(too_long) == len(examples) or (too_long and data.long_prompts == "stop"):
        longest = max(lengths, key=lambda location: lengths[location])
        raise ConfigError(
            f"{longest}: expected at most {limit} tokens (data.max_prompt_length), got "
            f"{lengths[longest]}; {len(too_long)} of {len(examples)} are too long. "
            f"Use data.max_prompt_length={lengths[longest]}, or data.long_prompts=skip"
        )
    return too_long


def _num_chars(content: str | Messages) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(str(message["content"])) for message in content)
