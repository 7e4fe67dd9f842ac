"""Turn prompts (strings or chat messages) into tokens, and check them before a run."""

import heapq
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from easyrl.config import ConfigError, DataConfig
from easyrl.types import Messages

MAX_CHECKED = 20_000
"""Number of prompts that are tokenized before a run: those with the most characters. If another one
is too long, the run ends when it reaches it."""
TEXT_PARTS = (None, "text", "input_text", "output_text")
"""Values of `type` of a text part, in the protocols that clients speak. None: it has no type."""
PICTURE_PARTS = ("image", "image_url", "input_image")
"""Values of `type` of a part for a picture."""
NO_CHAT_TEMPLATE = (
    "the prompts are chat messages, but the model's tokenizer has no chat template: use a chat "
    "model (model.path), a column with strings (data.prompt_column), data.chat=false if a preset "
    "makes chats of strings, or data.chat_template=FILE.jinja (docs/data.md); the built-in models "
    "need 'data.chat_template={% for message in messages %}{{ message[\"content\"] }}{% endfor %}'"
)


def read_messages(given: object, source: str, *, takes_pictures: bool = False) -> Messages:
    """Return chat messages whose contents are text.

    Text parts are joined. Keys with None are left out: tables give every key to all messages.
    `takes_pictures`: contents may have parts for pictures, and are then lists of parts.
    Raises ValueError, which names the message.
    """
    if not isinstance(given, list) or not given:
        raise ValueError(f"{source}: expected text or chat messages, not empty, got {given!r:.80}")
    messages: Messages = []
    for number, message in enumerate(given):
        try:
            messages.append(_read_message(message, takes_pictures=takes_pictures))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: message {number} {message!r:.80}: {error}") from None
    if messages[-1].get("tool_calls"):
        raise ValueError(f"{source}: message {number}: expected the results of its calls after it")
    return messages


def _read_message(message: Any, *, takes_pictures: bool) -> dict[str, Any]:
    """Return a copy of one message. Raises TypeError or ValueError for another form."""
    if not isinstance(message, dict) or "role" not in message:
        raise TypeError("expected a mapping with role and content")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    parts: list[dict[str, Any]] | None = None
    if takes_pictures and has_picture(content):
        assert isinstance(content, list)
        parts = [_read_part(part) for part in content]
        content = ""  # pictures are no JSON
    texts = {
        "role": _text(message["role"]),
        "content": _text(content),
    }
    copied = json.dumps(message | texts)
    read: dict[str, Any] = json.loads(copied, object_hook=_without_none)
    _parse_arguments(read)
    if parts is not None:
        read["content"] = parts
    return read


def has_picture(content: Any) -> bool:
    """Return whether a content has a part for a picture, in any form that is read."""
    if not isinstance(content, list):
        return False
    return any(_is_image(part) for part in content)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in PICTURE_PARTS


def _read_part(part: Any) -> dict[str, Any]:
    """Return a part of a content: a text, or a picture with what the part has of it."""
    if not _is_image(part):
        return {"type": "text", "text": _text(part)}
    own = {key: value for key, value in part.items() if value is not None and key != "text"}
    address = own.pop("image_url", None)  # as OpenAI's API has it: {"url": "data:…"}
    if address is not None:
        own["url"] = address.get("url") if isinstance(address, dict) else address
    return {**own, "type": "image"}


def _text(content: Any) -> str:
    """Return the text of a content: a string, a part such as `{"type": "text", "text": "…"}`, or a
    list of these."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(map(_text, content))
    if isinstance(content, dict) and content.get("type") in TEXT_PARTS:
        text = content.get("text")
        if isinstance(text, str):
            return text
    expected = "expected text"
    if _is_image(content):
        expected = (
            "expected text, because a picture is a part in a list, of a row's prompt or, with "
            "rollout.takes_pictures=true, of an episode"
        )
    raise ValueError(f"{expected}, got {content!r:.80}")


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _parse_arguments(message: dict[str, Any]) -> None:
    """Parse the arguments of a message's calls, which OpenAI's API writes as JSON."""
    functions = [message.get("function_call")]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        for call in calls:
            functions.append(call.get("function", call) if isinstance(call, dict) else None)
    for function in functions:
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"].strip() or "{}")


def render_prompt(
    content: str | Messages, tokenizer: Any, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Tokenize a prompt: a string, or messages by the chat template with `variables`.

    An assistant's message at the end is the beginning of the answer. Raises ConfigError if there is
    no template, it refuses the messages, or no token is left.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if not template and not isinstance(content, str):
        raise ConfigError(NO_CHAT_TEMPLATE)
    try:
        json.dumps(content, ensure_ascii=False).encode()  # raises for half a surrogate pair
        if isinstance(content, str):
            ids = _encode(content, tokenizer)
        else:
            ids = _encode_chat(content, tokenizer, template, variables or {})
    except Exception as error:  # a template is a program and may raise anything
        raise refusal_of(error) from error
    if not ids:
        raise ConfigError(f"the prompt {content!r:.200} has no tokens")
    return ids


def refusal_of(error: Exception) -> ConfigError:
    """Return the error of a prompt that tokenizer, template or processor have refused."""
    if isinstance(error, ConfigError):
        return error
    text = str(error).strip() or type(error).__name__
    reason = text.splitlines()[0]
    source = "tokenizer (model.path) or chat template (data.chat_template)"
    return ConfigError(f"the {source} refuses it: {reason}")


def _encode_chat(
    messages: Messages, tokenizer: Any, template: str, variables: Mapping[str, Any]
) -> list[int]:
    """Tokenize messages by the tokenizer's chat template."""
    is_begun = messages[-1]["role"] in ("assistant", "model")
    # Some templates show calls only beside a content of None, which is "" here.
    shows_calls = "tool_calls" in template and "'content'] is none" not in template
    has_calls = any(message.get("tool_calls") for message in messages)
    if has_calls and not shows_calls:
        raise ValueError("it does not show tool_calls, which a message has")
    ids: list[int] = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        return_dict=False,  # transformers 5 would return a BatchEncoding
        **variables,
    )
    return ids


def _encode(text: str, tokenizer: Any) -> list[int]:
    """Tokenize a string without an end token, and with one begin token, also if it has its own."""
    plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids: list[int] = tokenizer(text)["input_ids"]
    # `ids` is begin tokens + `plain` + end tokens. Search from the end, so that an empty text has
    # the begin token.
    num_special = len(ids) - len(plain)
    for start in range(num_special, -1, -1):
        end = start + len(plain)
        if ids[start:end] == plain:
            begin = ids[:start]
            if plain[:start] == begin:  # the text has its own
                return plain
            return begin + plain
    return ids  # special tokens change how the text is divided


def encode_behind(text: str, tokenizer: Any) -> list[int]:
    """Tokenize a text that stands behind other tokens, without special tokens of the tokenizer's
    own. Some tokenizers put a space before a text, so it is read behind the end token."""
    end = tokenizer.eos_token_id
    added_token = tokenizer.added_tokens_decoder.get(end)
    if added_token is not None and not added_token.rstrip:  # else it takes the text's space
        whole: list[int] = tokenizer(f"{added_token}{text}", add_special_tokens=False)["input_ids"]
        if whole[:1] == [end]:
            return whole[1:]
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def text_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return a function from the tokens of a completion to its text.

    Special tokens have no text, except pairs of tags such as `<think>` and `</think>`: these belong
    to the form of an answer.
    """
    special = {}  # names of special tokens, by id
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special[token_id] = str(token)
    names = set(special.values())
    names -= {tokenizer.bos_token, tokenizer.eos_token}
    tags: set[str] = set()
    for name in names:
        closing = f"{name[:1]}/{name[1:]}"  # of `<think>`: `</think>`
        if closing in names:
            tags |= {name, closing}
    hidden = {token_id for token_id, name in special.items() if name not in tags}

    def decode(token_ids: Sequence[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in hidden]
        return str(tokenizer.decode(shown))

    return decode


def special_stops(tokenizer: Any, stop: Collection[str]) -> dict[int, str]:
    """Return the stop strings that are special tokens, by their ids. In the text of a completion
    (`text_decoder`) they are not found."""
    found = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special and str(token) in stop:
            found[token_id] = str(token)
    return found


class ShownPictures(NamedTuple):
    """The pictures of prompts that are checked."""

    num_tokens: Mapping[str, int]
    """Tokens of a prompt's pictures by its location, as {"data.jsonl:3": 256}, 0 for none. A prompt
    that is not here is not checked."""
    length: Callable[[str, str | Messages, Mapping[str, Any]], int]
    """Returns the number of tokens of a prompt, with its pictures, from its location, itself and
    the variables of the chat template. Raises ConfigError if it cannot be rendered."""


def check_prompts(
    examples: Mapping[str, str | Messages],
    tokenizer: Any,
    data: DataConfig,
    tools: Sequence[Mapping[str, Any]] = (),
    shown: ShownPictures | None = None,
) -> set[str]:
    """Check prompts, and return the locations of those that are too long, which are skipped.

    `examples`: prompts by their location, such as `data.jsonl:3`. `tools`: descriptions that all
    prompts have. `shown`: the pictures of the prompts, if there are any. Raises ConfigError for
    other unusable prompts.
    """
    is_chat = not isinstance(next(iter(examples.values())), str)
    template = getattr(tokenizer, "chat_template", None)
    if is_chat and not template:
        raise ConfigError(f"{next(iter(examples))}: {NO_CHAT_TEMPLATE}")
    variables = data.chat_template_kwargs
    words = re.findall(r"\w+", str(template)) if is_chat else []
    unknown = [name for name in variables if name not in words]
    if unknown:
        raise ConfigError(
            "data.chat_template_kwargs: expected variables of the chat template, which prompts "
            f"that are strings do not go through, got {', '.join(unknown)}"
        )
    if data.chat_template is not None and not is_chat:
        raise ConfigError(
            "data.chat_template: expected chat messages with it, but the prompts are strings: set "
            "data.chat=true (or data.system_prompt), or data.chat_template=null"
        )
    if tools:
        variables = {**variables, "tools": tools}
        if "tools" not in words:
            raise ConfigError(
                "data.chat_template: expected a template that shows tools to the model, but that "
                "of the model (model.path) does not use the variable `tools`; use a model that "
                "is made for them (Qwen3), or a file as in docs/environments.md"
            )
    limit = data.max_prompt_length
    lengths: dict[str, int] = {}
    longest_texts = heapq.nlargest(MAX_CHECKED, examples, lambda each: len(str(examples[each])))
    for location in longest_texts:
        try:
            if shown is None:
                lengths[location] = len(render_prompt(examples[location], tokenizer, variables))
            elif location in shown.num_tokens:
                lengths[location] = shown.length(location, examples[location], variables)
        except ConfigError as error:
            raise ConfigError(f"{location}: {error}") from error
    too_long = {location for location, length in lengths.items() if length > limit}
    are_all = len(too_long) == len(examples)
    if are_all or (too_long and data.long_prompts == "stop"):
        longest = max(lengths, key=lambda location: lengths[location])
        about_pictures = ""
        smaller = ""
        if shown is not None and shown.num_tokens[longest]:
            about_pictures = f", of which its pictures are {shown.num_tokens[longest]}"
            smaller = ", a smaller data.max_image_pixels"
        raise ConfigError(
            f"{longest}: expected at most {limit} tokens (data.max_prompt_length), got "
            f"{lengths[longest]}{about_pictures}; {len(too_long)} of {len(examples)} are too long. "
            f"Use data.max_prompt_length={lengths[longest]}{smaller}, or data.long_prompts=skip"
        )
    return too_long
