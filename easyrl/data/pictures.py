"""Pictures of prompts: image files read from rows, and opened for the model's processor.

    {"bytes": …}, {"path": …}, path, data: address, PIL image ─► Picture (the file) ─► RGB image

A picture stays the file that the data has: it is smaller than its pixels, and its digest says
whether two pictures are the same. Only still images in the usual formats are opened.
"""

import base64
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from easyrl.formatting import require
from easyrl.types import Picture, is_picture_part

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats by Pillow's names. Others start programs (EPS) or have no pixels."""
PHOTO_WITH_PREVIEW = "MPO"
"""Pillow's name of a JPEG file in which phones write a second, small picture behind the first."""
MAX_PIXELS = 100_000_000
"""Pixels of the largest picture that is opened: 400 MB as RGBA. A file of a few kilobytes may claim
to have many more."""
WEB_ADDRESS = re.compile(r"^(?!data:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)
DATA_ADDRESS = re.compile(r"^data:image/[\w.+-]+;base64,(.*)$", re.IGNORECASE | re.DOTALL)
FILE_NAME = re.compile(r"\.(png|jpe?g|webp|gif|bmp|tiff?|p[bgp]m)$", re.IGNORECASE)
NUM_SHOWN = 80  # characters of a value in an error
THUMBNAIL_SIDE = 160  # pixels of the longer side
THUMBNAIL_QUALITY = 80  # of 100, as JPEG
WHITE = (255, 255, 255, 255)
DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N", "I")
"""Pillow's modes of grey images with 16 bits, which its own conversion would cut off at 255."""


class PictureError(ValueError):
    """A picture cannot be used. The message does not say which it is."""


class PictureSize(NamedTuple):
    """Size as it is shown, after the file's rotation."""

    height: int
    width: int


def is_file_name(text: str) -> bool:
    """Return whether a text looks like the path or the address of a picture."""
    return FILE_NAME.search(text) is not None


def read_picture(value: Any, folder: Path | None = None) -> Picture:
    """Return the picture that a row's value stands for: the bytes of a file, its path (relative to
    `folder`), a mapping with `bytes` or `path`, a `data:` address, or a PIL image. Raises
    PictureError, also if a file does not exist; the content is not looked at."""
    if isinstance(value, Picture):
        return value
    if isinstance(value, dict):
        content = value.get("bytes")
        value = value.get("path") if content is None else content
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture(bytes(value))
    if isinstance(value, str | Path) and str(value):
        return _read_address(str(value), folder)
    if hasattr(value, "getpalette"):  # a PIL image
        return _from_image(value)
    expected = "expected a picture: {'bytes': …}, {'path': …}, a path or a PIL image"
    raise PictureError(f"{expected}, got {value!r:.{NUM_SHOWN}}")


def _read_address(address: str, folder: Path | None) -> Picture:
    if WEB_ADDRESS.match(address):
        raise PictureError(
            "expected the path of a file, because pictures are not downloaded during a run, got "
            f"the address '{address:.{NUM_SHOWN}}'; download it first"
        )
    if address.startswith("data:"):
        return read_data_address(address)
    path = Path(address).expanduser()
    if folder is not None:
        path = folder / path
    try:
        return Picture(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PictureError(f"cannot read the file '{path}': {reason}") from None


def read_data_address(address: str) -> Picture:
    """Return the picture of a `data:` address. Raises PictureError."""
    match = DATA_ADDRESS.match(address)
    if match is None:
        expected = "expected data:image/…;base64,…"
        raise PictureError(f"{expected}, got {address[:NUM_SHOWN]!r}")
    try:
        return Picture(base64.b64decode("".join(match[1].split()), validate=True))
    except ValueError as error:  # binascii.Error, or characters that are not in ASCII
        raise PictureError(f"a data: address is not base64: {error}") from None


def _from_image(image: Any) -> Picture:
    """Return a PIL image as a PNG file, which loses nothing and is the same for the same pixels."""
    file = io.BytesIO()
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = _to_rgb(image)
    image.save(file, format="PNG")
    return Picture(file.getvalue())


def size_of(picture: Picture) -> PictureSize:
    """Read the size in the file's header. Raises PictureError as `open_picture`, but for content
    that is damaged."""
    with _opened(picture) as image:
        width, height = image.size
        with _naming_damage():
            orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    if orientation in _TURNED_ORIENTATIONS:
        return PictureSize(width, height)
    return PictureSize(height, width)


_ORIENTATION_TAG = 0x0112  # in EXIF
_TURNED_ORIENTATIONS = range(5, 9)  # by a quarter, to one side or the other


def open_picture(picture: Picture) -> Any:
    """Return the picture as an RGB image of PIL, turned as its file says.

    Transparent parts are white. Grey values of 16 bits keep their highest 8. Raises PictureError
    for a damaged file, an unknown format, an animation, and more than MAX_PIXELS pixels.
    """
    from PIL import ImageOps

    with _opened(picture) as image, _naming_damage():
        image.load()
        return _to_rgb(ImageOps.exif_transpose(image))


def _to_rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode in DEEP_GREY:
        values = np.asarray(image).astype(np.int64) >> 8
        shallow = values.clip(0, 255).astype(np.uint8)
        return Image.fromarray(shallow).convert("RGB")
    if image.mode == "F":
        raise PictureError("expected at most 16 bits for each channel, got floating-point values")
    if image.has_transparency_data:
        shown = image.convert("RGBA")
        background = Image.new("RGBA", shown.size, WHITE)
        return Image.alpha_composite(background, shown).convert("RGB")
    return image.convert("RGB")


@contextmanager
def _opened(picture: Picture) -> Iterator[Any]:
    """Open the file without reading its pixels. Raises PictureError."""
    require_pillow()
    from PIL import Image, UnidentifiedImageError

    begin = picture.data[:NUM_SHOWN]
    with _naming_damage(), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            image = Image.open(io.BytesIO(picture.data), formats=FORMATS)
        except UnidentifiedImageError:
            names = ", ".join(FORMATS)
            raise PictureError(f"expected an image file ({names}), got {begin!r}") from None
        except Image.DecompressionBombError:
            raise PictureError(_too_large("more than twice as many")) from None
    with image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise PictureError(_too_large(f"{width} x {height}"))
        with _naming_damage():
            num_frames = getattr(image, "n_frames", 1)  # it looks for them in the whole file
        if num_frames > 1 and image.format != PHOTO_WITH_PREVIEW:
            raise PictureError(
                f"expected a still picture, got {num_frames} frames ({image.format}); save the "
                "one that is meant as a file of its own"
            )
        yield image


@contextmanager
def _naming_damage() -> Iterator[None]:
    """Raise PictureError for whatever Pillow raises when it reads a damaged file: besides its own
    errors IndexError, TypeError and struct.error have been seen."""
    try:
        yield
    except (PictureError, MemoryError):
        raise
    except Exception as error:
        raise PictureError(f"the image file is damaged: {error}") from None


def _too_large(got: str) -> str:
    return f"expected at most {MAX_PIXELS:,} pixels, got {got}; scale the picture down"


def data_address(picture: Picture) -> str:
    """Return the file as a `data:` address, as HTTP interfaces of models take it."""
    with _opened(picture) as image:
        file_type = image.get_format_mimetype() or "image/png"
    return f"data:{file_type};base64,{base64.b64encode(picture.data).decode()}"


def thumbnail(picture: Picture) -> bytes:
    """Return the picture as a small JPEG file, to be shown to people. Raises PictureError."""
    image = open_picture(picture)
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=THUMBNAIL_QUALITY)
    return file.getvalue()


def is_picture(value: Any) -> bool:
    """Return whether a value is an image of PIL, a picture, or a list with one of these or with a
    content's part for a picture."""
    if isinstance(value, list):
        return any(is_picture_part(each) or is_picture(each) for each in value)
    return isinstance(value, Picture) or hasattr(value, "getpalette")


def picture_of_part(part: Mapping[str, Any]) -> Picture:
    """Return the picture of a content's part `{"type": "image"}`, which has it as `image`, `path`,
    `bytes`, `url`, or OpenAI's `image_url`. Raises PictureError; the content is not looked at."""
    for key in ("image", "bytes", "path", "url", "image_url"):
        value = part.get(key)
        if isinstance(value, dict) and key == "image_url":
            value = value.get("url")
        if value is not None:
            return read_picture(value)
    raise PictureError(f"expected a part with its picture as image, path or url, got {list(part)}")


def with_images(value: Any) -> Any:
    """Return a column's value with RGB images of PIL in the places of pictures, as functions of
    users get it."""
    if isinstance(value, Picture):
        return open_picture(value)
    if isinstance(value, list) and any(isinstance(each, Picture) for each in value):
        return [with_images(each) for each in value]
    return value


def require_pillow() -> None:
    """Raise ConfigError if the library that opens images is missing."""
    require("vision", "a data set with pictures")
