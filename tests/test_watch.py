"""`easyrl watch` and the trace it reads: finished, going on, killed, resumed, or garbage."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from easyrl import events
from easyrl.config import Config, load_config, to_commented_yaml
from easyrl.events import Activity, Event, FromWorker, GroupScored, Sample, Span, UnderWay
from easyrl.observe import trace
from easyrl.observe import watch as watching
from easyrl.observe.report import PlainLines
from easyrl.observe.state import RunState
from easyrl.observe.trace import TraceWriter
from easyrl.observe.watch import GrowingFile, RunFiles, watch
from easyrl.runtime.run_folder import RunFolder, lock_folder
from runs import SMALL, Finished, start
from terminals import Terminal, after_the_view

METRICS = {
    "iteration": 0,
    "reward": 0.5,
    "completions/mean_length": 9.0,
    "loss": 0.0,
    "grad_norm": 1.0,
    "num_updates_not_finite": 0.0,
    "perf/iteration_seconds": 2.0,
    "perf/tokens_per_second": 1000.0,
    "perf/infer_seconds": 1.5,
    "perf/train_seconds": 1.0,
    "perf/weights_seconds": 0.0,
}
FIXTURE = Path(__file__).parent / "fixtures" / "run_before_0_2" / "run"


def group(time_: float, prompt_index: int, iteration: int = 0, **more: object) -> FromWorker:
    scored = GroupScored(iteration, 0, prompt_index, [1.0, 0.0], [], [100, 200], 0, 0.0)
    return FromWorker("rollout-0", time_, dataclasses.replace(scored, **more))  # type: ignore[arg-type]


def active(worker: str, *spans: Span, **more: object) -> FromWorker:
    activity = Activity(spans, 0, 0)
    return FromWorker(worker, 0.0, dataclasses.replace(activity, **more))  # type: ignore[arg-type]


def run_events(folder: Path, config: Config) -> list[Event]:
    """All kinds of events, in the order of a run."""
    t = time.monotonic()
    devices = {"rollout-0": "cpu", "train-0": "cpu"}
    sample = Sample("5", 1.0, 0.1, {})
    error = "reward 'score' failed, for the prompt '2+3='"
    return [
        events.RunStarted(t, folder, config, devices, "two workers"),
        FromWorker("rollout-0", t + 1, events.Starting("importing torch")),
        FromWorker("train-0", t + 1, events.Starting("importing torch")),
        FromWorker("rollout-0", t + 2, events.Starting("loading the model")),
        FromWorker("rollout-0", t + 3, events.Ready()),
        FromWorker("train-0", t + 4, events.Ready()),
        events.EvaluationStarted(t + 5, 0, 2),
        events.FirstRollout(5.5),
        FromWorker("rollout-0", t + 5.5, events.PromptEvaluated(0, 1, [1.0])),
        events.Evaluated(t + 6, 0, 0.5, 2),
        events.IterationStarted(t + 7, 0),
        active("rollout-0", Span("weights", t + 7, t + 7.1), Span("generate", t + 7.1, t + 8),
               Span("score", t + 7.5, t + 8.5), num_tokens=300),
        group(t + 8, 0, prompt="2+3=", samples=[sample]),
        group(t + 8.1, 1, errors=[error]),
        events.RoundStarted(t + 8.2, 0, 1, 1),
        group(t + 8.3, 2, is_rejected=True),
        events.Note("a note"),
        active("train-0", Span("train", t + 8, t + 9), num_tokens=200, num_groups=1),
        active("rollout-0", under_way=UnderWay("wait", t + 9.1)),
        active("train-0", under_way=UnderWay("train", t + 9.3)),
        events.NoEvents(t + 10.4, ""),
        events.NoEvents(t + 70.4, "no events for 60 s"),
        active("train-0", Span("train", t + 9.3, t + 71), num_tokens=20),
        events.EvaluationStarted(t + 70.5, 2, 2),
        events.Evaluated(t + 70.8, 2, 0.7, 2, 0.1, num_iterations=1),
        events.IterationFinished(t + 71, METRICS),
        FromWorker("train-0", t + 71.2, events.CheckpointSaved(1, 0.1, 100)),
        events.Stopping(t + 71.4, "SIGTERM: saving the checkpoint of iteration 1"),
        events.SavingModel(t + 72, folder / "model"),
        events.RunFinished(t + 73, {"iterations": 1}),
        events.RunEnded(0, ""),
    ]  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> tuple[RunFolder, list[Event]]:
    config = load_config(None, {"output.dir": str(tmp_path / "run"), "train.iterations": 1})
    folder = RunFolder(config)
    return folder, run_events(folder.path, config)


def write(folder: RunFolder, run: Sequence[Event], *more: events.Observer) -> None:
    notify = events.combine_observers([folder.observe, TraceWriter(), *more])
    for event in run:
        notify(event)


def state_of(found: Iterator[Event] | Sequence[Event]) -> RunState:
    state = RunState()
    for event in found:
        state.apply(event)
    return state


def summary_of(state: RunState) -> dict[str, object]:
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
            for spans in worker.spans.values()
            for span in spans
        ]
    return values


def test_files_give_the_same_state_as_the_events(written: tuple[RunFolder, list[Event]]) -> None:
    """After each event, as one who follows the run, and all at once, as one who comes late."""
    folder, run = written
    notify = events.combine_observers([folder.observe, TraceWriter()])
    files: RunFiles | None = None
    live, read = RunState(), RunState()
    for event in run:
        live.apply(event)
        notify(event)
        files = files or RunFiles(folder.path)
        for found in files.read():
            read.apply(found)
        assert summary_of(read) == summary_of(live), event
    assert live.ended is not None
    assert summary_of(state_of(RunFiles(folder.path).read())) == summary_of(live)


def test_resumed_run_reads_as_one_run(written: tuple[RunFolder, list[Event]]) -> None:
    """The first command is killed in its second iteration; the next resumes after the first."""
    folder, run = written
    started = run[0]
    assert isinstance(started, events.RunStarted)
    done = next(n for n, e in enumerate(run) if isinstance(e, events.IterationFinished)) + 1
    notify = events.combine_observers([folder.observe, TraceWriter()])
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


def test_resumed_run_is_watched_to_its_last_end(written: tuple[RunFolder, list[Event]]) -> None:
    folder, run = written
    write(folder, run)
    started = run[0]
    assert isinstance(started, events.RunStarted)
    again = dataclasses.replace(started, started=time.monotonic() + 100, num_iterations=1)
    write(folder, [again, events.RunEnded(1, "no more memory")])
    found = list(watching._follow(RunFiles(folder.path)))
    assert [event for event in found if isinstance(event, events.RunEnded)] == found[-1:]
    assert found[-1] == events.RunEnded(1, "no more memory")


def test_run_folder_written_before_0_2_can_be_watched() -> None:
    state = state_of(RunFiles(FIXTURE).read())
    assert state.ended == events.RunEnded(0, "") and state.summary is not None
    assert len(state.rewards) == 2 and len(state.accuracies) == 2
    assert not state.is_starting and all(worker.tokens for worker in state.workers.values())


# The trace.


def test_finished_trace_is_json_and_needs_no_pairs(written: tuple[RunFolder, list[Event]]) -> None:
    """Complete events, instants, counters and metadata: any part of the trace is valid."""
    folder, run = written
    write(folder, run)
    lines = json.loads((folder.path / "trace.json").read_text())
    assert {line["ph"] for line in lines} == {"M", "X", "i", "C"}
    for line in lines:
        assert isinstance(line["pid"], int) and isinstance(line["tid"], int)
        assert line["ph"] == "M" or line["ts"] >= 0
        assert line["ph"] != "X" or line["dur"] >= 0


def test_trace_is_bounded_and_still_valid_and_followed(
    written: tuple[RunFolder, list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two days of a worker that reports four times a second, at any moment."""
    monkeypatch.setattr(trace, "MAX_BYTES", 20_000)
    folder, run = written
    notify = events.combine_observers([folder.observe, TraceWriter()])
    first = next(n for n, e in enumerate(run) if isinstance(e, events.IterationStarted)) + 1
    live = state_of(run[:first])
    for event in run[:first]:
        notify(event)
    files = RunFiles(folder.path)
    follower = state_of(files.read())
    file, largest, began = folder.path / "trace.json", 0, time.monotonic() + 100
    for number in range(2000):
        span = Span("train", began + number, began + number + 0.5)
        event = active("train-0", span, num_tokens=1)
        notify(event)
        live.apply(event)
        largest = max(largest, file.stat().st_size)
        if number % 37 == 0:
            for found in files.read():
                follower.apply(found)
            json.loads(file.read_text().rstrip(",\n") + "]")
    for found in files.read():
        follower.apply(found)
    assert largest <= 20_000
    assert follower.accuracies == live.accuracies and not follower.is_starting
    assert live.run is not None
    assert follower.newest == pytest.approx(live.newest - live.run.started, abs=1e-3)
    late = state_of(RunFiles(folder.path).read())  # has only the newest part, and what matters
    assert late.accuracies == live.accuracies and late.workers.keys() == live.workers.keys()
    assert 20 < len(late.workers["train-0"].spans[False]) < 2000
    assert late.workers["train-0"].spans[False][-1].ended == pytest.approx(
        follower.workers["train-0"].spans[False][-1].ended
    )
    notify(events.RunEnded(0, ""))
    assert isinstance(json.loads(file.read_text()), list)
    TraceWriter()(run[0])  # a resumed run bounds what it finds
    assert file.stat().st_size <= 20_000
    json.loads(file.read_text().rstrip(",\n") + "]")


def test_numbers_that_are_not_finite_are_null_in_files_and_none_on_the_screen(
    written: tuple[RunFolder, list[Event]], capsys: pytest.CaptureFixture[str]
) -> None:
    """An iteration whose groups were all skipped has no reward, no loss, no accuracy."""
    folder, run = written
    nan = float("nan")
    empty = {**METRICS, "reward": nan, "loss": nan, "grad_norm": nan}
    changed: list[Event] = []
    for event in run[:-2]:
        match event:
            case FromWorker(_, time_, GroupScored(prompt_index=index)):
                changed.append(group(time_, index, rewards=[nan, nan]))
            case events.Evaluated():
                changed.append(dataclasses.replace(event, accuracy=nan))
            case events.IterationFinished(time_):
                changed.append(events.IterationFinished(time_, empty))
            case _:
                changed.append(event)
    write(folder, changed, PlainLines())
    text = (folder.path / "trace.json").read_text().rstrip(",\n") + "]"
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    live, lines = capsys.readouterr().out, PlainLines()
    for event in RunFiles(folder.path).read():
        lines(event)
    for shown in (live, capsys.readouterr().out):
        assert "held-out accuracy none" in shown
        assert "reward none" in shown and "loss none" in shown


# Reading files that grow, or hold garbage.


def test_only_whole_lines_that_are_due_are_read(tmp_path: Path) -> None:
    file = GrowingFile(tmp_path / "lines.json")
    assert list(file.read()) == []
    with file.path.open("w") as out:
        out.write('[\n{"a": 1},\n{"a": 2},\n{"a"')
        out.flush()
        assert list(file.read(lambda line: line["a"] < 2)) == [{"a": 1}]
        assert list(file.read()) == [{"a": 2}]
        out.write(': 3},\n{"a": \n{"a": 4}\n]\n')
        out.flush()
        assert list(file.read()) == [{"a": 3}, {"a": 4}]
    assert list(file.read()) == []


@pytest.mark.parametrize(
    "garbage",
    [b"", bytes(range(256)) * 1000, b"null\n" * 100, b'{"ph": "M", "args": {"devices": 3}},\n'],
)
def test_garbage_instead_of_a_trace_is_an_error(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "config.yaml").write_text(to_commented_yaml(load_config()))
    (tmp_path / "trace.json").write_bytes(garbage)
    with pytest.raises(ValueError, match=r"trace\.json"):
        watch(tmp_path, live=False)


def test_removed_folder_ends_the_watching(written: tuple[RunFolder, list[Event]]) -> None:
    folder, run = written
    write(folder, run[:12])
    following = watching._follow(RunFiles(folder.path))
    next(following)
    folder.discard()
    with pytest.raises(FileNotFoundError):
        list(following)


BAD_LINES = (
    "null", "7", "[]", '{"ph": "M"}', '{"ph": "X", "cat": "activity", "ts": 1}',
    '{"ph": "X", "cat": "activity", "ts": "x", "dur": 1, "pid": 1, "name": "train"}',
    '{"ph": "i", "cat": "group", "ts": 1, "pid": 0, "args": {"iteration": null}}',
    '{"ph": "i", "cat": "iteration", "ts": 1e999, "pid": 0, "args": {"iteration": 1}}',
    '{"ph": "i", "cat": "evaluation", "ts": 1, "pid": 0, "args": {"no": 1}}',
    '{"ph": "i", "cat": "note", "ts": 1, "pid": 0, "args": 3}', "[" * 100_000,
    '{"ph": "M", "args": {"removed": "x"}}', "\x00\x00\x1b[2J",
)  # fmt: skip


def test_bad_lines_in_a_trace_are_skipped(written: tuple[RunFolder, list[Event]]) -> None:
    folder, run = written
    write(folder, run)
    file = folder.path / "trace.json"
    lines = file.read_text().splitlines()
    mixed = [line for number, line in enumerate(lines) for line in (line, BAD_LINES[number % 13])]
    file.write_text("\n".join([*lines[:2], *mixed[4:]]) + "\n")
    assert summary_of(state_of(RunFiles(folder.path).read())) == summary_of(state_of(run))


# Real runs.


def easyrl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "easyrl", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("missing", ["all", "config.yaml", "trace.json"])
def test_folder_of_no_run_is_refused(tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "run"
    if missing != "all":
        folder.mkdir()
        (folder / "config.yaml").write_text(to_commented_yaml(load_config()))
        (folder / "trace.json").write_text("[\n")
        (folder / missing).unlink()
    done = easyrl("watch", str(folder))
    assert done.returncode == 2
    assert str(folder) in done.stderr and "Traceback" not in done.stderr


def test_finished_run_is_shown_as_it_ended(finished_run: Finished) -> None:
    terminal = Terminal(sys.executable, "-m", "easyrl", "watch", str(finished_run.folder))
    assert terminal.end() == 0
    assert "\x1b[?1049h" not in terminal.output  # nothing to follow: no alternate screen
    assert "finished after 3/3 iterations" in terminal.output
    assert "█" in terminal.output and "▓" in terminal.output  # its lanes
    assert "run folder" in terminal.output and "next commands" in terminal.output


def test_finished_run_without_a_terminal_gives_plain_lines(finished_run: Finished) -> None:
    done = easyrl("watch", str(finished_run.folder))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("iteration ")]) == 3
    assert any(line.startswith("first rollout after") for line in lines)
    assert "finished" in lines and "\x1b" not in done.stdout


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
    again = easyrl("watch", str(folder))
    assert again.returncode == 1 and "the run was killed" in again.stderr
