"""`easyrl samples RUN`: prompts and completions with their rewards, through a pager.

For runs, finished or not, and for evaluations. The file is read as the pager asks for more.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from easyrl.formatting import counted
from easyrl.observe.text import printable, safe, shown
from easyrl.observe.watch import GrowingFile

SAMPLES = "samples.jsonl"
MAX_TEXT = 1_000_000  # characters of a prompt or completion
Line = Mapping[str, Any]


def show_samples(
    folder: Path,
    min_reward: float | None,
    max_reward: float | None,
    iteration: str | None,
    limit: int | None,
) -> None:
    """Page through the samples of a folder. Raises ValueError if there are none of this kind.

    `iteration`: `3` or `3-5`, counted from 1.
    """
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", iteration or "0")
    oldest, newest = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
    if iteration is not None and not 1 <= oldest <= newest:
        raise ValueError(
            f"--iteration: expected a number from 1, or a range like 3-5, got '{iteration}'"
        )
    file = folder / SAMPLES
    if not file.is_file():
        raise ValueError(
            f"'{folder}': expected the folder of an `easyrl grpo` or `easyrl eval`, with {SAMPLES}"
        )

    def is_wanted(line: Line) -> bool:
        reward = math.nan if line["reward"] is None else line["reward"]
        return (
            (min_reward is None or reward >= min_reward)
            and (max_reward is None or reward <= max_reward)
            and (iteration is None or oldest <= line.get("iteration", -1) + 1 <= newest)
        )

    lines = filter(is_wanted, GrowingFile(file).read())
    first = next(lines, None)
    if first is None:
        raise ValueError(
            f"'{file}' has no such sample yet; try again later, or change --min-reward, "
            "--max-reward or --iteration"
        )
    texts = _texts(islice(chain([first], lines), limit))
    words = shlex.split(os.environ.get("PAGER") or "less")
    if sys.stdout.isatty() and shutil.which(words[0]) is not None:
        _page(texts, words)
    else:
        sys.stdout.writelines(texts)
        sys.stdout.flush()


def _page(texts: Iterator[str], words: list[str]) -> None:
    environment = {"LESS": "-FRX", **os.environ}  # colours; a single page is just printed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager
    pager = subprocess.Popen(
        words, stdin=subprocess.PIPE, text=True, errors="replace", env=environment
    )
    with contextlib.suppress(BrokenPipeError), pager:  # it may be left early
        assert pager.stdin is not None
        pager.stdin.writelines(texts)


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
    parts.append(f"reward {shown(line['reward'], '.3g')}")
    if "advantage" in line:
        parts.append(f"advantage {shown(line['advantage'], '+.3f')}")
    if "answer" in line:
        parts.append(f"answer {printable(str(line['answer']))[:40]}")
    if "length" in line:
        truncated = ", truncated" if line.get("truncated") else ""
        parts.append(f"{counted(line['length'], 'token')}{truncated}")
    return "  ".join(parts)
