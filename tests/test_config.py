"""The config: four layers, YAML and words to values, and errors that name the key."""

import pickle
import re
import runpy
from functools import reduce
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import performance_model
from easyrl.config import (
    KEYS,
    Config,
    ConfigError,
    key_hint,
    load_config,
    options_by_key,
    to_arguments,
    to_commented_yaml,
)
from easyrl.config.devices import parse_device_set
from easyrl.config.hints import INSTEAD, names_of_others
from easyrl.config.schema import SECTIONS, keys_marked
from easyrl.config.section import MAY_CHANGE
from easyrl.config.values import allowed_values
from easyrl.data.presets import TRAINED
from easyrl.runtime.placement import check_disjoint
from easyrl.runtime.resolve import resolve

ROOT = Path(__file__).parent.parent


def of(*words):
    return load_config(words=words)


def write(folder, text):
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def error_of(*words):
    with pytest.raises(ConfigError) as caught:
        of(*words)
    return str(caught.value)


def test_later_layers_win_and_empty_ones_are_the_defaults(tmp_path):
    file = write(tmp_path, "train: {iterations: 1, prompts_per_iteration: 11, learning_rate: 1e-6}")
    settings = {"train.iterations": 2, "train.prompts_per_iteration": 22}
    train = load_config(file, settings, ["train.iterations=3"]).train
    assert (train.iterations, train.prompts_per_iteration, train.learning_rate) == (3, 22, 1e-6)
    assert options_by_key(seed=None, iterations=0) == {"train.iterations": 0}
    for text in ("", "train:\n  # iterations: 3\nmodel:\n  lora:\n"):
        assert load_config(write(tmp_path, text)) == load_config() == Config()


@pytest.mark.parametrize("name", ["runs", "läufe 走", 'a "b"'])
def test_a_moved_run_finds_its_inputs_in_a_folder_of_any_name(name, tmp_path):
    folder = tmp_path / name / "first"
    (folder / "inputs").mkdir(parents=True)
    functions = [f"{folder}/inputs/rewards.py:length", "exact_match"]
    config = load_config(None, {"output.dir": str(folder), "reward.functions": functions})
    (folder / "config.yaml").write_text(to_commented_yaml(config), encoding="utf-8")
    moved = folder.rename(folder.with_name(f"{name} moved"))
    found = load_config(moved / "config.yaml").reward.functions
    assert found == [f"{moved}/inputs/rewards.py:length", "exact_match"]


def test_every_synonym_and_advice_names_settings_that_exist():
    named = {
        key for here in names_of_others().values() for key in re.findall(r"[a-z]\w*\.[\w.]+", here)
    }
    functions = {"easyrl.train"}  # of Python
    assert "train.learning_rate" in named and named <= {*KEYS, *functions}
    for (name, value), instead in INSTEAD.items():
        assert instead in error_of(f"{name}={value}")
        of(instead)


def value_of(config, key):
    return reduce(getattr, key.split("."), config)


KWARGS = 'a: 1, b: 1e-3, c: None, d: "null", e: yes, f: 007, g: False, h: {j: [true, x y]}'
LATEX = r"\nabla f, \neq, \nu_1 and \not: \text{{x}}"


@pytest.mark.parametrize(
    ("key", "typed", "expected"),
    [
        # Every text is one for a key that takes a string, but for quotes.
        *(
            ("data.prompt_template", text, text)
            for text in ("123", "[0-4]$", "a: b", "a #b", "1e3", " Q: {q}\nA: ")
        ),
        ("data.prompt_template", '"[A-M]"', "[A-M]"),
        # A typed end of a line is one, unless it begins a LaTeX command.
        ("data.system_prompt", r"{prompt}\n\nsteps\n", "{prompt}\n\nsteps\n"),
        ("data.system_prompt", LATEX, LATEX),
        ("data.prompt_template", r"{q}\nnot now\n", "{q}\nnot now\n"),  # \nnot is no command
        ("data.prompt_template", r"{q}\\nA:", r"{q}\\nA:"),
        ("data.chat_template", __file__, Path(__file__).read_text()),
        # Null, as YAML and Python write it.
        *(("data.preset", text, None) for text in ("null", "~", "", "None")),
        *((f"data.{key}", "None", None) for key in ("system_prompt", "prompt_column")),
        ("data.chat_template", "None", None),
        ("data.answer_from", "none", None),
        ("algorithm.scale_rewards", "none", "none"),
        ("reward.functions", "None", None),
        # Lists, mappings and other forms.
        ("rollout.stop", "[007, 1:30]", ["007", "1:30"]),
        ("rollout.stop", r"[\n\n, END]", ["\n\n", "END"]),
        ("rollout.stop", r'["\\n"]', [r"\n"]),
        ("rollout.stop", r"[\nu, don't]", ["\nu", "don't"]),
        ("data.dataset", "[d 1.jsonl, e]", ["d 1.jsonl", "e"]),
        ("model.dtype", "bf16", "bfloat16"),
        ("rollout.environment", '{a: "x y.py:A", b: guess}', {"a": "x y.py:A", "b": "guess"}),
        (
            "data.chat_template_kwargs",
            f"{{{KWARGS}}}",
            {"a": 1, "b": 1e-3, "c": None, "d": "null", "e": "yes", "f": "007", "g": False}
            | {"h": {"j": [True, "x y"]}},
        ),
    ],
)
def test_a_word_has_the_value_that_was_meant_and_yaml_and_arguments_keep_it(
    key, typed, expected, tmp_path
):
    config = of(f"{key}={typed}")
    assert repr(value_of(config, key)) == repr(expected)
    assert load_config(write(tmp_path, to_commented_yaml(config))) == config
    words = to_arguments(config, Config())
    assert all(word.isprintable() for word in words)
    assert key == "data.dataset" or load_config(None, {}, words) == config  # of flags


def test_a_removed_setting_of_earlier_runs_is_read(tmp_path):
    file = write(tmp_path, "runtime:\n  restart: never\n  seed: 5\n")
    assert load_config(file) == load_config(None, {"runtime": {"restart": "on_failure", "seed": 5}})
    with pytest.raises(ConfigError, match=r"runtime\.restart"):
        load_config(file, {}, ["runtime.restart=on_failure"])


def test_each_mark_of_a_field_is_found():
    """One inside a union, as in `MayChange[int] | None`, would be lost."""
    for section in SECTIONS.values():
        for name, annotation in get_type_hints(section, include_extras=True).items():
            for part in get_args(annotation):
                assert "Mark." not in str(get_args(part)), f"{section.__name__}.{name}"
    assert "train.iterations" in keys_marked(MAY_CHANGE)


@pytest.mark.parametrize(
    ("key", "values", "refused"),
    [
        ("train.iterations", "integer ≥ 1", "0"),
        ("rollout.top_p", "number > 0 and ≤ 1", "0"),
        ("algorithm.epsilon", "number > 0 and < 1", "1.0"),
        ("runtime.seed", "integer ≥ 0 and < 9223372036854775808", "9223372036854775808"),
        ("reward.memory_limit_gib", "number ≥ 0.25 or null", "0.2"),
        ("model.dtype", "float32 or bfloat16", "float16"),
        ("train.reshard", "auto, true or false", "2"),
        ("reward.model_device", "cpu or integer ≥ 0", "gpu"),
        ("data.weights", "list of numbers > 0 or null", "[0]"),
        ("reward.judge.range", "[number, number]", "[0]"),
        ("output.log_to", "list of tensorboard, wandb or trackio", "mlflow"),
        ("data.columns", "mapping or list of mappings", "answer"),
        ("rollout.stop", "list of texts", "{}"),
    ],
)
def test_the_values_that_a_key_takes_in_words(key, values, refused):
    allowed = allowed_values()
    assert allowed.keys() == KEYS.keys() and allowed[key] == values
    assert key in error_of(f"{key}={refused}")


def test_generated_files_are_current():
    assert all(field.description for field in KEYS.values()) and len(KEYS) <= 130
    yaml, markdown = ROOT / "configs" / "default.yaml", ROOT / "docs" / "settings.md"
    assert yaml.read_text() == to_commented_yaml(Config()), "easyrl config > configs/default.yaml"
    script = ROOT / "docs" / "settings.py"
    current = markdown.read_text() == runpy.run_path(str(script))["settings_markdown"]() + "\n"
    assert current, "python docs/settings.py > docs/settings.md"
    names = [ROOT / "easyrl" / "config" / "trl_and_verl.md", ROOT / "docs" / "trl_and_verl.md"]
    assert names[0].read_text() == names[1].read_text(), "one is a copy of the other"
    for preset in TRAINED:
        assert f"`{preset}`" in KEYS["data.dataset"].description
    devices = (ROOT / "docs" / "devices.md").read_text()
    assert "\n".join(performance_model.tables()) in devices, performance_model.__doc__


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    number=st.floats(min_value=1e-12, max_value=1e12),
    texts=st.lists(
        st.sampled_from(["null", "a.py:f", "x, y", "1", "1e-6", "\n\n", "#", "'", "{", "é\t"]),
        min_size=1,
        unique=True,
    ),
)
def test_commented_yaml_loads_again_to_an_equal_config(text, number, texts, tmp_path_factory):
    flags = {"model.path": text, "data.preset": text, "train.learning_rate": number}
    flags |= {"data.chat_template_kwargs": {"a": texts, "b": number}, "rollout.stop": texts}
    config = load_config(None, flags)
    file = write(tmp_path_factory.getbasetemp(), to_commented_yaml(config))
    assert load_config(file) == config


@pytest.mark.parametrize(
    "word",
    [
        *(f"train.iterations={text}" for text in ("many", "true", "null", "0", "[1")),
        *("train.learning_rate=1e999", 'rollout.stop=[""]', "runtime.deterministic=maybe"),
        *("runtime.schedule=async", "runtime.resume=auto", "reward.pattern=a", "model.lora=1"),
        *("model.path=", "model.lora.alpha=2", "data.dataset=[]", "data.weights=[1, 2]"),
        *(f"data.chat_template={text}" for text in ("no_such.j2", "chatml", "default", "/tmp")),
        "reward.model_device=true",
        *("data.system_prompt=s.txt", "data.system_prompt=a/b.md", "data.prompt_template=t.jinja"),
        *("train.max_tokens_per_micro_batch=767", "train.updates_per_iteration=3"),
        *(f"devices.infer={text}" for text in ("3-1", "0,,2", "gpu", "cpu:0", "0-2,1")),
    ],
)
def test_wrong_value_is_refused_with_its_key(word):
    assert error_of(word).startswith(word.partition("=")[0])


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"train:\n  iterations: [1\nmodel: {}\n", "config.yaml:3"),
        (b"train: 3\n", "train"),
        (b"model: {lora.rank: 3}\n", "model: {lora: {rank: ...}}"),
        (b"modl: {lora: {rank: 16}}\n", "did you mean model.lora.rank?"),
        (b"train:\n  iterations: 1\n  iterations: 2\n", "config.yaml:3"),
        (b"train: !!python/object:os.system {}\n", "config.yaml:1"),
        (b"a: &a [x, x]\nb: &b [*a, *a]\n", "config.yaml"),  # aliases could grow without bound
        (b"\xff\xfe\x00train", "config file"),
        (None, "config file"),
    ],
)
def test_unusable_file_is_refused_with_its_line(content, where, tmp_path):
    if content is not None:
        (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml", {"train.iterations": 7})
    assert where in str(caught.value)


LONG = ("rollout.max_completion_length=4096", "data.max_prompt_length=100")


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (("model.lora.rank=1",), "learning_rate", 3e-3),
        (("model.path=m",), "learning_rate", 1e-6),
        (("model.lora.rank=1", "train.learning_rate=2e-6"), "learning_rate", 2e-6),
        ((), "max_tokens_per_micro_batch", 4096),
        (LONG, "max_tokens_per_micro_batch", 4196),
        ((), "importance_sampling_correction", "none"),
        (("model.dtype=bfloat16",), "importance_sampling_correction", "truncate"),
        (("algorithm.epsilon=0.1",), "algorithm.resolved_epsilon_high", 0.1),
        (("algorithm.loss_type=cispo",), "algorithm.resolved_epsilon_high", 5.0),
        (("algorithm.beta=0.01",), "algorithm.trains_zero_advantages", True),
    ],
)
def test_what_a_default_means(words, key, expected):
    assert value_of(of(*words), key) == expected


def test_keys_that_must_agree():
    assert "null" in error_of(*LONG, "train.max_tokens_per_micro_batch=4096")
    cispo = ("algorithm.loss_type=cispo", "algorithm.epsilon_high=0.28")
    assert error_of(*cispo).startswith("algorithm.epsilon_high")
    small = ["rollout.ring_slots=31", "train.prompts_per_iteration=32"]
    of(*small)  # periodic, in arrival order: back-pressure is fine
    for word in ("runtime.schedule=sync", "runtime.deterministic=true"):  # else a deadlock
        assert error_of(word, *small).startswith("rollout.ring_slots")
        of(word, *small, "rollout.ring_slots=32")


def test_device_sets_are_disjoint_or_one_shared_accelerator():
    for text, indices in (("0-3", (0, 1, 2, 3)), ("4-5,0", (0, 4, 5)), ("cpu:3", (0, 1, 2))):
        parsed = parse_device_set(text)
        assert parsed.indices == indices and (parsed.kind == "cpu") == ("cpu" in text)
        assert parse_device_set(str(parsed)) == parsed
    for infer, train in (("0-3", "4-7"), ("0", "0"), ("cpu", "cpu"), ("cpu:2", "0")):
        check_disjoint(parse_device_set(infer), parse_device_set(train))
    for infer, train in (("0-3", "3-4"), ("0,1", "0,1"), ("0", "0-1")):
        with pytest.raises(ConfigError, match=r"devices\.train"):
            check_disjoint(parse_device_set(infer), parse_device_set(train))


def test_names_of_trl_and_verl_are_answered_from_the_table_of_the_docs():
    table = (ROOT / "docs" / "trl_and_verl.md").read_text()
    rows = re.findall(r"^\| `([\w.=]+)`.*?\| `(\w+)`", table, re.MULTILINE)  # TRL's first name
    assert len(rows) > 20 and all(ours in key_hint(theirs) for ours, theirs in rows)
    assert "nothing" in key_hint("logging_steps") == key_hint("logging-steps")
    assert "train.prompts_per_iteration" in key_hint("train.batch_size")
    assert "algorithm.beta" in key_hint("actor_rollout_ref.actor.kl_loss_coef")
    assert "did you mean algorithm.beta" in key_hint("train.beta")


def test_an_unknown_setting_is_named_in_full_and_all_problems_at_once():
    assert len(error_of("foo", "train.lerning_rate=1", "train.iterations=x").splitlines()) == 3
    error = error_of("actor_rollout_ref.rollout.n=8")
    assert error.startswith("actor_rollout_ref.rollout.n:") and "rollout.num_generations" in error
    assert "train.learning_rate=" in error_of("train.learning_rate", "1e-5")
    assert "model.lora.rank=" in error_of("model.lora=8")
    assert "a space after the colon, got 'a:b'" in error_of("data.columns={a:b}")


def test_a_run_has_a_value_for_all_that_the_config_leaves_open():
    run = resolve(of("data.dataset=gsm8k", "model.path=owner/name", "model.dtype=bfloat16"))
    assert pickle.loads(pickle.dumps(run)) == run
    assert (run.rewards.functions, run.rewards.names, run.rewards.weights) == (
        ("gsm8k",),
        ("gsm8k",),
        (1.0,),
    )
    assert run.rewards.timeout_seconds == 120.0 and run.episodes is None and run.teacher is None
    assert run.optimizer.learning_rate == 1e-6 and run.loss.correction == "truncate"
    assert run.schedule.ring_slots == 16 and run.batches.max_tokens == 4096
    assert run.loss.epsilon_high == 0.2 and run.limits.max_sequence_length == 768


def test_what_acts_in_episodes_may_score_them():
    agent = resolve(of("rollout.agent=a.py:solve", "reward.functions=math", "reward.weights=[3]"))
    assert agent.rewards.functions == ("agent", "math") and agent.rewards.weights == (1.0, 3.0)
    assert agent.episodes.key == "rollout.agent" and agent.episodes.rewards == agent.rewards
    game = resolve(of("rollout.environment=guess", "runtime.deterministic=true"))
    assert game.rewards.functions == ("environment",) and game.episodes.num_threads == 1
    assert game.data.environments == ("",)
    assert resolve(of("data.dataset=mine.jsonl")).rewards.functions == ()  # a check refuses it
