"""The config: four layers, YAML and words to values, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import performance_model
from easyrl.config import (
    KEYS,
    SECTIONS,
    Config,
    ConfigError,
    load_config,
    options_by_key,
    settings_markdown,
    to_arguments,
    to_commented_yaml,
)
from easyrl.config.devices import DeviceSet, check_disjoint, parse_device_set
from easyrl.config.hints import INSTEAD, SYNONYMS, similar_names
from easyrl.workers.rollout import sampling_settings

ROOT = Path(__file__).parent.parent


def of(*words: str) -> Config:
    return load_config(words=words)


def write(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def error_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        of(*words)
    return str(caught.value)


# The layers.


@pytest.mark.parametrize(
    "text",
    ["Q: {q}\nA: ", " {q}", "{q}\t", "'q'{q}", " ", "null ", "[x] {q}", "a\x1b\u202e\x9b{q}"],
)
def test_values_keep_their_spaces_as_words_and_in_yaml(text: str, tmp_path: Path) -> None:
    key, config = "data.prompt_template", load_config(None, {"data.prompt_template": text})
    [word] = to_arguments(config, Config())
    assert word.startswith(f"{key}=") and word.isprintable()
    assert of(word) == config == load_config(write(tmp_path, to_commented_yaml(config)))
    if text.isprintable() and text[:1] not in "'n":
        assert of(f"{key}={text}") == config


def test_arguments_make_the_config_of_several_environments_again() -> None:
    words = ['rollout.environment={a: "x y.py:A", b: guess}', "data.dataset=[d 1.jsonl, e]"]
    config = of(*words)
    options = to_arguments(config, Config())
    assert options[:-1] == ["--dataset", "d 1.jsonl", "--dataset", "e"]
    assert of(options[-1]).rollout == config.rollout


@pytest.mark.parametrize(
    "text", ["a: &a [x, x]\nb: &b [*a, *a]\n", "a: &a [*a]", "a: &a {b: *a}", "[" * 3000]
)
def test_aliases_and_nesting_that_grow_without_bound_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_config(write(tmp_path, text))
    file = write(tmp_path, "data: {dataset: &rows d.jsonl}\neval: {dataset: *rows}")
    assert load_config(file).eval.dataset == "d.jsonl"


def test_later_layers_win(tmp_path: Path) -> None:
    file = write(tmp_path, "train: {iterations: 1, prompts_per_iteration: 11, learning_rate: 1e-6}")
    settings = {"train.iterations": 2, "train.prompts_per_iteration": 22}
    train = load_config(file, settings, ["train.iterations=3"]).train
    assert (train.iterations, train.prompts_per_iteration, train.learning_rate) == (3, 22, 1e-6)
    assert options_by_key({"seed": None, "iterations": 0}) == {"train.iterations": 0}


def test_empty_files_and_sections_are_the_defaults(tmp_path: Path) -> None:
    assert load_config() == Config() == load_config(write(tmp_path, ""))
    file = write(tmp_path, "train:\n  # iterations: 3\nmodel:\n  lora:\n")
    assert load_config(file) == Config()
    assert load_config(file, words=["train.iterations=3"]).train.iterations == 3


def test_section_that_is_no_mapping_is_refused_beside_a_flag(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("train: 3\n")
    with pytest.raises(ConfigError, match="train"):
        load_config(tmp_path / "c.yaml", {"train.iterations": 7})


def test_keys_of_a_nested_section_are_words_flags_and_yaml(tmp_path: Path) -> None:
    file = write(tmp_path, "model:\n  path: m\n  lora:\n    rank: 16\n    alpha: 4\n")
    config = load_config(file, {"model.lora.alpha": 5}, ["model.lora.target_modules=[q, v]"])
    lora = {"rank": 16, "alpha": 5, "target_modules": ["q", "v"]}
    assert (config.model.path, config.model.lora.model_dump()) == ("m", lora)
    off = load_config(file, {}, ["model.lora.rank=null", "model.lora.alpha=null"])
    assert off == of("model.path=m")


# Names and values of other trainers.


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.lr", "train.learning_rate"),
        ("learning-rate", "train.learning_rate"),
        ("eval_dataset", "eval.dataset"),
        ("rollout.n", "rollout.num_generations"),
        ("algorithm.kl_coef", "algorithm.beta"),
        ("trian.iterations", "train.iterations"),
        ("modle", "model"),
        ("model.lora.r", "model.lora.rank"),
        ("use-lora", "model.lora.rank"),
        ("eval_steps", "train.eval_every"),
    ],
)
def test_an_unknown_name_is_answered_with_the_setting_that_it_may_mean(
    typed: str, meant: str
) -> None:
    assert similar_names(typed, [*SECTIONS, *KEYS])[0] == meant
    assert meant in error_of(f"{typed}=1") or "." in typed


def test_every_synonym_and_advice_names_settings_that_exist() -> None:
    last_parts = {name.rpartition(".")[2] for name in KEYS}
    assert last_parts.issuperset(SYNONYMS.values())
    for (name, value), instead in INSTEAD.items():
        assert instead in error_of(f"{name}={value}")
        of(instead)


def test_one_reward_function_needs_no_list() -> None:
    assert of("reward.functions=r.py:f") == of("reward.functions=[r.py:f]")


def test_short_names_of_dtypes_are_accepted() -> None:
    assert of("model.dtype=bf16") == of("model.dtype=bfloat16")


@pytest.mark.parametrize("name", ["chat.jinja", "mine.j2", "template"])
def test_a_chat_template_is_kept_as_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{{ messages }}\n")
    config = of(f"data.chat_template={tmp_path}/{name}")
    assert config.data.chat_template == "{{ messages }}\n"
    assert load_config(write(tmp_path, to_commented_yaml(config))) == config


# YAML to values.


@pytest.mark.parametrize("text", ["123", "0123", "2024-01-02", "1:30", "yes", "a b"])
def test_string_keys_take_text_that_looks_like_something_else(text: str, tmp_path: Path) -> None:
    assert of(f"data.preset={text}").data.preset == text
    assert load_config(write(tmp_path, f"data: {{preset: {text}}}")).data.preset == text
    assert of(f"rollout.stop=[{text}]").rollout.stop == [text]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        *((text, text) for text in ("[0-4]$", "{x}.y", "a: b", "a #b", "true", "1e3")),
        *(('"[A-M]"', "[A-M]"), ("'a: b'", "a: b"), ('"\\\\d"', "\\d")),
    ],
)
def test_word_of_a_string_key_is_plain_text_without_its_quotes(word: str, expected: str) -> None:
    assert of(f"data.prompt_template={word}").data.prompt_template == expected


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("chat_template", name) for name in ("chatml", "llama3", "no_such.j2", "Be brief.")),
        *(("system_prompt", "system.txt"), ("prompt_template", "prompts/math.j2")),
    ],
)
def test_a_name_is_not_taken_for_a_text(key: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}: "):
        of(f"data.{key}={name}")


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (r"{prompt}\nAnswer:", "{prompt}\nAnswer:"),
        (r"{prompt}\n\nother steps\n", "{prompt}\n\nother steps\n"),
        (
            r"\nabla f, \neq, \nu_1 and \not: \text{{x}}",
            r"\nabla f, \neq, \nu_1 and \not: \text{{x}}",
        ),
        (r"'print(\n)'", r"print(\n)"),
        (r'"a\\n\n{b}"', "a\\n\n{b}"),
    ],
)
def test_a_typed_end_of_a_line_is_one(typed: str, text: str, tmp_path: Path) -> None:
    for key in ("prompt_template", "system_prompt"):
        config = of(f"data.{key}={typed}")
        assert getattr(config.data, key) == text
        assert load_config(None, {}, to_arguments(config, Config())) == config


@pytest.mark.parametrize("null", ["None", "none", "NULL"])
def test_null_may_be_written_as_in_python(null: str, tmp_path: Path) -> None:
    for key in ("data.system_prompt", "data.chat_template", "reward.pattern", "devices.infer"):
        assert of(f"{key}={null}") == Config()
    assert load_config(write(tmp_path, f"data: {{preset: {null}, chat: {null}}}")) == Config()
    typed = of("data.chat_template_kwargs={a: None, b: False}").data.chat_template_kwargs
    assert typed == {"a": None, "b": False}
    assert of("algorithm.scale_rewards=none").algorithm.scale_rewards == "none"


@pytest.mark.parametrize("null", ["null", "~", ""])
def test_null_is_none_where_the_key_takes_it(null: str, tmp_path: Path) -> None:
    assert load_config(None, {"data.preset": "x"}, [f"data.preset={null}"]).data.preset is None
    assert of(f"rollout.ring_slots={null}").rollout.ring_slots is None
    assert load_config(write(tmp_path, 'data: {preset: "null"}')).data.preset == "null"


def test_values_of_a_free_mapping_keep_their_types(tmp_path: Path) -> None:
    value = {"a": 1, "b": 1e-3, "c": None, "d": "null", "e": "yes", "f": "007", "g": False}
    value |= {"h": "1", "i": {"j": [True, "x y"]}}
    text = "a: 1, b: 1e-3, c: null, d: 'null', e: yes, f: 007, g: false"
    config = of(f'data.chat_template_kwargs={{{text}, h: "1", i: {{j: [true, x y]}}}}')
    assert repr(config.data.chat_template_kwargs) == repr(value)
    assert load_config(write(tmp_path, to_commented_yaml(config))) == config


# YAML out.


def test_every_key_has_a_comment_and_there_are_at_most_100() -> None:
    assert all(field.description for field in KEYS.values())
    assert "# Rank of the adapters; null" in to_commented_yaml(Config())
    assert len(KEYS) <= 100


def test_generated_files_are_current() -> None:
    yaml, markdown = ROOT / "configs" / "default.yaml", ROOT / "docs" / "settings.md"
    assert yaml.read_text() == to_commented_yaml(Config()), "easyrl config > configs/default.yaml"
    current = markdown.read_text() == settings_markdown()
    assert current, "easyrl config --markdown > docs/settings.md"
    devices = (ROOT / "docs" / "devices.md").read_text()
    assert "\n".join(performance_model.tables()) in devices, performance_model.__doc__


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    number=st.floats(min_value=1e-12, max_value=1e12),
    flag=st.booleans(),
    texts=st.lists(
        st.sampled_from(["null", "a.py:f", "x, y", "1", "1e-6", "\n\n", "#", "'", "{", "é\t"]),
        min_size=1,
        unique=True,
    ),
)
def test_commented_yaml_loads_again_to_an_equal_config(
    text: str,
    number: float,
    flag: bool,
    texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    flags = {
        "model.path": text,
        "data.preset": text,
        "data.chat_template_kwargs": {"a": texts, "b": number},
        "model.lora.rank": 3,
        "model.lora.target_modules": texts[:1],
        "train.learning_rate": number,
        "runtime.deterministic": flag,
        "rollout.stop": texts,
    }
    config = load_config(None, flags)
    file = write(tmp_path_factory.getbasetemp(), to_commented_yaml(config))
    assert load_config(file) == config


# Errors.


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("train.learning_rte=1", "did you mean train.learning_rate?"),
        ("trian.iterations=1", "did you mean train?"),
        ("learning_rate=1", "did you mean train.learning_rate?"),
        ("runtime.iterations=1", "did you mean train.iterations?"),
        ("model.lra.rank=1", "did you mean model.lora?"),
        ("xx.yy=1", "easyrl config"),
        ("iterations", "section.key=value"),
    ],
)
def test_unknown_key_names_the_nearest(word: str, near: str) -> None:
    assert near in error_of(word)


@pytest.mark.parametrize(
    "word",
    [
        "train.iterations=many",
        "train.iterations=true",
        "train.iterations=null",
        "train.iterations=0",
        "train.iterations=[1",
        "train.learning_rate=1e999",
        'rollout.stop=[""]',
        "runtime.deterministic=maybe",
        "runtime.schedule=async",
        "runtime.resume=auto",
        "reward.pattern=a",
        "model.lora=1",
        "model.path=",
        "model.lora.alpha=2",
        "data.dataset=[]",
        "data.weights=[1, 2]",
        "train.updates_per_iteration=3",
        "train.max_tokens_per_micro_batch=767",
        "algorithm.epsilon_high=1",
        *(f"devices.infer={text}" for text in ("3-1", "0,,2", "gpu", "cpu:0", "0-2,1")),
    ],
)
def test_wrong_value_is_refused_with_its_key(word: str) -> None:
    assert error_of(word).startswith(word.partition("=")[0])


def test_all_problems_are_reported_at_once() -> None:
    assert len(error_of("foo", "train.lerning_rate=1", "train.iterations=x").splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("train:\n  iterations: [1\nmodel: {}\n", "config.yaml:3"),
        ("train: 3\n", "train"),
        ("train.iterations: 3\ntrain: {save_every: 5}\n", "train: {iterations: ...}"),
        ("model: {lora.rank: 3}\n", "model: {lora: {rank: ...}}"),
        ("modl: {lora: {rank: 16}}\n", "did you mean model?"),
        ("just text\n", "config.yaml"),
        ("train:\n  iterations: 1\n  iterations: 2\n", "config.yaml:3"),
        ("train: !!python/object:os.system {}\n", "config.yaml:1"),
    ],
)
def test_unusable_file_is_refused_with_its_line(text: str, where: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert where in str(caught.value)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00train")
    for path in (tmp_path / "none.yaml", tmp_path / "binary.yaml"):
        with pytest.raises(ConfigError, match="config file"):
            load_config(path)


def test_ring_that_would_deadlock_is_refused() -> None:
    small = ["rollout.ring_slots=31", "train.prompts_per_iteration=32"]
    of(*small)  # periodic, in arrival order: back-pressure is fine
    for word in ("runtime.schedule=sync", "runtime.deterministic=true"):
        assert error_of(word, *small).startswith("rollout.ring_slots")
        of(word, *small, "rollout.ring_slots=32")


# What defaults mean.


def test_learning_rate_depends_on_the_model_and_lora() -> None:
    assert of().learning_rate == 3e-4 and of("model.lora.rank=1").learning_rate == 3e-3
    other = "model.path=m"
    assert of(other).learning_rate == 1e-6 and of(other, "model.lora.rank=1").learning_rate == 1e-5
    assert of("model.lora.rank=1", "train.learning_rate=2e-6").learning_rate == 2e-6


def test_a_micro_batch_holds_the_longest_rollout() -> None:
    assert of().max_tokens_per_micro_batch == 4096
    long = ("rollout.max_completion_length=4096", "data.max_prompt_length=100")
    assert of(*long).max_tokens_per_micro_batch == 4196
    assert of(*long, "train.max_tokens_per_micro_batch=5000").max_tokens_per_micro_batch == 5000
    assert "null" in error_of(*long, "train.max_tokens_per_micro_batch=4096")


def test_the_upper_clip_is_epsilon_or_a_ratio_of_cispo() -> None:
    def upper(*words: str) -> float:
        return of(*words).algorithm.resolved_epsilon_high

    cispo = "algorithm.loss_type=cispo"
    assert upper("algorithm.epsilon=0.1") == 0.1 and upper(cispo) == 5.0
    assert upper("algorithm.loss_type=dapo", "algorithm.epsilon_high=0.28") == 0.28
    assert upper(cispo, "algorithm.epsilon_high=1") == 1.0
    assert error_of(cispo, "algorithm.epsilon_high=0.28").startswith("algorithm.epsilon_high")


def test_auto_corrects_nothing_in_float32() -> None:
    assert of().importance_sampling_correction == "none"
    assert of("model.dtype=bfloat16").importance_sampling_correction == "truncate"
    mask = of("algorithm.importance_sampling_correction=mask")
    assert mask.importance_sampling_correction == "mask"


def test_advantages_of_zero_are_trained_where_they_have_a_gradient() -> None:
    assert not of().algorithm.trains_zero_advantages
    for word in ("algorithm.beta=0.01", "algorithm.entropy_coef=0.01"):
        assert of(word).algorithm.trains_zero_advantages


def test_every_sampling_key_reaches_the_engine() -> None:
    changes: dict[str, Any] = {"max_completion_length": 31, "temperature": 0.5, "stop": ["a"]}
    changes |= {"top_k": 5, "top_p": 0.5}
    default = sampling_settings(of())
    for key, value in changes.items():
        got = sampling_settings(Config.model_validate({"rollout": {key: value}}))
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(got, key) == expected != getattr(default, key)
    others = {"num_generations", "max_concurrent_groups", "ring_slots", "engine"}
    others |= {"tensor_parallel_size", "memory_fraction", "environment", "tools", "tool_format"}
    others |= {"max_turns", "tool_timeout_seconds", "episode_timeout_seconds"}
    others |= {"environment_workers", "concurrent_calls"}
    assert set(Config().rollout.model_dump()) == set(changes) | others
    assert sampling_settings(of("runtime.seed=7")).seed == 7 != default.seed


# Device sets.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3", DeviceSet("accelerator", (0, 1, 2, 3))),
        ("4-5,0", DeviceSet("accelerator", (0, 4, 5))),
        ("cpu", DeviceSet("cpu", (0,))),
        ("cpu:3", DeviceSet("cpu", (0, 1, 2))),
    ],
)
def test_device_sets(text: str, expected: DeviceSet) -> None:
    assert parse_device_set(text) == expected == parse_device_set(str(expected))
    assert expected.count == len(expected.indices)


def test_device_sets_are_disjoint_or_one_shared_accelerator() -> None:
    for infer, train in (("0-3", "4-7"), ("0", "0"), ("cpu", "cpu"), ("cpu:2", "0"), ("1", "cpu")):
        check_disjoint(parse_device_set(infer), parse_device_set(train))
    for infer, train in (("0-3", "3-4"), ("0,1", "0,1"), ("0", "0-1")):
        with pytest.raises(ConfigError, match=r"devices\.train"):
            check_disjoint(parse_device_set(infer), parse_device_set(train))
