"""The list of checks: what each needs; a start, a plan and an evaluation give the same answer."""

import functools
import inspect
import shutil
from types import SimpleNamespace

import pytest

from easyrl import devices
from easyrl.config import ConfigError, load_config
from easyrl.data.hub import resolve_model
from easyrl.engines.vllm import platforms
from easyrl.evaluation.command import check_evaluation
from easyrl.runtime import memory_estimate
from easyrl.runtime.checks import CHECKS, FACTS, Check, Checks, Stage
from easyrl.runtime.checks.devices import find_disk, written_by_run
from easyrl.runtime.checks.engine import measure_model
from easyrl.runtime.preflight import check_run, make_plan
from easyrl.runtime.resolve import resolve
from mistakes import make_run


def test_a_check_gets_what_it_needs():
    for check in CHECKS:
        assert {*inspect.signature(check.function).parameters} == {*check.needs}, check
    assert {fact for check in CHECKS for fact in check.needs} == FACTS.keys()


def test_a_check_is_made_once_when_all_that_it_needs_is_known(monkeypatch):
    calls = []

    def note(config, disk):
        calls.append((config, disk))
        return ["a warning"]

    check = Check(note, ("config", "disk"), frozenset({Stage.START}))
    monkeypatch.setattr("easyrl.runtime.checks.CHECKS", [check])
    checks = Checks(Stage.START)
    checks.add(config=1)
    assert calls == []
    checks.add(disk=2)
    checks.add(config=3)
    assert calls == [(1, 2)] and checks.warnings == ["a warning"]
    checks.finish()
    Checks(Stage.PLAN).add(config=1, disk=2)
    assert len(calls) == 1


def test_a_check_whose_facts_no_stage_adds_is_noticed(monkeypatch):
    check = Check(lambda disk: None, ("disk",), frozenset({Stage.START}))
    monkeypatch.setattr("easyrl.runtime.checks.CHECKS", [check])
    checks = Checks(Stage.START)
    checks.finish(unknown=["disk"])
    with pytest.raises(AssertionError, match="disk"):
        checks.finish()


def answers(config, *, is_evaluated=True):
    """What a start, a plan and an evaluation say to a config, without the words around it."""
    texts = []
    for check in (check_run, check_evaluation) if is_evaluated else (check_run,):
        with pytest.raises(ConfigError) as refused:
            check(config)
        texts.append(str(refused.value))
    plan = make_plan(config)
    assert not plan.would_start
    return [*texts, plan.verdict.removeprefix("a run would not start: ")]


@pytest.fixture
def full_disk(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_the_same_error_before_a_start_and_in_a_plan(tmp_path):
    config = load_config(words=[f"output.dir={tmp_path}/run"])
    started, planned = answers(config, is_evaluated=False)
    assert started == planned and started.startswith("output.dir (--output): model and check")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "num_bytes"), [
    ((), 4 + 3 * 4 * (1 + 1)),  # per weight: the model, and a checkpoint with its successor
    (("train.eval_every=1",), 4 + 3 * 4 * (2 + 1)),
    (("model.dtype=bfloat16", "train.keep_checkpoints=0"), 4),
    (("model.dtype=bfloat16", "model.lora.rank=2"), 2),
    (("model.lora.rank=2",), 4),
])  # fmt: skip
def test_a_run_needs_the_disk_for_the_weights_in_the_dtype_that_it_writes(words, num_bytes):
    spec = resolve(load_config(words=["train.keep_checkpoints=1", *words]))
    model = measure_model(spec.model)
    written = written_by_run(spec, model, None, is_resumed=False)
    assert written.num_bytes == num_bytes * model.num_weights


@pytest.mark.usefixtures("full_disk")
def test_an_evaluation_needs_the_disk_only_if_its_model_is_to_be_made(tmp_path):
    words = [f"output.dir={tmp_path}/eval", "eval.max_completion_length=9"]
    check_evaluation(load_config(words=words))
    make_run(tmp_path / "run", {10: {}})
    config = load_config(words=[*words, f"model.path={tmp_path}/run"])
    with pytest.raises(ConfigError, match=r"^output\.dir \(--output\): the model takes 0\.00 GiB"):
        check_evaluation(config)
    config = load_config(words=[f"output.dir={tmp_path}/next", f"model.path={tmp_path}/run"])
    assert "output.dir" in make_plan(config).verdict


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs, vLLM, and no C compiler."""
    monkeypatch.setattr(devices, "accelerator", lambda **_: ("cuda", 2))
    monkeypatch.setattr(devices, "total_memory_bytes", lambda kind, index: 2**36)
    monkeypatch.setattr(devices, "memory_in_use", functools.cache(lambda *_: (0, "")))
    monkeypatch.setattr(devices, "has_peer_access", lambda *_: True)
    monkeypatch.setattr(devices, "has_c_compiler", lambda: False)
    monkeypatch.setattr(memory_estimate, "available_memory_bytes", lambda: 2**40)
    monkeypatch.setattr(platforms, "vllm_version", lambda: "0.32.0")


@pytest.mark.usefixtures("two_gpus")
def test_a_missing_compiler_is_the_same_error_in_all_three(tmp_path):
    words = [f"output.dir={tmp_path}/run", "devices.infer=0", "devices.train=1"]
    config = load_config(words=[*words, "rollout.engine=vllm"])
    assert len({*answers(config)}) == 1
    assert answers(config)[0].startswith("devices: expected a C compiler")
    # Other machines have compilers and disks of their own.
    assumed = devices.parse_assumed("2x80GiB")
    assert make_plan(config, assumed).would_start


@pytest.mark.usefixtures("full_disk")
def test_a_plan_for_other_machines_does_not_look_at_this_disk(tmp_path):
    model = f"model.path={resolve_model('tiny')}"
    config = load_config(words=[f"output.dir={tmp_path}/run", model])
    assert not make_plan(config).would_start
    assert make_plan(config, devices.parse_assumed("80GiB")).would_start


def test_a_plan_with_unusable_data_proposes_what_fits_the_memory_all_the_same(tmp_path):
    words = [f"output.dir={tmp_path}/run", f"data.dataset={tmp_path}/none.jsonl"]
    plan = make_plan(load_config(words=words), devices.parse_assumed("2x0.8GiB"))
    assert "data.dataset" in plan.verdict and "warning: by estimate" in plan.text
    assert plan.changes
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    taken = load_config(words=[f"output.dir={tmp_path}/taken"])
    plan = make_plan(taken, devices.parse_assumed("2x0.8GiB"))
    assert "--output" in plan.verdict and "warning: by estimate" in plan.text
    assert plan.changes
    plan = make_plan(load_config(words=words), devices.parse_assumed("2x0.01GiB"))
    assert "data.dataset" in plan.verdict and "even without buffers" in plan.text


def test_a_plan_with_pictures_that_vllm_cannot_show_says_so_first(tmp_path):
    words = ["model.path=tiny-vision", "data.dataset=picture-sums", "rollout.engine=vllm"]
    config = load_config(words=[*words, f"output.dir={tmp_path}/run"])
    plan = make_plan(config, devices.parse_assumed("2x0.8GiB"))
    assert "rollout.engine: expected embedded, because prompts have pictures" in plan.verdict
    assert "are frozen (model.vision)" in plan.text


def test_the_plan_of_a_run_that_resumes_by_itself_checks_its_settings(tmp_path):
    make_run(tmp_path / "run", {10: {}}, "runtime.resume=auto")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    words = ["runtime.resume=auto", f"output.dir={tmp_path}/run"]
    assert make_plan(load_config(words=words)).would_start
    plan = make_plan(load_config(words=[*words, "algorithm.beta=0.1"]))
    assert not plan.would_start and "algorithm.beta" in plan.verdict
    plan = make_plan(load_config(words=[words[0], f"output.dir={tmp_path}/taken"]))
    assert not plan.would_start and "--output" in plan.verdict


def test_an_existing_folder_may_be_another_disk_than_its_parent(tmp_path, monkeypatch):
    asked = []

    def usage(path):
        asked.append(path)
        return SimpleNamespace(free=2**20)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    find_disk(tmp_path)
    find_disk(tmp_path / "new" / "run")
    assert asked == [tmp_path, tmp_path]


@pytest.mark.parametrize("long_prompts", ["stop", "skip"])
def test_a_plan_finds_variables_that_no_template_has(tmp_path, long_prompts):
    words = [f"output.dir={tmp_path}/run", f"data.long_prompts={long_prompts}"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words += [f"data.dataset={rows}", "reward.functions=[exact_match]"]
    config = load_config(words=[*words, "data.chat_template_kwargs={nothing: 1}"])
    found = answers(config)
    assert len({*found}) == 1 and found[0].startswith("data.chat_template_kwargs: expected")


def test_a_plan_leaves_it_to_the_start_whether_every_prompt_is_too_long(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = [f"output.dir={tmp_path}/run", f"data.dataset={rows}", "data.long_prompts=skip"]
    words += ["reward.functions=[exact_match]", "data.max_prompt_length=2"]
    assert make_plan(load_config(words=words)).would_start


def test_a_template_that_writes_no_calls_is_the_same_error_in_all_three(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    template = "{{ tools }}{% for each in messages %}{{ each['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "1+1="}]}\n')
    functions = tmp_path / "own.py"
    functions.write_text(
        'def draw() -> int:\n    """Draw a card."""\n    return 1\n\n\n'
        "def score(completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    words = [f"output.dir={tmp_path}/run", f"data.dataset={rows}", f"model.path={model}"]
    words += [f"reward.functions=['{functions}:score']", f"rollout.tools=['{functions}:draw']"]
    started, evaluated, planned = answers(load_config(words=words))
    assert started == evaluated == planned
    assert started.startswith("rollout.tool_format: expected one of")
