"""`easyrl samples RUN`: prompts and completions with their rewards, of a run or an evaluation."""

import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.text import Text

from easyrl.events import JUDGE_REPLIES
from easyrl.formatting import ConfigError, counted, printable, shorten
from easyrl.observe.run_files import GrowingFile
from easyrl.observe.text import is_discarded, safe, say_rich, shown
from easyrl.runtime.run_folder import PICTURES, from_1

SAMPLES = "samples.jsonl"
MAX_TEXT = 1_000_000  # characters of a prompt or completion
MAX_VALUE = 40  # characters of another column
Line = Mapping[str, Any]  # of samples.jsonl
PICTURE_NAME = re.compile(rf"{PICTURES}/[0-9a-f]+\.jpg")
ONLY_IF_SET = ("truncated", "inserted_tokens")
"""Columns that are not shown if they are false or 0."""
LEFT_OUT = {
    "prompt",
    "completion",
    "pictures",
    "entry",
    "problem",
    "rewards",
    "branches",
    "raw",
    "messages",
    "column/messages",
    JUDGE_REPLIES,
}
"""Columns that are shown in another way, or are too long."""


def show_samples(
    folder: Path,
    min_reward: float | None,
    max_reward: float | None,
    iteration: str | None,
    limit: int | None,
    *,
    is_raw: bool = False,
) -> None:
    """Print the samples of a folder. Raises ConfigError if there are none of this kind.

    `iteration`: `3` or `3-5`, counted from 1. `limit`: print only the last ones. `is_raw`: print
    the texts as the model sees them.
    """
    iterations = None if iteration is None else _parse_iterations(iteration)
    file = folder / SAMPLES
    if not file.is_file():
        raise ConfigError(f"'{folder}': expected the folder of a run or evaluation, with {SAMPLES}")

    def is_wanted(line: Line) -> bool:
        # A comparison with NaN is false.
        reward = math.nan if line["reward"] is None else line["reward"]
        if min_reward is not None and not reward >= min_reward:
            return False
        if max_reward is not None and not reward <= max_reward:
            return False
        return iterations is None or line.get("iteration", 0) in iterations

    lines = from_1(folder, GrowingFile(file).read())
    wanted: Iterable[tuple[Line, int]] = folded(filter(is_wanted, lines))
    if limit:
        wanted = deque(wanted, limit)
    before: Any = None  # prompt of the sample before
    for line, count in wanted:
        if is_discarded():
            return
        title = columns_of(line, MAX_VALUE)
        if count > 1:
            title.append(f"x{count}")
        say_rich(Text("  ".join(title), style="bold"))
        prompt, completion = line["raw"] if is_raw else (line["prompt"], line["completion"])
        if _prompt_of(line) != before:
            _print_text(prompt, style="dim")
            about = about_pictures(folder, line)
            if about:
                _print_text(about, style="dim")
        _print_text(completion)
        for text in (*replies_of(line), *branches_of(line)):
            _print_text(text, style="dim")
        before = _prompt_of(line)
    if before is None:
        raise ConfigError(f"no such sample in '{file}' (--min-reward, --max-reward, --iteration)")


def _print_text(text: Any, style: str = "") -> None:
    """Print a text of any origin, and an empty line."""
    printed = safe(str(text), MAX_TEXT)
    say_rich(Text(f"{printed}\n", style))


def _parse_iterations(text: str) -> range:
    """Parse `3` or `3-5`. Raises ConfigError."""
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if numbers:
        oldest = int(numbers[1])
        newest = int(numbers[2] or numbers[1])
        if 1 <= oldest <= newest:
            return range(oldest, newest + 1)
    raise ConfigError(f"--iteration: expected a number from 1, or as 3-5, got '{text}'")


def picture_files(folder: Path, line: Line) -> list[Path]:
    """Return the files of the small pictures that belong to a sample's prompt."""
    files = []
    for name in line.get("pictures", ()):
        if PICTURE_NAME.fullmatch(str(name)):  # anything may stand in a file that was copied here
            files.append(folder / name)
    return files


def about_pictures(folder: Path, line: Line) -> str:
    """Return a line with the pictures of a sample's prompt; empty without any."""
    files = picture_files(folder, line)
    if not files:
        return ""
    paths = ", ".join(map(str, files))
    return f"{counted(len(files), 'picture')}: {paths}"


def replies_of(line: Line) -> list[str]:
    """Return what the judge wrote about the sample, each reply behind its score."""
    texts = []
    for judged in line.get(JUDGE_REPLIES) or ():
        texts.append(f"judge {judged['score']:.3g}: {judged['reply']}")
    return texts


def branches_of(line: Line) -> list[str]:
    """Return an agent's other conversations as texts, each from where it leaves the shown one."""
    shown_chat = line.get("messages", ())
    texts = []
    for number, chat in enumerate(line.get("branches", ()), 1):
        num_common = 0
        for message, other in zip(chat, shown_chat, strict=False):
            if message != other:
                break
            num_common += 1
        lines = [f"branch {number} from message {num_common + 1}"]
        for message in chat[num_common:]:
            lines.append(f"{message['role']}: {message['content'] or ''}")
        texts.append("\n".join(lines))
    return texts


def _prompt_of(line: Line) -> tuple[Any, Any]:
    """Return what samples of one prompt have in common."""
    return line.get("iteration"), line.get("prompt_index")


def folded(lines: Iterable[Line]) -> Iterator[tuple[Line, int]]:
    """Yield the different samples of each prompt, with how often each is there."""
    for _, group in groupby(lines, _prompt_of):
        firsts: dict[str, Line] = {}
        counts: Counter[str] = Counter()
        for line in group:
            content = _content_of(line)
            firsts.setdefault(content, line)
            counts[content] += 1
        for content, line in firsts.items():
            yield line, counts[content]


def _content_of(line: Line) -> str:
    """Return what two samples have in common if they are equal: all but their number."""
    values = [(name, value) for name, value in line.items() if name != "sample"]
    return str(sorted(values))


def columns_of(line: Line, max_length: int) -> list[str]:
    """Return names with values of all columns but the texts, as in `reward 0.5`. Samples count from
    1. The rewards of several functions follow, unless a column has such a name."""
    values = dict(line)
    functions = line.get("rewards", {})
    if len(functions) > 1:
        for name, reward in functions.items():
            values.setdefault(name, reward)
    columns = []
    for name, value in values.items():
        if name in LEFT_OUT or (name in ONLY_IF_SET and not value):
            continue
        if name == "sample":
            text = str(value + 1)
        elif value is None or isinstance(value, float):
            text = shown(value, ".3g")
        else:
            text = str(value)
        text = shorten(text, max_length)
        columns.append(printable(f"{name} {text}"))
    return columns
