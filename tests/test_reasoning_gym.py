"""The tasks of reasoning-gym as data, with the library's own scores."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import reasoning_gym_scores
from reasoning_gym_scores import RECORDED, are_equal, findings_of

from easyrl.config import ConfigError, load_config
from easyrl.data.datasets import open_prompts, problems_of
from easyrl.data.reasoning_gym import REFUSED, ReasoningGym, library_data
from easyrl.rewards import functions
from easyrl.runtime.resolve import resolve, with_eval_data
from runs import SMALL, lines_of, succeed, summary_of

SUMS, LEGS = "reasoning_gym:chain_sum", "reasoning_gym:leg_counting"
FEW = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
"""Options of `chain_sum` with 200 different problems."""
IN_ANOTHER_PROCESS = """
import json, sys
from easyrl.data.reasoning_gym import REFUSED, ReasoningGym, library_data
for name in sys.argv[1:]:
    print(json.dumps(ReasoningGym(name, "{}", 1).train_row(3, 5), sort_keys=True))
"""
UNORDERED = ("codeio", "isomorphic_strings", "polynomial_multiplication", "ransom_note")
"""Tasks that depend on the order of sets or on global random numbers."""


def config_of(*names, options=None, **settings):
    values = {"data.dataset": [*names], "data.options": options or {}}
    return load_config(None, values | {f"data.{key}": x for key, x in settings.items()})


def test_a_row_depends_on_seed_and_index_alone():
    program = [sys.executable, "-c", IN_ANOTHER_PROCESS, *reversed(UNORDERED)]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    rows = [ReasoningGym(name, "{}", 1).train_row(3, 5) for name in UNORDERED]
    assert [json.dumps(row, sort_keys=True) for row in rows] == printed.splitlines()[::-1]
    task = ReasoningGym("chain_sum", "{}", 1)
    assert len({task.train_row(0, index)["prompt"] for index in range(100)}) == 100
    assert all(task.train_row(0, index) != task.train_row(1, index) for index in range(20))


def test_held_out_problems_are_never_trained_though_there_are_few():
    stream = open_prompts(resolve(config_of(SUMS, options=FEW)).data)
    held_out = [problem.content for problem in stream.held_out()]
    assert 20 < len({*held_out}) == len(held_out) < 80
    trained = {stream.prompt(index).content for index in range(1000)}
    assert len(trained) > 100 and trained.isdisjoint(held_out)
    fewer = open_prompts(resolve(config_of(SUMS, options=FEW, num_held_out=5)).data).held_out()
    assert [problem.content for problem in fewer] == held_out[:5]
    assert not open_prompts(resolve(config_of(SUMS, num_held_out=0)).data).held_out()
    assert len(open_prompts(resolve(config_of(SUMS)).data).held_out()) == 256


def test_the_librarys_scorer_reads_the_answer_and_gives_parts():
    row = ReasoningGym("chain_sum", "{}", 1).train_row(0, 0)
    right = row["answer"]
    texts = [right, f"<think>1</think> {right} ", f"so <answer>{right}</answer>", f"{right}.0", "x"]
    texts += [f"{right}, yes", [{"role": "assistant", "content": right}]]
    count = len(texts)
    columns = {"entry": [row["entry"]] * count, "task": [row["task"]] * count}
    part = len(right) / len(f"{right}, yes".replace(",", ""))
    assert functions.reasoning_gym(texts, **columns) == [1, 1, 1, 1, 0, part, 1]
    # Its scorer raises where it cannot read an answer; and the other rows of a mixture are no task.
    row = ReasoningGym("prime_factorization", "{}", 1).train_row(0, 0)
    scores = functions.reasoning_gym("ab", entry=[row["entry"], None], task=[row["task"], None])
    assert scores == [0, None]


def test_no_number_is_no_answer():
    """The scorer of this task would give it full marks."""
    row = ReasoningGym("complex_arithmetic", "{}", 1).train_row(0, 0)
    texts = [row["answer"], "nan", "NaN", "<answer>nan + nani</answer>", "1 + nani", "inf"]
    columns = {"entry": [row["entry"]] * len(texts), "task": [row["task"]] * len(texts)}
    assert functions.reasoning_gym(texts, **columns) == [1, 0, 0, 0, 0, 0]


def test_the_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"easyrl-train\[reasoning-gym\]"):
        library_data("chain_sum", '{"min_terms": 2}', 3)


BY_TASK = {"chain_sum": FEW, "leg_counting": {"min_animals": 1, "max_animals": 2}}


def test_options_go_by_task():
    mixture = config_of(SUMS, LEGS, options=BY_TASK, chat=True)
    run = resolve(mixture)
    assert run.rewards.functions == ("reasoning_gym",)
    prompt = open_prompts(run.data).prompt(0)
    (message,) = prompt.content
    assert message["role"] == "user" and "arithmetic problem" in message["content"]
    columns = {name: [prompt.columns[name]] for name in ("entry", "task")}
    assert functions.reasoning_gym([columns["entry"][0]["answer"]], **columns) == [1]
    assert with_eval_data(config_of(SUMS, options=FEW)).data.options == FEW
    other = load_config(None, {"data.dataset": SUMS, "data.options": FEW, "eval.dataset": LEGS})
    assert with_eval_data(other).data.options == {}
    stream = open_prompts(resolve(with_eval_data(other)).data)
    problem = next(iter(problems_of(stream, other.data).values()))
    assert "legs" in problem.content


def test_a_curriculum_rises_by_the_librarys_levels():
    """Level n of chain_sum has 2 to 2 + n numbers of 1 to 1 + n digits."""
    options = {"level": [0, 4], "rows_per_level": 10, "min_terms": 2}
    prompts = open_prompts(resolve(config_of(SUMS, options=options, num_held_out=64)).data)

    def most_digits(rows):
        return max(len(n) for row in rows for n in re.findall(r"\d+", row.content))

    rises = [most_digits(map(prompts.prompt, range(n, n + 10))) for n in (0, 10, 40, 90)]
    assert rises[0] == 1 and rises[1] == 2 and rises[2:] == [5, 5]
    problems = problems_of(prompts, config_of(SUMS, options=options, num_held_out=64).data)
    assert most_digits(problems.values()) == 5
    last = ReasoningGym("chain_sum", json.dumps({"level": 4, "min_terms": 2}), 1)
    assert prompts.prompt(90).content == last.train_row(0, 90)["prompt"]


@pytest.mark.parametrize("name", RECORDED["constant"])
def test_a_task_that_rewards_a_constant_is_refused(name):
    assert name in REFUSED and findings_of(name) >= {"constant"}
    with pytest.raises(ConfigError, match=rf"^data\.dataset.*{name}"):
        open_prompts(resolve(config_of(f"reasoning_gym:{name}")).data)
    with pytest.raises(ConfigError, match=name):
        open_prompts(resolve(config_of(SUMS, f"reasoning_gym:{name}")).data)

    def data_of_parts(parts):
        config = config_of("reasoning_gym:composite", options={"datasets": parts})
        return resolve(config).data

    parts = [{"name": part, "weight": 0.5, "config": {}} for part in ("chain_sum", name)]
    with pytest.raises(ConfigError, match=rf"^data\.options\.datasets.*{name}"):
        open_prompts(data_of_parts(parts))
    parts[1]["name"] = "leg_counting"
    assert open_prompts(data_of_parts(parts)).prompt(0)


def test_tasks_are_found_by_what_their_scorers_do():
    assert are_equal("0", "0.0") and are_equal("yes", "Yes") and not are_equal("0", "0.25")
    assert findings_of("chain_sum") == set()
    for name in ("sokoban", "color_cube_rotation", "rush_hour"):
        assert findings_of(name) == {key for key, names in RECORDED.items() if name in names}


@pytest.mark.long
def test_the_scorers_of_the_library_are_as_recorded():
    """If this fails, the library has moved: update RECORDED, REFUSED and docs/data.md."""
    program = [sys.executable, reasoning_gym_scores.__file__]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(program, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(REFUSED) == RECORDED["constant"]
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    section = page.split("## reasoning-gym")[1].split("\n## ")[0]
    named = {name for key in ("constant", "empty", "sentence") for name in RECORDED[key]}
    assert all(f"`{name}`" in section for name in named)


@pytest.mark.long
def test_a_mixture_is_trained(tmp_path):
    folder, samples = tmp_path / "run", "output.samples=8"
    words = (*SMALL, "data.max_prompt_length=600", "data.weights=[3, 1]", "--iterations", "1")
    options = f"data.options={json.dumps(BY_TASK)}"
    datasets = ("--dataset", SUMS, "--dataset", LEGS)
    succeed(*datasets, "--output", str(folder), *words, options, samples, "data.num_held_out=4")
    assert "accuracy_after" in summary_of(folder)
    assert "rewards/reasoning_gym" in str(lines_of(folder / "metrics.jsonl")[-1])


@pytest.mark.long
def test_every_task_of_the_library_is_loaded_and_scores_its_own_answer():
    from reasoning_gym.factory import DATASETS

    names = sorted({*DATASETS} - {"composite", *REFUSED})
    assert len(names) > 100
    for name in names:
        task = ReasoningGym(name, "{}", 1)
        (held_out,) = task.held_out_rows()
        for row in (task.train_row(0, 0), task.train_row(0, 10**6), held_out):
            assert row["prompt"] == row["entry"]["question"] and json.dumps(row)
            answers = [row["answer"] or "", "nothing"]
            columns = {"entry": [row["entry"]] * 2, "task": [row["task"]] * 2}
            right, wrong = functions.reasoning_gym(answers, **columns)
            assert (right == 1 or row["answer"] is None) and 0 <= wrong <= 1, name
