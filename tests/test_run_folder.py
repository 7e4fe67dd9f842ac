"""The run folder: one writer, whole lines wherever it is cut off, a log of what went wrong."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import pytest

from easyrl import events
from easyrl.config import Config, ConfigError, load_config
from easyrl.observe.report import PlainLines
from easyrl.runtime.controller import Controller
from easyrl.runtime.run import FAILED, run
from easyrl.runtime.run_folder import RunFolder, lock_folder, read_lines
from runs import SMALL


def config_for(folder: Path) -> Config:
    return load_config(None, {"output.dir": str(folder)}, SMALL)


def finished(iteration: int) -> events.IterationFinished:
    metrics = {"iteration": iteration, "entropy": math.nan, "note": 'a "}" \n b'}
    return events.IterationFinished(0.0, metrics)


def test_metrics_cut_off_at_any_byte_lose_no_whole_line(tmp_path: Path) -> None:
    folder = RunFolder(config_for(tmp_path / "run"))
    for iteration in range(3):
        folder.observe(finished(iteration))
    file = folder.path / "metrics.jsonl"
    whole = read_lines(file)
    assert [line["iteration"] for line in whole] == [0, 1, 2]
    assert whole[0]["entropy"] is None
    content = file.read_bytes()
    last = content[:-1].rindex(b"\n") + 1
    for end in range(last, len(content) + 1):
        file.write_bytes(content[:end])
        # All that is missing in the end may be the line's end.
        assert read_lines(file) == whole[: 3 if end >= len(content) - 1 else 2]
    file.write_bytes(b'{"iteration": 0}\n{"itera\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2"):
        read_lines(file)


def test_internal_error_is_short_on_the_screen_and_complete_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def lose(controller: Controller) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(Controller, "run", lose)
    folder = tmp_path / "run"
    assert run(config_for(folder), [PlainLines()]) == FAILED
    _, err = capfd.readouterr()
    log = folder / "logs" / "easyrl.log"
    assert err == f"easyrl: KeyError: 'lost'\n(the full traceback is in {log})\n"
    assert "Traceback (most recent call last)" in log.read_text()
    assert "in lose" in log.read_text()


@pytest.mark.parametrize("cause", ["removed", "full"])
def test_run_ends_if_its_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cause: str
) -> None:
    folder = tmp_path / "run"

    def write(controller: Controller) -> None:
        if cause == "removed":
            shutil.rmtree(folder)
        else:
            (folder / "metrics.jsonl").symlink_to("/dev/full")
        controller.notify(finished(0))

    monkeypatch.setattr(Controller, "run", write)
    assert run(config_for(folder), [PlainLines()]) == FAILED
    _, err = capfd.readouterr()
    assert f"'{folder}' cannot be written any more" in err and "Traceback" not in err


def begun(tmp_path: Path) -> tuple[Path, dict[str, int]]:
    """A folder with two iterations, and the sizes of its files after the first."""
    folder = RunFolder(config_for(tmp_path / "run"))
    sizes: dict[str, int] = {}
    for iteration in range(2):
        sample = events.Sample("2", 1.0, 0.0, {})
        group = events.GroupScored(iteration, 0, 0, [1.0], [], [1], 0, 0.0, samples=[sample])
        folder.observe(events.FromWorker("rollout-0", 0.0, group))
        folder.observe(events.IterationFinished(1.0, {"iteration": iteration}))
        sizes = sizes or folder.file_sizes()
    folder.observe(events.RunFinished(2.0, {}))
    folder.close()
    return folder.path, sizes


def test_resumed_folder_is_cut_back_to_its_checkpoint(tmp_path: Path) -> None:
    path, sizes = begun(tmp_path)
    folder = RunFolder(config_for(path), lock_folder(path), sizes)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [line["iteration"] for line in read_lines(path / name)] == [0]
    assert not (path / "summary.json").exists()
    folder.observe(events.IterationFinished(1.0, {"iteration": 1}))
    assert read_lines(path / "metrics.jsonl") == [{"iteration": 0}, {"iteration": 1}]


def test_lines_lost_in_a_power_failure_leave_no_partial_line(tmp_path: Path) -> None:
    """The checkpoint was on the disk before them."""
    path, sizes = begun(tmp_path)
    whole = (path / "metrics.jsonl").stat().st_size
    os.truncate(path / "metrics.jsonl", whole - 5)
    folder = RunFolder(config_for(path), lock_folder(path), sizes | {"metrics.jsonl": whole})
    folder.observe(events.IterationFinished(1.0, {"iteration": 2}))
    assert read_lines(path / "metrics.jsonl") == [{"iteration": 0}, {"iteration": 2}]


def test_folder_has_one_writer(tmp_path: Path) -> None:
    folder = RunFolder(config_for(tmp_path / "run"))
    with pytest.raises(ConfigError, match="still running"):
        lock_folder(folder.path)
    folder.close()
    os.close(lock_folder(folder.path))
