"""Prompts as the data has them (a string or chat messages), and as tokens.

Floor 1. The tokenizer comes from the caller: nothing here loads a model.
"""

from __future__ import annotations

from typing import Any

from easyrl.types import Messages


def what_is_wrong(content: object) -> str | None:
    """Why this cannot be a prompt; None if it can."""
    if isinstance(content, str):
        return None if content else "an empty string came"
    if not isinstance(content, list):
        return f"{'null' if content is None else type(content).__name__} came"
    if not content:
        return "an empty list of messages came"
    for message in content:
        if not isinstance(message, dict):
            return f"a list with a {type(message).__name__} in it came"
        if not isinstance(message.get("role"), str) or message.get("content") is None:
            return (
                f"a message without role and content came, with {', '.join(message) or 'nothing'}"
            )
    return None


def render_prompt(content: str | Messages, tokenizer: Any) -> list[int]:
    """Token ids of a prompt, up to where the completion begins.

    A string is tokenised as it is, with the special tokens that the tokenizer itself puts around
    a text; messages go through the model's chat template, up to the opened answer. Raises
    ValueError where there is no template, or where nothing is left to complete.
    """
    ids: list[int]
    if isinstance(content, str):
        ids = tokenizer(content)["input_ids"]
    elif getattr(tokenizer, "chat_template", None):
        ids = tokenizer.apply_chat_template(
            content,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,  # transformers 5 would return a BatchEncoding
        )
    else:
        raise ValueError(
            "the prompts are chat messages, but the model's tokenizer has no chat template: use a "
            "chat model (model.path), or a column with plain strings (data.prompt_column)"
        )
    if not ids:
        raise ValueError(f"the prompt {content!r} has no tokens")
    return ids
