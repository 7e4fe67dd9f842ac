"""The folder of an evaluation. The same command continues in it after it was stopped or killed.

config.yaml     the settings, for --config
progress.json   the settings that must not change, and the seconds spent so far
samples.jsonl   a line per completion, the lines of a problem together
logs/           the workers' output
model/          the model that a checkpoint or an adapter was converted into, until the end
eval.json       the results, written last
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from easyrl.config import Config, ConfigError, to_commented_yaml
from easyrl.evaluate.figures import Evaluation, Lines, rewards_of
from easyrl.observe.watch import GrowingFile
from easyrl.runtime.run_folder import finite, folder_of, lock_folder

PROGRESS, SAMPLES, RESULTS = "progress.json", "samples.jsonl", "eval.json"
KEY = "output.dir (--output)"
MODEL = "model.path (--model)"  # the key of the model among the settings
PROMPT_CHARACTERS = 200  # how much of a prompt is kept when it is read back


class EvalFolder:
    def __init__(self, config: Config, settings: Mapping[str, Any]) -> None:
        """Create the folder, or continue in it.

        `settings`: what must not change once a problem is answered, by the keys that users know.
        Raises ConfigError if it changed, or if the folder is not one of an evaluation.
        """
        self.path = folder_of(config, "eval-")
        self.model = self.path / "model"
        self._asked_model, self._settings = config.model.path, settings
        before = _read_progress(self.path)
        is_empty = self.path.is_dir() and not any(self.path.iterdir())
        if before is None and self.path.exists() and not is_empty:
            raise ConfigError(
                f"{KEY}: expected a new folder or that of an evaluation, got '{self.path}'"
            )
        self.seconds: float = before["seconds"] if before else 0.0
        """Spent on answering, by all commands."""
        new = json.loads(json.dumps(settings))
        old = before["settings"] if before else new
        changed = [
            f"{key}: expected {json.dumps(old.get(key))} as in that evaluation, got "
            f"{json.dumps(new.get(key))}"
            for key in old | new
            if old.get(key) != new.get(key)
        ]
        samples = self.path / SAMPLES
        if changed and samples.is_file() and samples.stat().st_size > 0:
            about = f"{KEY}: '{self.path}' has an evaluation with other settings:"
            what_to_do = "To continue it, repeat its command; else choose a new folder"
            raise ConfigError("\n".join([about, *changed, what_to_do]))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.path)
            if old.get(MODEL) != new[MODEL]:
                shutil.rmtree(self.model, ignore_errors=True)  # converted from the other one
            self.start_clock()
            self._write_progress()  # first: this file marks the folder as one of an evaluation
            self._write("config.yaml", to_commented_yaml(config))
            (self.path / "logs").mkdir(exist_ok=True)
            samples.touch()
        except OSError as error:
            raise ConfigError(f"{KEY}: cannot write '{self.path}': {error.strerror}") from None

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def read(self, num_samples: int) -> dict[str, Lines]:
        """Return the answers so far, by problem. A problem with fewer samples, which is the last
        one if the evaluation was killed while writing it, is cut off."""
        answers: dict[str, Lines] = {}
        lines: list[Mapping[str, Any]] = []
        complete_bytes = 0
        for end, line in _read_samples(self.path / SAMPLES):
            lines.append(line)
            if len(lines) == num_samples:
                answers[line["problem"]] = lines
                lines, complete_bytes = [], end
        os.truncate(self.path / SAMPLES, complete_bytes)
        return answers

    def append(self, lines: Lines) -> None:
        """Write the lines of one problem with one call, and add the time since the last one."""
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with (self.path / SAMPLES).open("ab") as file:
            file.write(text.encode())
        self.seconds += time.monotonic() - self._clock
        self.start_clock()
        self._write_progress()

    def start_clock(self) -> None:
        """Count the seconds from now on."""
        self._clock = time.monotonic()

    def write_results(self, results: Mapping[str, Any]) -> None:
        self._write(RESULTS, json.dumps(finite(results), indent=2, allow_nan=False) + "\n")
        shutil.rmtree(self.model, ignore_errors=True)

    def _write_progress(self) -> None:
        content = {"model": self._asked_model, "settings": self._settings, "seconds": self.seconds}
        self._write(PROGRESS, json.dumps(content, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        new = self.path / f"{name}.unfinished"
        new.write_text(text, encoding="utf-8")
        new.replace(self.path / name)


def converted_model(config: Config) -> tuple[Path, dict[str, Any]] | None:
    """The model that an unfinished evaluation has converted its checkpoint or adapter into, and the
    `path` and `files` that identify what it was made of. None if there is none, or if the command
    asks for another model. The training run may have continued since."""
    folder = folder_of(config, "eval-")
    progress = _read_progress(folder)
    made = folder / "model"
    if progress is None or progress.get("model") != config.model.path or not made.is_dir():
        return None
    return made, progress["settings"][MODEL]


def read_evaluation(path: Path) -> Evaluation:
    """Read the evaluation in a folder, or of a `samples.jsonl` or `eval.json`. Problems with
    missing samples or rewards are left out. Raises ConfigError if there is no evaluation."""
    folder = path if path.is_dir() else path.parent
    samples = path if path.suffix == ".jsonl" else folder / SAMPLES
    if not path.exists() or not samples.is_file():
        raise ConfigError(
            "--compare: expected the folder of an evaluation (easyrl eval --output DIR), its "
            f"eval.json or its samples.jsonl, got '{path}'"
        )
    answers: dict[str, list[Mapping[str, Any]]] = {}
    for _, line in _read_samples(samples):
        answers.setdefault(line["problem"], []).append(line)
    num_samples = max(map(len, answers.values()), default=0)
    scored = {
        problem: lines
        for problem, lines in answers.items()
        if len(lines) == num_samples and len(rewards_of([lines]))
    }
    if not scored:
        raise ConfigError(f"--compare: expected scored answers in '{samples}', got none")
    model = None
    with contextlib.suppress(OSError, ValueError):  # not finished
        model = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["model"]
    return Evaluation(path, model, scored)


def _read_samples(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a `samples.jsonl` without their completions, each with the offset of its end in
    bytes. Raises ConfigError if it is not that of an evaluation."""
    lines = GrowingFile(file)
    for line in lines.read():
        if "problem" not in line:
            raise ConfigError(
                f"'{file}': expected the samples of an evaluation; to evaluate a training run: "
                "easyrl eval --model RUN"
            )
        prompt = str(line.get("prompt"))[:PROMPT_CHARACTERS]
        yield lines.offset, {**line, "prompt": prompt, "completion": ""}


def _read_progress(folder: Path) -> Any:
    """None if there is none."""
    file = folder / PROGRESS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
