"""`easyrl.train` and `easyrl.evaluate`."""

import gc
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from easyrl import events
from easyrl.api import calls
from easyrl.api.calls import Run, evaluate, train
from easyrl.api.inputs import Inputs
from easyrl.cli.eval import evaluate as eval_command
from easyrl.cli.grpo import grpo
from easyrl.config import Config, ConfigError, load_config, to_commented_yaml
from easyrl.observe.observers import make_observers
from easyrl.observe.text import say_rich
from easyrl.runtime.resolve import resolve
from own_processes import WAIT_SECONDS
from runs import descendants, lines_of, start_process, wait_for_line
from tool_models import call, chat_model

ROOT = Path(__file__).parent.parent
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 14) for b in range(50, 54)]
LOCK = threading.Lock()  # cannot be pickled
SMALL = {
    "train": {"prompts_per_iteration": 2},
    "rollout": {"num_generations": 2, "max_completion_length": 8},
    "data": {"max_prompt_length": 32},
}


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def open_descriptors():
    gc.collect()  # pipes of ended processes
    return len(list(Path("/proc/self/fd").iterdir()))


def traces():
    stop = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    tracker = "resource_tracker"  # multiprocessing's own
    children = [p for p in descendants(os.getpid()) if tracker not in " ".join(p.cmdline())]
    others = re.compile("tqdm_monitor|process_request")  # of datasets, of an earlier test's server
    threads = [each for each in threading.enumerate() if not others.search(each.name)]
    return threads, children, dict(os.environ), list(sys.path), stop


@pytest.mark.parametrize("is_resumed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_train_resume_and_evaluate_leave_only_their_folders(tmp_path, is_resumed):
    import datasets

    weight = 2.0  # a function of a function, with a value of its own

    def doubled(completions, answer, **columns):
        return [weight * len(text) for text in completions]

    before = traces()
    options = {**SMALL, "iterations": 1, "progress": False}
    run = train("tiny", ROWS, [doubled, length], output=tmp_path / "run", **options)
    num_descriptors = open_descriptors()
    assert len(run.metrics) == 1 and run.summary["iterations"] == 1
    rewards = run.metrics[0]["rewards/doubled/mean"], run.metrics[0]["rewards/length/mean"]
    assert rewards[0] == pytest.approx(2 * rewards[1]) and rewards[1] > 0
    assert run.samples[0]["completion"] and run.samples[0]["answer"] in {r["answer"] for r in ROWS}
    assert run.model_path is not None and (Path(run.model_path) / "config.json").is_file()
    moved = Run(run.folder.rename(tmp_path / "moved"))
    assert lines_of(moved.folder / "inputs" / "data.jsonl") == ROWS
    rows = datasets.Dataset.from_list(ROWS[:3])
    options = {**SMALL, "output": tmp_path / "evaluation", "progress": False}
    with ThreadPoolExecutor(1) as pool:  # not the main thread: it has no signal handlers
        if is_resumed:
            again = pool.submit(moved.resume, iterations=2, progress=False).result()
            assert [line["iteration"] for line in again.metrics] == [1, 2]
        result = pool.submit(evaluate, moved, rows, doubled, **options).result()
    assert len(result.samples) == 3
    assert result.summary["reward_functions"] == ["inputs/rewards.py:doubled"]
    assert traces() == before and open_descriptors() <= num_descriptors


PROGRAM = """
from easyrl.api.inputs import Inputs
WORDS = {"a", "b", "c"}
class Room:
    def reset(self, **_): self.seen = {"x", "y"}
def make(k):
    def f(completions, **_): return [k if t in WORDS | {"d", "e"} else %s for t in completions]
    return f
for value in ({"reward.functions": make(2)}, {"rollout.environment": Room}):
    print(*[text for text in Inputs(value)._texts.values()][0].splitlines()[1:2])
"""


def test_the_same_objects_have_the_same_identity_in_another_process():
    def run(number, seed):
        command = (sys.executable, "-c", PROGRAM % number)
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.check_output(command, env=env, text=True).splitlines()

    function, environment = run(0, "1")
    assert function != environment and run(0, "2") == [function, environment]
    other, same = run(1, "1")
    assert other != function and same == environment


@pytest.mark.long
def test_classes_and_tools_are_environments(tmp_path):
    rate = 0.5

    class Silent:
        def reset(self, **columns):
            pass

        def get_reward(self):
            return rate

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    run = train(
        chat_model(tmp_path / "model", [call("add", '{"a": 1, "b": 2}')]),
        ROWS,
        environment=Silent,
        output=tmp_path / "run",
        iterations=1,
        progress=False,
        **{**SMALL, "rollout": {**SMALL["rollout"], "tools": [add]}},
    )
    assert run.metrics[0]["rewards/environment/mean"] == rate
    assert run.resume(iterations=2, progress=False).summary["iterations"] == 2


def test_only_names_of_stored_objects_get_the_path_of_their_folder(tmp_path):
    values = {
        "data.dataset": ROWS,
        "eval.dataset": [ROWS[0]],
        "data.prompt_template": "<inputs>/data.jsonl {prompt}",
        "data.system_prompt": "Use <inputs>.",
        "reward.functions": [length, "exact_match"],
        "rollout.environment": {"room": Mock, "<inputs>": "mine.py:Room"},
    }
    inputs = Inputs(values)
    with inputs.stored(load_config(None, values), tmp_path / "run") as config:
        home = tmp_path / "run" / "inputs"
        assert config.data.dataset == str(home / "data.jsonl")
        assert config.eval.dataset == str(home / "eval.jsonl")
        assert config.data.prompt_template == values["data.prompt_template"]
        assert config.data.system_prompt == values["data.system_prompt"]
        assert config.reward.functions == [f"{home}/rewards.py:length", "exact_match"]
        rooms = {"room": f"{home}/environments.py:Mock", "<inputs>": "mine.py:Room"}
        assert config.rollout.environment == rooms
        assert "agent" not in config.rollout.model_fields_set
        names = {path.name for path in home.iterdir()}
        assert names == {"data.jsonl", "eval.jsonl", "rewards.py", "environments.py"}


@pytest.mark.parametrize(("arguments", "expected"), [
    ({}, ("own.jsonl", ["math", "format"], "zero")),
    ({"reward": {"on_error": "stop"}}, ("own.jsonl", ["math", "format"], "stop")),
    ({"reward": {"functions": ["gsm8k"]}}, ("own.jsonl", ["gsm8k"], "stop")),
    ({"reward": "gsm8k"}, ("own.jsonl", ["gsm8k"], "stop")),
    ({"data": {"dataset": "other.jsonl"}}, (None, ["math", "format"], "zero")),
    ({"dataset": "other.jsonl"}, (None, ["math", "format"], "zero")),
])  # fmt: skip
def test_an_evaluation_of_a_run_has_its_settings(arguments, expected, tmp_path, monkeypatch):
    """However the run, and what replaces its settings, is given."""
    evaluated = Mock(side_effect=RuntimeError)
    monkeypatch.setattr(calls, "run_evaluation", evaluated)
    run = {"eval.dataset": "own.jsonl", "reward.functions": ["math", "format"]}
    run |= {"data.dataset": "rows.jsonl", "reward.on_error": "zero"}
    (tmp_path / "config.yaml").write_text(to_commented_yaml(load_config(None, run)))
    for model in (tmp_path, {"path": str(tmp_path), "dtype": "bfloat16"}):
        with pytest.raises(RuntimeError):
            evaluate(model, output=tmp_path / "evaluation", progress=False, **arguments)
        config = evaluated.call_args.args[0]
        found = config.eval.dataset, config.reward.functions, config.reward.on_error
        assert found == expected


def test_other_settings_of_the_section_reward_are_no_other_reward(tmp_path, monkeypatch):
    resumed = Mock(side_effect=RuntimeError)
    monkeypatch.setattr(calls, "run", resumed)
    run = {"data.dataset": "rows.jsonl", "reward.functions": ["math"]}
    (tmp_path / "config.yaml").write_text(to_commented_yaml(load_config(None, run)))
    with pytest.raises(RuntimeError):
        Run(tmp_path).resume(reward={"on_error": "zero"}, progress=False)
    config = resumed.call_args.args[0]
    assert (config.reward.functions, config.reward.on_error) == (["math"], "zero")
    with pytest.raises(ConfigError, match="reward"):
        Run(tmp_path).resume(reward={"functions": ["gsm8k"]}, progress=False)


def test_a_call_with_rows_and_functions_resumes_the_run_that_it_began(tmp_path, monkeypatch):
    def start(config, *_):
        for name in ("logs", "checkpoints"):
            (Path(config.output.dir) / name).mkdir(exist_ok=True)
        (Path(config.output.dir) / "config.yaml").write_text(to_commented_yaml(config))
        return events.RunEnded(0, "")

    def scaled(weight):
        return lambda completions, **columns: [weight * len(text) for text in completions]

    monkeypatch.setattr(calls, "run", start)
    folder = tmp_path / "run"
    auto = {"output": folder, "runtime": {"resume": "auto"}, "progress": False}
    for _ in range(2):
        assert train("tiny", ROWS, scaled(2.0), **auto).folder == folder
    before = {file: file.read_text() for file in (folder / "inputs").iterdir()}
    assert len(before) == 2
    for rows, reward in ((ROWS[1:], scaled(2.0)), (ROWS, scaled(3.0))):
        with pytest.raises(ConfigError, match=r"runtime\.resume"):
            train("tiny", rows, reward, **auto)
    with pytest.raises(ConfigError, match=r"output\.dir"):
        train("tiny", ROWS, scaled(2.0), **auto | {"runtime": {}})
    assert {file: file.read_text() for file in (folder / "inputs").iterdir()} == before


def unusable_dataset(kind):
    import datasets
    import pandas

    rows = datasets.Dataset.from_list(ROWS)
    if kind == "pandas":
        return pandas.DataFrame(ROWS)
    return rows.to_iterable_dataset() if kind == "stream" else datasets.DatasetDict({"train": rows})


@pytest.mark.parametrize(("arguments", "shown"), [
    ({"dataset": [{"prompt": "1+1=", "answer": object()}]}, "row 0"),
    ({"dataset": "splits"}, "split"),
    ({"reward": lambda completions, lock=LOCK: [0.0]}, "another process"),
    ({"dataset": "pandas"}, "to_dict"),
    ({"dataset": "stream"}, "no stream"),
    ({"train": {"learning_rat": 1e-5}}, "train.learning_rate"),
    ({"output": "."}, "output"),  # the folder has `inputs`, but not those of a run
])  # fmt: skip
def test_mistakes_are_value_errors_and_leave_nothing(arguments, shown, tmp_path, monkeypatch):
    if isinstance(kind := arguments.get("dataset"), str):
        arguments = {"dataset": unusable_dataset(kind)}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inputs").mkdir()
    arguments = {"dataset": ROWS, "reward": "exact_match", "progress": False} | arguments
    with pytest.raises(ValueError, match=re.escape(shown)):
        train(**arguments)
    with pytest.raises(ValueError, match=re.escape(shown)):
        evaluate(**arguments)
    assert not list(tmp_path.glob("runs/*"))


def test_the_functions_have_the_options_of_the_commands():
    not_in_python = {"no_live", "words", "dry_run", "assume", "full"}
    for command, function in ((grpo, train), (eval_command, evaluate)):
        options = inspect.signature(command).parameters.keys() - not_in_python
        only_in_python = {"progress", "settings", "callbacks"}
        assert options == inspect.signature(function).parameters.keys() - only_in_python


def script(body, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(body)
    return start_process([sys.executable, str(file)], {"PYTHONPATH": str(ROOT)}, tmp_path)


def test_a_script_without_a_guard_gets_one_clear_error(tmp_path):
    reward = "lambda completions, **columns: [0.0]"
    body = f"import easyrl\neasyrl.train('tiny', {ROWS}, {reward}, output='run', **{SMALL})\n"
    _, err = script(body, tmp_path).communicate(timeout=WAIT_SECONDS)
    assert err.count("Traceback") == 1 and 'if __name__ == "__main__"' in err
    assert "ConfigError: " in err


@pytest.mark.long
def test_an_interrupted_call_can_be_resumed(tmp_path):
    body = f"""
import easyrl
if __name__ == "__main__":
    try:
        easyrl.train("tiny", {ROWS}, "exact_match", iterations=100000, output="run", **{SMALL})
    except KeyboardInterrupt as stop:
        assert "SIGINT" in str(stop) and "--resume" in str(stop), stop
    done = len(easyrl.Run("run").metrics)
    print(done, len(easyrl.Run("run").resume(iterations=done + 1).metrics))
"""
    process = script(body, tmp_path)
    wait_for_line(process, "iteration 1/")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_SECONDS)
    before, after = map(int, out.splitlines()[-1].split())
    assert before >= 1 and after == before + 1 and "Traceback" not in err


PAGE_EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)


@pytest.mark.long
@pytest.mark.parametrize("code", PAGE_EXAMPLES, ids=["own reward", "callback"])
def test_the_examples_of_the_page_run(code, tmp_path):
    small = code.replace("iterations=20", "iterations=2").replace('held_out": 20', 'held_out": 2')
    assert small.count("=2,") + small.count(": 2}") == 2  # both are in the page
    out, err = script(small, tmp_path).communicate(timeout=WAIT_SECONDS)
    *_, accuracy = out.splitlines()[-1].split()  # the last line ends with it
    assert 0.0 <= float(accuracy) <= 1.0, err


def test_a_notebook_shows_one_output_that_is_updated(monkeypatch):
    display = Mock(HTML=str)  # stands for `IPython.display`
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, display)
    make_observers(live=False)
    assert not display.display.called, "no notebook"
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("easyrl.observe.view.REFRESHES_PER_SECOND", 1e9)
    of_rich = Mock()  # Rich would add an output of its own for each picture
    monkeypatch.setattr("rich.jupyter.display", of_rich)
    *_, view = make_observers(live=False)
    devices = {"rollout-0": "cpu", "train-0": "cpu"}
    view(events.RunStarted(0.0, Path("run"), resolve(Config()), {}, devices, ""))
    view(events.FromWorker("train-0", 1.0, events.Starting("loading the model")))
    view(events.RunEnded(1, ""))
    display.display.assert_called_once()
    pages = [each.args[0] for each in display.display.return_value.update.call_args_list]
    assert len(pages) == 3 and "loading the model" in pages[1]
    assert all(page.startswith("<pre") and "rollout-0 cpu" in page for page in pages)
    say_rich("text")
    assert not of_rich.called


ONLY_IN_WORKERS = """
import multiprocessing, easyrl
if multiprocessing.current_process().name != "MainProcess":
    raise ImportError("only in workers")
if __name__ == "__main__":
    easyrl.train(model="tiny", iterations=1, output="run")
"""


def test_a_script_that_workers_cannot_import_is_named_with_the_cause(tmp_path):
    process = script(ONLY_IN_WORKERS, tmp_path)
    _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1 and "ImportError: only in workers" in err
    assert "exit code 1" in err and "Bad file" not in err
