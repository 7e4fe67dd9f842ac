"""Prompts with pictures: files, rows, tokens and arrays, and what is refused."""

import base64
import io
import json
import re
from contextlib import closing
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from reward_pools import call as score
from reward_pools import rewards_of
from transformers import AutoProcessor

from easyrl import events
from easyrl.agents.protocols.base import read_conversation
from easyrl.api.inputs import Inputs
from easyrl.config import Config, ConfigError, load_config, to_commented_yaml
from easyrl.data import pictures
from easyrl.data.datasets import open_prompts, problem_ids
from easyrl.data.pictures import (
    THUMBNAIL_SIDE,
    PictureError,
    data_address,
    open_picture,
    read_picture,
    size_of,
    thumbnail,
)
from easyrl.engines.base import Turn
from easyrl.environments.episodes import EnvironmentEpisodes, with_observation
from easyrl.environments.pool import EnvironmentPool
from easyrl.environments.single_turn import SingleTurns
from easyrl.evaluation import command
from easyrl.model.processor import load_processor
from easyrl.model.prompt_renderer import PromptRenderer
from easyrl.observe.history import read_histories
from easyrl.observe.report import to_page
from easyrl.observe.samples import picture_files, show_samples
from easyrl.observe.trackers import Trackers
from easyrl.rewards.functions import RewardError
from easyrl.runtime.checks.engine import measure_model
from easyrl.runtime.checks.prompts import (
    check_pictures,
    describe_first_prompt,
    describe_pictures,
    find_too_long,
    load_renderer,
)
from easyrl.runtime.resolve import resolve
from easyrl.runtime.run_folder import RunFolder
from easyrl.types import GroupKey, Picture, Prompt
from judges import judge_server
from run_events import METRICS
from runs import easyrl
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


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow
@pytest.mark.parametrize("file_format", ["GIF", "PNG", "TIFF", "WEBP"])
def test_whatever_is_damaged_in_a_file_is_an_error_of_the_picture(file_format):
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [drawn(6, 4, seed) for seed in range(2)]
    options = {"exif": exif} if file_format != "GIF" else {}
    more = {"save_all": True, "append_images": frames[1:]} if file_format == "GIF" else {}
    whole = saved(frames[0], file_format, **options, **more).data
    damaged = [whole[:length] for length in range(len(whole))]
    for place in range(len(whole)):
        damaged.append(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
    num_refused = 0
    for data in damaged:
        for look in (size_of, open_picture, data_address):
            try:
                look(Picture(data))
            except PictureError:
                num_refused += 1
    assert num_refused > len(whole)


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
    assert rendered.media.short_ids.count(placeholder) <= 2
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


# -- rows ------------------------------------------------------------------------------------------


def opened(path, **options):
    config = Config(data={"dataset": str(path), "shuffle": False, **options})
    return open_prompts(resolve(config).data)


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parts(*given):
    """Parts of a content: a picture for None, else a text."""
    made = []
    for text in given:
        made.append({"type": "image"} if text is None else {"type": "text", "text": text})
    return made


@pytest.fixture
def files(tmp_path):
    """Two pictures, and their files in the folder of the data."""
    made = two_pictures()
    for number, picture in enumerate(made):
        (tmp_path / f"{number}.png").write_bytes(picture.data)
    return made


def test_forms_of_trl_and_verl_show_the_same_pictures(tmp_path, files):
    inline = "data:image/png;base64," + base64.b64encode(files[0].data).decode()
    user = {"role": "user"}
    both = ["0.png", "1.png"]
    forms = [
        ({"prompt": "Which?", "image": "0.png"}, parts(None, "Which?"), 1),
        ({"prompt": "Which?", "images": both}, parts(None, None, "Which?"), 2),
        ({"prompt": [{**user, "content": "a"}], "images": both}, parts(None, None, "a"), 2),
        (
            {"prompt": [{**user, "content": parts("a", None, "b", None)}], "images": both},
            parts("a", None, "b", None),
            2,
        ),
        ({"prompt": "<image> or <image>?", "images": both}, parts(None, " or ", None, "?"), 2),
        (
            {"prompt": [{**user, "content": "a <image>"}], "images": [{"path": "0.png"}]},
            parts("a ", None),
            1,
        ),
        (
            {"prompt": [{**user, "content": [{"type": "image", "image": inline}]}]},
            parts(None),
            1,
        ),
        (
            {
                "prompt": [
                    {
                        **user,
                        "content": [{"type": "image_url", "image_url": {"url": inline}}],
                    }
                ]
            },
            parts(None),
            1,
        ),
    ]
    for row, content, count in forms:
        stream = opened(write_rows(tmp_path / "rows.jsonl", row))
        prompt = stream.prompt(0)
        assert prompt.content == [{**user, "content": content}]
        assert prompt.pictures == tuple(files[:count])


def test_rewards_get_the_column_as_pictures(tmp_path, files):
    rows = [{"prompt": "a", "image": "0.png"}, {"prompt": "b", "image": None}]
    stream = opened(write_rows(tmp_path / "rows.jsonl", *rows))
    assert [stream.prompt(index).columns["image"] for index in range(2)] == [files[0], None]
    assert stream.prompt(1).content == [{"role": "user", "content": "b"}]
    assert stream.prompt(1).pictures == ()
    function = tmp_path / "mine.py"
    function.write_text(
        "def wide(completions, image, images, prompts, **_):\n"
        "    assert prompts[0][0]['content'][0] == {'type': 'image'}\n"
        "    return [one.width + two.width for one, (two,) in zip(image, images)]\n"
    )
    rewards = rewards_of(f"{function}:wide")
    columns = {"image": files[0], "images": [files[1]]}
    scored = score(rewards, Prompt(0, CHAT, columns), ["x", "y"])
    assert (scored.errors, scored.scores) == ([], [[200.0, 200.0]])


def test_pictures_of_tables_stay_files(tmp_path, files):
    rows = {
        "prompt": ["a", "b <image> <image>"],
        "images": [[files[0].data], [file.data for file in files]],
        "answer": ["1", "2"],
    }
    features = Features(
        {"prompt": Value("string"), "images": List(ImageFeature()), "answer": Value("string")}
    )
    table = Dataset.from_dict(
        {
            **rows,
            "images": [[{"bytes": each, "path": None} for each in row] for row in rows["images"]],
        },
        features=features,
    )
    table.to_parquet(tmp_path / "of_datasets.parquet")
    table.save_to_disk(tmp_path / "saved")
    bare = Features({**features, "images": List(Value("binary"))})
    Dataset.from_dict(rows, features=bare).to_parquet(tmp_path / "bare.parquet")
    fingerprints = set()
    for name in ("of_datasets.parquet", "saved", "bare.parquet"):
        stream = opened(tmp_path / name)
        assert stream.prompt(0).pictures == (files[0],)
        assert stream.prompt(1).pictures == tuple(files)
        assert stream.prompt(1).columns == {"images": files, "answer": "2"}
        sizes = [(height, width) for width, height in SIZES]
        assert [*stream.picture_sizes().values()] == [sizes[:1], sizes]
        fingerprints.add(stream.fingerprint())
    assert len(fingerprints) == 1


def test_identity_is_that_of_the_files(tmp_path, files):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "image": "0.png"})
    before = opened(path)
    (tmp_path / "copy.png").write_bytes(files[0].data)
    same = opened(write_rows(tmp_path / "other.jsonl", {"prompt": "a", "image": "copy.png"}))
    (ids,) = problem_ids([before.prompt(0)])
    assert (before.fingerprint(), [ids]) == (same.fingerprint(), problem_ids([same.prompt(0)]))
    first = before.fingerprint()
    (tmp_path / "0.png").write_bytes(files[1].data)
    changed = opened(path)
    assert changed.fingerprint() != first
    assert problem_ids([changed.prompt(0)]) != [ids]


def test_identity_is_that_of_the_files_within_messages(tmp_path, files):
    def rows_in(folder, *names):
        rows = []
        for name in names:
            content = [{"type": "image", "image": name}, *parts("What is it?")]
            rows.append({"prompt": [{"role": "user", "content": content}]})
        return opened(write_rows(folder / "rows.jsonl", *rows))

    folders = []
    for name, order in (("a", (0, 1)), ("b", (1, 0)), ("c", (0, 1))):
        folder = tmp_path / name
        folder.mkdir()
        for number, place in enumerate(order):
            (folder / f"{number}.png").write_bytes(files[place].data)
        folders.append(rows_in(folder, "0.png", "1.png"))
    first, other_order, same = folders
    ids, other_ids, same_ids = (
        problem_ids([stream.prompt(0), stream.prompt(1)]) for stream in folders
    )
    assert len({*ids}) == 2
    assert other_ids == ids[::-1] and same_ids == ids
    assert first.fingerprint() == same.fingerprint() != other_order.fingerprint()
    fingerprint = first.fingerprint()
    (tmp_path / "a" / "0.png").write_bytes(files[1].data)
    changed = rows_in(tmp_path / "a", "0.png", "1.png")
    assert changed.fingerprint() != fingerprint
    with_system = opened(tmp_path / "c" / "rows.jsonl", system_prompt="Look.")
    assert with_system.fingerprint() == same.fingerprint()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "<image> and <image>", "images": ["0.png"]}, "'<image>' of the prompt, 2"),
        ({"prompt": "<image>", "images": []}, "'<image>' of the prompt, 1 in all, got 0"),
        (
            {"prompt": [{"role": "user", "content": parts(None)}], "images": ["0.png", "1.png"]},
            "part of type 'image' of the prompt, 1 in all, got 2",
        ),
        ({"prompt": [{"role": "user", "content": parts(None)}]}, "got 0"),
        ({"prompt": "a", "image": "https://example.org/a.png"}, "not downloaded"),
        ({"prompt": "a", "image": "gone.png"}, "No such file"),
        ({"prompt": [{"role": "system", "content": "a"}], "image": "0.png"}, "user's message"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "expected text"),
    ],
)
def test_rows_without_their_pictures_are_named(row, expected, tmp_path, files):
    whole = {"prompt": "b", "images": ["1.png"], "image": "1.png"}
    rows = [{name: whole[name] for name in row}, row] if "images" in row else [row]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(ConfigError, match=expected) as raised:
        stream = opened(path)
        stream.picture_sizes()
    assert f"rows.jsonl:{len(rows)}" in str(raised.value)


def test_a_column_that_has_no_pictures_is_left_alone(tmp_path, files):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "a <image>", "image": "ubuntu:24.04"})
    prompt = opened(path).prompt(0)
    assert (prompt.content, prompt.columns) == ("a <image>", {"image": "ubuntu:24.04"})
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "image": "0.png", "shot": "1.png"})
    assert opened(path, image_column="shot").prompt(0).pictures == (files[1],)
    assert opened(path, image_column="").prompt(0).content == "a"
    with pytest.raises(ConfigError, match=r"data\.image_column: expected a column"):
        opened(path, image_column="picture")


def test_mixtures_have_pictures_in_some_of_their_parts(tmp_path, files):
    shown = write_rows(tmp_path / "shown.jsonl", {"prompt": "a", "image": "0.png"})
    texts = write_rows(tmp_path / "texts.jsonl", {"prompt": [{"role": "user", "content": "b"}]})
    config = Config(data={"dataset": [str(shown), str(texts)], "shuffle": False})
    mixed = open_prompts(resolve(config).data)
    prompts = [mixed.prompt(index) for index in range(4)]
    assert sorted(len(prompt.pictures) for prompt in prompts) == [0, 0, 1, 1]
    assert {prompt.columns["image"] for prompt in prompts} == {files[0], None}


# -- prompts as the model gets them ----------------------------------------------------------------


def vision_run(tmp_path, rows, family="qwen2_5_vl", **settings):
    """Check a run on rows with pictures, by the processor of a model without weights."""
    model = processor_folder(tmp_path / "model", family)
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    data = {"dataset": str(path), "shuffle": False, **settings}
    config = Config(model={"path": str(model)}, data=data)
    spec = resolve(config)
    prompts = open_prompts(spec.data)
    spec = spec.with_pictures(prompts.has_pictures)
    examples = prompts.examples()
    renderer = load_renderer(spec, examples)
    sizes = prompts.picture_sizes()
    skipped = find_too_long(spec, examples, {}, renderer, sizes)
    about = describe_pictures(renderer, sizes)
    about += describe_first_prompt(spec, prompts.prompt(0), {}, renderer)
    return skipped, "\n".join(about)


def test_an_evaluation_counts_the_weights_of_the_tower(tmp_path, files, monkeypatch):
    rows = write_rows(tmp_path / "rows.jsonl", {"prompt": "1+1=", "image": "0.png", "answer": "2"})
    sizes = []
    fit = command._fit_memory
    monkeypatch.setattr(
        command, "_fit_memory", lambda *given: sizes.append(given[2]) or fit(*given)
    )
    settings = {"model.path": "tiny-vision", "data.dataset": str(rows), "data.chat": True}
    settings |= {"data.max_prompt_length": 60, "reward.functions": ["exact_match"]}
    command.check_evaluation(load_config(None, settings))
    assert sizes[0].num_frozen_weights == 105_856


def test_the_start_says_what_pictures_cost(tmp_path, files):
    rows = [
        {"prompt": "12+3=", "images": ["0.png"]},
        {"prompt": "7?", "images": []},
        {"prompt": "<image> or <image>", "images": ["0.png", "1.png"]},
    ]
    skipped, about = vision_run(tmp_path, rows)
    assert not skipped
    assert "pictures: 0 to 2 pictures in a prompt, 4 to 35 tokens for each" in about
    assert "<|vision_start|><|image_pad|>[x4]<|vision_end|>12+3=" in about


def test_a_prompt_that_is_too_long_for_its_picture_is_named_with_the_setting(tmp_path, files):
    rows = [{"prompt": "12+3=", "image": "0.png"}, {"prompt": "1+1=", "image": "1.png"}]
    with pytest.raises(ConfigError, match=r"jsonl:2: .* 35.*data\.max_image_pixels"):
        vision_run(tmp_path, rows, max_prompt_length=40)
    skipped, _ = vision_run(tmp_path, rows, max_prompt_length=40, long_prompts="skip")
    assert [location.rpartition(":")[2] for location in skipped] == ["2"]
    assert vision_run(tmp_path, rows, max_prompt_length=40, max_image_pixels=3136)[0] == set()


def test_a_text_model_with_pictures_names_models_that_understand_them(tmp_path, files):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "image": "0.png", "answer": "1"})
    expected = r"model\.path.*'tiny'.*Qwen.*data\.image_column="
    flags = ["--dataset", path, "--reward", "exact_match", "--output", tmp_path / "run"]
    for options in (["--dry-run"], []):
        done = easyrl("grpo", *flags, *options)
        assert done.exit_code == 2
        assert re.search(expected, done.output)
    assert not (tmp_path / "run").exists()
    spec = resolve(Config(data={"dataset": str(path)})).with_pictures(True)
    with pytest.raises(ConfigError, match=expected):
        load_renderer(spec, {})


def test_a_placeholder_in_a_text_is_named_with_its_row(tmp_path, files):
    rows = [{"prompt": "a", "image": "0.png"}, {"prompt": "<|image_pad|>", "image": None}]
    with pytest.raises(ConfigError, match=r"jsonl:2: .*<\|image_pad\|>"):
        vision_run(tmp_path, rows)


def test_single_turns_give_the_engine_tokens_and_arrays(tmp_path, files):
    model = processor_folder(tmp_path / "model", "qwen2_5_vl")
    spec = resolve(Config(model={"path": str(model)})).with_pictures(True)
    renderer = PromptRenderer.of(spec.model)
    episodes = SingleTurns({})
    requests = []
    episodes.bind(SimpleNamespace(submit=requests.append), renderer, 8)
    prompt = Prompt(0, CHAT, {}, pictures=tuple(files))
    episodes.submit(GroupKey(0, 0, 0), prompt, 4)
    episodes.submit(GroupKey(0, 0, 1), Prompt(1, [{"role": "user", "content": "2"}], {}), 4)
    shown, text = requests
    rendered = renderer.render(CHAT, files)
    assert shown.prompt_ids == rendered.token_ids
    assert shown.media.pictures == tuple(files)
    assert shown.media.arrays.keys() == {"pixel_values", "image_grid_thw"}
    assert text.media is None


# -- what sees pictures beside the model -----------------------------------------------------------


def test_a_judge_gets_the_pictures_that_its_template_names(tmp_path, files, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    template = tmp_path / "ask.txt"
    template.write_text("See {image}: is '{completion}' right?")
    seen = []

    def answer(number, question):
        seen.append(question)
        return "Score: 7"

    with judge_server(answer) as server:
        words = [f"reward.judge.url={server.url}", f"reward.judge.template={template}"]
        rewards = resolve(load_config(None, {"reward.functions": ["judge"]}, words)).rewards
        scored = score(rewards, Prompt(0, CHAT, {"image": files[0]}), ["5"])
    assert (scored.scores, scored.errors) == ([[0.7]], [])
    first, picture, last = seen[0]
    assert (first["text"], last["text"]) == ("See ", ": is '5' right?")
    assert read_picture(picture["image_url"]["url"]) == files[0]


def test_an_environment_sees_the_picture_and_may_not_write_a_placeholder(tmp_path, files):
    content = [{"role": "user", "content": parts(None, "How wide?")}]
    shown = with_observation(content, " It is 70 wide.")
    assert shown[0]["content"] == parts(None, "How wide?", " It is 70 wide.")
    assert content[0]["content"] == parts(None, "How wide?")


def shown_group(files, iteration=1):
    """A group whose prompt shows pictures, as its worker reports it."""
    sample = events.Sample("5<b>", 1.0, 0.0, {}, {"score": 1.0}, length=2)
    return events.GroupScored(
        iteration,
        *(0, 0, [1.0], [], [2], 0, 0.0),
        prompt="user: <image> how many?",
        samples=[sample],
        pictures=[thumbnail(file) for file in files],
    )


def test_thumbnails_are_small_and_what_they_show_is_turned_and_opaque(files):
    wide = thumbnail(saved(drawn(1000, 500)))
    assert Image.open(io.BytesIO(wide)).size == (THUMBNAIL_SIDE, THUMBNAIL_SIDE // 2)
    assert len(wide) < 20_000
    see_through = Image.open(io.BytesIO(thumbnail(saved(Image.new("LA", (4, 4), (0, 0))))))
    assert see_through.getpixel((0, 0)) == (255, 255, 255)


def test_samples_and_report_show_the_pictures(tmp_path, files, capsys):
    folder = RunFolder(tmp_path / "run", to_commented_yaml(Config()))
    for iteration in (1, 2):
        report = shown_group(files, iteration)
        folder.observe(events.FromWorker("rollout-0", 0.0, report))
    folder.observe(events.IterationFinished(1.0, METRICS | {"iteration": 1}))
    folder.close()
    kept = sorted((folder.path / "pictures").iterdir())
    assert sorted(file.read_bytes() for file in kept) == sorted(map(thumbnail, files))

    show_samples(folder.path, None, None, None, 1)
    printed = "".join(capsys.readouterr().out.split())
    assert "2pictures:" in printed
    for file in kept:
        assert str(file) in printed

    page = to_page(read_histories([folder.path]))
    for file in kept:
        address = base64.b64encode(file.read_bytes()).decode()
        assert f'<img src="data:image/jpeg;base64,{address}"' in page
    assert "5&lt;b&gt;" in page


def test_files_outside_of_the_folder_are_not_shown(tmp_path):
    names = ["../secret.jpg", "/etc/passwd", "pictures/../a.jpg", "pictures/0a.jpg"]
    shown = picture_files(tmp_path, {"pictures": names})
    assert shown == [tmp_path / "pictures" / "0a.jpg"]


def test_trackers_get_the_pictures_of_an_iteration(tmp_path, files):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = load_config(None, {}, ["output.log_to=[tensorboard]"])
    started = events.RunStarted(0.0, tmp_path, resolve(config), {}, {}, "")
    tracker = Trackers()
    for event in (
        started,
        events.FromWorker("rollout-0", 0.0, shown_group(files)),
        events.IterationFinished(0.0, {"iteration": 1, "reward": 0.5}),
        events.IterationFinished(0.0, {"iteration": 2, "reward": 0.5}),
        events.RunEnded(0, ""),
    ):
        assert tracker(event) is None
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    for number, file in enumerate(files):
        (image,) = found.Images(f"pictures/{number}")
        assert image.step == 1
        assert image.encoded_image_string == thumbnail(file)
    assert [event.step for event in found.Scalars("reward")] == [1, 2]


# -- other ways in ---------------------------------------------------------------------------------


def test_a_python_call_takes_images_bytes_and_tables(tmp_path, files):
    image = open_picture(files[0])
    features = Features({"prompt": Value("string"), "images": List(ImageFeature())})
    table = Dataset.from_dict(
        {"prompt": ["a"], "images": [[{"bytes": files[0].data, "path": None}]]}, features=features
    )
    given = (
        [{"prompt": "a", "images": [image]}],
        [{"prompt": "a", "image": {"bytes": files[0].data, "path": None}}],
        table,
    )
    for rows in given:
        settings = {"data.dataset": rows}
        inputs = Inputs(settings)
        config = Config(data={"dataset": settings["data.dataset"]})
        with inputs.stored(config, tmp_path / "run") as stored:
            prompt = open_prompts(resolve(stored).data).prompt(0)
        (picture,) = prompt.pictures
        assert np.array_equal(open_picture(picture), image)
        assert prompt.content == [{"role": "user", "content": parts(None, "a")}]
    assert picture == files[0]  # a table's files are not written again


def test_requests_of_agents_show_pictures_only_if_the_run_says_so():
    address = "data:image/png;base64,AAAA"
    content = [{"type": "image_url", "image_url": {"url": address}}]
    with pytest.raises(ValueError, match=r"message 0.*rollout\.takes_pictures"):
        read_conversation([{"role": "user", "content": content}])


def test_an_agent_gets_data_with_pictures_only_if_it_may_show_them(tmp_path, files):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "image": "0.png"})
    config = Config(data={"dataset": str(path)}, rollout={"agent": "mine.py:solve"})
    spec = resolve(config)
    model = measure_model(spec.model)
    model.files.config["vision_config"] = {"patch_size": 14}
    with pytest.raises(ConfigError, match=r"rollout\.takes_pictures.*data\.image_column="):
        check_pictures(spec, open_prompts(spec.data), model)
    rollout = {"agent": "mine.py:solve", "takes_pictures": True}
    spec = resolve(Config(data={"dataset": str(path)}, rollout=rollout))
    check_pictures(spec, open_prompts(spec.data), model)


def test_a_teacher_has_no_prompt_of_its_own_beside_pictures(tmp_path, files):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "image": "0.png", "hint": "b"})
    algorithm = {"teacher": "policy", "teacher_prompt": "hint"}
    config = Config(data={"dataset": str(path)}, algorithm=algorithm)
    with pytest.raises(ConfigError, match=r"algorithm\.teacher_prompt"):
        open_prompts(resolve(config).data)


class TurnByTurn:
    """An engine that takes groups, and suspends the turns that a test gives it."""

    end_tokens = (1,)
    can_step = False

    def __init__(self):
        self.requests = []
        self.turns = []

    def submit(self, request):
        self.requests.append(request)

    def take_turns(self):
        taken = self.turns
        self.turns = []
        return taken


GALLERY = """
class Gallery:
    def reset(self, image):
        return f"{image.width} or {image.height}?"

    def step(self, text):
        return "<|image_pad|>", False
"""


def test_environments_show_the_picture_and_may_not_return_a_placeholder(tmp_path, files):
    model = processor_folder(tmp_path / "model", "qwen2_5_vl")
    game = tmp_path / "game.py"
    game.write_text(GALLERY)
    config = Config(
        model={"path": str(model)},
        rollout={"environment": f"{game}:Gallery", "num_generations": 2},
        reward={"functions": ["exact_match"]},
    )
    spec = resolve(config).with_pictures(True)
    renderer = PromptRenderer.of(spec.model)
    engine = TurnByTurn()
    pool = EnvironmentPool(spec.episodes, {})
    with closing(EnvironmentEpisodes(spec.episodes, pool, max_open_groups=1)) as episodes:
        episodes.bind(engine, renderer, 2)
        key = GroupKey(0, 0, 0)
        content = [{"role": "user", "content": parts(None)}]
        prompt = Prompt(0, content, {"image": files[0]}, pictures=(files[0],))
        episodes.submit(key, prompt, 2)
        while not engine.requests:
            episodes.advance()
        (request,) = engine.requests
        assert request.media.pictures == (files[0],)
        assert request.media.arrays["image_grid_thw"].tolist() == [[1, 4, 4]]
        assert "[x4]<|vision_end|>70 or 50?" in renderer.decode(request.prompt_ids)

        engine.turns = [Turn(key, 0, np.array([5, 1], dtype=np.int32), 100)]
        with pytest.raises(RewardError, match="stands for a picture"):
            for _ in range(10**6):
                episodes.advance()


def test_files_that_are_too_large_for_the_ring_are_named(tmp_path, files):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "images": ["0.png", "1.png"]})
    assert opened(path).picture_sizes()
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: .*data\.max_image_bytes"):
        opened(path, max_image_bytes=len(files[0].data)).picture_sizes()
