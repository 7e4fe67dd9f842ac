"""Where the rows of a data set have their pictures, and where their prompts show them.

    TRL's form     column `image` or `images`; parts {"type": "image"} in the chat, or none: then
                   the pictures stand before the text of the first user's message
    verl's form    column `images`, and `<image>` in the text for each picture
    with parts     {"type": "image", "image": …}: the part has its picture itself

A prompt is then a chat, in which parts {"type": "image"} stand for the pictures in their order.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from easyrl.config import ConfigError
from easyrl.data.pictures import DATA_ADDRESS, PictureError, is_file_name, read_picture
from easyrl.data.tables import Table
from easyrl.data.values import is_missing
from easyrl.types import PICTURE_PART, Messages, Picture, is_picture_part

KEY = "data.image_column"
USUAL_COLUMNS = ("images", "image")
"""Columns that are looked for unless `data.image_column` names one."""
TAG = "<image>"
"""Text that stands for a picture in prompts of verl's form."""
OWN_VALUES = ("image", "bytes", "path", "url", "base64")
"""Keys of a content part with a picture of its own."""
NUM_LOOKED_AT = 1000  # rows, for the first one with a picture


class Placed(NamedTuple):
    """A chat in which every picture has its place."""

    messages: Messages
    values: list[Any]  # of the pictures, in their order, as `read_picture` takes them


class PictureSource:
    """Where the pictures of a data set's prompts are: in a column, in content parts, or both."""

    def __init__(
        self,
        column: str | None = None,
        folder: Path | None = None,
        *,
        max_bytes: int | None = None,
    ) -> None:
        """`folder`: that of the data file, to which paths are relative; `max_bytes`: of all files
        of a prompt, None: unlimited."""
        self.column = column
        self._max_bytes = max_bytes
        self._folder = folder
        self._shown = "content part" if column is None else f"column '{column}'"

    def place(self, messages: Messages, row: Any) -> Placed:
        """Give every picture of a row its place in the chat. Raises ValueError where the numbers of
        pictures and of places differ."""
        values = [] if self.column is None else values_of(row.get(self.column))
        return place(messages, values, self._shown, has_tags=self.column is not None)

    def read(self, values: Iterable[Any]) -> tuple[Picture, ...]:
        """Read the files. Raises PictureError, which names the column."""
        try:
            pictures = tuple(read_picture(value, self._folder) for value in values)
        except PictureError as error:
            raise PictureError(f"{self._shown}: {error}") from None
        num_bytes = sum(len(picture.data) for picture in pictures)
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise PictureError(
                f"{self._shown}: expected image files of at most {self._max_bytes:,} bytes in one "
                f"prompt (data.max_image_bytes), got {num_bytes:,}"
            )
        return pictures

    def as_pictures(self, value: Any) -> Any:
        """Return a value of the column with pictures in the places of their files: one, several as
        a list, or None."""
        if isinstance(value, list | tuple):
            return list(self.read(value))
        if is_missing(value):
            return None
        return self.read([value])[0]


def values_of(value: Any) -> list[Any]:
    """Return the pictures of a row's value: one, several, or none."""
    if hasattr(value, "tolist") and not hasattr(value, "getpalette"):  # an array of pandas
        value = value.tolist()
    if isinstance(value, list | tuple):
        return list(value)
    return [] if is_missing(value) else [value]


def find_column(named: str | None, columns: Collection[str], rows: Any, dataset: str) -> str | None:
    """Return the column with pictures; None if there is none, or `named` is empty.

    `rows` are looked at only for a usual name: a column `image` may have other values, such as the
    name of a container image. Raises ConfigError if there is no column `named`.
    """
    if named == "":
        return None
    if named is not None:
        if named not in columns:
            raise ConfigError(
                f"{KEY}: expected a column of '{dataset}', which are {', '.join(columns)}, got "
                f"'{named}'"
            )
        return named
    for name in USUAL_COLUMNS:
        if name in columns and _has_pictures(rows, name):
            return name
    return None


def _has_pictures(rows: Any, column: str) -> bool:
    """Return whether the first value of the column looks like a picture, or a list of these."""
    for row in islice(_only(rows, column), NUM_LOOKED_AT):
        values = values_of(row.get(column))
        if values:
            return _is_picture_like(values[0])
    return False


def _only(rows: Any, column: str) -> Iterable[Any]:
    """Return the rows; of a table those that have the column alone, as files."""
    if not isinstance(rows, Table):
        return list(rows)
    return rows.files([column])


def _is_picture_like(value: Any) -> bool:
    if isinstance(value, dict):
        content = value.get("bytes")
        return content is not None or _is_picture_like(value.get("path"))
    if isinstance(value, str):
        return is_file_name(value) or DATA_ADDRESS.match(value) is not None
    return isinstance(value, bytes | Picture) or hasattr(value, "getpalette")


def place(
    messages: Messages, values: Sequence[Any], source: str, *, has_tags: bool = True
) -> Placed:
    """Give pictures their places in a chat. `has_tags`: `<image>` in a text is such a place. Raises
    ValueError for another number of places; the message names `source`, where pictures are."""
    num_parts = _count_parts(messages)
    if num_parts:
        return _fill_parts(messages, values, source, num_parts)
    num_tags = sum(_text_of(message).count(TAG) for message in messages)
    if num_tags and has_tags:
        _check_number(len(values), num_tags, f"'{TAG}'", source)
        return Placed([_split_tags(message) for message in messages], list(values))
    if not values:
        return Placed(messages, [])
    return Placed(_put_in_front(messages, len(values)), list(values))


def shows_pictures(content: str | Messages) -> bool:
    """Return whether a prompt has parts that stand for pictures."""
    return not isinstance(content, str) and _count_parts(content) > 0


def _count_parts(messages: Messages) -> int:
    count = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            count += sum(1 for part in content if is_picture_part(part))
    return count


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _check_number(num_pictures: int, num_places: int, place_name: str, source: str) -> None:
    if num_pictures != num_places:
        raise ValueError(
            f"expected a picture for each {place_name} of the prompt, {num_places} in all, got "
            f"{num_pictures} ({source})"
        )


def _fill_parts(messages: Messages, values: Sequence[Any], source: str, num_parts: int) -> Placed:
    """Take pictures from the parts that have their own, the others from `values`."""
    filled: Messages = []
    found: list[Any] = []
    rest = list(values)
    num_own = 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            filled.append(message)
            continue
        parts = []
        for part in content:
            if not is_picture_part(part):
                parts.append(part)
                continue
            own = _own_value(part)
            num_own += own is not None
            if own is None and rest:
                own = rest.pop(0)
            found.append(own)
            parts.append(dict(PICTURE_PART))
        filled.append({**message, "content": parts})
    _check_number(len(values), num_parts - num_own, "part of type 'image'", source)
    return Placed(filled, found)


def _own_value(part: dict[str, Any]) -> Any:
    """Return the picture that a part has itself; None if it has none."""
    for key in OWN_VALUES:
        value = part.get(key)
        if value is None:
            continue
        if key == "base64":
            return f"data:image/unknown;base64,{value}"
        return value
    return None


def _split_tags(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with parts: a picture in the place of each tag."""
    texts = _text_of(message).split(TAG)
    if len(texts) == 1:
        return message
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        if number > 0:
            parts.append(dict(PICTURE_PART))
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _put_in_front(messages: Messages, count: int) -> Messages:
    """Put pictures before the text of the first user's message. Raises ValueError without one."""
    for number, message in enumerate(messages):
        if message["role"] == "user":
            parts = [dict(PICTURE_PART) for _ in range(count)]
            text = _text_of(message)
            if text:
                parts.append({"type": "text", "text": text})
            shown = {**message, "content": parts}
            return [*messages[:number], shown, *messages[number + 1 :]]
    raise ValueError("expected a user's message, which shows the pictures, got none")
