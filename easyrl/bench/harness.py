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
from transformers.utils import logging

from easyrl import events
from easyrl.config import load_config
from easyrl.data.chat import render_prompt
from easyrl.data.hub import resolve_model
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
    """Run the suite; return the exit code. In JSON, rows with a name (`row`) are found by it. If it
    fails or is interrupted, the rows before are shown and written."""
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
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(errors="replace"))
    machine = {
        "cpu": cpu[1] if cpu is not None else platform.machine(),
        "cores": num_cores(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(f"easyrl bench {name}: {machine['cpu']}, {machine['cores']} cores")
    names = dict.fromkeys(name for row in rows for name in row)
    table = [[name, *(_cell(row.get(name)) for row in rows)] for name in names]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print(*(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    if json_file is not None:
        results = {row["row"]: row for row in rows} if all("row" in row for row in rows) else rows
        found = {"suite": name, "machine": machine, "results": results}
        json_file.write_text(json.dumps(found, indent=2), encoding="utf-8")
    return code


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def take_turns(
    actions: Mapping[str, Callable[[], T]], repetitions: int, num_warm_up: int = 1
) -> dict[str, list[T]]:
    """Return the results of each action after the warm-up. Actions take turns, so that noise
    affects all of them alike; compare them by `median_ratio`."""
    turns = [
        {name: action() for name, action in actions.items()}
        for _ in range(num_warm_up + repetitions)
    ]
    return {name: [turn[name] for turn in turns[num_warm_up:]] for name in actions}


def median_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over the repetitions of how many times as long the first takes."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def write_model_and_prompts(
    folder: Path,
    model: Any,
    dtype: str,
    num_prompts: int,
    prompt_length: int,
    *,
    is_chat: bool = False,
) -> dict[str, Any]:
    """Write a random model, with the tokenizer of `tiny`, and prompts of that many digits, or
    chats that ask for a sum with so many. Return the flags that name them, and the reward.
    `model`: also the path of one, which is used as it is."""
    if isinstance(model, str):
        path = resolve_model(model)
    else:
        path = str(folder / "model")
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model.to(getattr(torch, dtype)).save_pretrained(path)
        load_tokenizer("tiny").save_pretrained(path)
    tokenizer = load_tokenizer(path)
    drawn = random.Random(0)
    digits = ["".join(drawn.choices("0123456789", k=prompt_length)) for _ in range(num_prompts)]
    prompts: list[str | Messages] = [*digits]
    if is_chat:
        half = prompt_length // 2
        example = [("user", "What is 12 + 25?"), ("assistant", "37")]  # so that answers are brief
        sums = ([*example, ("user", f"What is {x[:half]} + {x[half:]}?")] for x in digits)
        prompts = [[{"role": role, "content": text} for role, text in chat] for chat in sums]
    rows = (json.dumps({"prompt": prompt}) for prompt in prompts)
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    return {
        "model.path": path,
        "data.dataset": str(folder / "prompts.jsonl"),
        "data.max_prompt_length": max(len(render_prompt(each, tokenizer)) for each in prompts),
        "reward.functions": [f"{__name__}:spread"],
    }


def spread(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward between 0 and 1 that differs between completions."""
    return [zlib.crc32(repr(list(ids)).encode()) % 1000 / 1000 for ids in completion_ids]


def record(
    name: str,
    flags: Mapping[str, Any],
    words: Sequence[str] = (),
    *,
    iterations: int,
) -> dict[str, float]:
    """Train for `iterations` after one that warms up. The learning rate is 0, so that all do the
    same work. Returns the medians of the run's `perf` metrics, and means of an iteration:
    `completion_tokens`, and the `seconds` from its predecessor's end to its own. Raises
    WorkerFailure with `name` if the run fails."""
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
    medians = {
        key.removeprefix("perf/"): float(statistics.median(line[key] for line in lines[1:]))
        for key in lines[0]
        if key.startswith("perf/")
    }
    name = "num_completion_tokens"
    num_tokens = lines[-1][name] - lines[0][name]  # counted from the run's start
    seconds = (finished[-1].time - finished[0].time) / iterations
    return medians | {"completion_tokens": num_tokens / iterations, "seconds": seconds}
