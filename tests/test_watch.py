"""`easyrl watch` and the trace it reads: of runs that finished, run, were killed or resumed."""

import dataclasses
import json
import os
import re
import signal
import sys

import pytest
from test_report import page_of, text_of

from easyrl import events
from easyrl.config import Config
from easyrl.events import FromWorker, Span
from easyrl.observe import trace
from easyrl.observe.run_files import RunFiles
from easyrl.observe.state import RunState
from easyrl.observe.trace import TraceWriter
from easyrl.observe.watch import follow, watch
from run_events import METRICS, active, group, run_events, state_of, write_trace
from runs import SMALL, descendants, start, wait_for_line, wait_until_gone
from terminals import Terminal, after_the_view


@pytest.fixture
def written(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    return tmp_path, run_events(tmp_path, Config())


def lines_of(folder):
    """The trace, with the end that its format does not ask for; each line is valid."""
    text = (folder / "trace.json").read_text().rstrip(",\n") + "]"
    lines = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    for line in lines:
        assert isinstance(line["pid"], int) and isinstance(line["tid"], int)
        assert line["ts"] > 0 and (line["ph"] != "X" or line["dur"] >= 0)
    return lines


def content(state):
    """Empty fields, those that the trace leaves out, and NaN are the same."""
    fields = dataclasses.asdict(state)
    fields["run"]["earlier"] = None
    text = re.sub(r"\{\}|\[\]|NaN", "null", json.dumps(fields, default=str))
    return re.sub(r"\\u001b|\\u0007|\\u202e", r"\\ufffd", text)


def test_trace_gives_the_state_of_the_events_and_is_bounded(written, monkeypatch):
    """It is read during the run, with a worker that reports four times a second, and at the end."""
    monkeypatch.setattr(trace, "MAX_BYTES", 30_000)
    folder, run = written
    first = next(n for n, e in enumerate(run) if isinstance(e, events.IterationFinished)) + 1
    spans = [Span("train", 300.0 + number, 300.5 + number) for number in range(700)]
    run[first:first] = [
        events.WorkerSpawned(300.0, "rollout-1", "cpu"),  # `easyrl scale`
        *(events.IterationFinished(300.0, {**METRICS, "iteration": n}) for n in range(1, 11)),
        *(active("train-0", span) for span in spans),
        active("rollout-1", spans[-1]),
    ]
    notify, live, follower, files, kinds = TraceWriter(), RunState(), RunState(), None, set()
    for number, event in enumerate(run):
        live.apply(event)
        notify(event)
        files = files or RunFiles(folder)
        if number % 11 == 0 or number < first or number > len(run) - 20:
            for found in files.read():
                follower.apply(found)
            assert content(follower) == content(live), event
            assert (folder / "trace.json").stat().st_size <= 30_000
            kinds |= {line["ph"] for line in lines_of(folder)}
    assert live.ended is not None and kinds == {"M", "X", "B", "E", "i"}
    late = state_of(RunFiles(folder).read())  # has only the newest part, and what matters
    kept = [json.dumps([each.accuracies, each.lines]) for each in (late, live)]
    assert kept[0] == kept[1].replace("NaN", "null")
    assert 20 < len(late.workers["train-0"].spans) < 700
    assert late.workers["train-0"].spans[-1] == live.workers["train-0"].spans[-1]


def test_resumed_run_reads_as_one_run(written):
    """Killed after two iterations, resumed after the first one. The last end counts."""
    folder, run = written
    write_trace(run[:-2])
    with (folder / "trace.json").open("a") as file:
        file.write('{"ph": "i", "na')
    more = {"started": 300.0, "num_iterations": 1, "earlier": [METRICS]}
    resumed = [
        dataclasses.replace(run[0], **more, accuracies=[(0, 0.5)]),
        FromWorker("rollout-0", 303.0, events.Ready()),
        events.IterationStarted(307.0, 2),
        group(308.0, 4, iteration=2),
    ]
    write_trace(resumed)
    assert content(state_of(RunFiles(folder).read())) == content(state_of(resumed))
    assert lines_of(folder)
    write_trace([resumed[0], events.RunEnded(1, "no more memory")])
    found = list(follow(RunFiles(folder)))
    assert [event for event in found if isinstance(event, events.RunEnded)] == found[-1:]
    assert found[-1] == events.RunEnded(1, "no more memory")


def test_trace_of_version_02_counts_from_0(written):
    folder, run = written
    write_trace(run)
    state, text = content(state_of(RunFiles(folder).read())), (folder / "trace.json").read_text()
    text = re.sub(r'"iteration": (\d+)', lambda found: f'"iteration": {int(found[1]) - 1}', text)
    of_now, of_then = '"spec": null, "settings": null', '"config": null'
    assert of_now in text
    text = text.replace(of_now, of_then).replace(', "first_iteration": 1', "")
    (folder / "trace.json").write_text(text)
    assert content(state_of(RunFiles(folder).read())) == state
    write_trace(run)  # a command of this version resumes it
    assert content(state_of(RunFiles(folder).read())) == state


def test_folder_without_a_readable_trace_is_refused(written):
    folder, run = written
    with pytest.raises(ValueError, match=f"'{folder}'.*trace.json"):
        watch(folder, live=False)
    (folder / "trace.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=f"'{folder}'.*trace.json"):
        watch(folder, live=False)
    write_trace(run)  # the run is resumed
    assert content(state_of(RunFiles(folder).read())) == content(state_of(run))


def test_finished_run_is_shown_as_it_ended(finished_run, capsys, monkeypatch):
    # The timelines are left out where the end table would not fit.
    words = (sys.executable, "-m", "easyrl", "watch", str(finished_run.folder))
    terminal = Terminal(*words, lines=60)
    monkeypatch.setattr("easyrl.observe.lines.find_spec", lambda module: None)  # as it ran
    assert watch(finished_run.folder, live=False) == 0
    assert capsys.readouterr().out == finished_run.out
    assert terminal.end() == 0
    output = after_the_view(terminal.output)
    for text in ("finished after 3/3 iterations", "█", "▓", "run folder", "next commands"):
        assert text in output


def test_run_is_followed_until_it_is_killed_outlives_a_watcher_and_can_be_reported(tmp_path):
    folder = tmp_path / "run"
    process = start("--output", str(folder), "--iterations", "100000", "--no-live", *SMALL)
    wait_for_line(process, "iteration 2/")
    words = (sys.executable, "-m", "easyrl", "watch", str(folder))
    interrupted = Terminal(*words)
    follower = Terminal(*words)
    assert "still running" in text_of(page_of(folder))
    for watcher in (interrupted, follower):
        watcher.read_until("ETA")
    workers = descendants(process.pid)
    os.kill(interrupted.process.pid, signal.SIGINT)
    interrupted.read_until(None)
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert wait_until_gone(workers) == []
    assert interrupted.end() == 128 + signal.SIGINT and follower.end() == 1
    assert "the run continues" in after_the_view(interrupted.output)
    assert "the run was killed" in after_the_view(follower.output)
    assert watch(folder, live=False) == 1
    for name in ("metrics.jsonl", "samples.jsonl", "trace.json"):
        with (folder / name).open("a") as file:  # cut off in the middle of a line
            file.write('{"iteration": 99999, "rew')
    page = text_of(page_of(folder))
    for text in ("of 100000 iterations: its process is gone", "both at once"):
        assert text in page
