"""What the steps have shown: kept as JSON after each of them, merged, and shown as a table."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "ended", "skipped"]
Figures = dict[str, Any]
"""By name. A curve is a list of numbers."""
MAX_POINTS = 8
"""A curve is shown by so many of its points."""


@dataclass(frozen=True)
class StepResult:
    part: int
    name: str
    status: Status
    """`ended`: at its time limit; its figures are those until then."""
    seconds: float = 0.0
    reason: str = ""
    """Why it was skipped or ended, or the last line that it printed when it failed."""
    figures: Figures = field(default_factory=dict)


@dataclass
class Results:
    machine: dict[str, Any]
    """Names and values: the device, and versions."""
    is_rehearsal: bool
    steps: dict[str, StepResult] = field(default_factory=dict)  # by name

    def add(self, step: StepResult) -> None:
        """Add a step. It replaces an earlier one, unless it was skipped."""
        if step.status != "skipped" or step.name not in self.steps:
            self.steps[step.name] = step

    def write(self, folder: Path) -> None:
        """Write `results.json` and `table.md`."""
        text = json.dumps(asdict(self), indent=1)
        temporary = folder / "results.json.new"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / "results.json")  # whoever is killed meanwhile leaves the old one
        (folder / "table.md").write_text("\n".join(table(self)) + "\n", encoding="utf-8")


def read_results(file: Path) -> Results:
    """Read a `results.json`."""
    found = json.loads(file.read_text(encoding="utf-8"))
    steps = {name: StepResult(**step) for name, step in found["steps"].items()}
    return Results(found["machine"], found["is_rehearsal"], steps)


def merge(every: Iterable[Results]) -> Results:
    """Merge the results of several calls on one kind of machine; of a step the newest counts.
    Raises ValueError for results of different machines, and of rehearsals and real calls."""
    first, *others = every
    merged = Results(first.machine, first.is_rehearsal, dict(first.steps))
    for other in others:
        if (other.machine, other.is_rehearsal) != (first.machine, first.is_rehearsal):
            raise ValueError(
                f"expected results of one machine, got {first.machine} and {other.machine}"
            )
        for step in other.steps.values():
            merged.add(step)
    return merged


def table(results: Results) -> Iterator[str]:
    """Yield the lines of a Markdown table, by part."""
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    kind = "A rehearsal on" if results.is_rehearsal else "On"
    yield f"{kind} {machine}."
    yield ""
    yield "| part | step | result | seconds | figures |"
    yield "|---|---|---|---|---|"
    for step in sorted(results.steps.values(), key=lambda step: step.part):
        result = f"{step.status}: {step.reason}" if step.reason else step.status
        figures = "; ".join(shown_figures(step.figures))
        cells = (str(step.part), step.name, one_line(result), f"{step.seconds:.0f}", figures)
        yield f"| {' | '.join(cells)} |"


def shown_figures(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield texts like "accuracy 0.34 → 0.49"."""
    for name, value in figures.items():
        yield f"{name.replace('_', ' ')} {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > MAX_POINTS:
        step = (len(value) - 1) / (MAX_POINTS - 1)
        value = [value[round(step * point)] for point in range(MAX_POINTS)]
    if isinstance(value, list):
        return " → ".join(map(_shown, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return one_line(str(value))


def one_line(text: str) -> str:
    """Return a text as it may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "/")
