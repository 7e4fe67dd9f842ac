"""Pictures that environments answer with, and that agents show in their requests."""

import json
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from PIL import Image

from agent_worker import KEY, Worker, asked, chat, said
from easyrl.agents.program import fill_in
from easyrl.agents.protocols import base
from easyrl.agents.protocols.base import PictureReader, read_conversation
from easyrl.config import Config, ConfigError
from easyrl.data.pictures import (
    PictureError,
    data_address,
    open_picture,
    read_picture,
    size_of,
)
from easyrl.engines.shown import NUM_IDS, ShownPictures
from easyrl.environments.host import EnvironmentHost
from easyrl.environments.pictures import (
    EpisodePictures,
    NoRoomForPictures,
    ShownFiles,
    with_addresses,
)
from easyrl.environments.tool_calls.calls import ToolCall
from easyrl.model.prompt_renderer import PromptRenderer
from easyrl.runtime.resolve import resolve
from easyrl.runtime.resume import _replaced_settings
from easyrl.types import BrokenInvariant, Picture, picture_part
from own_processes import popen
from runs import ALL_SAMPLES, both_schedules, finish, lines_of, succeed, summary_of
from vision_processors import (
    FAMILIES,
    NEEDS_TORCHVISION,
    has_torchvision,
    processor_folder,
    write_model_with_processor,
)

SIZES = ((70, 50), (40, 90), (130, 60))  # widths and heights
SETTINGS = (
    *("--no-live", "runtime.deterministic=true", "data.num_held_out=0", "data.chat=true"),
    *("train.prompts_per_iteration=2", "rollout.num_generations=2", "--iterations", "2"),
    *("rollout.max_completion_length=150", "data.max_prompt_length=60", "rollout.max_turns=16"),
    *("train.learning_rate=0.01", "rollout.takes_pictures=true", ALL_SAMPLES),
)
STOPS = 'rollout.stop=["0","1","2","3","4","5","6","7","8","9"]'  # random models end no answer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    found = []
    for number, (width, height) in enumerate(SIZES):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        found.append(read_picture(folder / f"{number}.png"))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_with_ids_of_pictures_are_those_of_the_processor(tmp_path, files, family):
    if family in NEEDS_TORCHVISION and not has_torchvision():
        pytest.skip("its processor needs torchvision")
    model = processor_folder(tmp_path / "model", family)
    spec = resolve(Config(model={"path": str(model)})).with_pictures(True)
    renderer = PromptRenderer.of(spec.model)
    shown = ShownPictures()
    pictures = EpisodePictures(renderer.processor, renderer.tokenizer, shown)
    for file in files:
        pictures.add(file, "group")
    parts = [{"type": "text", "text": "See "}, picture_part(files[0]), picture_part(files[1])]
    parts += [{"type": "text", "text": " and\n"}, picture_part(files[0])]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]
    ids = pictures.prompt_ids(messages, {})
    plain = [{"type": "image"} if "digest" in part else part for part in parts]
    own = [files[0], files[1], files[0]]
    expected = renderer.render([messages[0], {"role": "user", "content": plain}], own)
    placeholder = min(renderer.placeholder_ids)
    assert [placeholder if token < 0 else token for token in ids] == expected.token_ids
    found = shown.find(ids)
    assert [each.picture for each in found] == own
    for each in found:
        span = expected.token_ids[each.start : each.stop]
        assert span[0] == span[-1] == placeholder
        num_own = renderer.processor.written(size_of(each.picture)).num_placeholders
        assert span.count(placeholder) == num_own > 0
    with pytest.raises(BrokenInvariant):
        shown.find(ids[: found[0].start + 1])
    with pytest.raises(ConfigError, match="in no text"):
        text = renderer.tokenizer.convert_ids_to_tokens(placeholder)
        pictures.prompt_ids([{"role": "user", "content": text}], {})


def test_pictures_are_known_until_their_owners_are_forgotten(monkeypatch):
    shown = ShownPictures()
    one, other = Picture(b"one"), Picture(b"other")
    known = shown.add(one, 2, "a")
    assert shown.add(one, 2, "b") is known and -NUM_IDS <= known.picture_id < 0
    shown.forget("a")
    assert shown.find([known.picture_id] * 2)[0].picture == one
    shown.forget("b")
    with pytest.raises(KeyError):
        shown.find([known.picture_id] * 2)
    monkeypatch.setattr("easyrl.engines.shown.NUM_IDS", 1)  # all files have the same number
    monkeypatch.setattr(Picture, "digest", property(lambda picture: picture.data.hex()))
    first = shown.add(one, 1, "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("easyrl.engines.shown.NUM_IDS", 2)
        assert shown.add(other, 1, "a").picture_id != first.picture_id


# -- environments ----------------------------------------------------------------------------------


def host_of(**rollout):
    config = Config(
        rollout={"environment": "guess", **rollout}, reward={"functions": ["exact_match"]}
    )
    return EnvironmentHost(resolve(config).episodes)


def called(host, tool):
    """What a tool's answer becomes."""
    episode = SimpleNamespace(tools={"look": tool}, environment=None, random_states=None)
    host._groups["key"] = {0: episode}
    return host.act("key", 0, [ToolCall("look", {}, "")]).messages[0]["content"]


def test_a_tool_answers_with_pictures_in_any_form(tmp_path, files):
    host = host_of(takes_pictures=True)
    path = tmp_path / "a.png"
    path.write_bytes(files[0].data)
    address = {"type": "image", "url": data_address(files[0])}
    image = {"type": "image", "path": str(path)}
    assert called(host, lambda: image) == [address]
    assert called(host, lambda: {"type": "image", "url": address["url"]}) == [address]
    assert called(host, lambda: {"type": "image", "bytes": files[0].data}) == [address]
    (pixels,) = called(host, lambda: Image.open(path))
    assert size_of(read_picture(pixels["url"])) == size_of(files[0])
    text = {"type": "text", "text": "that"}
    assert called(host, lambda: ["this", image, text]) == [
        {"type": "text", "text": "this"},
        address,
        text,
    ]
    assert called(host, lambda: [1, 2]) == "[1, 2]"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"type": "image", "url": "https://a.org/b.png"}, "not downloaded"),
        ({"type": "image", "url": "data:image/png;base64,?"}, "base64"),
        ({"type": "image", "bytes": b"no picture"}, "image file"),
        ({"type": "image", "path": "/nowhere.png"}, "nowhere"),
        ({"type": "image"}, "image, path or url"),
    ],
)
def test_a_tool_that_answers_with_no_picture_is_named(answer, reason):
    with pytest.raises(TypeError, match=rf"tool 'look': .*{reason}"):
        called(host_of(takes_pictures=True), lambda: answer)
    with pytest.raises(TypeError, match=r"tool 'look': .*rollout\.takes_pictures"):
        called(host_of(), lambda: [answer])
    assert called(host_of(), lambda: answer) == str(answer)  # it may be about something else


def test_an_episode_shows_files_that_the_ring_has_room_for(files):
    shown = ShownFiles(len(files[0].data) + len(files[2].data))
    shown.add([files[0], files[2], files[0]])
    shown.add([files[2]])
    with pytest.raises(NoRoomForPictures, match=r"data\.max_image_bytes"):
        shown.add([files[1]])
    too_small = ShownFiles(len(files[0].data) - 1)
    with pytest.raises(PictureError) as caught:  # no episode could show it
        too_small.add([files[0]])
    assert not isinstance(caught.value, NoRoomForPictures)


def test_a_setting_without_episodes_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.takes_pictures"):
        Config(rollout={"takes_pictures": True})


# -- requests of agents ----------------------------------------------------------------------------


def request_of(url):
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [{"type": "text", "text": "See"}, part]}]


def test_requests_name_pictures_by_their_files(files):
    given = request_of(data_address(files[0]))
    messages, pictures = read_conversation(given, reader=PictureReader())
    assert messages[0]["content"][1] == picture_part(files[0])
    assert pictures == {files[0].digest: files[0]}
    again = read_conversation(messages, reader=PictureReader(), known=pictures)
    assert again == (messages, pictures)
    with pytest.raises(ValueError, match=r"message 0: .*data:image"):
        read_conversation(messages, reader=PictureReader())  # a digest that is not known
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    sent = with_addresses(prompt, [files[1]])
    assert read_conversation(sent, reader=PictureReader()).pictures == {files[1].digest: files[1]}


def test_a_command_gets_the_addresses_of_pictures(files):
    row = {"image": files[0], "images": [files[0], files[1]], "number": 5}
    words = fill_in(["ask", "{image}", "{images}", "{number}"], row)
    addresses = [data_address(files[0]), data_address(files[1])]
    assert words == ["ask", addresses[0], json.dumps(addresses), "5"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://a.org/b.png", "downloaded"),
        ("/etc/passwd", "downloaded"),
        ("data:image/png;base64,?", "base64"),
        ("data:image/png;base64,AAAA", "image file"),
        (None, "data:image"),
    ],
)
def test_what_is_no_picture_in_a_request_is_refused(url, reason):
    with pytest.raises(ValueError, match=f"message 0: .*{reason}"):
        read_conversation(request_of(url), reader=PictureReader())
    answer = [{**request_of(url)[0], "role": "assistant"}, {"role": "user", "content": "?"}]
    with pytest.raises(ValueError, match="in an answer"):
        read_conversation(answer, reader=PictureReader())


ENDS_WITH_THE_CONTENT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def test_a_request_that_cannot_be_shown_names_the_key_and_none_stays_known(tmp_path, files):
    (tmp_path / "template.jinja").write_text(ENDS_WITH_THE_CONTENT)
    answers, refused = [], []

    def ask(client, *contents):
        messages = [{"role": "user", "content": list(contents)}]
        try:
            answers.append(chat(client, messages, max_tokens=2))
        except openai.APIStatusError as error:
            refused.append(str(error))

    def solve(client):
        shown, other = (request_of(data_address(file))[0]["content"][1] for file in files[:2])
        text = {"type": "text", "text": "1+1="}
        large = request_of("data:image/png;base64," + "A" * 20_000_000)[0]["content"][1]
        ask(client, shown, text)
        ask(client, text, shown)  # its last token stands for a part of the picture
        ask(client, text, shown, text)
        ask(client, text, shown, shown, other, text)
        ask(client, *[shown] * 50, text)
        ask(client, large)
        ask(client, {"type": "image", "digest": [1]})
        return 1.0

    words = ("rollout.takes_pictures=true", f"data.chat_template={tmp_path / 'template.jinja'}")
    words += ("data.max_image_bytes=500000",)
    with closing(Worker("tiny-vision", *words, length=200, prompt_length=60)) as worker:
        worker.run(solve)
        assert not worker.engine.shown._by_id and not worker.engine.shown._by_digest
    assert len(answers) == 3
    expected = ("data.chat_template", "data.max_image_pixels", "data.max_image_bytes", "data:image")
    assert len(refused) == len(expected)
    for text, key in zip(refused, expected, strict=True):
        assert key in text


@pytest.fixture
def opened(monkeypatch):
    """Digests of the pictures that requests have had opened."""
    digests = []

    def open_counted(picture):
        digests.append(picture.digest)
        return open_picture(picture)

    monkeypatch.setattr(base, "open_picture", open_counted)
    return digests


def test_a_picture_that_every_turn_shows_again_is_opened_once(opened, files):
    def solve(client):
        messages = []
        for file in files[:2]:
            messages += request_of(data_address(file))
            for _ in range(2):
                answer = chat(client, messages, max_tokens=2)
                messages += [said(answer), asked("?")]
        return 1.0

    with closing(Worker("tiny-vision", "rollout.takes_pictures=true", length=200)) as worker:
        worker.run(solve)
    assert opened == [file.digest for file in files[:2]]


def test_a_picture_is_stored_once_and_only_while_it_is_held(opened, files):
    reader = PictureReader()
    address = data_address(files[0])
    picture = reader.read(address)
    assert reader.read(address) is picture
    assert len(opened) == 1
    del picture
    assert reader.read(address) == files[0]
    assert len(opened) == 2
    damaged = Picture(files[0].data[:-40])
    for _ in range(2):
        with pytest.raises(PictureError, match="damaged"):
            reader.read(data_address(damaged))


def test_an_agent_that_shows_more_than_there_is_room_for_has_reached_a_limit(files):
    def solve(client):
        messages = []
        for file in (files[2], files[0], files[1]):
            messages += request_of(data_address(file))
            messages.append(said(chat(client, messages, max_tokens=2)))
        return 1.0

    room = len(files[2].data) + len(files[0].data)
    words = ("rollout.takes_pictures=true", f"data.max_image_bytes={room}")
    with closing(Worker("tiny-vision", *words, length=300, prompt_length=60)) as worker:
        _, _, _, scored, _, columns = worker.run(solve)[KEY]
    assert columns["ended_by"] == ["length"]
    assert scored.scores == [[0.0]] and scored.errors == []


def test_an_unchanged_picture_may_be_shown_in_every_turn(files):
    num_turns = 8
    large = Picture(files[0].data + bytes(250_000))

    def solve(client):
        messages = []
        for _ in range(num_turns):
            messages += request_of(data_address(large))
            messages.append(said(chat(client, messages, max_tokens=2)))
        return 1.0

    words = ("rollout.takes_pictures=true", f"data.max_image_bytes={len(large.data)}")
    with closing(Worker("tiny-vision", *words, length=900, prompt_length=60)) as worker:
        _, _, _, scored, _, columns = worker.run(solve)[KEY]
    assert columns["ended_by"] == ["answer"] and scored.errors == []


# -- whole runs ------------------------------------------------------------------------------------

GALLERY = """
import pathlib
FOLDER = pathlib.Path(__file__).parent


class Gallery:
    def reset(self, seed):
        self.number = seed % 3
        self.turn = 0
        self.length = 0

    def step(self, text) -> tuple[str | list, bool]:
        self.turn += 1
        self.length = len(text)
        self.number = (self.number + 1) % 3
        image = {"type": "image", "path": str(FOLDER / f"{self.number}.png")}
        if self.turn == 2:
            return "And now? " * 2, False
        return [{"type": "text", "text": "What is it?"}, image], self.turn == 4

    def get_reward(self):
        return self.turn + self.length / 7
"""
AGENT = """
import base64
import json
import pathlib
import urllib.request

FOLDER = pathlib.Path(__file__).parent


def data(number):
    return base64.b64encode((FOLDER / f"{number}.png").read_bytes()).decode()


def solve(row, base_url, api_key):
    def ask(path, **body):
        headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        sent = json.dumps(body).encode()
        request = urllib.request.Request(f"{base_url}/{path}", sent, headers)
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    def chat(messages):
        answer = ask("chat/completions", messages=messages, max_tokens=6)
        return answer["choices"][0]["message"]

    def see(text, *numbers):
        parts = [{"type": "text", "text": text}]
        for number in numbers:
            url = {"url": f"data:image/png;base64,{data(number)}"}
            parts.append({"type": "image_url", "image_url": url})
        return {"role": "user", "content": parts}

    assert row["image"].width > 0
    first = row["prompt"]  # with the picture of the row
    assert first[-1]["content"][0]["type"] == "image_url"
    messages = [*first, chat(first), see("And this?", 1)]
    messages += [chat(messages), see("These?", 2, 1)]
    messages += [chat(messages)]
    total = sum(map(ord, messages[-1]["content"])) % 17
    chat([*messages[:-2], see("These?", 0, 1)])  # a branch with another picture
    chat([see("New.", 2)])  # a conversation of its own
    block = {"type": "base64", "media_type": "image/png", "data": data(0)}
    content = [{"type": "image", "source": block}, {"type": "text", "text": "What?"}]
    said = [{"role": "user", "content": content}]
    ask("messages", messages=said, max_tokens=5)
    shown = {"type": "input_image", "image_url": f"data:image/png;base64,{data(1)}"}
    item = {"role": "user", "content": [shown, {"type": "input_text", "text": "What?"}]}
    before = ask("responses", input=[item], max_output_tokens=5)
    more = [{"role": "user", "content": [shown]}]
    ask("responses", input=more, previous_response_id=before["id"], max_output_tokens=5)
    return total / 10
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with models, pictures, rows with a picture, and what acts on them."""
    folder = tmp_path_factory.mktemp("inputs")
    for family in ("qwen2_5_vl", "llava", "gemma3"):
        write_model_with_processor(folder / family, family, max_position_embeddings=512)
    for number, (width, height) in enumerate(SIZES):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    rows = [{"prompt": f"Is it {number}?", "image": f"{number}.png"} for number in range(3)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "texts.jsonl").write_text('{"prompt": "Look."}\n{"prompt": "See."}')
    (folder / "gallery.py").write_text(GALLERY)
    (folder / "agent.py").write_text(AGENT)
    return folder


def words_for(inputs, family, what, rows):
    places = ("--model", str(inputs / family), "--dataset", str(inputs / rows))
    if what == "agent":
        longer = "rollout.max_completion_length=400"
        return (*places, "--agent", f"{inputs / 'agent.py'}:solve", *SETTINGS, longer, STOPS)
    return (*places, f"rollout.environment={inputs / 'gallery.py'}:Gallery", *SETTINGS, STOPS)


def largest_gap(run):
    name = "sampling/sampling_logp_difference/max"
    found = [metrics[name] for metrics in lines_of(run / "metrics.jsonl")]
    return max(gap for gap in found if gap is not None)  # None: no rollout had a gradient


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl",
        pytest.param("llava", marks=pytest.mark.long),
        pytest.param("gemma3", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("what", "rows"), [("game", "texts.jsonl"), ("game", "rows.jsonl"), ("agent", "rows.jsonl")]
)
def test_engine_and_trainer_agree_on_pictures_of_episodes(inputs, tmp_path, family, what, rows):
    run = tmp_path / "run"
    succeed(*words_for(inputs, family, what, rows), "--output", str(run))
    assert summary_of(run)["policy_version"] == 2
    assert largest_gap(run) <= 1e-4
    samples = lines_of(run / "samples.jsonl")
    shown = json.dumps([sample["messages"] for sample in samples])
    assert shown.count('"digest"') >= 2 * len(samples)
    assert "base64" not in shown


def test_a_game_that_shows_more_than_there_is_room_for_ends_as_at_another_limit(inputs, tmp_path):
    run = tmp_path / "run"
    sizes = [(inputs / f"{number}.png").stat().st_size for number in range(len(SIZES))]
    room = f"data.max_image_bytes={max(sizes)}"
    succeed(
        *words_for(inputs, "qwen2_5_vl", "game", "texts.jsonl"),
        *("--output", str(run), room, "--iterations", "1"),
    )
    samples = lines_of(run / "samples.jsonl")
    ends = {sample["ended_by"] for sample in samples}
    assert "length" in ends and ends <= {"length", "done"}


@pytest.mark.parametrize("what", ["game", "agent"])
def test_both_schedules_of_episodes_with_pictures_end_in_the_same_bits(inputs, tmp_path, what):
    both_schedules(tmp_path, *words_for(inputs, "qwen2_5_vl", what, "rows.jsonl"))


def test_the_endpoint_without_training_shows_pictures(files):
    words = ["--model", "tiny-vision", "--port", "0", "rollout.takes_pictures=true"]
    words += ["rollout.agent=own.py:solve", "data.max_prompt_length=60"]
    command = [sys.executable, "-m", "easyrl", "agent", "serve", *words]
    process = popen(command, stdout=subprocess.PIPE, text=True)
    url = next(line for line in process.stdout if "OPENAI_BASE_URL" in line)
    url = url.partition("OPENAI_BASE_URL=")[2].split()[0]
    client = openai.OpenAI(base_url=url, api_key="any")
    for file in files[:2]:
        messages = request_of(data_address(file))
        answer = client.chat.completions.create(model="any", messages=messages, max_tokens=2)
        assert answer.usage.prompt_tokens == len("See") + 25 + len("\n")
        assert answer.usage.completion_tokens > 0


def test_an_evaluation_of_a_preset_takes_no_pictures_from_the_run():
    run = Config(rollout={"agent": "own.py:solve", "takes_pictures": True})
    of_run = {"rollout.agent": "own.py:solve", "rollout.takes_pictures": True}
    replaced = _replaced_settings({"data.dataset": "gsm8k"}, run, of_run)
    assert replaced.issuperset(of_run)


def test_a_model_of_text_shows_no_pictures(inputs, tmp_path):
    words = words_for(inputs, "qwen2_5_vl", "game", "texts.jsonl")
    code, _, error = finish(*words, "--model", "tiny", "--output", str(tmp_path / "run"))
    assert code != 0 and "model.path" in error and "takes_pictures" in error
