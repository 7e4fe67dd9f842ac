"""`easyrl eval`: what it evaluates, writes and compares, and how it continues."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from easyrl import events
from easyrl.api.calls import evaluate as python_evaluate
from easyrl.config import (
    Config,
    ConfigError,
    by_name,
    load_config,
    to_commented_yaml,
    yaml_value,
)
from easyrl.config.rollout import SamplingChoice
from easyrl.data.tasks import ARITHMETIC
from easyrl.evaluation import command
from easyrl.runtime.metrics import evaluation_metrics
from easyrl.runtime.resume import load_to_evaluate
from easyrl.runtime.run_folder import lock_folder
from easyrl.runtime.supervisor import Interrupted, WorkerFailure
from mistakes import TINY, make_run
from own_processes import WAIT_SECONDS, popen
from runs import descendants, easyrl, kill_worker, lines_of, wait_until, wait_until_gone, write_rows

NUM_PROBLEMS = 6
SMALL = ("--infer-devices=cpu", f"data.num_held_out={NUM_PROBLEMS}", "eval.max_completion_length=9")


def call(folder, *words, code=0):
    done = easyrl("eval", "--no-live", "--output", folder, *words)
    assert done.exit_code == code, done.output
    return done.output


def evaluated(folder, *words):
    call(folder, *words)
    return read_results(folder)


def read_results(folder):
    return json.loads((folder / "eval.json").read_text())


def write_sums(file, *numbers):
    return write_rows(file, [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in numbers])


class Workers:
    def __init__(self):
        self.asked = []
        self.errors = {}
        """Raised once this many problems are answered."""
        self.rewards = lambda n, sample: float((n + sample) % 3 == 0)

    def __call__(self, plan, model, problems, *more):
        count = plan.sampling.num_samples
        self.asked.append([problem.index for problem in problems])
        for number, problem in enumerate(reversed(problems)):  # any order is allowed
            if number in self.errors:
                raise self.errors[number]
            n = problem.index
            rewards = [self.rewards(n, sample) for sample in range(count)]
            [name], is_skipped = plan.spec.rewards.names, any(map(math.isnan, rewards))
            samples = [
                events.Sample(
                    str(k),
                    x,
                    0.0,
                    {},
                    {name: None if is_skipped else x},
                    5 + n,
                    truncated=n == 0,
                    inserted_tokens=2 * n,
                )
                for k, x in enumerate(rewards)
            ]
            yield number + 1.0, events.PromptEvaluated(0, n, samples, str(problem.content))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A training run with a checkpoint, whose export is a stub."""
    monkeypatch.setattr(
        "easyrl.model.export.export_checkpoint",
        lambda checkpoint, folder, **options: shutil.copytree(TINY, folder),
    )
    make_run(tmp_path / "run", {10: {}})
    return tmp_path / "run"


@pytest.fixture
def workers(monkeypatch):
    workers = Workers()
    monkeypatch.setattr(command, "answers_of_workers", workers)
    return workers


def without_time(results):
    return {k: v for k, v in results.items() if k not in ("wall_seconds", "tokens_per_second")}


def eval_command(*words):
    return [sys.executable, "-m", "easyrl", "eval", "--no-live", *words]


def test_model_is_evaluated_by_several_engines(tmp_path):
    words = eval_command("--output", str(tmp_path), "--num-samples", "2", "--infer-devices=cpu:2")
    words += ["data.num_held_out=8", "eval.max_completion_length=100"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    samples, results = lines_of(tmp_path / "samples.jsonl"), read_results(tmp_path)
    for sample in samples:  # of the built-in model, scored by its task
        right = sample["completion"].rpartition("#")[1:] == ("#", sample["answer"])
        assert sample["reward"] == float(right) == sample["rewards"]["score"]
        assert sample["length"] == len(sample["completion"]) + (not sample["truncated"])
        assert sample["raw"][1].endswith("<eos>") != sample["truncated"]
    contents = [row["prompt"] for row in ARITHMETIC.held_out_rows()[:8]]
    rewards = [[s["reward"] for s in samples if s["prompt"] == content] for content in contents]
    assert len(samples) == sum(map(len, rewards)) == 16
    assert results["accuracy"] == pytest.approx(sum(map(sum, rewards)) / 16)
    assert results["pass_at_k"]["2"] == sum(map(max, rewards)) / 8
    assert results["num_engines"] == 2 and results["tokens_per_second"] > 0
    assert f"{results['accuracy']:.3f} ±" in done.stdout
    assert not list(tmp_path.glob(".model*"))


def test_figures_cover_problems_and_completions(workers, tmp_path):
    results = evaluated(tmp_path / "ev", "--num-samples", "4", *SMALL)
    means = [count / 4 for count in (2, 1, 1, 2, 1, 1)]  # multiples of 3 in 0 … 3, 1 … 4, …
    accuracy = sum(means) / 6
    spread = math.sqrt(sum((mean - accuracy) ** 2 for mean in means) / 5)
    assert results["pass_at_k"].keys() == {"1", "2", "3", "4"}
    expected = {"accuracy": accuracy, "standard_error": spread / math.sqrt(6)}
    expected |= {"wall_seconds": 6.0, "tokens_per_second": 4 * 45 / 6.0, "temperature": 1.0}
    expected |= {"mean_completion_length": 7.5, "truncated_share": 1 / 6, "num_samples": 4}
    expected |= {"completion_tokens": 4 * 45, "inserted_tokens": 4 * 30, "mean_inserted_length": 5}
    assert {key: results[key] for key in expected} == pytest.approx(expected)
    # Problems without rewards are counted and left out.
    workers.rewards = lambda problem, sample: math.nan if problem == 2 else 1.0
    results = evaluated(tmp_path / "skip", "reward.on_error=skip_group", *SMALL)
    assert (results["num_problems"], results["num_skipped"], results["accuracy"]) == (5, 1, 1.0)


def test_stopped_evaluation_continues(workers, tmp_path):
    """After Ctrl-C, and after a kill, which leaves half a line or half a problem."""
    words, folder = ("--num-samples", "2", *SMALL), tmp_path / "ev"
    whole = evaluated(tmp_path / "whole", *words)
    workers.errors[4] = Interrupted(signal.SIGINT)
    assert "4 of 6" in call(folder, *words, code=130)
    assert not (folder / "eval.json").exists()
    workers.errors.clear()
    assert without_time(evaluated(folder, *words)) == without_time(whole)
    file = folder / "samples.jsonl"
    lines, size = lines_of(file), file.stat().st_size
    for num_lines in (0.5, 3):
        os.truncate(file, size - round(num_lines * size / len(lines)))
        assert without_time(evaluated(folder, *words)) == without_time(whole)
    call(folder, *words)  # nothing is left to ask
    assert workers.asked[1:] == [[0, 1, 2, 3, 4, 5], [0, 1], [0], [0, 1]]
    assert sorted(map(json.dumps, lines_of(file))) == sorted(map(json.dumps, lines))


def test_other_settings_are_refused_once_a_problem_is_answered(workers, run, tmp_path):
    folder, words = tmp_path / "ev", ("--num-samples", "2", *SMALL)
    workers.errors[0] = WorkerFailure("rollout-0 was killed by SIGKILL")
    call(folder, "--model", str(run), *SMALL, code=1)
    workers.errors.clear()
    results = evaluated(folder, *words)
    assert results["model"] == "tiny" and {"rollout.environment", "rollout.tools"} <= {*results}
    assert not list(folder.glob(".model*"))
    for more, key in {
        ("--num-samples", "3"): "num_samples",
        ("--model", str(run)): "model",
        ("data.num_held_out=5",): "dataset_identity",
        ("--reward", "exact_match"): "reward_functions",
        ("--reward", "regex", "reward.pattern=1"): "reward.pattern",
        ("rollout.max_turns=3",): "rollout.max_turns",
        ("data.chat=true", "data.chat_template={{ messages }}"): "data.chat_template",
    }.items():
        assert f"{key}: expected" in call(folder, *words, *more, code=2)
    file, own = tmp_path / "r.py", tmp_path / "own"  # a reward that is edited
    more = ("--reward", f"{file}:f", *SMALL)
    for value, code in ((0, 0), (1, 2)):
        file.write_text(f"def f(completions, **_):\n    return [{value}] * len(completions)\n")
        out = call(own, *more, code=code)
    assert "reward.functions_identity" in out
    out = call(tmp_path / "edited", *more, "--compare", str(own))
    assert "not the same evaluation: reward.functions_identity" in out
    lock = lock_folder(folder)  # of another command
    assert "output.dir" in call(folder, *words, code=2)
    os.close(lock)
    # Settings that change no answer may differ, and so may spellings.
    call(folder, *words, "reward.num_workers=2", "eval.temperature=1.0")
    assert len(workers.asked) == 4


def test_a_run_is_evaluated_as_it_was_trained(workers, run, tmp_path):
    """But for what is given, where it ran, and what opens a sandbox or runs a model's code."""
    settings = {
        "data.dataset": write_sums(tmp_path / "d.jsonl", 1),
        "reward.functions": ["exact_match"],
        "reward.weights": [2],
        "model.dtype": "bfloat16",
    }
    not_taken = {
        "model.trust_remote_code": True,
        "reward.code_sandbox": "limits",
        "rollout.engine": "vllm",
    }
    config = load_config(None, settings | not_taken)
    (run / "config.yaml").write_text(to_commented_yaml(config))
    results = evaluated(tmp_path / "ev", "--model", str(run / "checkpoints" / "10"), *SMALL)
    names = ("num_problems", "reward_functions", "model.dtype")
    assert [results[name] for name in names] == [1, ["exact_match"], "bfloat16"]
    others = ("--dataset", write_sums(tmp_path / "others.jsonl", 2))
    for more, is_noted in (((), True), (others, False)):
        out = call(tmp_path / f"ev{is_noted}", "--model", str(run), *SMALL, *more)
        assert ("run trained on rows of this data set" in out) == is_noted


def test_an_evaluation_of_a_run_takes_all_settings_but_those_of_its_machine(run):
    """Whether what replaces them is given as options or as words."""
    settings = {
        "data.dataset": "run.jsonl",
        "reward.functions": ["exact_match"],
        "reward.weights": [2],
        "model.dtype": "bfloat16",
        "eval.dataset": "held_out.jsonl",
        "rollout.tools": ["math:sqrt"],
        "rollout.tool_timeout_seconds": 600.0,
        "rollout.concurrent_calls": 1,
        "rollout.environment_workers": 8,
        "reward.on_error": "zero",
        "reward.timeout_seconds": 900.0,
        "reward.memory_limit_gib": 32.0,
        "reward.num_workers": 3,
        "reward.check": False,
    }
    not_taken = {
        "model.trust_remote_code": True,
        "reward.code_sandbox": "limits",
        "reward.model_device": 3,
        "rollout.engine": "vllm",
        "rollout.memory_fraction": 0.7,
        "rollout.max_concurrent_groups": 5,
        "rollout.ring_slots": 40,
    }
    config = load_config(None, settings | not_taken)
    (run / "config.yaml").write_text(to_commented_yaml(config))
    defaults = by_name(Config().model_dump(mode="json"))
    own = {key: defaults[key] for key in settings if key.startswith("reward.")}
    of_file = {"eval.dataset": None}
    of_preset = {**own, "eval.dataset": None, "rollout.tools": []}
    for given, replaced in [
        ({}, {}),
        ({"reward.num_workers": 4}, {}),
        ({"reward.functions": ["math"]}, own),
        ({"data.dataset": "others.jsonl"}, of_file),
        ({"data.dataset": "gsm8k"}, of_preset),
    ]:
        flags = {"model.path": str(run), **given}
        words = [f"{key}={yaml_value(value)}" for key, value in flags.items()]
        for taken in (load_to_evaluate(None, flags), load_to_evaluate(None, {}, words)):
            values = by_name(taken.model_dump(mode="json"))
            expected = settings | replaced | flags
            assert {key: values[key] for key in expected} == expected
            assert all(values[key] != value for key, value in not_taken.items())


def test_config_of_a_run_names_no_folder_for_an_evaluation(workers, run, tmp_path, monkeypatch):
    settings = {
        "data.dataset": write_sums(tmp_path / "d.jsonl", 1),
        "reward.functions": ["exact_match"],
        "output.dir": str(run),
    }
    (run / "config.yaml").write_text(to_commented_yaml(load_config(None, settings)))
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "easyrl.log").touch()
    names = {path.name for path in run.iterdir()}
    moved = run.rename(tmp_path / "moved")
    words = ("eval", "--no-live", *SMALL, "--model", "tiny")
    monkeypatch.chdir(moved)
    done = easyrl(*words, "--config", "config.yaml")
    assert done.exit_code == 0, done.output
    assert {path.name for path in moved.iterdir()} == names | {"runs"} and not run.exists()
    [folder] = moved.glob("runs/*-eval-*")
    assert read_results(folder)["dataset"] == settings["data.dataset"]
    call(tmp_path / "ev", *words[2:], "--config", moved / "config.yaml")
    (tmp_path / "ev" / "eval.json").unlink()
    done = easyrl(*words, "--config", tmp_path / "ev" / "config.yaml")  # an evaluation continues
    assert done.exit_code == 0, done.output
    assert read_results(tmp_path / "ev")["num_problems"] == 1


def test_rows_of_a_program_are_evaluated_in_an_empty_folder(workers, tmp_path):
    folder = tmp_path / "ev"
    folder.mkdir()
    options = {"output": folder, "infer_devices": "cpu", "progress": False}
    rows = [{"prompt": "1+1=", "answer": "2"}]
    with pytest.raises(ConfigError, match=r"^model\.path"):
        python_evaluate(tmp_path / "no model", rows, "exact_match", **options)
    assert folder.is_dir() and not [*folder.iterdir()]
    result = python_evaluate("tiny", rows, "exact_match", **options)
    assert len(result.samples) == 1 and (folder / "inputs" / "data.jsonl").is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(ConfigError, match=r"output\.dir"):
        python_evaluate("tiny", rows, "exact_match", **(options | {"output": tmp_path / "mine"}))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_each_row_of_a_file_is_evaluated_once(workers, tmp_path):
    data = write_sums(tmp_path / "d.jsonl", 5, 3, 4, 3)
    words = ("--dataset", data, "--infer-devices", "cpu", "--reward", "exact_match")
    results = evaluated(tmp_path / "ev", *words)
    assert results["temperature"] == 0.0, "greedy, with one sample each"
    samples = sorted(lines_of(tmp_path / "ev" / "samples.jsonl"), key=lambda s: s["prompt_index"])
    assert [sample["prompt"] for sample in samples] == ["5+1=", "3+1=", "4+1=", "3+1="]
    ids = [sample["problem"] for sample in samples]
    assert ids[3] == f"{ids[1]}-2" and len(set(ids)) == 4


def test_sampling_is_the_users_then_the_presets_then_that_of_training():
    of_preset = {"num_samples": 64, "temperature": 0.6, "top_p": 0.95, "max_completion_length": 999}
    training = ("rollout.temperature=0.7", "rollout.max_completion_length=9")
    for words, preset, expected in [
        ((), of_preset, SamplingChoice(64, 999, 0.6, 0, 0.95)),
        (("eval.num_samples=2",), of_preset, SamplingChoice(2, 999, 0.6, 0, 0.95)),
        ((), {}, SamplingChoice(1, 256, 0.0)),
        (("eval.num_samples=3", *training), {}, SamplingChoice(3, 9, 0.7)),
        (("eval.temperature=0",), of_preset, SamplingChoice(1, 999, 0.0, 0, 0.95)),
        (("eval.num_samples=3",), {"temperature": 0.0}, SamplingChoice(3, 256, 1.0)),
    ]:
        config = load_config(words=words)
        assert SamplingChoice.of_evaluation(config.eval, config.rollout, preset) == expected


def test_comparison_is_printed_and_written(workers, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    words = ("--num-samples", "2", *SMALL)
    call(first, *words)
    workers.rewards = lambda problem, sample: 1.0
    assert "difference +0." in call(second, "--compare", str(first), "--seed", "1", *words)
    comparison = read_results(second)["comparison"]
    assert comparison["num_better"] == 6 and comparison["p_value"] == 2 / 64
    assert len(lines_of(second / "comparison.jsonl")) == 6
    output = call(first, "--compare", str(second), *words)
    assert "difference -0." in output and "not the same evaluation" not in output
    assert len(workers.asked) == 2, "a finished evaluation is not asked again"
    # Another temperature is another evaluation. Means of graded rewards are shown as well.
    workers.rewards = lambda problem, sample: 0.5
    output = call(tmp_path / "c", "--compare", str(first), *words, "eval.temperature=0.5")
    assert "temperature: 0.5 here, 1.0 there" in output
    assert "accuracy 0.000 ± 0.000, mean reward 0.500" in output
    comparison = read_results(tmp_path / "c")["comparison"]
    assert (comparison["reward"], comparison["other_reward"]) == (0.5, pytest.approx(1 / 3))
    assert re.search(r"mean reward +0.500 ± 0.000 +0.333 ± 0.105", output)


def test_evaluations_with_other_prompts_are_compared_with_a_warning(workers, tmp_path):
    words = ("--dataset", write_sums(tmp_path / "d.jsonl", *range(6)), "--reward", "exact_match")
    call(tmp_path / "a", *words, *SMALL)
    words += ("--compare", str(tmp_path / "a"), "data.prompt_template=Add {prompt}", *SMALL)
    output, warning = call(tmp_path / "b", *words), "data.prompt_template: Add {prompt} here, None"
    assert "on 6 common problems" in output
    assert output.index(warning) < output.index("6/6")
    write_sums(tmp_path / "d.jsonl", *range(1, 7))
    write_sums(tmp_path / "d.jsonl", 5, 6, 7)
    output = call(tmp_path / "few", *words[:4], "--compare", str(tmp_path / "a"), *SMALL)
    assert "warning: only 1 of 3 problems are in both" in output
    write_sums(tmp_path / "d.jsonl", *range(1, 7))
    assert "without a common problem" in " ".join(call(tmp_path / "c", *words, code=2).split())


def test_held_out_accuracy_does_not_depend_on_the_order_of_arrival():
    answers = [
        events.PromptEvaluated(0, n, [events.Sample("", value, 0.0, {})])
        for n, value in enumerate([1.0, 0.1, 0.7, math.nan])
    ]
    found = evaluation_metrics(answers, 0.7)
    assert found == evaluation_metrics(answers[::-1], 0.7)
    expected = {"eval/accuracy": 2 / 3, "eval/standard_error": 1 / 3, "eval/reward": 0.6}
    assert found == (pytest.approx(expected), 3)


@pytest.mark.long
@pytest.mark.parametrize(("how", "code"), [("Ctrl-C", 130), ("a worker", 0), ("the command", -9)])
def test_stopped_evaluation_leaves_nothing_behind(tmp_path, how, code):
    words = ("--output", str(tmp_path), "--num-samples", "4", "--infer-devices", "cpu:2")
    run = eval_command(*words, "data.num_held_out=64", "eval.max_completion_length=128")
    process = popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    samples = tmp_path / "samples.jsonl"
    wait_until(lambda: samples.exists() and samples.stat().st_size, process)
    children = descendants(process.pid)
    if how == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    elif how == "a worker":
        kill_worker(process)
    else:
        process.kill()
    process.communicate(timeout=WAIT_SECONDS)
    assert wait_until_gone(children) == [] and process.returncode == code
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    keys = [(line["problem"], line["sample"]) for line in lines_of(samples)]
    assert len(keys) == len({*keys}) == 256
