"""`easyrl watch` and the trace it reads: of runs that finished, run, were killed or resumed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from easyrl import events
from easyrl.config import load_config
from easyrl.events import Event, FromWorker, Span
from easyrl.observe import trace
from easyrl.observe.report import PlainLines
from easyrl.observe.state import ViewState
from easyrl.observe.trace import TraceWriter
from easyrl.observe.watch import RunFiles, follow, watch
from easyrl.runtime.run_folder import RunFolder, lock_folder
from run_events import METRICS, active, group, run_events, state_of
from runs import SMALL, Finished, start
from terminals import Terminal, after_the_view

FIXTURE = Path(__file__).parent / "fixtures" / "run_before_0_2" / "run"
Written = tuple[RunFolder, list[Event]]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    config = load_config(None, {"output.dir": str(tmp_path / "run"), "train.iterations": 1})
    folder = RunFolder(config)
    return folder, run_events(folder.path, config)


def writer(folder: RunFolder) -> events.Observer:
    return events.combine_observers([folder.observe, TraceWriter()])


def write(folder: RunFolder, run: Sequence[Event]) -> None:
    notify = writer(folder)
    for event in run:
        notify(event)


def summary_of(state: ViewState) -> dict[str, object]:
    """What two states have in common, whatever their clocks."""
    fields = dataclasses.fields(state)
    clocks = {"run", "workers", "iteration_started", "newest", "saving_since", "evaluation"}
    values = {f.name: getattr(state, f.name) for f in fields if f.name not in clocks}
    values["evaluation"] = state.evaluation and state.evaluation.round
    begun = state.run.started if state.run is not None else 0.0
    for name, worker in state.workers.items():
        values[name] = worker.phase, [n for _, _, n in worker.tokens]
        values[f"{name} spans"] = [
            (span.kind, round(span.started - begun, 3), round(span.ended - begun, 3))
            for span in [*worker.spans, *worker.scoring]
        ]
    return values


def test_files_give_the_same_state_as_the_events(written: Written) -> None:
    """After each event, as one who follows the run, and all at once, as one who comes late."""
    folder, run = written
    notify = writer(folder)
    files: RunFiles | None = None
    live, read = ViewState(), ViewState()
    for event in run:
        live.apply(event)
        notify(event)
        files = files or RunFiles(folder.path)
        for found in files.read():
            read.apply(found)
        assert summary_of(read) == summary_of(live), event
    assert live.ended is not None
    assert summary_of(state_of(RunFiles(folder.path).read())) == summary_of(live)


def test_resumed_run_reads_as_one_run(written: Written) -> None:
    """The first command is killed in its second iteration; the next resumes after the first."""
    folder, run = written
    started = run[0]
    assert isinstance(started, events.RunStarted)
    done = next(n for n, e in enumerate(run) if isinstance(e, events.IterationFinished)) + 1
    notify = writer(folder)
    for event in run[:done]:
        notify(event)
    sizes = folder.file_sizes()
    notify(events.IterationStarted(started.started + 80, 1))
    notify(group(started.started + 81, 4, iteration=1))
    folder.close()
    again = RunFolder(started.config, lock_folder(folder.path), sizes)
    later = time.monotonic() + 100
    resumed = [
        dataclasses.replace(started, started=later, num_iterations=1),
        events.RunResumed([METRICS], [(0, 0.5), (1, 0.7)]),
        FromWorker("rollout-0", later + 3, events.Ready()),
        events.IterationStarted(later + 7, 1),
        group(later + 8, 4, iteration=1),
    ]
    write(again, resumed)
    live, read = state_of(resumed), state_of(RunFiles(folder.path).read())
    assert read.run is not None and read.run.started > 90
    assert (read.rewards, read.accuracies) == (live.rewards, live.accuracies)
    assert (read.iteration, read.num_groups) == (1, 1)
    assert read.iteration_started == pytest.approx(read.run.started + 7, abs=1e-3)
    json.loads((folder.path / "trace.json").read_text().rstrip(",\n") + "]")


def test_resumed_run_is_watched_to_its_last_end(written: Written) -> None:
    folder, run = written
    write(folder, run)
    started = run[0]
    assert isinstance(started, events.RunStarted)
    again = dataclasses.replace(started, started=time.monotonic() + 100, num_iterations=1)
    write(folder, [again, events.RunEnded(1, "no more memory")])
    found = list(follow(RunFiles(folder.path)))
    assert [event for event in found if isinstance(event, events.RunEnded)] == found[-1:]
    assert found[-1] == events.RunEnded(1, "no more memory")


def test_run_folder_written_before_0_2_can_be_watched() -> None:
    state = state_of(RunFiles(FIXTURE).read())
    assert state.ended == events.RunEnded(0, "") and state.summary is not None
    assert len(state.rewards) == 2 and len(state.accuracies) == 2
    assert not state.is_starting and all(worker.tokens for worker in state.workers.values())


# The trace.


def test_finished_trace_is_json_of_known_events(written: Written) -> None:
    folder, run = written
    write(folder, run)
    lines = json.loads((folder.path / "trace.json").read_text())
    assert {line["ph"] for line in lines} == {"M", "X", "B", "E", "i", "C"}
    for line in lines:
        assert isinstance(line["pid"], int) and isinstance(line["tid"], int)
        assert line["ph"] == "M" or line["ts"] >= 0
        assert line["ph"] != "X" or line["dur"] >= 0


def test_trace_is_bounded_and_still_valid_and_followed(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two days of a worker that reports four times a second, at any moment."""
    monkeypatch.setattr(trace, "MAX_BYTES", 20_000)
    folder, run = written
    first = next(n for n, e in enumerate(run) if isinstance(e, events.IterationStarted)) + 1
    began = time.monotonic() + 100
    spans = [Span("train", began + number, began + number + 0.5) for number in range(2000)]
    run[first:-1] = [active("train-0", span, num_tokens=1) for span in spans]
    live, follower, notify = state_of(run), ViewState(), writer(folder)
    files, file = None, folder.path / "trace.json"
    for number, event in enumerate(run):
        notify(event)
        files = files or RunFiles(folder.path)
        if number % 37 == 0 or number >= len(run) - 2:
            for found in files.read():
                follower.apply(found)
            assert file.stat().st_size <= 20_000
            json.loads(file.read_text().rstrip(",]\n") + "]")
    assert live.run is not None and not follower.is_starting
    assert follower.accuracies == live.accuracies and follower.ended == live.ended
    assert follower.newest == pytest.approx(live.newest - live.run.started, abs=1e-3)
    assert len(follower.workers["train-0"].spans) == len(live.workers["train-0"].spans)
    late = state_of(RunFiles(folder.path).read())  # has only the newest part, and what matters
    assert late.accuracies == live.accuracies and late.workers.keys() == live.workers.keys()
    newest = [state.workers["train-0"].spans for state in (late, follower)]
    assert 20 < len(newest[0]) < 2000 and newest[0][-1] == newest[1][-1]
    TraceWriter()(run[0])  # a resumed run bounds what it finds
    assert file.stat().st_size <= 20_000
    json.loads(file.read_text().rstrip(",\n") + "]")


def test_numbers_that_are_not_finite_are_null_in_files_and_none_on_the_screen(
    written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    """An iteration whose groups were all skipped has no reward, no loss, no accuracy."""
    folder, run = written
    nan = math.nan
    changes: dict[type, dict[str, object]] = {
        events.Evaluated: {"accuracy": nan},
        events.IterationFinished: {"metrics": {**METRICS, "reward": nan, "loss": nan}},
    }
    run = [dataclasses.replace(event, **changes.get(type(event), {})) for event in run[:-2]]
    write(folder, [*run, group(time.monotonic(), 5, rewards=[nan, nan])])
    text = (folder.path / "trace.json").read_text().rstrip(",\n") + "]"
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    for source in (run, RunFiles(folder.path).read()):
        lines = PlainLines()
        for event in source:
            lines(event)
        output = capsys.readouterr().out
        assert "held-out accuracy none" in output
        assert "reward none" in output and "loss none" in output


def test_lines_that_are_damaged_or_of_another_version_are_skipped(written: Written) -> None:
    folder, run = written
    write(folder, run)
    file = folder.path / "trace.json"
    other = '{"ph": "i", "cat": "evaluation", "ts": 1, "pid": 0, "args": {"no": 1}}'
    lines = file.read_text().splitlines()
    file.write_text("\n".join(f"{line}\n{other},\n\0{line[:9]}" for line in lines) + "\n")
    assert summary_of(state_of(RunFiles(folder.path).read())) == summary_of(state_of(run))


# Real runs.


@pytest.mark.parametrize("missing", ["config.yaml", "trace.json"])
def test_folder_of_no_run_is_refused(tmp_path: Path, missing: str) -> None:
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "trace.json").write_text("[\n")
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=f"'{tmp_path}'.*{missing}"):
        watch(tmp_path, live=False)


def test_finished_run_is_shown_as_it_ended(finished_run: Finished) -> None:
    terminal = Terminal(sys.executable, "-m", "easyrl", "watch", str(finished_run.folder))
    assert terminal.end() == 0
    assert "\x1b[?1049h" not in terminal.output  # nothing to follow: no alternate screen
    assert "finished after 3/3 iterations" in terminal.output
    assert "█" in terminal.output and "▓" in terminal.output  # its lanes
    assert "run folder" in terminal.output and "next commands" in terminal.output


@pytest.mark.parametrize(("words", "term"), [(["--no-live"], "xterm"), ([], "dumb")])
def test_plain_lines_without_a_live_view(
    finished_run: Finished, words: list[str], term: str
) -> None:
    command = [sys.executable, "-m", "easyrl", "watch", str(finished_run.folder), *words]
    terminal = Terminal(*command, TERM=term)
    assert terminal.end() == 0
    lines = terminal.output.splitlines()
    assert len([line for line in lines if line.startswith("iteration ")]) == 3
    assert "█" not in terminal.output and "next commands" in terminal.output


@pytest.fixture(scope="module")
def going_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run in its iterations. The test that kills it comes last."""
    folder = tmp_path_factory.mktemp("watched") / "run"
    process = start("--output", str(folder), "--iterations", "100000", "--no-live", *SMALL)
    deadline = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    yield process, folder
    process.kill()
    process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_watching_and_not_the_run(
    going_on: tuple[subprocess.Popen[str], Path], signum: signal.Signals
) -> None:
    process, folder = going_on
    terminal = Terminal(sys.executable, "-m", "easyrl", "watch", str(folder))
    terminal.read_until("ETA")
    os.kill(terminal.process.pid, signum)
    assert terminal.end() == 128 + signum
    after_the_view(terminal.output)
    assert process.poll() is None


def test_run_is_followed_until_it_is_killed(going_on: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = going_on
    terminal = Terminal(sys.executable, "-m", "easyrl", "watch", str(folder))
    terminal.read_until("ETA")
    process.kill()
    process.wait()
    assert terminal.end() == 1
    assert "the run was killed" in after_the_view(terminal.output)
    assert watch(folder, live=False) == 1
