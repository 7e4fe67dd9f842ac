"""Runs that end early: conditions on metrics, and callbacks of a Python program."""

import json
from typing import Any

import pytest

import easyrl
from easyrl.config import ConfigError, load_config
from easyrl.config.stopping import parse_condition
from easyrl.runtime.checks.stopping import check_stop_when
from easyrl.runtime.resolve import resolve
from easyrl.runtime.stopping import metric_names, reason_to_stop
from runs import SMALL, finish, lines_of, succeed, summary_of


def reason(text, values, metric="reward", *, start=1):
    """The reason to stop after these values; None stands for an iteration without the metric."""
    lines = [{"iteration": start + n, metric: value} for n, value in enumerate(values)]
    return reason_to_stop([parse_condition(text)], lines)


@pytest.mark.parametrize(
    ("text", "stops", "goes_on"),
    [
        ("reward >= 0.9", [0.1, 0.9], [0.9, 0.899]),
        ("reward>0.9", [0.91], [0.9]),
        ("reward < -1e-2 for 2", [0, -0.02, -0.03], [-0.02, 0, -0.03]),
        ("reward <= 0.5 for 2 iterations", [0.5, None, 0.5], [0.5]),
        ("reward without a rise for 2", [0.5, 0.4, 0.5], [0.5, 0.4, 0.51, 0.51]),
        ("reward without a rise for 2", [None, 0.5, None, 0.4, 0.5], [0.4, 0.5, None, 0.4]),
        ("reward without a rise of 0.01 for 2", [0.56, 0.565, 0.569], [0.56, 0.57, 0.575]),
        ("reward without a fall for 1", [0.5, 0.5], [0.5, 0.4]),
    ],
)
def test_conditions_hold_as_they_are_written(text, stops, goes_on):
    assert reason(text, stops).startswith(f"train.stop_when: {text} (")
    assert reason(text, goes_on) is None and reason(text, []) is None


def test_reason_names_the_iteration_of_the_best_value():
    assert "(highest: 0.75 in iteration 4)" in reason(
        "reward without a rise for 1", [0.75, 0], start=4
    )
    assert "(0.9 in iteration 2)" in reason("reward >= 0.9", [0, 0.9])


def checked(*conditions, **settings):
    flags = {"train.stop_when": [*conditions], **settings}
    return check_stop_when(resolve(load_config(None, flags)))


@pytest.mark.parametrize(
    ("text", "settings", "named"),
    [
        ("acuracy > 1", {"train.eval_every": 1}, "'acuracy'; did you mean eval/accuracy?"),
        ("accuracy > 1", {"train.eval_every": 1}, "did you mean eval/accuracy?"),
        ("eval/acuracy > 1", {"train.eval_every": 1}, "did you mean eval/accuracy?"),
        ("eval/accuracy > 1", {}, "needs train.eval_every over 0"),
        ("kl > 1", {}, "needs algorithm.beta over 0"),
        ("teacher/kl > 1", {}, "needs algorithm.teacher"),
        ("tools/calls > 1", {}, "needs rollout.environment or rollout.tools"),
        ("logged/steps > 1", {}, "needs a reward function of your own"),
        ("rewards/math/mean > 1", {}, "did you mean rewards/score/mean?"),
        ("mean_reward > 1", {}, "did you mean reward?"),
        ("completion_length > 400", {}, "did you mean completions/mean_length?"),
        ("critic/rewards/mean > 1", {}, "did you mean reward?"),
        ("objective/kl > 1", {}, "did you mean kl?"),
        ("steps > 1", {"reward.functions": ["mine.py:f"]}, "logged/NAME"),
        (
            "reward > 1",
            {"train.keep_checkpoints": 0},
            "train.keep_checkpoints: expected at least 1",
        ),
    ],
)
def test_metrics_that_never_appear_are_refused(text, settings, named):
    with pytest.raises(ConfigError) as error:
        checked(text, **settings)
    assert named in str(error.value), error.value


def test_metrics_of_the_run_are_accepted_and_patience_that_is_too_long_is_said():
    own = {"reward.functions": ["mine.py:f"], "algorithm.beta": 0.1, "train.eval_every": 10}
    texts = ("rewards/f/mean > 1", "logged/steps > 1", "kl > 1", "eval/reward without a rise for 4")
    assert not checked(*texts, **own)
    (warning,) = checked("eval/reward without a rise for 6", **own)
    assert "needs 7 values of eval/reward, and the run has 6" in warning


@pytest.mark.parametrize(
    "text", ["reward", "reward =< 3", "reward > high", "reward without a rise", "reward > 1 for 0",
             "eval/accuracy > 1 for 3 iterations", "reward without a rise for 3 evaluations"]
)  # fmt: skip
def test_other_texts_are_refused_with_examples(text):
    with pytest.raises(ConfigError, match=r"train\.stop_when: expected"):
        load_config(None, {}, [f"train.stop_when={text}"])


def test_conditions_are_a_text_or_a_list_on_the_command_line():
    def given(text):
        return load_config(None, {}, [f"train.stop_when={text}"]).train.stop_when

    assert given("eval/accuracy without a rise for 5") == ["eval/accuracy without a rise for 5"]
    assert given("[reward >= 0.9, kl > 1 for 3]") == ["reward >= 0.9", "kl > 1 for 3"]
    assert given("null") is None


class Watch(easyrl.Callback):
    """Writes down its calls, and returns or raises something in one of them."""

    def __init__(self, method: str = "", iteration: int = 0, value: Any = "stop") -> None:
        self.calls: list[Any] = []
        self.answer = (method, iteration, value)

    def called(self, method: str, iteration: int, *about: Any) -> Any:
        self.calls.append((method, iteration, *about))
        *when, value = self.answer
        if [method, iteration] != when:
            return None
        if isinstance(value, Exception):
            raise value
        return value

    def on_start(self, run):
        return self.called("start", len(run.metrics))

    def on_iteration(self, run, metrics):
        assert metrics == run.metrics[-1]
        return self.called("iteration", metrics["iteration"])

    def on_evaluation(self, run, metrics):
        names = ("accuracy", "standard_error", "reward", "problems")
        assert metrics.keys() == {"iteration", *(f"eval/{name}" for name in names)}
        return self.called("evaluation", metrics["iteration"])

    def on_checkpoint(self, run, path):
        state = json.loads(
            (run.folder / "checkpoints" / path.split("/")[-1] / "state.json").read_text()
        )
        return self.called("checkpoint", state["state"]["num_iterations"])

    def on_end(self, run, status):
        return self.called("end", len(run.metrics), status)


SETTINGS: dict[str, Any] = {
    "train": {"prompts_per_iteration": 4, "eval_every": 1, "save_every": 1},
    "rollout": {"num_generations": 4, "max_completion_length": 24},
    "data": {"num_held_out": 8, "max_prompt_length": 32},
    "progress": False,
}


def test_callbacks_watch_a_run_stop_it_and_cannot_harm_it(tmp_path):
    """A run that a callback stops is returned, and resumes; what a callback does wrong ends it with
    the checkpoint of its last iteration."""
    watch = Watch("iteration", 2)
    run = easyrl.train("tiny", "arithmetic", output=tmp_path / "run", iterations=9,
                       callbacks=[watch, Watch()], **SETTINGS)  # fmt: skip
    names = [name for name, *_ in watch.calls]
    of_iterations = [call for call in watch.calls if call[0] not in ("checkpoint",)]
    assert of_iterations == [
        ("start", 0),
        ("evaluation", 0),
        ("evaluation", 1),
        ("iteration", 1),
        ("evaluation", 2),
        ("iteration", 2),
        ("end", 2, "stopped"),
    ]
    checkpoints = [call for call in watch.calls if call[0] == "checkpoint"]
    assert checkpoints == [("checkpoint", 1), ("checkpoint", 2)] and names[-1] == "end"
    assert (run.model_path, len(run.metrics), run.summary) == (None, 2, {})
    assert run.best_checkpoint is not None

    failed = LookupError("mine")
    for answer, error, named in (
        (("iteration", 3, failed), RuntimeError, "callback Watch.on_iteration failed:"),
        (("evaluation", 4, True), ConfigError, 'on_evaluation: expected None or "stop", got True'),
    ):
        watch = Watch(*answer)
        with pytest.raises(error, match="to resume: easyrl grpo --resume") as caught:
            run.resume(callbacks=[watch], progress=False)
        assert named in str(caught.value)
        assert (caught.value.__cause__ is failed) == (error is RuntimeError)
        assert watch.calls[0] == ("start", answer[1] - 1) and watch.calls[-1][-1] == "failed"
        newest = max(int(path.name) for path in run.folder.glob("checkpoints/[0-9]*"))
        assert newest == len(run.metrics) == answer[1]

    watch = Watch("iteration", 5)
    finished = run.resume(5, callbacks=[watch], progress=False)  # its last iteration: it finishes
    assert finished.summary["iterations"] == 5 and watch.calls[-1] == ("end", 5, "finished")
    best = finished.best_checkpoint
    assert str(finished.folder / finished.summary["checkpoint_best"]) == best


class NoArguments:
    def on_iteration(self):
        """Has too few."""


class Asynchronous:
    async def on_start(self, run):
        """Is not awaited."""


class OfAnotherTrainer:
    def on_step_end(self, args, state, control):
        """Is not called here."""


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([Watch], "use Watch()"),
        ([3], "got 3"),
        (Watch(), "expected a list"),
        ([NoArguments()], "expected def on_iteration(self, run, metrics)"),
        ([Asynchronous()], "expected a plain function, got async"),
        ([OfAnotherTrainer()], "got OfAnotherTrainer with on_step_end"),
    ],
)
def test_objects_that_are_no_callbacks_are_refused_before_the_run(tmp_path, given, named):
    with pytest.raises(ConfigError) as error:
        easyrl.train("tiny", "arithmetic", callbacks=given, output=tmp_path / "run")
    assert named in str(error.value) and not (tmp_path / "run").exists()


LEARNS = """
def score(completions, trainer_state, **_):
    \"\"\"Rises until update 3, whatever the policy does: held-out problems, too.\"\"\"
    return [float(min(trainer_state.global_step, 3)) for _ in completions]
"""


def test_run_without_a_rise_ends_with_its_best_checkpoint_also_if_it_was_resumed(tmp_path):
    """eval/reward is 1, 2, 3, 3, 3: the third evaluation is the best, and two follow."""
    (tmp_path / "r.py").write_text(LEARNS)
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    condition = "train.stop_when=eval/reward without a rise for 2"
    words = (*SMALL, "train.eval_every=1", "--reward", f"{tmp_path}/r.py:score", condition)
    words += ("runtime.deterministic=true", "train.keep_checkpoints=1")
    code, out, err = finish("--output", str(whole), "--iterations", "9", *words)
    assert (code, err) == (143, ""), err
    assert "stopped by train.stop_when: eval/reward without a rise for 2 (highest: 3 in" in out
    assert f"best checkpoint: {whole}/checkpoints/best (eval/reward 3 in iteration 3)" in out
    assert f"to resume: easyrl grpo --resume {whole}" in out
    assert (whole / "checkpoints" / "best").resolve().name == "3"
    assert (whole / "checkpoints" / "5").is_dir() and not (whole / "model").exists()

    early = "train.stop_when=[eval/reward without a rise for 2, eval/reward > 2 for 2]"
    code, out, _ = finish("--output", str(parts), "--iterations", "9", *words, early)
    assert code == 143 and len(lines_of(parts / "metrics.jsonl")) == 4
    code, out, _ = finish("--resume", str(parts), condition)
    assert code == 143 and "without a rise for 2 (highest: 3 in iteration 3)" in out
    of_whole, of_parts = (lines_of(each / "metrics.jsonl") for each in (whole, parts))
    assert [line["loss"] for line in of_whole] == [line["loss"] for line in of_parts]
    assert len(of_parts) == 5

    before = (parts / "metrics.jsonl").read_bytes()
    code, out, _ = finish("--resume", str(parts))  # the condition holds still
    assert code == 143 and "nothing is left to do" in out and "train.stop_when=null" in out
    assert (parts / "metrics.jsonl").read_bytes() == before

    more = ["--resume", str(parts), "--iterations", "6", "train.stop_when=null"]
    plan = succeed(*more, "--dry-run")
    assert f"# resumes from {parts}/checkpoints/5: 5 of 6 iterations done\n" in plan
    assert "# changed: train.stop_when [" in plan and "ends early" not in plan
    succeed(*more)
    assert summary_of(parts)["checkpoint_best"] == "checkpoints/3"
    of_run = metric_names(resolve(load_config(parts / "config.yaml")))
    (*_, newest) = lines_of(parts / "metrics.jsonl")
    assert newest.keys() - {"iteration"} == {name for name, needs in of_run.items() if not needs}
