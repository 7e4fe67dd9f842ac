"""The processor of a checkpoint: chat messages and pictures to token ids and the model's arrays.

    messages ─► chat template ─► text with one placeholder per picture ─┐               token ids
    pictures ─► RGB images ─────────────────────────────────────────────┴► processor ─► and arrays

In the token ids every picture has as many placeholders as the model has features for it. The arrays
have the names of the model's arguments (`pixel_values`, `image_grid_thw`, …).

It is transformers' own processor of the checkpoint, without its parts for video and sound: these
need libraries (torchvision) that pictures do not need. No family is named here. Sizes are capped by
the settings that the checkpoint's image processor has for that (`_size_settings`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from easyrl.config import ConfigError
from easyrl.data.hub import KEY, loadable_model
from easyrl.data.pictures import PictureSize, open_picture, require_pillow
from easyrl.formatting import install_command
from easyrl.model.files import load_model_config, load_part, load_tokenizer, quieten_transformers
from easyrl.types import Messages, Picture, PromptMedia, is_picture_part

SIZE_KEY = "data.max_image_pixels"
PLACEHOLDER_KEYS = ("image_token_id", "image_token_index")
"""Keys of config.json with the id of the token that stands for a part of a picture."""
OTHER_TOKENS = ("image_token", "video_token", "audio_token", "boi_token")
"""Attributes of processors with texts that they replace, so that no prompt may have them itself."""
OF_TEXT = {
    *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"),
    *("text_replacement_offsets", "special_tokens_mask"),
}
"""What a processor returns for the text. The rest are the arrays of the pictures."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files that may name the class of the processor, the first one that does so wins."""
MAX_SIZES = 100  # of pictures, whose numbers of tokens are measured and remembered
BROKEN_TORCHVISION = ("operator torchvision::", "torchvision.extension", "libtorchvision")
"""What errors say where torchvision was built for another torch."""


class Rendered(NamedTuple):
    """A prompt as the model gets it."""

    token_ids: list[int]  # with as many placeholders as there are features
    media: PromptMedia


class Written(NamedTuple):
    """What the processor writes in a prompt for a picture of a certain size."""

    text: str  # in the place of the one placeholder that a chat template writes
    num_placeholders: int  # in that text


class Processor:
    """transformers' processor of a checkpoint that understands pictures."""

    def __init__(
        self, processor: Any, placeholder_id: int, size_settings: Mapping[str, Any]
    ) -> None:
        """`placeholder_id`: the token at which the model puts a picture's features.
        `size_settings`: see the attribute."""
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self.placeholder_ids = frozenset([placeholder_id])
        """Tokens that stand for parts of pictures: they are never sampled, and no text has them."""
        self.size_settings = dict(size_settings)
        """Arguments of the image processor that cap sizes, as {"size": {"longest_edge": 512}}: what
        an engine that runs a processor of its own must be given."""
        texts = {str(self._tokenizer.convert_ids_to_tokens(placeholder_id))}
        for name in OTHER_TOKENS:
            text = getattr(processor, name, None)
            if isinstance(text, str) and text:
                texts.add(text)
        self.placeholder_texts = tuple(sorted(texts))
        """Texts that stand for media, and may not be a part of a prompt's own text."""
        self._ids_of_size = lru_cache(MAX_SIZES)(self._measure)
        self.written = lru_cache(MAX_SIZES)(self._written)

    @property
    def chat_template(self) -> str:
        """Return the processor's chat template, else the tokenizer's; empty if there is none."""
        template = self._processor.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return str(template or self._tokenizer.chat_template or "")

    def arrays(self, pictures: Sequence[Picture]) -> dict[str, np.ndarray]:
        """Return the model's arguments for the pictures of one prompt, by their names. Raises
        PictureError for one that cannot be opened."""
        text = self._processor.image_token * len(pictures)
        _, arrays = self._process(text, pictures)
        return arrays

    def render(
        self,
        messages: Messages,
        pictures: Sequence[Picture],
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> Rendered:
        """Render chat messages, in whose contents parts `{"type": "image"}` stand for the pictures,
        in their order.

        An assistant's message at the end is the beginning of the answer. `variables` go to the
        chat template, by default the checkpoint's own. Raises ValueError where a text has a
        placeholder, or a template shows another number of pictures; PictureError for a picture that
        cannot be opened; and whatever a template raises.
        """
        text = self._as_text(messages, len(pictures), variables or {}, chat_template)
        token_ids, arrays = self._process(text, pictures)
        media = PromptMedia(tuple(pictures), arrays, tuple(self._tokens_of(text)))
        return Rendered(token_ids, media)

    def length(
        self,
        messages: Messages,
        sizes: Sequence[PictureSize],
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> int:
        """Return the number of tokens of a prompt with pictures of these sizes, without computing
        on pixels. Raises as `render`."""
        text = self._as_text(messages, len(sizes), variables or {}, chat_template)
        ids = self._tokens_of(text)
        return len(ids) + sum(self.num_tokens(size) - 1 for size in sizes)

    def num_tokens(self, size: PictureSize) -> int:
        """Return how many tokens the placeholder of a picture of this size becomes, with those
        around its features."""
        return len(self._ids_of_size(size))

    def ids_of_text(
        self,
        text: str,
        pictures: Sequence[PictureSize],
        picture_ids: Sequence[int],
        *,
        is_whole: bool,
    ) -> list[int]:
        """Tokenize what a template has written, with a placeholder for each of these pictures. In
        the tokens their placeholders have these ids. `is_whole`: it is a whole prompt, which may
        need a begin token. Raises ValueError for another number of placeholders."""
        parts = text.split(self._processor.image_token)
        if len(parts) - 1 != len(pictures):
            raise ValueError(
                f"expected a chat template that shows each of {len(pictures)} pictures as "
                f"{self._processor.image_token!r}, got {len(parts) - 1} of these"
            )
        written = [self.written(size) for size in pictures]
        whole = parts[0]
        for each, part in zip(written, parts[1:], strict=True):
            whole += each.text + part
        options = self._text_options(text) if is_whole else {"add_special_tokens": False}
        ids: list[int] = self._tokenizer(whole, **options)["input_ids"]
        wanted = list[int]()
        for each, picture_id in zip(written, picture_ids, strict=True):
            wanted += [picture_id] * each.num_placeholders
        places = [place for place, token in enumerate(ids) if token in self.placeholder_ids]
        for place, picture_id in zip(places, wanted, strict=True):
            ids[place] = picture_id
        return ids

    def _tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a rendered chat, with one placeholder for each picture."""
        ids: list[int] = self._tokenizer(text, **self._text_options(text))["input_ids"]
        return ids

    def _as_text(
        self,
        messages: Messages,
        num_pictures: int,
        variables: Mapping[str, Any],
        chat_template: str | None,
    ) -> str:
        self.check_texts(messages)
        is_begun = messages[-1]["role"] in ("assistant", "model")
        text = self._tokenizer.apply_chat_template(
            messages,
            chat_template=chat_template or self.chat_template,
            tokenize=False,
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
            **variables,
        )
        shown = text.count(self._processor.image_token)
        if shown != num_pictures:
            raise ValueError(
                f"expected a template that shows each of {num_pictures} pictures as "
                f"{self._processor.image_token!r}, got {shown} of these"
            )
        return str(text)

    def check_texts(self, content: str | Messages) -> None:
        """Raise ValueError if a text, not a part `{"type": "image"}`, has a placeholder."""
        if isinstance(content, str):
            written = content
        else:
            written = json.dumps([_texts_of(message) for message in content], ensure_ascii=False)
        for placeholder in self.placeholder_texts:
            if placeholder in written:
                raise ValueError(
                    f"expected {placeholder!r} in no text, because the model's processor puts a "
                    "picture there; leave it out, and give the picture a content part "
                    '{"type": "image"}'
                )

    def _text_options(self, text: str) -> dict[str, Any]:
        """Return how a rendered chat is tokenized: a begin token only if the text has none, as
        transformers' processors do."""
        own = getattr(self._processor, "text_kwargs", None) or {}  # of the processor's class
        adds_special_tokens = own.get("add_special_tokens", True)
        begin = self._tokenizer.bos_token
        if begin is not None and text.startswith(begin):
            adds_special_tokens = False
        return {"add_special_tokens": adds_special_tokens}

    def _process(
        self, text: str, pictures: Sequence[Picture]
    ) -> tuple[list[int], dict[str, np.ndarray]]:
        """Return a rendered chat's tokens, and the model's arguments for its pictures."""
        import torch

        images = [open_picture(picture) for picture in pictures]
        found = self._processor(
            text=[text],
            images=images or None,
            return_tensors="pt",
            **self._text_options(text),
        )
        arrays: dict[str, np.ndarray] = {}
        for name, value in found.items():
            if name not in OF_TEXT:
                tensor = value if isinstance(value, torch.Tensor) else torch.stack(list(value))
                arrays[name] = tensor.numpy()
        return found["input_ids"][0].tolist(), arrays

    def _written(self, size: PictureSize) -> Written:
        ids = self._ids_of_size(size)
        text = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        num_placeholders = sum(token in self.placeholder_ids for token in ids)
        return Written(str(text), num_placeholders)

    def _measure(self, size: PictureSize) -> list[int]:
        """Return the tokens that the placeholder of a picture of this size becomes: measured,
        because no interface of processors says that."""
        from PIL import Image

        blank = Image.new("RGB", (size.width, size.height))
        found = self._processor(
            text=[self._processor.image_token],
            images=[blank],
            return_tensors="pt",
            add_special_tokens=False,
            do_rescale=False,  # the values of the pixels do not matter
            do_normalize=False,
        )
        ids: list[int] = found["input_ids"][0].tolist()
        return ids


def _texts_of(message: Mapping[str, Any]) -> list[Any]:
    """Return what a message has besides its role and its pictures: texts, and calls of tools."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part for part in parts if not is_picture_part(part)]
    rest = dict(message)
    rest.pop("role", None)
    rest.pop("content", None)
    return [texts, rest]


def load_processor(
    path: str, *, max_image_pixels: int | None = None, trust_remote_code: bool = False
) -> Processor | None:
    """Load the processor of the model of `path`; None if the model understands no pictures.

    `max_image_pixels`: most pixels of a picture, as `data.max_image_pixels`. Raises ConfigError if
    a library is missing, or the checkpoint has no files of a processor.
    """
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    placeholder_id = placeholder_of(config)
    if placeholder_id is None:
        return None
    require_pillow()
    quieten_transformers()
    source = Path(loadable_model(path))
    processor_class = _processor_class(source, config, path)
    image_processor = _load_image_processor(path, {})
    settings: dict[str, Any] = {}
    if max_image_pixels is not None:
        settings = _size_settings(image_processor, max_image_pixels)
    if settings:
        image_processor = _load_image_processor(path, settings)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    try:
        processor = _make(processor_class, source, image_processor, tokenizer)
    except Exception as error:  # of many types: a missing library, or files that do not fit
        raise _cannot_load(path, error) from error
    return Processor(processor, placeholder_id, settings)


def placeholder_of(config: Any) -> int | None:
    """Return the token at which a model of this configuration puts the features of pictures; None:
    it understands no pictures."""
    if getattr(config, "vision_config", None) is None:
        return None
    for key in PLACEHOLDER_KEYS:
        token = getattr(config, key, None)
        if token is not None:
            return int(token)
    return None


def _processor_class(source: Path, config: Any, path: str) -> Any:
    """Return transformers' class of the processor, as its AutoProcessor finds it."""
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING,
        processor_class_from_name,
    )

    for name in PROCESSOR_FILES:
        named = _read_file(source, name, path).get("processor_class")
        if named:
            found = processor_class_from_name(named)
            if found is not None:
                return _not_missing(found, path)
    if type(config) in PROCESSOR_MAPPING:
        return _not_missing(PROCESSOR_MAPPING[type(config)], path)
    raise ConfigError(
        f"{KEY}: expected a model whose processor transformers has, for a data set with pictures, "
        f"got '{path}' of type '{config.model_type}'"
    )


def _read_file(source: Path, name: str, path: str) -> dict[str, Any]:
    """Return the content of one of the model's files, which may be on the hub; empty without it."""
    from transformers.utils.hub import cached_file

    file = cached_file(
        str(source),
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return {}
    try:
        content: dict[str, Any] = json.loads(Path(file).read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{KEY}: {name} of '{path}' is not JSON: {error}") from None
    return content


def _not_missing(processor_class: Any, path: str) -> Any:
    """Return the class. Raises ConfigError if it stands for one whose libraries are missing."""
    if not getattr(processor_class, "is_dummy", False):
        return processor_class
    libraries = ", ".join(getattr(processor_class, "_backends", ())) or "torchvision"
    name = processor_class.__name__
    raise _cannot_load(path, ImportError(f"{name} needs {libraries}"))


def _load_image_processor(path: str, settings: Mapping[str, Any]) -> Any:
    """Load the part for pictures. transformers takes torchvision if it is there, else Pillow, whose
    results differ in the last bits of a picture; engines of their own choose in the same way."""
    from transformers import AutoImageProcessor

    try:
        return load_part(AutoImageProcessor, "image processor", path, **settings)
    except ConfigError as error:
        raise _cannot_load(path, error.__cause__ or error) from error


def _cannot_load(path: str, error: BaseException) -> ConfigError:
    reason = " ".join(str(error).split()) or type(error).__name__
    advice = ""
    if any(part in reason for part in BROKEN_TORCHVISION):
        advice = (
            "; the installed torchvision was built for another torch: pip uninstall torchvision"
        )
    elif "torchvision" in reason.lower():
        advice = "; pip install torchvision (from the index of the torch that is installed)"
    elif "num2words" in reason:
        advice = f"; {install_command('vision')}"
    text = f"cannot load the processor of '{path}', which pictures need: {reason.rstrip('.')}"
    return ConfigError(f"{KEY}: {text}{advice}")


def _make(processor_class: Any, source: Path, image_processor: Any, tokenizer: Any) -> Any:
    """Return a processor that has parts for pictures and text alone."""

    class WithoutVideo(processor_class):  # type: ignore[misc]  # its class is known here only
        """The checkpoint's processor, which accepts that its other parts are missing."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(name, argument)

    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    arguments = [parts.get(name) for name in processor_class.get_attributes()]
    settings, _ = processor_class.get_processor_dict(str(source))
    return WithoutVideo.from_args_and_dict(arguments, settings)


def _size_settings(image_processor: Any, max_pixels: int) -> dict[str, Any]:
    """Return the settings with which an image processor gives no picture more than `max_pixels`
    pixels; empty if it never does. Raises ConfigError if it has none that can.

    Image processors cap sizes in five ways, told apart by the settings that they have.
    """
    size = dict(getattr(image_processor, "size", None) or {})
    soft_tokens = getattr(image_processor, "max_soft_tokens", None)
    if soft_tokens is not None:
        return _fewer_soft_tokens(image_processor, soft_tokens, max_pixels)
    if getattr(image_processor, "max_image_tokens", None) is not None:
        return _fewer_image_tokens(image_processor, max_pixels)
    if getattr(image_processor, "max_patches", None) is not None and size.get("height"):
        return _fewer_tiles(image_processor, size["height"] * size["width"], max_pixels)
    if getattr(image_processor, "merge_size", None) is not None and size.get("longest_edge"):
        # Here both edges are numbers of pixels, whatever their names say.
        smallest = min(size["shortest_edge"], max_pixels)
        return _if_smaller(size, {"shortest_edge": smallest, "longest_edge": max_pixels})
    if size.get("longest_edge") and not size.get("shortest_edge"):
        return _if_smaller(size, {"longest_edge": math.isqrt(max_pixels)})
    fixed = dict(getattr(image_processor, "crop_size", None) or {}) or size
    height = fixed.get("height") or size.get("shortest_edge") or 0
    width = fixed.get("width") or height
    if height * width <= max_pixels:
        return {}
    raise ConfigError(
        f"{SIZE_KEY}: expected {height * width} or more, because the model's processor scales "
        f"every picture to {height} x {width} pixels, got {max_pixels}"
    )


def _if_smaller(size: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, Any]:
    if size["longest_edge"] <= wanted["longest_edge"]:
        return {}
    return {"size": dict(wanted)}


def _fewer_soft_tokens(image_processor: Any, given: int, max_pixels: int) -> dict[str, Any]:
    """Cap the number of features of a picture, which may have certain values only."""
    side = image_processor.patch_size * image_processor.pooling_kernel_size
    allowed = given
    while allowed > 1 and allowed * side**2 > max_pixels:
        allowed //= 2  # each of the values that such models know is half of the next
    changed = {} if allowed == given else {"max_soft_tokens": allowed}
    try:
        type(image_processor)(**changed)
    except ValueError as error:
        raise ConfigError(f"{SIZE_KEY}: expected more than {max_pixels}: {error}") from None
    return changed


def _fewer_image_tokens(image_processor: Any, max_pixels: int) -> dict[str, Any]:
    """Cap the features of a picture that is not split, and the number of tiles of one that is."""
    side = image_processor.encoder_patch_size * image_processor.downsample_factor
    num_tokens = max_pixels // side**2
    if num_tokens < 1:
        raise ConfigError(f"{SIZE_KEY}: expected {side**2} or more, got {max_pixels}")
    changed: dict[str, Any] = {}
    if num_tokens < image_processor.max_image_tokens:
        changed["max_image_tokens"] = num_tokens
        changed["min_image_tokens"] = min(image_processor.min_image_tokens, num_tokens)
    num_tiles = max_pixels // image_processor.tile_size**2
    if num_tiles < image_processor.min_tiles:
        changed["do_image_splitting"] = False
    elif num_tiles < image_processor.max_tiles:
        changed["max_tiles"] = num_tiles
    return changed


def _fewer_tiles(image_processor: Any, tile_pixels: int, max_pixels: int) -> dict[str, Any]:
    """Cap the number of tiles that a picture is split into."""
    num_tiles = max_pixels // tile_pixels
    if num_tiles < 1:
        raise ConfigError(
            f"{SIZE_KEY}: expected {tile_pixels} or more, which a tile of the model has, got "
            f"{max_pixels}"
        )
    if num_tiles >= image_processor.max_patches:
        return {}
    return {
        "max_patches": num_tiles,
        "min_patches": min(image_processor.min_patches, num_tiles),
    }
