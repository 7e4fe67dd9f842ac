"""Which checkpoints the controller requests from the train worker."""

from __future__ import annotations

from pathlib import Path

from easyrl import events
from easyrl.config import load_config
from easyrl.runtime.checkpoints import Checkpoints
from easyrl.runtime.resume import SavedState
from easyrl.runtime.run_folder import RunFolder


def open_checkpoints(folder: Path, *words: str) -> tuple[Checkpoints, list[events.Event]]:
    config = load_config(None, {"output.dir": str(folder)}, words)
    notified: list[events.Event] = []
    checkpoints = Checkpoints(config, RunFolder(config), notified.append, saved_version=None)  # type: ignore[arg-type]
    return checkpoints, notified


def test_a_failed_checkpoint_is_reported_and_requested_again(tmp_path: Path) -> None:
    checkpoints, notified = open_checkpoints(tmp_path / "run")
    requested: list[events.SaveCheckpoint] = []
    for error in ("No space left on device", ""):
        assert not checkpoints.has(1)
        checkpoints.save(requested.append, SavedState(1, 1))  # type: ignore[arg-type]
        assert checkpoints.has(1) and checkpoints.is_saving
        checkpoints.on_saved(events.CheckpointSaved(1, 0.1, 100, error))
        assert not checkpoints.is_saving
    assert checkpoints.has(1) and [command.policy_version for command in requested] == [1, 1]
    (note,) = notified
    assert isinstance(note, events.Note) and "checkpoints/1" in note.text


def test_the_trainer_gets_the_best_version_only_if_it_is_to_be_kept(tmp_path: Path) -> None:
    for keeps in (True, False):
        words = (f"train.eval_every={int(keeps)}",)
        checkpoints, _ = open_checkpoints(tmp_path / str(keeps), *words)
        requested: list[events.SaveCheckpoint] = []
        for best in (None, {"accuracy": 0.5, "num_iterations": 3, "policy_version": 6}):
            state = SavedState(8, 4, best=best)
            checkpoints.save(requested.append, state)  # type: ignore[arg-type]
            checkpoints.on_saved(events.CheckpointSaved(8, 0.1, 100))
        assert [command.best_version for command in requested] == [None, 6 if keeps else None]
