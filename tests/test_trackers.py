"""Trackers: what they receive, and that none of their failures stops a run."""

import sys
import time
from dataclasses import replace
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import pytest

from easyrl import events
from easyrl.config import load_config
from easyrl.observe import trackers
from easyrl.observe.observers import make_observers
from easyrl.observe.run_files import RunFiles
from easyrl.observe.trackers import Trackers
from easyrl.runtime.resolve import resolve
from easyrl.runtime.run_folder import read_lines
from run_events import with_config


@pytest.fixture
def wandb(monkeypatch):
    stub = MagicMock(__spec__=ModuleSpec("wandb", None))
    stub.init.return_value.id = "7"
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def track(folder, kind="wandb", num_iterations=0):
    """A tracked run that has started: a function for its next events, and all notes."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    config = load_config(None, {}, [f"output.log_to=[{kind}]"])
    spec, settings = resolve(config), config.model_dump(mode="json")
    tracker = Trackers()
    notes = []

    def notify(event):
        notes.extend(filter(None, [tracker(event)]))

    notify(events.RunStarted(0.0, folder, spec, settings, {}, "", num_iterations=num_iterations))
    return notify, notes


def finished(iteration, **more):
    metrics = {"iteration": iteration, "reward": 0.5 * iteration, **more}
    return events.IterationFinished(0.0, metrics)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in tags}


def test_tensorboard_gets_what_metrics_jsonl_gets(finished_run, tmp_path):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    config = load_config(None, {}, ["output.log_to=[tensorboard]"])
    notify = events.combine_observers(make_observers(config.output.log_to, live=False))
    for event in RunFiles(finished_run.folder).read():
        is_start = isinstance(event, events.RunStarted)
        notify(replace(with_config(event, config), folder=folder) if is_start else event)
    lines, values = read_lines(finished_run.folder / "metrics.jsonl"), scalars(folder)
    rewards = [(line["iteration"], pytest.approx(line["reward"], rel=1e-6)) for line in lines]
    assert values["reward"] == rewards
    assert values.keys() >= {name for name, value in lines[0].items() if value is not None}
    assert [step for step, _ in values["eval/accuracy"]] == [0, 3]


def test_resumed_run_replaces_lines_after_its_checkpoint(tmp_path, wandb):
    """Two iterations, a kill, and a resume from the checkpoint after the first."""
    folder = tmp_path / "run"
    for first, rewards in ((0, (1.0, 2.0)), (1, (3.0, 4.0))):
        notify, notes = track(folder, "tensorboard, wandb", num_iterations=first)
        for iteration, reward in enumerate(rewards, start=first + 1):
            notify(finished(iteration, reward=reward))
        notify(events.RunEnded(0, ""))
        assert notes == []
        time.sleep(1.1)  # TensorBoard's files are named by the second
    assert scalars(folder)["reward"] == [(1, 1.0), (2, 3.0), (3, 4.0)]
    created, resumed = (each.kwargs for each in wandb.init.call_args_list)
    assert (created["id"], resumed["id"]) == (None, "7")
    assert (created["project"], created["name"]) == ("easyrl", "run")
    assert created["config"]["data"]["dataset"] == "arithmetic"


@pytest.mark.parametrize(("name", "hangs"), [("init", False), ("log", True), ("finish", True)])
def test_failing_tracker_is_disabled_with_one_warning(tmp_path, wandb, monkeypatch, name, hangs):
    monkeypatch.setattr(trackers, "END_SECONDS", 1.0)
    fails = wandb.init if name == "init" else getattr(wandb.init.return_value, name)
    # SystemExit: as wandb without a login.
    fails.side_effect = (lambda *_, **__: time.sleep(1000)) if hangs else SystemExit(3)
    notify, notes = track(tmp_path)
    for iteration in range(1, 4):
        notify(finished(iteration))
        time.sleep(0.05)
    notify(events.RunEnded(0, ""))
    assert len(notes) == 1 and "wandb" in notes[0].text
    assert fails.call_count == 1


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_real_library_accepts_the_calls(tmp_path, monkeypatch, kind):
    pytest.importorskip(kind)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    for first in (0, 1):
        notify, notes = track(tmp_path / "run", kind, num_iterations=first)
        for iteration in range(first + 1, first + 3):
            notify(finished(iteration))
        notify(events.RunEnded(0, ""))
        assert notes == []
