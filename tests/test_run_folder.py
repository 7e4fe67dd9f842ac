"""The run folder: made once, readable when cut off anywhere, and a log of what went wrong."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from easyrl import records
from easyrl.config import Config, ConfigError, load_config
from easyrl.observe.plain_lines import PlainLines
from easyrl.runtime import run_folder
from easyrl.runtime.run_folder import RunFolder, RunFolderLost, lock_folder, read_lines
from runs import SMALL


def config_for(folder: Path) -> Config:
    return load_config(None, {"output.dir": str(folder)}, SMALL)


def finished(iteration: int) -> records.IterationFinished:
    metrics = {"iteration": iteration, "reward": 0.5, "entropy": math.nan, "note": 'a "}" \n b'}
    return records.IterationFinished(0.0, metrics)


# metrics.jsonl


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


def test_a_file_without_lines_has_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_a_broken_line_before_the_last_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 0}\n{"itera\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not a line of JSON"):
        read_lines(file)


# A folder that cannot be made.


@pytest.mark.parametrize("kind", ["exists", "in a file", "nowhere to write", "a name too long"])
def test_a_folder_that_cannot_be_made_is_named_with_its_key(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    path = {
        "exists": tmp_path,
        "in a file": tmp_path / "file" / "run",
        "nowhere to write": Path("/proc/run"),  # for root too
        "a name too long": tmp_path / ("x" * 300),
    }[kind]
    with pytest.raises(ConfigError) as caught:
        RunFolder(config_for(path))
    message = str(caught.value)
    assert message.startswith(f"output.dir (--output): '{path}' ")
    assert "; accepted: a folder" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        RunFolder(config_for(tmp_path / "run"))


# logs/easyrl.log


def test_the_log_tells_the_run_and_why_it_ended(tmp_path: Path) -> None:
    folder = RunFolder(config_for(tmp_path / "run"))
    for record in (
        records.WorkerStarting(0.0, "train-0", "loading the model"),
        records.Note("wandb tracks this run no longer"),
        records.RunEnded(1, "KeyError: 'x'"),
    ):
        folder.observe(record)
    log = folder.log.read_text()
    for told in ("train-0: loading the model", "no longer", "exit code 1", "KeyError"):
        assert told in log


def test_an_error_of_our_own_is_short_on_the_screen_and_whole_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from easyrl.runtime.controller import Controller
    from easyrl.runtime.run import FAILED, run

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


def test_a_folder_that_is_lost_is_named_and_a_traceback_lies_where_it_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(config_for(tmp_path / "run"))
    assert folder.keep_traceback("Traceback: one") == folder.log
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    monkeypatch.setattr(run_folder, "ROOM_SECONDS", 0.0)
    line = records.IterationFinished(1.0, {"iteration": 0})
    with pytest.raises(RunFolderLost, match=r"run' cannot be written any more: No space left"):
        folder.observe(line)
    folder.discard()
    with pytest.raises(RunFolderLost, match=r"run' was removed while"):
        folder.observe(line)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    elsewhere = folder.keep_traceback("Traceback: two")
    assert elsewhere is not None and elsewhere.read_text() == "Traceback: two"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert folder.keep_traceback("Traceback: three") is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_for_a_moment_loses_no_line_and_leaves_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A checkpoint that does not fit fills it, until it is given up."""
    folder = RunFolder(config_for(tmp_path / "run"))
    folder.observe(finished(0))
    file, fails = folder.path / "metrics.jsonl", [True, True]
    open_file = Path.open

    class Full:
        """Takes the first bytes, and finds no room for the others."""

        def __init__(self, opened: Any) -> None:
            self._opened = opened
            self._has_room = True

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self._opened.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._opened, name)

        def write(self, content: bytes) -> int:
            if not self._has_room:
                raise OSError(code, os.strerror(code))
            self._has_room = False
            written: int = self._opened.write(content[:7])
            return written

    def open_or_fail(path: Path, mode: str, **options: Any) -> Any:
        opened = open_file(path, mode, **options)
        return Full(opened) if fails and fails.pop() else opened

    monkeypatch.setattr(Path, "open", open_or_fail)
    folder.observe(finished(1))
    assert fails == []
    monkeypatch.setattr(run_folder, "ROOM_SECONDS", 0.1)
    fails += [True] * 100
    with pytest.raises(RunFolderLost, match=f"cannot be written any more: {os.strerror(code)}"):
        folder.observe(finished(2))
    assert file.read_bytes().endswith(b"\n")
    assert [line["iteration"] for line in read_lines(file)] == [0, 1]


def test_a_run_whose_folder_is_removed_ends_with_that_as_its_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from easyrl.runtime.run import FAILED, run

    folder = tmp_path / "run"

    def remove(record: records.Record) -> None:
        if isinstance(record, records.IterationStarted) and record.iteration == 1:
            shutil.rmtree(folder)

    config = load_config(None, {"output.dir": str(folder), "train.iterations": 5}, SMALL)
    assert run(config, [remove, PlainLines()]) == FAILED
    _, err = capfd.readouterr()
    assert err == f"easyrl: the run folder '{folder}' was removed while the run was under way\n"


def test_an_observer_that_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    from easyrl.runtime.run import run

    def refuse(record: records.Record) -> None:
        if not isinstance(record, records.RunStarted):
            return
        assert record.folder.is_dir()
        raise ValueError("output.log_to: no")

    with pytest.raises(ValueError, match=r"output.log_to: no"):
        run(config_for(tmp_path / "run"), [refuse])
    assert not (tmp_path / "run").exists()


def test_what_an_observer_notes_goes_to_all() -> None:
    note = records.Note("half of it is lost")
    told: list[records.Record] = []

    def speak(record: records.Record) -> records.Note | None:
        return note if isinstance(record, records.RunEnded) else None

    tell = records.tell_all([told.append, speak, told.append])  # type: ignore[list-item]
    end = records.RunEnded(0, "")
    tell(end)
    assert told == [end, end, note, note]


def test_discarding_removes_the_run_folder_and_nothing_above_it(tmp_path: Path) -> None:
    folder = RunFolder(config_for(tmp_path / "runs" / "run"))
    (folder.path / "logs" / "train-0.log").touch()
    folder.discard()
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


# A run that goes on in its folder.


def begun(tmp_path: Path) -> tuple[Path, dict[str, int]]:
    """A folder with two iterations, and the sizes of its files after the first."""
    folder = RunFolder(config_for(tmp_path / "run"))
    sizes: dict[str, int] = {}
    for iteration in range(2):
        folder.observe(records.Sampled({"iteration": iteration}))
        folder.observe(records.IterationFinished(1.0, {"iteration": iteration}))
        sizes = sizes or folder.file_sizes()
    folder.observe(records.RunFinished(2.0, {}))
    folder.close()
    return folder.path, sizes


def test_what_came_after_the_checkpoint_is_taken_back_and_nothing_before(tmp_path: Path) -> None:
    path, sizes = begun(tmp_path)
    folder = RunFolder.again(config_for(path), lock_folder(path), sizes)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert read_lines(path / name) == [{"iteration": 0}]
    assert not (path / "summary.json").exists()
    folder.observe(records.IterationFinished(1.0, {"iteration": 1}))
    assert read_lines(path / "metrics.jsonl") == [{"iteration": 0}, {"iteration": 1}]
    folder.discard()  # no tracker could start: what the run has done stays
    assert path.is_dir()


def test_lines_that_a_power_failure_took_leave_no_half_one(tmp_path: Path) -> None:
    """The checkpoint was on the disk before them."""
    path, sizes = begun(tmp_path)
    whole = (path / "metrics.jsonl").stat().st_size
    os.truncate(path / "metrics.jsonl", whole - 5)
    folder = RunFolder.again(config_for(path), lock_folder(path), sizes | {"metrics.jsonl": whole})
    folder.observe(records.IterationFinished(1.0, {"iteration": 2}))
    assert read_lines(path / "metrics.jsonl") == [{"iteration": 0}, {"iteration": 2}]


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    folder = RunFolder(config_for(tmp_path / "run"))
    with pytest.raises(ConfigError, match="is going on; two cannot write to one folder"):
        lock_folder(folder.path)
    folder.close()
    os.close(lock_folder(folder.path))


def test_what_another_run_holds_gets_no_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`runtime.resume=auto` found the folder while it was empty, and was quicker."""
    locks: list[int] = []

    def lock_second(path: Path) -> int:
        monkeypatch.setattr(run_folder, "lock_folder", lock_folder)
        locks.append(lock_folder(path))
        return lock_folder(path)

    monkeypatch.setattr(run_folder, "lock_folder", lock_second)
    with pytest.raises(ConfigError, match="is going on; two cannot write to one folder"):
        RunFolder(config_for(tmp_path / "run"))
    assert list((tmp_path / "run").iterdir()) == []
    os.close(locks[0])

    def lock_after(path: Path) -> int:  # one that has held it, and has ended
        monkeypatch.setattr(run_folder, "lock_folder", lock_folder)
        RunFolder.again(config_for(path), lock_folder(path), {}).close()
        return lock_folder(path)

    monkeypatch.setattr(run_folder, "lock_folder", lock_after)
    with pytest.raises(ConfigError, match="exists; accepted: a folder that does not"):
        RunFolder(config_for(tmp_path / "other"))
    assert (tmp_path / "other" / "config.yaml").is_file()
    os.close(lock_folder(tmp_path / "other"))


def test_a_folder_that_goes_away_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be opened: No such file.*; accepted: a run"):
        lock_folder(tmp_path / "gone")


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    path, sizes = begun(tmp_path)
    before = (path / "metrics.jsonl").read_bytes()
    lock = lock_folder(path)
    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(ConfigError, match=rf"cannot be written: {os.strerror(code)}; accepted"):
        RunFolder.again(config_for(path), lock, sizes)
    assert (path / "metrics.jsonl").read_bytes() == before
