"""The run folder: one writer, whole lines wherever it is cut off, a log of what went wrong."""

import errno
import math
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from easyrl import events
from easyrl.api.calls import Run
from easyrl.config import ConfigError, load_config, to_commented_yaml
from easyrl.observe.lines import PlainLines
from easyrl.runtime import run_folder
from easyrl.runtime.controller import Controller
from easyrl.runtime.run import run
from easyrl.runtime.run_folder import (
    RunFolder,
    RunFolderLost,
    free_name,
    is_locked,
    lock_folder,
    read_lines,
    write_whole,
)
from easyrl.runtime.supervisor import FAILED
from runs import SMALL

CONFIG = to_commented_yaml(load_config(words=SMALL))


def finished(iteration):
    metrics = {"iteration": iteration, "entropy": math.nan, "note": 'a "}" \n b'}
    return events.IterationFinished(0.0, metrics)


def test_metrics_cut_off_at_any_byte_lose_no_whole_line(tmp_path):
    folder = RunFolder(tmp_path / "run", CONFIG)
    for iteration in (1, 2, 3):
        folder.observe(finished(iteration))
    file = folder.path / "metrics.jsonl"
    whole = read_lines(file)
    assert [line["iteration"] for line in whole] == [1, 2, 3]
    assert whole[0]["entropy"] is None
    content = file.read_bytes()
    last = content[:-1].rindex(b"\n") + 1
    for end in range(last, len(content) + 1):
        file.write_bytes(content[:end])
        assert read_lines(file) == whole[: 3 if end == len(content) else 2]
    file.write_bytes(b'{"iteration": 0}\n{"itera\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2"):
        read_lines(file)


def test_an_error_is_short_on_the_screen_and_complete_in_the_log(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Controller, "run", Mock(side_effect=KeyError("lost")))
    config = load_config(None, {"output.dir": str(tmp_path / "run")}, SMALL)
    assert run(config, [PlainLines()]).exit_code == FAILED
    log = tmp_path / "run" / "logs" / "easyrl.log"
    shown = f"easyrl: KeyError: 'lost'\n(the full traceback is in {log})\n"
    shown += "to start again (there is no checkpoint): easyrl grpo --config"
    assert capfd.readouterr().err.startswith(shown)
    assert "Traceback (most recent call last)" in log.read_text()


def test_disk_that_is_full_for_a_moment_loses_no_line(tmp_path, monkeypatch):
    """As when a checkpoint that does not fit fills the disk, until it is removed."""
    folder = RunFolder(tmp_path / "run", CONFIG)

    def write_to_full_disk(file, content):
        outcomes = iter([7, *[OSError(errno.ENOSPC, "No space left")] * num_failures])

        def write(rest):  # seven bytes, and none for a while
            if isinstance(outcome := next(outcomes, len(rest)), OSError):
                raise outcome
            return file.write(rest[:outcome])

        write_whole(Mock(wraps=file, write=write), content)

    folder.observe(finished(1))
    monkeypatch.setattr(run_folder, "write_whole", write_to_full_disk)
    num_failures = 1
    folder.observe(finished(2))
    num_failures = 1000
    monkeypatch.setattr(run_folder, "FULL_DISK_SECONDS", 0.1)
    for event, name in ((finished(3), "metrics"), (scored(3), "samples")):
        with pytest.raises(RunFolderLost, match=rf"No space left \({name}\.jsonl\)"):
            folder.observe(event)
    assert [line["iteration"] for line in read_lines(folder.path / "metrics.jsonl")] == [1, 2]
    assert (folder.path / "metrics.jsonl").read_bytes().endswith(b"\n")


def scored(iteration):
    sample = events.Sample("2", 1.0, 0.0, {})
    group = events.GroupScored(iteration, 0, 0, [1.0], [], [1], 0, 0.0, samples=[sample])
    return events.FromWorker("rollout-0", 0.0, group)


@pytest.mark.parametrize("num_read", [7, 2**20])
@pytest.mark.parametrize(("num_lost", "first"), [(0, 1), (5, 1), (0, 0)])
def test_resumed_folder_is_cut_back_to_whole_lines_of_its_checkpoint(
    tmp_path, monkeypatch, num_lost, first, num_read
):
    """After a power failure bytes may be missing that were written before the checkpoint. The files
    of a run that version 0.2 began count from 0 to their end."""
    monkeypatch.setattr(run_folder, "BLOCK_BYTES", num_read)
    folder = RunFolder(tmp_path / "run", CONFIG)
    folder._first = first
    sizes, path = {}, folder.path
    for iteration in (1, 2):
        folder.observe(scored(iteration))
        folder.observe(events.IterationFinished(1.0, {"iteration": iteration}))
        sizes = sizes or folder.file_sizes()
    folder.observe(events.RunFinished(2.0, {}))
    folder.close()
    if num_lost:
        sizes["metrics.jsonl"] = (path / "metrics.jsonl").stat().st_size
        os.truncate(path / "metrics.jsonl", sizes["metrics.jsonl"] - num_lost)
    folder = RunFolder(path, CONFIG, lock_folder(path), sizes)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [line["iteration"] for line in read_lines(path / name)] == [first]
    assert not (path / "summary.json").exists()
    folder.observe(events.IterationFinished(1.0, {"iteration": 2}))
    assert read_lines(path / "metrics.jsonl") == [{"iteration": first}, {"iteration": first + 1}]
    assert folder.read_metrics() == Run(path).metrics == [{"iteration": 1}, {"iteration": 2}]


def test_without_locks_a_run_has_ended_once_it_has_a_summary(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    assert is_locked(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    assert not is_locked(tmp_path)


def test_the_run_that_follows_one_in_this_folder_stands_beside_it(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(run)
    assert free_name(Path()) == f"{run}-2"
    assert free_name(Path("run")) == "run-2"


def test_folder_belongs_to_one_user_and_one_writer(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "run", CONFIG)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="still running"):
        lock_folder(folder.path)
    folder.close()
    os.close(lock_folder(folder.path))
