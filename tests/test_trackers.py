"""Trackers: what they are told, and that neither their start nor their end can harm a run."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from easyrl import records
from easyrl.config import Config, load_config
from easyrl.observe import trackers
from easyrl.observe.trackers import ACCURACY, STANDARD_ERROR, Trackers
from easyrl.records import Note, Observer, Record, tell_all
from easyrl.runtime.run_folder import read_lines
from runs import SMALL, descendants, finish, start, wait_for_line, wait_until_gone

FAKE_WANDB = """
import json, os, time

calls = open(os.environ["CALLS"], "a", buffering=1)

def call(name, /, **arguments):
    print(json.dumps([name, arguments]), file=calls)
    trouble = os.environ.get("TROUBLE", "")
    if trouble == f"{name} raises":
        raise RuntimeError("out of order")
    if trouble == f"{name} hangs":
        time.sleep(1000)
    if trouble == f"{name} dies":
        os._exit(3)

class Run:
    def log(self, values, step):
        call("log", values=values, step=step)

    def finish(self, exit_code):
        call("finish", exit_code=exit_code)

def login(verify):
    call("login", verify=verify)

def init(project, name, dir, config, settings, id, resume):
    print("a library's chatter")
    call("init", project=project, name=name, dir=dir, config=config, id=id, resume=resume)
    return Run()
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wandb that notes its calls, and a trackio that is not installed, before any real one."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    (folder / "wandb.py").write_text(FAKE_WANDB)
    (folder / "trackio.py").write_text("raise ModuleNotFoundError(\"No module named 'trackio'\")")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), before])))
    monkeypatch.syspath_prepend(folder)  # a spawned process gets sys.path from us
    return folder


def calls(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(name, values) for name, values in map(json.loads, (folder / "calls").open())]


def started(config: Config, folder: Path) -> records.RunStarted:
    (folder / "logs").mkdir(parents=True)
    return records.RunStarted(0.0, folder, config, devices={}, num_slots=1, description="")


def finished(iteration: int) -> records.IterationFinished:
    return records.IterationFinished(0.0, {"iteration": iteration, "reward": 0.5 * iteration})


def track(folder: Path, kind: str) -> tuple[Observer, list[Record]]:
    """A tracked run that has just begun: who is to be told of it, and what the others are told."""
    config = load_config(None, {}, [f"output.log_to=[{kind}]", "output.project=sums"])
    told: list[Record] = []
    tell = tell_all([Trackers(config), told.append])  # type: ignore[list-item]
    tell(started(config, folder))
    return tell, told


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def text_of(events: Any, tag: str) -> str:
    (event,) = events.Tensors(tag)
    text: str = event.tensor_proto.string_val[0].decode()
    return text


# What they are told.


@pytest.mark.usefixtures("fakes")
def test_tensorboard_and_wandb_get_what_metrics_jsonl_gets(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("output.log_to=[tensorboard, wandb]", "output.project=sums")
    code, out, err = finish("--output", str(folder), "--iterations", "3", *SMALL, *words)
    assert code == 0, err
    lines = read_lines(folder / "metrics.jsonl")
    names = {name for line in lines for name in line}

    events = events_of(folder)
    assert set(events.Tags()["scalars"]) == names | {ACCURACY, STANDARD_ERROR}
    for name in names:
        read = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in read] == [0, 1, 2]
        for (_, value), line in zip(read, lines, strict=True):
            if line[name] is None:  # not finite
                assert not math.isfinite(value)
            else:
                assert value == pytest.approx(line[name], rel=1e-6)
    for name in (ACCURACY, STANDARD_ERROR):
        assert [event.step for event in events.Scalars(name)] == [0, 3]
    assert "dataset: arithmetic" in text_of(events, "config")
    assert text_of(events, "status") == "finished"

    login, init, *logs, end = calls(tmp_path)
    assert login == ("login", {"verify": True})
    assert init[1]["project"] == "sums"
    assert (init[1]["name"], init[1]["dir"]) == ("run", str(folder))
    assert Config.model_validate(init[1]["config"]) == load_config(folder / "config.yaml")
    assert [log[1]["step"] for log in logs] == [0, 0, 1, 2, 3]
    assert {name for log in logs for name in log[1]["values"]} == names | {ACCURACY, STANDARD_ERROR}
    assert end == ("finish", {"exit_code": 0})
    assert "chatter" not in out
    assert "chatter" in (folder / "logs" / "wandb.log").read_text()


@pytest.mark.usefixtures("fakes")
def test_a_run_that_goes_on_is_the_same_run_to_them(tmp_path: Path) -> None:
    """Two iterations, a kill, and on from the checkpoint after the first."""
    folder = tmp_path / "run"
    config = load_config(None, {}, ["output.log_to=[tensorboard, wandb]"])
    (folder / "logs").mkdir(parents=True)
    for first, values in ((0, (1.0, 2.0)), (1, (3.0, 4.0))):
        trackers = Trackers(config)
        trackers(records.RunStarted(0.0, folder, config, {}, 1, "", num_iterations=first))
        for iteration, value in enumerate(values, start=first):
            trackers(records.IterationFinished(0.0, {"iteration": iteration, "reward": value}))
        trackers(records.RunEnded(0, ""))
        time.sleep(1.1)  # TensorBoard's files are named by the second
    assert [(e.step, e.value) for e in events_of(folder).Scalars("reward")] == [
        (0, 1.0),
        (1, 3.0),
        (2, 4.0),
    ]
    first_run, second_run = (values for name, values in calls(tmp_path) if name == "init")
    assert first_run["id"] == second_run["id"] and second_run["resume"] == "allow"


@pytest.mark.usefixtures("fakes")
def test_an_evaluation_is_sent_after_the_iteration_it_is_of(tmp_path: Path) -> None:
    """At one step more, for so many iterations went before it; no step is ever behind another."""
    folder = tmp_path / "run"
    tell, _ = track(folder, "wandb")
    tell(records.Evaluated(0.0, 0, 0.1, 8, 0.01, num_iterations=0))
    for number, accuracy in enumerate((0.2, 0.3)):
        tell(records.Evaluated(0.0, 2 + number, accuracy, 8, 0.02, num_iterations=number + 1))
        of_eval = {"eval/accuracy": accuracy, "eval/standard_error": 0.02}
        tell(records.IterationFinished(0.0, finished(number).metrics | of_eval))
    tell(records.RunEnded(0, ""))
    logs = [(log["step"], log["values"]) for name, log in calls(tmp_path) if name == "log"]
    steps = [step for step, _ in logs]
    assert steps == sorted(steps)
    accuracies = [(step, values[ACCURACY]) for step, values in logs if ACCURACY in values]
    assert accuracies == [(0, 0.1), (1, 0.2), (2, 0.3)]
    assert [step for step, values in logs if "reward" in values] == [0, 1]


@pytest.mark.usefixtures("fakes")
def test_a_run_that_fails_is_told_as_failed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tell, _ = track(folder, "tensorboard, wandb")
    tell(finished(0))
    tell(records.RunEnded(1, "no more memory"))
    assert calls(tmp_path)[-1] == ("finish", {"exit_code": 1})
    assert text_of(events_of(folder), "status") == "failed (exit code 1)"


@pytest.mark.long
def test_ctrl_c_reaches_the_tracker_as_the_end_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(
        *("--output", str(folder), "--iterations", "100000", *SMALL),
        "output.log_to=[tensorboard]",
    )
    wait_for_line(process, "iteration 2/")
    processes = descendants(process.pid)
    for each in processes:  # what a terminal does to the foreground group
        each.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")
    assert "no longer" not in out
    assert wait_until_gone(processes, 5) == []
    assert text_of(events_of(folder), "status") == "failed (exit code 130)"


# One that cannot start.


@pytest.mark.parametrize(
    ("kind", "trouble", "expected"),
    [
        ("trackio", "", "pip install 'easyrl[trackio]'"),
        ("wandb", "login raises", "wandb login"),
        ("wandb", "init raises", "RuntimeError: out of order"),
        ("wandb", "init dies", "ended unexpectedly"),
    ],
)
@pytest.mark.usefixtures("fakes")
def test_one_that_cannot_start_stops_the_run_before_it_begins(
    tmp_path: Path, kind: str, trouble: str, expected: str
) -> None:
    folder = tmp_path / "run"
    word = f"output.log_to=[tensorboard, {kind}]"
    code, out, err = finish("--output", str(folder), *SMALL, word, TROUBLE=trouble, timeout=60)
    assert (code, out) == (2, "")
    assert err.startswith(f"easyrl: output.log_to: '{kind}' cannot start: ")
    assert expected in err and "Traceback" not in err
    assert not folder.exists()


@pytest.mark.usefixtures("fakes")
def test_one_that_hangs_at_its_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "START_SECONDS", 2.0)
    monkeypatch.setenv("TROUBLE", "login hangs")
    with pytest.raises(ValueError, match="no answer within 2 seconds"):
        track(tmp_path / "run", "wandb")


@pytest.mark.usefixtures("fakes")
def test_those_that_have_begun_are_told_the_end_where_another_one_cannot(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = load_config(None, {}, ["output.log_to=[wandb, tensorboard]"])
    run = started(config, folder)
    (folder / "logs" / "tensorboard.log").mkdir()  # where a file is wanted
    with pytest.raises(ValueError, match="'tensorboard' cannot start"):
        Trackers(config)(run)
    assert [name for name, _ in calls(tmp_path)] == ["login", "init", "finish"]


@pytest.mark.usefixtures("fakes")
def test_a_mistake_is_answered_without_waiting_for_trackers(tmp_path: Path) -> None:
    words = ("output.log_to=[wandb]", "data.dataset=none.jsonl", "--output", str(tmp_path / "run"))
    began = time.monotonic()
    code, _, err = finish(*words, TROUBLE="login hangs")
    assert (code, "there is no file 'none.jsonl'" in err) == (2, True)
    assert time.monotonic() - began < trackers.START_SECONDS / 2


def test_one_that_is_not_installed_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'trackio' cannot start: .* 'easyrl\[trackio\]'"):
        Trackers(load_config(None, {}, ["output.log_to=[trackio]"]))


# One that fails later.


@pytest.mark.usefixtures("fakes")
def test_one_that_fails_in_mid_run_is_told_of_once_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = (*SMALL, "output.log_to=[wandb]")
    code, out, err = finish(
        *("--output", str(folder), "--iterations", "3", *words), TROUBLE="log raises"
    )
    assert (code, err) == (0, "")
    assert [line["iteration"] for line in read_lines(folder / "metrics.jsonl")] == [0, 1, 2]
    for told in (out, (folder / "logs" / "easyrl.log").read_text()):
        assert told.count("wandb tracks this run no longer: RuntimeError: out of order") == 1
        assert "Traceback" not in told
    assert "Traceback" in (folder / "logs" / "wandb.log").read_text()
    assert [name for name, _ in calls(tmp_path)] == ["login", "init", "log"]


@pytest.mark.alone
@pytest.mark.parametrize("trouble", ["log dies", "log hangs", "finish raises", "finish hangs"])
@pytest.mark.usefixtures("fakes")
def test_trouble_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(trackers, "END_SECONDS", 1.0)
    monkeypatch.setenv("TROUBLE", trouble)
    tell, told = track(tmp_path / "run", "wandb")
    began = time.monotonic()
    for iteration in range(200):
        tell(finished(iteration))
    assert time.monotonic() - began < 1.0
    time.sleep(0.5)
    tell(finished(200))
    tell(records.RunEnded(0, ""))
    assert time.monotonic() - began < 5.0
    notes = [record for record in told if isinstance(record, Note)]
    assert len(notes) == 1
    assert notes[0].text.startswith("wandb tracks this run no longer: ")


@pytest.mark.usefixtures("fakes")
def test_one_that_is_too_far_behind_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "MAX_WAITING", 10)
    monkeypatch.setenv("TROUBLE", "log hangs")
    tell, told = track(tmp_path / "run", "wandb")
    for iteration in range(100_000):
        tell(finished(iteration))
        if isinstance(told[-2], Note):
            break
    assert told[-2] == Note(
        "wandb tracks this run no longer: 10 messages behind. All is in metrics.jsonl."
    )


# The real libraries, where they are installed.


def test_wandb_itself_takes_our_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tell, told = track(tmp_path / "run", "wandb")
    for iteration in range(3):
        tell(finished(iteration))
    tell(records.RunEnded(0, ""))
    assert not any(isinstance(record, Note) for record in told)
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert "reward" in (tmp_path / "run" / "logs" / "wandb.log").read_text()  # its own summary


def test_trackio_itself_takes_our_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    tell, told = track(tmp_path / "run", "trackio")
    for iteration in range(3):
        tell(finished(iteration))
    tell(records.RunEnded(0, ""))
    assert not any(isinstance(record, Note) for record in told)
    assert (tmp_path / "trackio" / "sums.db").is_file()
