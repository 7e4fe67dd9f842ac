"""Run a suite, print its table and write JSON; whole runs, and prompts and models for them."""

import json
import platform
import random
import re
import signal
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoProcessor
from transformers.utils import logging

from easyrl import events
from easyrl.config import load_config
from easyrl.data.chat import render_prompt
from easyrl.data.hub import resolve_model
from easyrl.data.picture_sums import PICTURE_SUMS
from easyrl.model.files import load_tokenizer
from easyrl.processes import num_cores
from easyrl.runtime.run import run
from easyrl.runtime.supervisor import SIGNALLED, Interrupted, WorkerFailure
from easyrl.types import Messages

T = TypeVar("T")
Row = dict[str, Any]  # figures by name

QWEN3_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def run_suite(name: str, suite: Iterable[Row], json_file: Path | None) -> int:
    """Run the suite, print its table and write it as JSON; return the exit code. If the suite fails
    or is interrupted, the rows before are printed and written."""
    rows: list[Row] = []
    code = 0
    try:
        for row in suite:
            rows.append(row)
    except KeyboardInterrupt as error:
        code = SIGNALLED + int(getattr(error, "signum", signal.SIGINT))
    except WorkerFailure as failure:
        print(f"easyrl: {failure}", file=sys.stderr)
        code = 1
    if not rows:
        return code
    machine = _describe_machine()
    print(f"easyrl bench {name}: {machine['cpu']}, {machine['cores']} cores")
    _print_table(rows)
    if json_file is not None:
        results: Any = rows
        if all("row" in row for row in rows):  # rows that have a name are found by it
            results = {row["row"]: row for row in rows}
        found = {"suite": name, "machine": machine, "results": results}
        json_file.write_text(json.dumps(found, indent=2), encoding="utf-8")
    return code


def _describe_machine() -> dict[str, Any]:
    cpu_info = Path("/proc/cpuinfo").read_text(errors="replace")
    model = re.search(r"model name\s*:\s*(.+)", cpu_info)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": num_cores(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _print_table(rows: Sequence[Row]) -> None:
    """Print a line per figure and a column per row: a suite has few rows, with many figures."""
    names: dict[str, None] = {}  # a set that keeps the order
    for row in rows:
        names |= dict.fromkeys(row)
    columns = [list(names)]
    for row in rows:
        columns.append([_cell(row.get(name)) for name in names])
    padded = []
    for column in columns:
        width = max(map(len, column))
        padded.append([cell.ljust(width) for cell in column])
    for line in zip(*padded, strict=True):
        print(*line)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)


def take_turns(
    actions: Mapping[str, Callable[[], T]], repetitions: int, num_warm_up: int = 1
) -> dict[str, list[T]]:
    """Return the results of each action after the warm-up. Actions take turns, so that noise
    affects all of them alike; compare them by `median_ratio`."""
    results: dict[str, list[T]] = {name: [] for name in actions}
    for turn in range(num_warm_up + repetitions):
        for name, action in actions.items():
            result = action()
            if turn >= num_warm_up:
                results[name].append(result)
    return results


def median_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the median over the repetitions of how many times as long the first takes."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return statistics.median(ratios)


def write_model_and_prompts(
    folder: Path,
    model: Any,
    dtype: str,
    num_prompts: int,
    prompt_length: int,
    *,
    chat_about: Callable[[str], Messages] | None = None,
    schema_length: int = 0,
) -> dict[str, Any]:
    """Write a random model and prompts. Return the settings that name them, and the reward.

    `model`: a model, which gets the tokenizer of `tiny`, or the path of one, which is used as it
    is. `prompt_length`: number of digits of a prompt. `chat_about`: returns a prompt that is a chat
    about the digits. `schema_length`: characters of a schema of
    tools that stands before the digits of every prompt; each is a token of `tiny`.
    """
    if isinstance(model, str):
        path = resolve_model(model)
    else:
        path = str(folder / "model")
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model.to(getattr(torch, dtype)).save_pretrained(path)
        load_tokenizer("tiny").save_pretrained(path)
    tokenizer = load_tokenizer(path)
    rng = random.Random(0)
    rows = []
    lengths = []  # in tokens
    for _ in range(num_prompts):
        digits = "".join(rng.choices("0123456789", k=prompt_length))
        prompt: str | Messages = _schema_of_tools(schema_length) + digits
        if chat_about is not None:
            prompt = chat_about(digits)
        rows.append(json.dumps({"prompt": prompt}))
        lengths.append(len(render_prompt(prompt, tokenizer)))
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(rows))
    return {
        "model.path": path,
        "data.dataset": str(file),
        "data.max_prompt_length": max(lengths),
        "reward.functions": [f"{__name__}:spread"],
    }


def write_picture_model(folder: Path, model: Any, dtype: str) -> str:
    """Write a LLaVA with the tokenizer and the processor of `tiny-vision`, which makes pictures of
    its size. Return the folder."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    source = resolve_model("tiny-vision")
    processor = AutoProcessor.from_pretrained(source)  # type: ignore[no-untyped-call]
    tower = model.config.vision_config
    processor.image_processor.size = {"height": tower.image_size, "width": tower.image_size}
    processor.patch_size = tower.patch_size
    processor.save_pretrained(folder)
    return str(folder)


def write_pictures(folder: Path, model: str, num_prompts: int) -> dict[str, Any]:
    """Write prompts of `picture-sums`, each with its picture in a file of its own. Return the
    settings that name them, the model, and the reward."""
    rows = []
    for number in range(num_prompts):
        row = PICTURE_SUMS.train_row(0, number)
        picture = folder / f"{number}.png"
        picture.write_bytes(row["image"]["bytes"])
        rows.append(json.dumps({"prompt": row["prompt"], "image": str(picture)}))
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(rows))
    return {
        "model.path": resolve_model(model),
        "data.dataset": str(file),
        "data.max_prompt_length": 640,  # a picture of 576 tokens and the text
        "reward.functions": [f"{__name__}:spread"],
    }


def _schema_of_tools(length: int) -> str:
    """Return the first characters of a JSON schema of many tools."""
    tools: list[str] = []
    num_characters = 0
    while num_characters < length:
        name = f"look_up_{len(tools)}"
        tool = {
            "type": "function",
            "function": {
                "name": name,
                "description": "Look up a row of a table by its number, and return its text.",
                "parameters": {
                    "type": "object",
                    "properties": {"number": {"type": "integer", "description": "of the row"}},
                    "required": ["number"],
                },
            },
        }
        tools.append(json.dumps(tool))
        num_characters += len(tools[-1])
    return "\n".join(tools)[:length]


def sum_of(digits: str) -> Messages:
    """Return a chat that asks for the sum of two numbers, which have these digits together. An
    example before it makes answers brief."""
    half = len(digits) // 2
    return [
        {"role": "user", "content": "What is 12 + 25?"},
        {"role": "assistant", "content": "37"},
        {"role": "user", "content": f"What is {digits[:half]} + {digits[half:]}?"},
    ]


def story_about(digits: str) -> Messages:
    """Return a chat that asks for a long text about a number."""
    return [{"role": "user", "content": f"Write a long story about a house with number {digits}."}]


def spread(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return rewards between 0 and 1 that differ between completions."""
    rewards = []
    for ids in completion_ids:
        digest = zlib.crc32(repr(list(ids)).encode())
        rewards.append(digest % 1000 / 1000)
    return rewards


def record(
    name: str,
    flags: Mapping[str, Any],
    words: Sequence[str] = (),
    *,
    iterations: int,
) -> dict[str, float]:
    """Train for `iterations` after one that warms up. By default the learning rate is 0, so that
    all iterations do the same work.

    Return the medians of the run's `perf` metrics, without this prefix, and two means of an
    iteration: `completion_tokens`, and the `seconds` from its predecessor's end to its own. Raises
    WorkerFailure with `name` if the run fails.
    """
    own = {
        "data.num_held_out": 0,
        "train.iterations": 1 + iterations,
        "train.learning_rate": 0.0,
        "train.keep_checkpoints": 0,
    }
    finished: list[events.IterationFinished] = []

    def observe(event: events.Event) -> None:
        if isinstance(event, events.IterationFinished):
            finished.append(event)
            seconds = event.metrics["perf/iteration_seconds"]
            print(f"{name}: an iteration of {seconds:.2f} s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
        config = load_config(None, {**own, **flags, "output.dir": f"{folder}/run"}, words)
        end = run(config, [observe])
    if end.exit_code > SIGNALLED:
        raise Interrupted(end.exit_code - SIGNALLED)
    if end.exit_code != 0:
        raise WorkerFailure(f"bench, {name}: {end.message}")
    lines = [event.metrics for event in finished]
    figures = {}
    for key in lines[0]:
        if key.startswith("perf/"):
            values = [line[key] for line in lines[1:]]
            figures[key.removeprefix("perf/")] = float(statistics.median(values))
    # Tokens are counted from the run's start.
    num_tokens = lines[-1]["num_completion_tokens"] - lines[0]["num_completion_tokens"]
    num_measured = len(lines) - 1  # fewer than asked for, if `train.stop_when` has ended the run
    figures["completion_tokens"] = num_tokens / num_measured
    figures["seconds"] = (finished[-1].time - finished[0].time) / num_measured
    return figures
