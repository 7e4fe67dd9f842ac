"""`easyrl samples RUN`: prompts and completions with their rewards, through a pager.

For runs, finished or not, and for evaluations. The file is read as the pager asks for more.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import NoneType
from typing import Any

from rich.console import Console
from rich.text import Text

from easyrl.formatting import counted
from easyrl.observe.text import printable, safe
from easyrl.observe.watch import GrowingFile

SAMPLES = "samples.jsonl"
MAX_TEXT = 1_000_000
"""Characters of a prompt or completion."""
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which samples to show; None: all."""

    min_reward: float | None = None
    max_reward: float | None = None
    iterations: tuple[int, int] | None = None
    """The first and the last, counted from 1."""
    limit: int | None = None

    def takes(self, line: Line) -> bool:
        reward = line["reward"]
        if self.min_reward is not None and (reward is None or reward < self.min_reward):
            return False
        if self.max_reward is not None and (reward is None or reward > self.max_reward):
            return False
        if self.iterations is None:
            return True
        first, last = self.iterations
        return "iteration" in line and first <= line["iteration"] + 1 <= last


def parse_iterations(text: str) -> tuple[int, int]:
    """Parse `3` or `3-5`. Raises ValueError for anything else."""
    first, dash, last = text.partition("-")
    with contextlib.suppress(ValueError):
        numbers = int(first), int(last if dash else first)
        if 1 <= numbers[0] <= numbers[1]:
            return numbers
    raise ValueError(f"--iteration: expected a number from 1, or a range like 3-5, got '{text}'")


def show_samples(folder: Path, wanted: Wanted) -> None:
    """Page through the samples of a folder. Raises ValueError if there are none of this kind."""
    lines = _samples(folder)
    found = islice((line for line in lines if wanted.takes(line)), wanted.limit)
    first = next(found, None)
    if first is None:
        raise ValueError(
            f"'{folder / SAMPLES}': no sample is selected; change --min-reward, --max-reward or "
            "--iteration"
        )
    texts = _texts(chain([first], found))
    words = shlex.split(os.environ.get("PAGER") or "less")
    if sys.stdout.isatty() and shutil.which(words[0]) is not None:
        _page(texts, words)
    else:
        sys.stdout.writelines(texts)
        sys.stdout.flush()


def _page(texts: Iterator[str], words: list[str]) -> None:
    environment = {"LESS": "-FRX", **os.environ}  # colours; a single page is just printed
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager
    try:
        pager = subprocess.Popen(
            words, stdin=subprocess.PIPE, text=True, errors="replace", env=environment
        )
        with contextlib.suppress(BrokenPipeError), pager:  # it may be left early
            assert pager.stdin is not None
            pager.stdin.writelines(texts)
    finally:
        signal.signal(signal.SIGINT, before)


def _samples(folder: Path) -> Iterator[Line]:
    file = folder / SAMPLES
    if not file.is_file():
        what = f"has no {SAMPLES}" if folder.is_dir() else "is no folder"
        raise ValueError(
            f"'{folder}' {what}; expected the folder of an `easyrl grpo` or `easyrl eval`"
        )
    # Other lines are skipped: two halves of a line can meet after the disk was full.
    lines = filter(_is_sample, GrowingFile(file).read())
    first = next(lines, None)
    if first is None:
        raise ValueError(f"'{file}' has no samples yet; try again later")
    return chain([first], lines)


def _is_sample(line: object) -> bool:
    if not isinstance(line, dict) or not line.keys() >= {"prompt_index", "prompt", "completion"}:
        return False
    return isinstance(line.get("reward", ""), (int, float, NoneType))


def _texts(lines: Iterator[Line]) -> Iterator[str]:
    """For each line a title, the prompt unless it is the previous one's, and the completion."""
    console = Console(highlight=False)
    before: Any = None
    num_samples = 0
    for line in lines:
        num_samples += 1
        prompt = line.get("iteration"), line["prompt_index"]
        with console.capture() as capture:
            console.rule(Text(_title(line), style="bold"), align="left", style="dim")
            if prompt != before:
                console.print(Text(safe(str(line["prompt"]), MAX_TEXT), style="dim"), end="\n\n")
            console.print(Text(safe(str(line["completion"]), MAX_TEXT)), end="\n\n")
        before = prompt
        yield capture.get()
    yield counted(num_samples, "sample") + "\n"


def _title(line: Line) -> str:
    parts = [f"iteration {line['iteration'] + 1}"] if "iteration" in line else []
    parts.append(f"prompt {line['prompt_index']}")
    if "sample" in line:
        parts.append(f"sample {line['sample'] + 1}")
    parts.append("reward none" if line["reward"] is None else f"reward {line['reward']:.3g}")
    if "advantage" in line:
        advantage = line["advantage"]
        parts.append("advantage none" if advantage is None else f"advantage {advantage:+.3f}")
    if "answer" in line:
        parts.append(f"answer {printable(str(line['answer']))[:40]}")
    if "length" in line:
        truncated = ", truncated" if line.get("truncated") else ""
        parts.append(f"{counted(line['length'], 'token')}{truncated}")
    return "  ".join(parts)
