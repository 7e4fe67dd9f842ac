"""Put results of `make first-gpu` into the table of the README and into docs/devices.md.

    python -m benchmarks.first_gpu.hardware_table build/first-gpu/results.json [MORE.json]

Results of several calls on one machine are merged. In the README's table *What has run where* the
row of this device and these versions is replaced, or a new one follows the last one of its kind.
`--root FOLDER`: of the two files; rehearsals are only written to copies.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.first_gpu.commands import ROOT
from benchmarks.first_gpu.results import Results, StepResult, merge, read_results, table

HEADING = "| hardware | what has run |"
FIRST_CELL_OF_OTHERS = "| several GPUs"
"""The row before which a new one is put."""
START = "<!-- first-gpu: written by benchmarks/first_gpu/hardware_table.py -->"
END = "<!-- first-gpu: end -->"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    results = merge(map(read_results, options.results))
    if results.is_rehearsal and options.root.resolve() == ROOT:
        sys.exit("hardware_table: expected results of a device, got those of a rehearsal")
    readme = options.root / "README.md"
    devices = options.root / "docs" / "devices.md"
    readme.write_text(with_row(readme.read_text(), results))
    devices.write_text(with_table(devices.read_text(), results))


def with_row(readme: str, results: Results) -> str:
    """Return the README's text with a row for these results."""
    label = label_of(results)
    row = f"| {label} | {summary_of(results)} |"
    lines = readme.splitlines()
    first = lines.index(HEADING)
    for number in range(first, len(lines)):
        if lines[number].startswith(f"| {label} |"):
            lines[number] = row
            break
        if lines[number].startswith(FIRST_CELL_OF_OTHERS):
            lines.insert(number, row)
            break
    else:
        raise ValueError(f"README.md: expected a row '{FIRST_CELL_OF_OTHERS}' in the table")
    return "\n".join(lines) + "\n"


def with_table(page: str, results: Results) -> str:
    """Return the page's text with the table of these results between its two marks."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"docs/devices.md: expected the lines '{START}' and '{END}'")
    return "\n".join([before + start, "", *table(results), "", end + after])


def label_of(results: Results) -> str:
    """Return a text like "one NVIDIA H200 (torch 2.11, transformers 5.17, Python 3.12)"."""
    versions = []
    for name in ("torch", "transformers", "Python"):
        short = ".".join(results.machine[name].split(".")[:2])
        versions.append(f"{name} {short}")
    return f"one {results.machine['device']} ({', '.join(versions)})"


def summary_of(results: Results) -> str:
    """Return what has run, as text of a cell."""
    texts = []
    others = []  # names of the steps that have shown nothing
    for step in results.steps.values():
        text = _text_of(step)
        if text:
            texts.append(text)
        else:
            others.append(step.name)
    if others:
        texts.append(f"not run: {', '.join(others)}")
    version = results.machine["EasyRL"]
    return f"`make first-gpu`, version {version}: {'; '.join(texts)}"


def _text_of(step: StepResult) -> str:
    """Return what a step has shown; empty if that is nothing."""
    shown = ", ".join(_shown(step))
    if step.status == "failed":
        return f"**{step.name} failed**" + (f" ({shown})" if shown else "")
    if not shown:
        return ""
    ended = " (ended at its time limit)" if step.status == "ended" else ""
    return f"{step.name}: {shown}{ended}"


def _shown(step: StepResult) -> Iterator[str]:
    """Yield the figures that the README has; the rest is in docs/devices.md."""
    figures = step.figures
    accuracies = figures.get("held_out_accuracy", [])
    if len(accuracies) > 1:
        yield (
            f"held-out accuracy {accuracies[0]:.2f} → {accuracies[-1]:.2f} "
            f"(± {figures['standard_error']:.2f}) in {figures['iterations']} iterations"
        )
    if "gap_mean" in figures and step.part == 2:
        yield f"engine and trainer differ by {figures['gap_mean']:.1e} on average"
    if "same_bits_as_sync" in figures:
        same = figures["same_bits_as_sync"]
        yield "the bits of sync" if same else "**other bits than sync**"
    if step.name == "self-test":
        for part, outcome in figures.items():
            yield part if outcome == "passed" else f"**{part} failed**"
    if step.part == 3 and "tokens_per_second" in figures:
        yield f"{figures['tokens_per_second']:,.0f} tokens/s"
        if "mfu" in figures:
            yield f"MFU {figures['mfu']:.0%}"
        yield f"both sides busy {figures['both_busy']:.0%} of the time"
    if "gigabytes_per_second" in figures:
        yield f"{figures['gigabytes_per_second']:.0f} GB/s"
    if "ratio" in figures:
        yield f"{figures['ratio']:.1f} times the speed of {figures['peer']}"
    if "passed" in figures and step.part == 5:
        for outcome in ("passed", "failed", "skipped"):
            if outcome in figures:
                yield f"{figures[outcome]} tests {outcome}"


if __name__ == "__main__":
    main(sys.argv[1:])
