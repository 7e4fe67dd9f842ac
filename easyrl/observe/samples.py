"""`easyrl samples RUN`: prompts and completions with their rewards, of a run or an evaluation."""

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, groupby
from operator import eq
from pathlib import Path
from typing import Any

from rich.text import Text

from easyrl.formatting import ConfigError, printable, shorten
from easyrl.observe.run_files import GrowingFile
from easyrl.observe.text import safe, say_rich
from easyrl.runtime.run_folder import from_1

SAMPLES = "samples.jsonl"
MAX_TEXT = 1_000_000  # characters of a prompt or completion
MAX_VALUE = 40  # characters of another column
Line = Mapping[str, Any]
MESSAGES = ("messages", "column/messages")
ONLY_IF_SET = ("truncated", "inserted_tokens")  # shown unless false or 0
LEFT_OUT = ("prompt", "completion", "entry", "problem", "rewards", "branches", "raw", *MESSAGES)


def show_samples(
    folder: Path,
    min_reward: float | None,
    max_reward: float | None,
    iteration: str | None,
    limit: int | None,
    *,
    is_raw: bool = False,
) -> None:
    """Print the samples of a folder. `iteration`: `3` or `3-5`, counted from 1; `is_raw`: as the
    model sees them. Raises ConfigError if there are none of this kind."""
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", iteration or "")
    oldest, newest = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
    if iteration is not None and not 1 <= oldest <= newest:
        raise ConfigError(f"--iteration: expected a number from 1, or as 3-5, got '{iteration}'")
    file = folder / SAMPLES
    if not file.is_file():
        raise ConfigError(f"'{folder}': expected the folder of a run or evaluation, with {SAMPLES}")

    def is_wanted(line: Line) -> bool:
        reward = math.nan if line["reward"] is None else line["reward"]
        return (
            (min_reward is None or reward >= min_reward)
            and (max_reward is None or reward <= max_reward)
            and (iteration is None or oldest <= line.get("iteration", 0) <= newest)
        )

    before: Any = None
    wanted = folded(filter(is_wanted, from_1(folder, GrowingFile(file).read())))
    for line, count in deque(wanted, limit) if limit else wanted:
        prompt = _prompt(line)
        texts = line["raw"] if is_raw else (line["prompt"], line["completion"])
        title = [*columns_of(line, MAX_VALUE), *([f"x{count}"] if count > 1 else ())]
        say_rich(Text("  ".join(title), style="bold"))
        if prompt != before:
            say_rich(Text(safe(str(texts[0]), MAX_TEXT) + "\n", style="dim"))
        say_rich(Text(safe(str(texts[1]), MAX_TEXT) + "\n"))
        for text in branches_of(line):
            say_rich(Text(safe(f"{text}\n", MAX_TEXT), style="dim"))
        before = prompt
    if before is None:
        raise ConfigError(f"no such sample in '{file}' (--min-reward, --max-reward, --iteration)")


def branches_of(line: Line) -> list[str]:
    """Return an agent's other conversations as texts, each from where it leaves the shown one."""
    texts = []
    for number, chat in enumerate(line.get("branches", ()), 1):
        common = sum(accumulate(map(eq, chat, line.get("messages", ())), min))
        own = (f"{each['role']}: {each['content'] or ''}" for each in chat[common:])
        texts.append("\n".join([f"branch {number} from message {common + 1}", *own]))
    return texts


def _prompt(line: Line) -> tuple[Any, Any]:
    return line.get("iteration"), line.get("prompt_index")


def folded(lines: Iterable[Line]) -> Iterator[tuple[Line, int]]:
    """Yield each line with the number of its prompt's equal ones, but for the sample's number."""
    for _, group in groupby(lines, _prompt):
        folded: dict[str, tuple[Line, int]] = {}
        for line in group:
            key = str(sorted((name, value) for name, value in line.items() if name != "sample"))
            first, count = folded.get(key, (line, 0))
            folded[key] = first, count + 1
        yield from folded.values()


def columns_of(line: Line, max_length: int) -> list[str]:
    """Names with values of all columns but the texts. Samples count from 1."""
    functions = line.get("rewards", {})
    columns = []
    for name, value in {**line, **(functions if len(functions) > 1 else {}), **line}.items():
        shown = value + 1 if name == "sample" else value
        text = f"{shown:.3g}" if isinstance(shown, float) else str(shown)
        if name not in LEFT_OUT and (name not in ONLY_IF_SET or value):
            columns.append(printable(f"{name} {shorten(text, max_length)}"))
    return columns
