"""Prompts with pictures: files, rows, tokens and arrays, and what is refused."""

import base64
import io
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from easyrl.config import ConfigError
from easyrl.data import pictures
from easyrl.data.pictures import PictureError, open_picture, read_picture, size_of
from easyrl.model.processor import load_processor
from easyrl.types import Picture
from vision_processors import BACKEND_FREE, FAMILIES, NEEDS_TORCHVISION, processor_folder

HAS_TORCHVISION = find_spec("torchvision") is not None


def drawn(width, height, seed=0):
    """A picture of noise."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def saved(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return Picture(file.getvalue())


# -- files -----------------------------------------------------------------------------------------


def test_a_picture_is_read_from_each_form_and_stays_the_file(tmp_path):
    file = saved(drawn(5, 4))
    (tmp_path / "a.png").write_bytes(file.data)
    address = "data:image/png;base64," + base64.b64encode(file.data).decode()
    for value in (
        file,
        file.data,
        {"bytes": file.data, "path": "gone.png"},
        {"bytes": None, "path": "a.png"},
        "a.png",
        tmp_path / "a.png",
        address,
        {"path": address},
    ):
        assert read_picture(value, tmp_path) == file
    again = read_picture(drawn(5, 4))
    assert np.array_equal(open_picture(again), drawn(5, 4))
    assert again.digest == read_picture(drawn(5, 4)).digest != read_picture(drawn(5, 4, 1)).digest


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("https://example.org/a.png", "not downloaded"),
        ("s3://bucket/a.png", "not downloaded"),
        ("gone.png", "No such file"),
        ("data:image/png;base64,???", "base64"),
        ("data:text/plain,hello", "data:image"),
        ({"bytes": None, "path": None}, "expected a picture"),
        (None, "expected a picture"),
        (3, "expected a picture"),
    ],
)
def test_other_values_are_no_pictures(value, expected, tmp_path):
    with pytest.raises(PictureError, match=expected):
        read_picture(value, tmp_path)


def test_pictures_are_converted_as_documented():
    transparent = Image.new("LA", (2, 1), (0, 0))  # grey with alpha, all of it transparent
    transparent.putpixel((1, 0), (100, 255))
    palette = Image.new("P", (1, 1))
    palette.putpalette([10, 20, 30])
    deep = Image.fromarray(np.array([[0, 256, 65535]], dtype=np.uint16))
    shown = {
        "alpha": (saved(transparent), [[255, 255, 255], [100, 100, 100]]),
        "palette": (saved(palette), [[10, 20, 30]]),
        "see-through palette": (saved(palette, transparency=0), [[255, 255, 255]]),
        "16 bits": (saved(deep), [[0] * 3, [1] * 3, [255] * 3]),
        "one bit": (saved(Image.new("1", (1, 1), 1)), [[255, 255, 255]]),
    }
    for picture, expected in shown.values():
        image = open_picture(picture)
        assert image.mode == "RGB"
        assert np.asarray(image)[0].tolist() == expected


def test_a_photograph_is_turned_as_its_file_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter to the right
    picture = saved(drawn(30, 20), "JPEG", exif=exif)
    assert size_of(picture) == (30, 20)
    assert open_picture(picture).size == (20, 30)
    assert size_of(saved(drawn(30, 20))) == (20, 30)


def test_broken_huge_and_animated_files_are_refused(monkeypatch):
    whole = saved(drawn(40, 40), "JPEG").data
    frames = [drawn(4, 4, seed) for seed in range(3)]
    animation = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(PictureError, match="damaged"):
        open_picture(Picture(whole[: len(whole) // 2]))
    with pytest.raises(PictureError, match="expected an image file"):
        open_picture(Picture(b"%!PS-Adobe EPSF"))
    with pytest.raises(PictureError, match="3 frames"):
        size_of(animation)
    huge = saved(Image.new("1", (20_000, 20_000)))  # of a few kilobytes
    for look in (size_of, open_picture):
        with pytest.raises(PictureError, match="pixels"):
            look(huge)
    monkeypatch.setattr(pictures, "MAX_PIXELS", 100)
    with pytest.raises(PictureError, match="40 x 40"):
        size_of(Picture(whole))


def test_a_missing_library_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("easyrl.formatting.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"PIL.*pip install '.*\[vision\]'"):
        size_of(saved(drawn(2, 2)))


# -- the processors of models ----------------------------------------------------------------------

SIZES = ((70, 50), (130, 200))  # width and height
CHAT = [
    {
        "role": "user",
        "content": [
            {"type": "image"},
            {"type": "text", "text": "12+3="},
            {"type": "image"},
            {"type": "text", "text": "7?"},
        ],
    }
]
NUM_TOKENS = {
    "qwen2_5_vl": (67, 39),
    "qwen3_vl": (67, 39),
    "qwen3_5": (65, 39),
    "smolvlm": (92, 40),
    "idefics3": (92, 40),
    "internvl": (86, 56),
    "llava": (34, 8),
    "mistral3": (48, 18),
    "gemma3": (44, 8),
    "gemma4": (294, 266),
    "lfm2_vl": (267, 236),
}
"""Tokens of CHAT with pictures of SIZES, and those at which features are, as transformers' full
processors give them (5.24, with torchvision 0.28)."""


def two_pictures():
    return [saved(drawn(*size, seed)) for seed, size in enumerate(SIZES)]


def loaded(folder, family, **options):
    if family in NEEDS_TORCHVISION and not HAS_TORCHVISION:
        with pytest.raises(ConfigError, match="pip install torchvision"):
            load_processor(str(folder))
        pytest.skip("no torchvision")
    if family == "smolvlm" and find_spec("num2words") is None:
        with pytest.raises(ConfigError, match="num2words"):
            load_processor(str(folder))
        pytest.skip("no num2words")
    return load_processor(str(folder), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_become_what_the_full_processor_makes_of_them(family, tmp_path):
    folder = processor_folder(tmp_path / family, family)
    processor = loaded(folder, family)
    files = two_pictures()
    rendered = processor.render(CHAT, files)

    (placeholder,) = processor.placeholder_ids
    counts = (len(rendered.token_ids), rendered.token_ids.count(placeholder))
    assert counts == NUM_TOKENS[family]
    assert processor.length(CHAT, [size_of(file) for file in files]) == counts[0]
    assert processor.short_ids(CHAT, 2).count(placeholder) <= 2
    arrays = processor.arrays(files)
    assert arrays.keys() == rendered.media.arrays.keys()
    for name, values in arrays.items():
        assert np.array_equal(values, rendered.media.arrays[name])

    if HAS_TORCHVISION or family in BACKEND_FREE:
        content = [dict(part) for part in CHAT[0]["content"]]
        for part, file in zip(content[::2], files, strict=True):
            part["image"] = open_picture(file)
        full = AutoProcessor.from_pretrained(folder)
        expected = full.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        assert expected["input_ids"][0].tolist() == rendered.token_ids
        for name, values in arrays.items():
            assert np.array_equal(expected[name].numpy(), values)


CAPPED = {
    "qwen2_5_vl": 34,
    "smolvlm": 38,
    "idefics3": 38,
    "internvl": 62,
    "llava": 34,
    "mistral3": 36,
    "lfm2_vl": 108,
}
"""Tokens of CHAT with at most 56 x 56 pixels for a picture."""


@pytest.mark.parametrize("family", CAPPED)
def test_sizes_are_capped_by_the_settings_of_the_processor(family, tmp_path):
    folder = processor_folder(tmp_path / family, family)
    processor = loaded(folder, family, max_image_pixels=56 * 56)
    assert len(processor.render(CHAT, two_pictures()).token_ids) == CAPPED[family]
    unbounded = loaded(folder, family, max_image_pixels=10**8)
    assert unbounded.size_settings == {}
    assert len(unbounded.render(CHAT, two_pictures()).token_ids) == NUM_TOKENS[family][0]


@pytest.mark.parametrize("family", ["llava", "gemma3", "gemma4", "internvl"])
def test_a_cap_below_what_a_processor_can_do_is_refused(family, tmp_path):
    folder = processor_folder(tmp_path / family, family)
    with pytest.raises(ConfigError, match=r"data\.max_image_pixels: expected"):
        loaded(folder, family, max_image_pixels=100)


def test_a_text_may_not_have_a_placeholder(tmp_path):
    processor = loaded(processor_folder(tmp_path / "q", "qwen2_5_vl"), "qwen2_5_vl")
    texts = [
        [{"role": "user", "content": "12 <|image_pad|>"}],
        [{"role": "user", "content": [{"type": "text", "text": "<|video_pad|>"}]}],
        [{"role": "tool", "content": "1", "name": "<|image_pad|>"}],
    ]
    for messages in texts:
        with pytest.raises(ValueError, match="pad"):
            processor.render(messages, [])
    picture = two_pictures()[:1]
    with pytest.raises(ValueError, match="each of 1 pictures"):
        processor.render(CHAT, picture)
    with pytest.raises(PictureError, match="expected an image file"):
        processor.render(CHAT, [picture[0], Picture(b"no image")])


def test_a_text_model_has_no_processor():
    assert load_processor("tiny") is None
