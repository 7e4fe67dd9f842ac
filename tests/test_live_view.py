"""The live view: what it shows, that it fits, and that the terminal is restored after any end."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from easyrl import events
from easyrl.config import load_config
from easyrl.events import Event, FromWorker, Note, Sample, Span, UnderWay
from easyrl.observe.observers import Guard
from easyrl.observe.state import RunState
from easyrl.observe.view import render
from run_events import METRICS, active, group, state_of
from runs import SMALL
from terminals import Terminal, after_the_view

HOSTILE = "[red]no markup[/red] \x1b[2J\x07 \u202ereversed 日本"


def run_started(num_rollout: int = 1) -> events.RunStarted:
    config = load_config(None, {"train.iterations": 4, "train.prompts_per_iteration": 8})
    names = [*(f"rollout-{n}" for n in range(num_rollout)), "train-0"]
    devices = dict.fromkeys(names, "cpu")
    return events.RunStarted(100.0, Path("run"), config, devices, "two workers")


def scored(index: int, **more: Any) -> FromWorker:
    shown = Sample(f"completion {index} {HOSTILE}", 1.0, 0.0, {})
    return group(121.0, index, **{"iteration": 1, "prompt": "2+3=", "shown": shown, **more})


def state_after(*more: Event, num_rollout: int = 1) -> RunState:
    """A run in its second iteration."""
    start = run_started(num_rollout)
    return state_of(
        [
            start,
            *(FromWorker(worker, 102.0, events.Ready()) for worker in start.devices),
            events.EvaluationStarted(104.0, 10),
            events.Evaluated(106.0, 0.125, 10, 0.1, num_iterations=0),
            events.IterationStarted(108.0, 0),
            events.IterationFinished(118.0, METRICS),
            events.IterationStarted(118.0, 1),
            active("rollout-0", Span("weights", 118.0, 118.1)),
            active("rollout-0", Span("generate", 118.2, 121.0)),
            active(
                "train-0", Span("wait", 118.0, 120.0), Span("train", 120.0, 121.0), num_groups=1
            ),
            scored(0),
            scored(1),
            *more,
        ]
    )


def picture(state: RunState, now: float = 121.4, width: int = 80, height: int = 24) -> str:
    console = Console(width=width, height=height, color_system=None, force_terminal=False)
    lines = console.render_lines(
        render(state, now, width, height), console.options.update(width=width, height=height)
    )
    assert len(lines) <= height
    for line in lines:
        assert sum(segment.cell_length for segment in line) <= width
    return "\n".join("".join(segment.text for segment in line) for line in lines)


def test_shows_progress_rates_workers_reward_and_completion() -> None:
    shown = picture(state_after())
    assert "iteration 2/4  groups 2/8" in shown
    assert "ETA 0:27" in shown  # 3 of 10 s each, 3.4 s of the first gone
    assert "overlap 80%" in shown  # 8 + 5 + 1 - 10 of the shorter, 5
    assert "tokens/s 1,200  per device 600" in shown
    assert "reward 0.250" in shown and "held-out accuracy 0.125" in shown
    rewards = [{**METRICS, "iteration": n, "reward": n / 100} for n in range(200)]
    many = picture(state_after(*(events.IterationFinished(119.0, line) for line in rewards)))
    assert "▁▁" in many and "██" in many
    assert "completion 1" in shown and "2+3=" in shown


def test_shows_a_completion_of_each_of_the_newest_groups() -> None:
    """A long one is shown with its end, where the answer is."""
    shown = picture(state_after(scored(2)))
    assert [shown.index(f"completion {n}") for n in (2, 1, 0)] == sorted(
        shown.index(f"completion {n}") for n in range(3)
    )
    assert shown.count("reward 1 (mean of the group 0.5)") == 3
    long = Sample("\n".join(f"step {n}" for n in range(99)), 1.0, 0.0, {})
    shown = picture(state_after(scored(2, shown=long)))
    assert "step 1" in shown and "step 98" in shown and "completion" not in shown


def test_shows_all_evaluations_and_the_figures_of_the_newest_iteration() -> None:
    measured = [
        events.Evaluated(119.0, number / 100, 10, 0.1, num_iterations=number)
        for number in range(1, 100)
    ]
    line = {**METRICS, "iteration": 1, "entropy": 0.25, "completions/clipped_ratio": 0.125}
    line |= {"frac_reward_zero_std": 0.5, "rewards/right/mean": 0.75, "rewards/right/std": 0.1}
    line |= {f"rewards/other-{n}/mean": 0.5 for n in range(5)}
    state = state_after(*measured, events.IterationFinished(128.0, line))
    for width in (60, 80, 120):
        shown = picture(state, width=width)
        (row,) = (row for row in shown.splitlines() if "held-out accuracy" in row)
        assert "0.125 ▁" in row and "█ 0.990" in row
        for text in ("length 9.0  entropy 0.250  cut off 12%  no spread 50%", "right 0.750"):
            assert text in shown
        assert all(f"other-{n} 0.500" in shown for n in range(5)) and "KL" not in shown
    assert "KL 0.0100" in picture(
        state_after(events.IterationFinished(128.0, {**line, "kl": 0.01}))
    )


def test_shows_what_each_worker_did_and_does() -> None:
    state = state_after(
        active("rollout-0", under_way=UnderWay("score", 121.0)),
        active("train-0", under_way=UnderWay("wait", 121.0)),
    )
    rollout, train = (
        line
        for line in picture(state, now=124.4).splitlines()
        if line.startswith(("roll", "train"))
    )
    lane = rollout.split("cpu ")[1]
    assert lane.index("W") < lane.index("█") < lane.index("▪")
    assert rollout.endswith(" 7%")  # 2.8 of 40 s
    lane = train.split("cpu ")[1]
    assert lane.index("·") < lane.index("▓") < lane.rindex("·")


def test_shows_the_steps_of_the_start_and_the_placement() -> None:
    run = [
        run_started(),
        FromWorker("rollout-0", 101.0, events.Starting("loading the model")),
        FromWorker("train-0", 104.0, events.Ready()),
    ]
    shown = picture(state_of(run), now=105.0)
    assert "loading the model, 4.0 s" in shown and "ready" in shown and "two workers" in shown


def test_shows_what_goes_wrong() -> None:
    losses = {"groups_skipped": 2, "reward_errors": 3, "num_updates_not_finite": 1.0}
    state = state_after(
        events.IterationFinished(128.0, {**METRICS, **losses, "iteration": 1, "reward": None}),
        events.NoEvents(200.0, "no events for 60 s: train-0 wait"),
        Note(f"careful {HOSTILE}"),
        events.NoEvents(201.0, "no events for 61 s"),
    )
    shown = picture(state)
    for text in ("2 groups skipped", "3 reward calls failed", "1 update dropped", "for 61 s"):
        assert text in shown
    assert "careful" in shown and "\x1b" not in shown and "\u202e" not in shown
    assert "[red]no markup[/red]" in picture(state_after())
    # Rejected groups are not counted, but their errors are shown.
    state = state_after(scored(2, is_rejected=True, errors=["reward f failed"]))
    assert (state.num_groups, state.note) == (2, "reward f failed")


def test_lasting_note_is_wrapped_and_stays() -> None:
    text = "warning: " + "nothing " * 30 + "\nto see: easyrl samples RUN"
    shown = picture(state_after(Note(text, is_lasting=True), Note("a note")))
    assert shown.count("nothing") == 30 and "to see: easyrl samples RUN" in shown
    assert "a note" in shown and "completion 1" in shown


def test_fits_into_any_terminal() -> None:
    for width, height, num_rollout in itertools.product((1, 40, 80, 300), (1, 5, 24, 100), (1, 40)):
        state = state_after(num_rollout=num_rollout)
        shown = picture(state, width=width, height=height)
        if height >= 24 and width >= 80:
            assert "train-0" in shown and "iteration 2/4" in shown
        state.apply(events.RunEnded(1, "no more memory"))
        picture(state, width=width, height=height)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (events.EvaluationStarted(122.0, 10), "held-out problems 0/10"),
        (events.SavingModel(122.0), "saving the model, 2.0 s"),
        (events.RunEnded(0, ""), "finished after 1/4 iterations"),
        (events.RunEnded(1, "killed"), "ended after 1/4 iterations"),
    ],
)
def test_shows_what_the_run_does(event: Event, text: str) -> None:
    assert text in picture(state_after(event), now=124.0)


def test_resumed_run_shows_its_earlier_iterations() -> None:
    run = replace(run_started(), num_iterations=1, earlier=[METRICS], accuracies=[(1, 0.9)])
    shown = picture(state_of([run, events.RunEnded(1, "")]))
    assert "after 1/4" in shown and "reward 0.250" in shown and "accuracy 0.900" in shown


# Observers that fail.


class Fails:
    is_closed = False

    def __call__(self, event: Event) -> Note | None:
        if isinstance(event, events.NoEvents):
            raise KeyError("a bug")
        return None

    def close(self) -> None:
        self.is_closed = True


def test_observer_that_fails_is_replaced_with_one_note() -> None:
    received: list[Event] = []
    observer = Fails()
    guard = Guard(observer, fallback=received.append)  # type: ignore[arg-type]
    run, first, second = run_started(), events.NoEvents(1.0, ""), events.IterationStarted(2.0, 0)
    with pytest.raises(KeyError):  # before the run has started, the failure is the run's
        guard(first)
    assert guard(run) is None
    note = guard(first)
    assert note is not None and "KeyError: 'a bug'" in note.text and observer.is_closed
    assert guard(second) is None
    assert received == [run, first, second]


# Real terminals.


def grpo(folder: Path, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "easyrl", "grpo", "--output", str(folder), *SMALL, *words)


NOISY = """
import os
from easyrl import cli, events
from easyrl.observe import state as state_module

apply = state_module.RunState.apply

def noisy(state, event):
    apply(state, event)
    if isinstance(event, events.IterationStarted):
        print("from Python")
        os.write(2, b"from C")

state_module.RunState.apply = noisy
if __name__ == "__main__":
    cli.app()
"""


def test_terminal_is_restored_after_a_finished_run(tmp_path: Path) -> None:
    """The process prints other text meanwhile."""
    (tmp_path / "noisy.py").write_text(NOISY)
    folder = tmp_path / "run"
    words = grpo(folder, "--iterations", "2")[3:]
    terminal = Terminal(sys.executable, str(tmp_path / "noisy.py"), *words)
    assert terminal.end() == 0
    after = after_the_view(terminal.output)
    assert after.strip().count("\n") < 23  # with the shell's line on a screen of 24
    assert "finished after 2/2 iterations" in after and "next commands" in after
    log = (folder / "logs" / "controller.log").read_text()
    for text in ("from Python", "from C"):
        assert text in log and text not in terminal.output
