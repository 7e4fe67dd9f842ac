"""Where a run goes on, and where it must not: found before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from easyrl.config import Config, ConfigError, load_config
from easyrl.runtime import run
from easyrl.runtime.resume import find_resume
from mistakes import make_run

AUTO = ("runtime.resume=auto",)


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: Any, **options: Any) -> NoReturn:
        raise AssertionError("a run was started")

    monkeypatch.setattr(run, "_train", start)


def config_of(folder: Path, *words: str) -> Config:
    return load_config(None, {"output.dir": str(folder)}, words)


def finished(folder: Path, *versions: int) -> Path:
    """The folder of a run of the default number of iterations, with these checkpoints."""
    make_run(folder, {version: {} for version in versions})
    summary = {"iterations": config_of(folder).train.iterations}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.parametrize("versions", [(60,), (), (50,)])
def test_a_finished_run_is_left_whatever_checkpoints_it_keeps(
    tmp_path: Path, versions: tuple[int, ...]
) -> None:
    """One of train.keep_checkpoints=0 has none, and must not start over."""
    folder = finished(tmp_path / "run", *versions)
    there = sorted(folder.rglob("*"))
    for words, resume in ((AUTO, None), ((), folder)):
        told: list[Any] = []
        assert run.run(config_of(folder, *words), [told.append], resume) == 0
        assert "has finished its 60 iterations; nothing is left to do" in told[-1].message
    assert sorted(folder.rglob("*")) == there


def test_a_finished_run_without_a_checkpoint_cannot_grow(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    for words, resume in ((AUTO, None), ((), folder)):
        with pytest.raises(ConfigError, match=r"no checkpoint: the run has finished and kept none"):
            find_resume(config_of(folder, *words, "train.iterations=70"), resume)


def test_a_summary_that_was_cut_off_is_of_no_finished_run(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", 60)
    (folder / "summary.json").write_text('{"iterations": 6')
    found = find_resume(config_of(folder, *AUTO), None)
    assert found is not None and not found.is_finished(config_of(folder))
    assert found.num_iterations == 60
    os.close(found.lock)
