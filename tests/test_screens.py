"""The user interface: what each view makes of one stream of events, compared with tests/golden
(`golden_files.py`), and which samples `easyrl samples` shows."""

import html
import io
import json
import math
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from easyrl import __version__, cli, events
from easyrl.config import Config, load_config, to_commented_yaml
from easyrl.events import FromWorker
from easyrl.observe import samples
from easyrl.observe.lines import PlainLines, end_table, print_end
from easyrl.observe.run_files import RunFiles
from easyrl.observe.text import say_rich
from easyrl.observe.view import render
from easyrl.observe.watch import watch
from easyrl.runtime.resolve import resolve
from easyrl.runtime.run_folder import sample_line
from golden_files import check_golden
from run_events import (
    HOSTILE,
    METRICS,
    SUMMARY,
    run_events,
    run_started,
    state_of,
    with_config,
    write_trace,
)
from runs import easyrl, write_rows
from terminals import Terminal, after_the_view

MOMENTS = (4, 7, 14, 19, 24, 30, 32, 34)
"""Pictures are drawn after so many events of `run_events`."""
CPUS = {"rollout-0": "cpu", "train-0": "cpu"}
GPUS = {f"rollout-{n}": f"cuda:{n}" for n in range(4)}
GPUS |= {f"train-{n}": f"cuda:{n}" for n in range(4, 8)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    (run / "logs").mkdir(parents=True)
    stream = run_events(run)
    (run / "config.yaml").write_text(to_commented_yaml(Config(**stream[0].settings)))
    write_trace(stream)
    return run


def picture(state, width=80, height=24):
    console = Console(width=width, height=height, color_system=None, force_terminal=False)
    lines = console.render_lines(
        render(state, state.newest + 2.4, width, height),
        console.options.update(width=width, height=height),
    )
    assert len(lines) <= height
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)
    return "\n".join("".join(segment.text for segment in line) for line in lines) + "\n"


def test_live_view(folder):
    for stream in (run_events(folder), list(RunFiles(folder).read())):
        pictures = [f"-- {n} events\n{picture(state_of(stream[:n]))}" for n in MOMENTS]
        check_golden("live_view", "".join(pictures))


def test_live_view_of_a_teacher_alone_shows_its_divergence_and_no_reward(folder):
    """The data has no reward, so a reward of 0 would mislead."""
    words = ["algorithm.teacher=tiny", "reward.functions=none", "data.dataset=rows.jsonl"]
    started, *others = run_events(folder)
    state = state_of([with_config(started, load_config(words=words)), *others[: MOMENTS[-1]]])
    newest = {**state.lines[state.num_done], "reward": None, "frac_reward_zero_std": None}
    state.lines[state.num_done] = {**newest, "teacher/kl": 0.0123}
    shown = picture(state)
    assert "teacher KL 0.0123" in shown and shown.count("teacher KL") == 1
    assert "mean of the group" not in shown and "no spread" not in shown
    assert not any(line.startswith("reward ") for line in shown.splitlines())


def test_live_view_fits_into_any_terminal():
    stream = run_events(Path("run"))[1:19]
    for width, height, num_rollout in ((1, 1, 40), (40, 5, 1), (80, 24, 40), (300, 100, 1)):
        state = state_of([run_started(Path("run"), num_rollout), *stream])
        picture(state, width, height)
        state.apply(events.RunEnded(1, "no more memory"))
        assert height < 24 or "train-0" in picture(state, width, height)


NOISY = """
import os
from pathlib import Path
from easyrl.observe.view import LiveView
from run_events import run_events

view = LiveView(now=lambda: 190.0)
for number, event in enumerate(run_events(Path("run"))):
    view(event)
    if number == 9:
        print("from Python", flush=True)
        os.write(2, b"from C")
"""


def test_terminal_is_restored_at_the_end(folder):
    """With the last picture and the result on 24 lines. Other text of the process goes to a log."""
    path = f"{Path(__file__).parent}:{Path(cli.__file__).parents[2]}"
    terminal = Terminal(sys.executable, "-c", NOISY, PYTHONPATH=path)
    assert terminal.end() == 0, terminal.output
    after = after_the_view(terminal.output)
    assert after.strip().count("\n") < 23 and "finished after 2/4 iterations" in after
    log = (folder / "logs" / "controller.log").read_text()
    for text in ("from Python", "from C"):
        assert text in log and text not in terminal.output


def test_plain_lines(folder, capsys):
    lines = PlainLines()
    for event in run_events(folder):
        lines(event)
    check_golden("plain_lines", capsys.readouterr().out)
    assert watch(folder, live=False) == 0
    check_golden("plain_lines", capsys.readouterr().out)


NOTHING = {"reason": "all rewards were 0.000, so …", "causes": ["one", "another", "a third"]}
ENDS = {
    "no accuracy": (CPUS, {"accuracy_after": None, "groups_not_replaced": 7}),
    "two functions": (CPUS, {"rewards": {"one": [2.0, 3.0], "other": [None, 0.5]}}),
    "graded": (CPUS, {"held_out_reward_before": 0.5, "held_out_reward_after": 0.75}),
    "no gradient": (CPUS, {"sampling_logp_difference_max": None}),
    "nothing learned": (CPUS, {"nothing_learned": NOTHING}),
    "no clear change": (CPUS, {"error_before": 0.05, "error_after": 0.06, "held_out_problems": 64}),
    "cut off": (CPUS, {"cut_off_last": 0.94}),
    "a teacher alone": (
        CPUS,
        {"reward_last": None, "teacher_kl_first": 0.01234, "teacher_kl_last": 0.001},
    ),
    "tools": (CPUS, {"inserted_tokens": 23456}),
    "low overlap": (CPUS, {"overlap": 0.2}),
    "more GPUs for inference": (GPUS, {"infer_seconds": 47.0, "train_seconds": 20.0}),
    "balanced": (GPUS, {}),
    "one GPU for both": ({"rollout-0": "cuda:0", "train-0": "cuda:0"}, {"train_seconds": 10.0}),
}


def test_end_table(capsys):
    shown, start = "", run_started(Path("run"))
    for name, (devices, more) in ENDS.items():
        run = replace(start, spec=resolve(load_config()), devices=devices)
        say_rich(end_table(run, {**SUMMARY, **more}))
        shown += f"-- {name}\n{capsys.readouterr().out}"
    check_golden("end_table", shown)


@pytest.mark.parametrize("name", ["runs/1", "a [red]b:smile:", "slash[/b]", "x" * 120])
def test_commands_can_be_pasted_whatever_the_folder_is_called(capsys, name):
    say_rich(end_table(run_started(Path(name)), SUMMARY))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  easyrl")]
    resumed = ["easyrl", "grpo", "--resume", name, "--iterations", "8"]
    reads = [["easyrl", command, name] for command in ("samples", "report")]
    assert [shlex.split(line) for line in lines] == [*reads, resumed]


def test_error_text_cannot_take_over_the_terminal(capsys):
    print_end(1, "bad \x1b[2J\x07 \udcff\nsecond line" + "." * 100_000)
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and "\x07" not in shown and "\udcff" not in shown
    assert shown.count("second line") == 1 and len(shown) < 10_000


def test_samples_and_report(folder):
    """Equal completions of a prompt are folded; names of columns may be anything."""
    first = {"iteration": 1, "prompt_index": 0, "prompt": f"2+3= {HOSTILE}", "completion": "5"}
    first |= {"reward": 1.0, "rewards": {"right": 1.0, "brief": 0.5}, "truncated": False}
    first |= {"inserted_tokens": 0}
    first |= {"advantage": 0.5, "answer": "x" * 99 + "7", "\x1b]0;evil\x07\n": "\x9b2J", "[/x]": 7}
    second = first | {"prompt_index": 1, "prompt": "1+1=", "sample": 1, "length": 7, "reward": None}
    second |= {"inserted_tokens": 4}
    chat = [{"role": "user", "content": "<b>and?"}, {"role": "assistant", "content": HOSTILE}]
    lines = [
        first,
        first | {"completion": f"<b>6</b>\n{HOSTILE}"},
        first,
        first | {"rewards": {"right": 1.0, "brief": 0.25}, "truncated": True},
        second | {"problem": "a", "messages": chat, "branches": [chat[:1], [*chat, *chat]]},
    ]
    write_rows(folder / "samples.jsonl", lines)
    metrics = [METRICS, {**METRICS, "iteration": 2, "policy_version": 2, "reward": 0.75}]
    write_rows(folder / "metrics.jsonl", metrics)
    check_golden("samples", easyrl("samples", "run").output)
    assert easyrl("report", "run").exit_code == 0
    page = (folder / "report.html").read_text()
    body = re.sub(r"<(style|svg).*?</\1>", "", page, flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]*>", " ", body)).replace(__version__, "VERSION")
    check_golden("report", re.sub(r"\s*\n\s*", "\n", text))
    assert "<b>6" not in page and "\x1b" not in page


SAMPLES = [
    {
        "iteration": iteration,
        "prompt_index": 4 * iteration + place,
        "prompt": f"prompt {iteration}-{place}",
        "completion": f"completion {iteration}-{place}-{number}",
        "reward": None if iteration == 3 else number / 2,
        "advantage": float(number - 1),
    }
    for iteration in (1, 2, 3)
    for place in range(2)
    for number in range(3)
]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--min-reward 0.5 --max-reward 0.5", ["1-0-1", "1-1-1", "2-0-1", "2-1-1"]),
        ("--iteration 2 --min-reward 1", ["2-0-2", "2-1-2"]),
        ("--iteration 2-3 --limit 4", ["3-0-2", "3-1-0", "3-1-1", "3-1-2"]),
    ],
)
def test_options_select_samples(tmp_path, words, expected):
    write_rows(tmp_path / "samples.jsonl", SAMPLES)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(json.dumps(SAMPLES[4])[:40])
    shown = easyrl("samples", tmp_path, *words.split()).output
    assert re.findall(r"completion (\S+)", shown) == expected


def test_samples_end_once_nobody_reads_them(tmp_path, monkeypatch):
    write_rows(tmp_path / "samples.jsonl", SAMPLES)
    monkeypatch.setattr(samples, "is_discarded", lambda: True)
    assert easyrl("samples", tmp_path).output == ""


def test_rewards_of_a_skipped_group_are_shown_live_and_from_a_trace(tmp_path):
    for missing in (None, math.nan):
        state = state_of(run_events(tmp_path))
        state.sampled = [replace(group, rewards=[missing, missing]) for group in state.sampled]
        console = Console(width=100, height=50, file=io.StringIO())
        console.print(render(state, 190.0, 100, 50))
        assert "mean of the group none" in console.file.getvalue()


def test_the_time_left_has_evaluations_and_the_error_is_in_a_note(tmp_path):
    state = state_of(run_events(tmp_path, load_config(None, {"train.iterations": 40})))
    now = 1000.0
    for number in range(state.num_done + 1, state.num_done + 13):
        state.apply(events.IterationStarted(now + 30.0, number))
        now += 40.0
        finished = {**METRICS, "iteration": number, "perf/iteration_seconds": 10.0}
        state.apply(events.IterationFinished(now, finished))
    num_left = state.run.spec.schedule.iterations - state.num_done
    assert num_left > 0
    assert state.seconds_left(now) == pytest.approx(40.0 * num_left)
    assert state.seconds_left(now + 15.0) == pytest.approx(40.0 * num_left - 15.0)
    failed = events.FailedCall("reward 'f' failed:\nTraceback ...\nValueError: service down", "p")
    note = events.GroupScored(1, 0, 0, [1.0], [], [1], 0, 0.0, errors=[failed])
    state.apply(FromWorker("rollout-0", now, note))
    assert state.note == "reward 'f' failed: ValueError: service down"


def test_columns_may_have_any_name(tmp_path):
    columns = dict.fromkeys(events.SAMPLE_KEYS, "x")
    sample = events.Sample("c", 1.0, 0.5, {"rewards": 7, "y": 8}, {"f": 1.0, "g": 0.0}, 3)
    group = events.GroupScored(1, 0, 5, [1.0], [[1.0]], [3], 0, 0.0, prompt="p", columns=columns)
    line = sample_line(group, sample)
    assert [line[name] for name in ("iteration", "reward", "length", "y")] == [1, 1.0, 3, 8]
    assert line["column/sample"] == "x" and line["column/rewards"] == 7
    write_rows(tmp_path / "samples.jsonl", [line])
    shown = " ".join(easyrl("samples", tmp_path).output.split())
    assert "iteration 1 prompt_index 5 reward 1" in shown and "column/branches x" in shown


def test_raw_samples_are_what_the_model_sees(tmp_path):
    raw = [f"<user>{SAMPLES[0]['prompt']}<assistant>", f"{SAMPLES[0]['completion']}<end>"]
    write_rows(tmp_path / "samples.jsonl", [SAMPLES[0] | {"raw": raw}])
    assert all(text in easyrl("samples", tmp_path, "--raw").output for text in raw)
    assert "<end>" not in easyrl("samples", tmp_path).output
