"""The pictures that tools answer with, and that agents show: from messages to tokens.

    {"type": "image", "digest": "1f3c…"} ─► the template's placeholder ─► ids of the picture

A message names a picture by the digest of its file. So messages stay values of JSON, which may be
compared and kept as samples. In tokens the picture has an id of its own (`engines.shown`).
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from easyrl.config import ConfigError
from easyrl.data.chat import NO_CHAT_TEMPLATE, refusal_of
from easyrl.data.pictures import PictureError, data_address, picture_of_part, size_of
from easyrl.engines.shown import Known, ShownPictures
from easyrl.model.processor import Processor
from easyrl.types import DIGEST, Messages, Picture, is_picture_part, picture_part


def with_addresses(content: str | Messages, pictures: Sequence[Picture]) -> str | Messages:
    """Return a prompt as an agent may send it: with the addresses of its pictures."""
    if isinstance(content, str):
        return content
    left = iter(pictures)
    messages: Messages = []
    for message in content:
        parts = message["content"]
        if isinstance(parts, list):
            shown = list[dict[str, Any]]()
            for part in parts:
                if is_picture_part(part):
                    url = {"url": data_address(next(left))}
                    shown.append({"type": "image_url", "image_url": url})
                else:
                    shown.append(part)
            parts = shown
        messages.append({**message, "content": parts})
    return messages


class NoRoomForPictures(PictureError):
    """An episode has shown as much as it may: it ends, as at another limit."""


class ShownFiles:
    """The image files that an episode shows, each counted once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lengths: dict[str, int] = {}  # in bytes, by digest

    def add(self, pictures: Iterable[Picture]) -> None:
        """Count pictures. Raises PictureError if there is no room for them in the ring buffer, and
        NoRoomForPictures if only what the episode has shown before takes it."""
        added = {picture.digest: len(picture.data) for picture in pictures}
        lengths = {**self._lengths, **added}
        num_bytes = sum(lengths.values())
        if num_bytes > self._max_bytes:
            problem = (
                f"expected image files of at most {self._max_bytes} bytes in an episode "
                f"(data.max_image_bytes), got {num_bytes}"
            )
            new_bytes = sum(length for name, length in added.items() if name not in self._lengths)
            if new_bytes <= self._max_bytes:
                raise NoRoomForPictures(problem)
            raise PictureError(problem)
        self._lengths = lengths


class EpisodePictures:
    """Turns messages with pictures into tokens."""

    def __init__(self, processor: Processor, tokenizer: Any, shown: ShownPictures) -> None:
        self._processor = processor
        self._tokenizer = tokenizer
        self._shown = shown

    def add(self, picture: Picture, owner: Hashable) -> None:
        """Remember a picture, which can be opened, until its owner is forgotten. Raises
        PictureError if the model's processor cannot read it."""
        try:
            written = self._processor.written(size_of(picture))
        except PictureError:
            raise
        except Exception as error:  # of a processor, as for a picture that is too narrow
            raise PictureError(f"the model's processor cannot read it: {error}") from error
        self._shown.add(picture, written.num_placeholders, owner)

    def named(
        self, message: Mapping[str, Any], files: ShownFiles, owner: Hashable
    ) -> dict[str, Any]:
        """Return a message whose pictures, which have `data:` addresses, are named by digests, and
        add these. Raises PictureError."""
        content = message["content"]
        if not isinstance(content, list):
            return dict(message)
        pictures = {}  # by the number of the part
        for number, part in enumerate(content):
            if is_picture_part(part):
                pictures[number] = picture_of_part(part)
        files.add(pictures.values())
        parts = list[dict[str, Any]](content)
        for number, picture in pictures.items():
            self.add(picture, owner)
            parts[number] = picture_part(picture)
        return {**message, "content": parts}

    def prompt_ids(self, messages: Messages, variables: Mapping[str, Any]) -> list[int]:
        """Tokenize a prompt by the chat template. Raises ConfigError if it cannot be rendered."""
        if not self._tokenizer.chat_template:
            raise ConfigError(NO_CHAT_TEMPLATE)
        try:
            self._processor.check_texts(messages)
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **variables
            )
            return self._ids(str(text), messages, is_whole=True)
        except Exception as error:  # a template is a program and may raise anything
            raise refusal_of(error) from error

    def ids_behind_answer(self, text: str, messages: Messages) -> list[int]:
        """Tokenize what the template has written for these messages behind an answer. Raises
        ValueError if a text has a placeholder, or the template does not show the pictures."""
        self._processor.check_texts(messages)
        return self._ids(text, messages, is_whole=False)

    def _ids(self, text: str, messages: Messages, *, is_whole: bool) -> list[int]:
        known = list[Known]()
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                parts = [part for part in content if is_picture_part(part)]
                known += [self._shown.with_digest(part[DIGEST]) for part in parts]
        sizes = [size_of(each.picture) for each in known]
        ids = [each.picture_id for each in known]
        return self._processor.ids_of_text(text, sizes, ids, is_whole=is_whole)
