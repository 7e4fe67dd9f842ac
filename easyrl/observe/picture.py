"""The picture of a run: a pure function of its state, the time and the size of the terminal.

    header       iteration, time left, rates
    lanes        what each worker does, the ring between them
    curve        reward and held-out accuracy          (beside each other where there is room)
    sample       the newest completion, with its prompt and reward

Built from Rich's segments, a list of them per line: nothing is parsed as markup, for completions
are anybody's text, and a frame costs less than a millisecond or two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, chop_cells
from rich.segment import Segment, SegmentLines
from rich.style import Style

from easyrl.events import SpanKind
from easyrl.observe.curve import MARK, curve
from easyrl.observe.lanes import lane, legend, rewards_lane, slice_seconds
from easyrl.observe.run_state import RunState, WorkerState

Line = list[Segment]
PLAIN, DIM, BOLD = Style(), Style(dim=True), Style(bold=True)
GOOD, BAD, BAR = Style(color="green", bold=True), Style(color="red", bold=True), Style(color="blue")
KINDS: tuple[SpanKind, ...] = ("prefill", "generate", "score", "train", "weights", "wait")
LAG_SECONDS = 0.4
"""Workers tell a few times a second what they did: later than this it is known."""
MIN_WIDTH_OF_TWO = 120
"""From here on the curve and the sample stand beside each other."""
MAX_SAMPLE = 20_000
"""Characters of a completion that are looked at."""


def render(state: RunState, now: float, width: int, height: int) -> SegmentLines:
    """At most `height` lines of `width` cells each; `now` on the clock of the state's records."""
    if state.ended is not None:
        now = state.newest
    lines = _header(state, now, width)
    num_left = height - len(lines)
    if state.run is not None:
        lines += _lanes(state, now, width, max_lanes=max(2, num_left - 9))
        lines += _below(state, width, height - len(lines))
    lines = [Segment.adjust_line_length(line, width) for line in lines[:height]]
    return SegmentLines(lines, new_lines=True)


# -- header ---------------------------------------------------------------------------------------


def _header(state: RunState, now: float, width: int) -> list[Line]:
    run = state.run
    if run is None:
        return [[Segment("EasyRL", BOLD)]]
    config = run.config
    elapsed = f" {clock(now - run.started)}"
    what = f"  {printable(config.model.path)} on {printable(config.data.dataset)}"
    devices = ", ".join(dict.fromkeys(worker.device for worker in state.workers.values()))
    what += f" · {state.num_devices} devices ({devices})"
    title = Segment.adjust_line_length(
        [Segment("EasyRL", BOLD), Segment(what)], max(0, width - len(elapsed))
    )
    return [
        [*title, Segment(elapsed, DIM)],
        _progress(state, now, width),
        *_flow(_rates(state, now), width),
    ]


def _progress(state: RunState, now: float, width: int) -> Line:
    """What the run is at, how far it is, and how long it will take."""
    assert state.run is not None
    num_iterations = state.run.config.train.iterations
    done, total, right = len(state.rewards), num_iterations, ""
    style = BOLD
    if state.ended is not None:
        is_finished = state.ended.exit_code == 0
        text = "finished" if is_finished else "ended"
        text += f" after {done}/{total} iterations"
        style = GOOD if is_finished else BAD
    elif state.evaluation is not None:
        evaluation = state.evaluation
        done, total = evaluation.num_answered, evaluation.num_prompts
        when = "before" if evaluation.round == 0 else "after"
        text = f"held-out problems {when} training {done}/{total}"
    elif state.saving_since is not None:
        text = f"saving the model, {now - state.saving_since:.1f} s"
    elif state.is_starting:
        text = "starting the workers"
    elif state.iteration is not None:
        num_prompts = state.run.config.train.prompts_per_iteration
        text = f"iteration {state.iteration + 1}/{total}"
        left = state.seconds_left(now)
        right = f"ETA {clock(left)}" if left is not None else "ETA -:--"
        if width >= 60:
            text += f"  groups {state.num_groups}/{num_prompts}"
    else:
        text = f"iteration {min(done + 1, total)}/{total}"
    room = width - cell_len(text) - len(right) - 3
    return [Segment(text + " ", style), *_bar(done, total, room), Segment(f" {right}", BOLD)]


def _bar(done: float, total: float, width: int) -> Line:
    full = round(max(0, width) * min(1.0, max(0.0, done / max(total, 1))))
    return [Segment("━" * full, BAR), Segment("─" * (width - full), DIM)]


def _rates(state: RunState, now: float) -> list[Line]:
    if state.ended is not None:
        return []
    until = now - LAG_SECONDS
    generated = state.tokens_generated_per_second(until)
    trained = state.tokens_trained_per_second(until)
    per_device = state.tokens_per_second / max(1, state.num_devices)
    items = [
        [Segment("generated "), Segment(f"{generated:,.0f}", BOLD), Segment(" tokens/s")],
        [Segment("trained "), Segment(f"{trained:,.0f}", BOLD), Segment(" tokens/s")],
    ]
    if state.rewards:
        items.append([Segment("per device "), Segment(f"{per_device:,.0f}", BOLD)])
    if state.overlap is not None:
        items.append([Segment("overlap "), Segment(f"{state.overlap:.0%}", BOLD)])
    return items


# -- lanes ----------------------------------------------------------------------------------------


def _lanes(state: RunState, now: float, width: int, max_lanes: int) -> list[Line]:
    until = now if state.ended is not None else now - LAG_SECONDS
    workers = _workers_shown(list(state.workers.values()), max_lanes)
    is_wide = width >= 60
    shown = [worker for worker in workers if worker is not None]
    labels = {w.name: printable(f"{w.name} {w.device}" if is_wide else w.name) for w in shown}
    label_width = max(cell_len(label) for label in labels.values()) + 1
    rate_width = 10 if is_wide else 0
    num_slices = max(1, width - label_width - rate_width)
    seconds = slice_seconds(num_slices, state.mean_iteration_seconds)
    has_rewards_lanes = max_lanes >= len(shown) + sum(w.is_rollout for w in shown)
    lines = [_rule(f"the last {num_slices * seconds:.0f} s", width)]
    for worker in workers:
        if worker is None:
            lines.append([Segment(f"and {len(state.workers) - len(shown)} more", DIM)])
            continue
        label = Segment(f"{labels[worker.name]:<{label_width}}")
        if state.is_starting:
            lines.append([label, *_start_up(worker, now)])
            continue
        rate = f"{worker.tokens_per_second(until):,.0f}/s" if is_wide else ""
        cells = lane(worker, until, num_slices, seconds)
        lines.append([label, *cells, Segment(f"{rate:>{rate_width}}", BOLD)])
        if has_rewards_lanes and worker.is_rollout:
            label = Segment(f"{'  its rewards':<{label_width}}"[:label_width], DIM)
            lines.append([label, *rewards_lane(worker, until, num_slices, seconds)])
    if state.is_starting:
        return lines
    return [*lines, *_flow(legend(KINDS), width, gap=2), _ring(state, width)]


def _workers_shown(workers: list[WorkerState], max_lanes: int) -> list[WorkerState | None]:
    """All, or as many as there is room for, the last one (which trains) among them; None stands
    for those left out."""
    if len(workers) <= max_lanes:
        return list(workers)
    return [*workers[: max(0, max_lanes - 2)], None, workers[-1]]


def _start_up(worker: WorkerState, now: float) -> Line:
    if not worker.phase:
        seconds = sum(seconds for _, seconds in worker.past_phases)
        return [Segment("ready", GOOD), Segment(f" after {seconds:.1f} s", DIM)]
    before = "".join(f"  {name} {seconds:.1f} s" for name, seconds in worker.past_phases)
    text = f"{printable(worker.phase)}, {now - worker.phase_started:.1f} s"
    return [Segment(text, BOLD), Segment(printable(before), DIM)]


def _ring(state: RunState, width: int) -> Line:
    assert state.run is not None
    num_slots = state.run.num_slots
    text = f" {state.num_in_ring} of {num_slots} groups"
    return [
        Segment("ring "),
        *_bar(state.num_in_ring, num_slots, min(40, width - 24)),
        Segment(text),
    ]


# -- curve and sample -----------------------------------------------------------------------------


def _below(state: RunState, width: int, height: int) -> list[Line]:
    if height < 3:
        return []
    if width >= MIN_WIDTH_OF_TWO:
        left = (width - 2) // 2
        return _beside(_curve(state, left, height), _sample(state, width - 2 - left, height), left)
    curve_height = max(2, min(height // 2, 10))
    lines = _curve(state, width, curve_height)
    return lines + _sample(state, width, height - len(lines))


def _beside(left: list[Line], right: list[Line], left_width: int) -> list[Line]:
    height = max(len(left), len(right))
    left = left + [[] for _ in range(height - len(left))]
    right = right + [[] for _ in range(height - len(right))]
    return [
        [*Segment.adjust_line_length(a, left_width), Segment("  "), *b]
        for a, b in zip(left, right, strict=True)
    ]


def _curve(state: RunState, width: int, height: int) -> list[Line]:
    assert state.run is not None
    if not state.rewards and not state.accuracies:
        return [_rule("reward", width)]
    title = f"reward {state.rewards[-1]:.3f}" if state.rewards else "reward"
    lines = [_rule(title, width)]
    if state.accuracies:
        accuracies = " -> ".join(f"{accuracy:.3f}" for _, accuracy in state.accuracies[-3:])
        lines = [_rule(f"{title}  {MARK} held-out accuracy {accuracies}", width)]
    return lines + curve(
        state.rewards,
        state.accuracies,
        num_planned=state.run.config.train.iterations,
        width=width,
        height=max(1, height - 1),
    )


def _sample(state: RunState, width: int, height: int) -> list[Line]:
    """The newest completion: its beginning and, where not all fits, its end."""
    if height < 2 or state.sample is None:
        return []
    sample = state.sample
    title = f"iteration {sample['iteration'] + 1}, reward {sample['reward']:.3g}"
    prompt = _folded(str(sample["prompt"]), width)
    completion = _folded(str(sample["completion"]), width)
    num_prompt = min(len(prompt), max(1, (height - 1) // 3))
    return [
        _rule(title, width),
        *([Segment(text, DIM)] for text in _shortened(prompt, num_prompt)),
        *([Segment(text)] for text in _shortened(completion, height - 1 - num_prompt)),
    ]


def _folded(text: str, width: int) -> list[str]:
    if len(text) > MAX_SAMPLE:
        text = text[: MAX_SAMPLE // 2] + "\n⋯\n" + text[-MAX_SAMPLE // 2 :]
    lines = [printable(line.expandtabs(4)) for line in text.splitlines()]
    return [part for line in lines for part in chop_cells(line, max(1, width)) or [""]]


def _shortened(lines: Sequence[str], height: int) -> list[str]:
    if len(lines) <= height:
        return list(lines)
    if height < 3:
        return list(lines[:height])
    num_last = (height - 1) // 2
    return [*lines[: height - 1 - num_last], "⋯", *lines[-num_last:]]


# -- lines ----------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Without what could move the cursor, change colours, or turn the direction of writing."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _rule(title: str, width: int) -> Line:
    return [
        Segment("── ", DIM),
        Segment(title, BOLD),
        Segment(" " + "─" * max(0, width - cell_len(title) - 4), DIM),
    ]


def _flow(items: Iterable[Line], width: int, gap: int = 3) -> list[Line]:
    """The items one after another, on as many lines as they take."""
    lines: list[Line] = []
    for item in items:
        length = Segment.get_line_length(item)
        if lines and Segment.get_line_length(lines[-1]) + gap + length <= width:
            lines[-1] += [Segment(" " * gap), *item]
        else:
            lines.append(list(item))
    return lines
