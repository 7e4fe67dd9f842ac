"""The folder of an evaluation. The same command continues in it after it was stopped or killed.

config.yaml     the settings, for --config
progress.json   the settings that must not change, and the seconds spent so far
samples.jsonl   a line per completion, the lines of a problem together
logs/           the workers' output
model/          the model that a checkpoint or an adapter was converted into, until the end
eval.json       the results, written last
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from easyrl.config import Config, ConfigError, to_commented_yaml
from easyrl.evaluate.results import Answers
from easyrl.runtime.run_folder import finite, lock_folder

PROGRESS, SAMPLES, RESULTS = "progress.json", "samples.jsonl", "eval.json"
KEY = "output.dir (--output)"
MODEL = "model.path (--model)"
"""The key of the model among the settings."""
PROMPT_CHARACTERS = 200
"""How much of a prompt is kept when it is read back."""


class EvalFolder:
    def __init__(self, config: Config, settings: Mapping[str, Any]) -> None:
        """Create the folder, or continue in it.

        `settings`: what must not change once a problem is answered, by the keys that users know.
        Raises ConfigError if it changed, or if the folder is not one of an evaluation.
        """
        self.path = folder_of(config)
        self.model = self.path / "model"
        self._clock = time.monotonic()
        self._asked_model = config.model.path
        self._settings = settings
        self._progress = self.path / PROGRESS
        progress = _read_progress(self._progress)
        if progress is None and self.path.exists() and not _is_empty(self.path):
            raise ConfigError(
                f"{KEY}: expected a new folder or that of an evaluation, got '{self.path}'"
            )
        differing = [] if progress is None else _differing(progress["settings"], settings)
        samples = self.path / SAMPLES
        if differing and samples.is_file() and samples.stat().st_size > 0:
            raise ConfigError(
                f"{KEY}: '{self.path}' has an evaluation with other settings:\n"
                + "\n".join(differing)
                + "\nTo continue it, repeat its command; else choose a new folder"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.path)
            if progress is not None and progress["settings"].get(MODEL) != settings[MODEL]:
                shutil.rmtree(self.model, ignore_errors=True)  # converted from the other one
            self.seconds: float = progress["seconds"] if progress else 0.0
            """Spent on answering, by all commands."""
            self.save_progress()  # first: this file marks the folder as one of an evaluation
            self._write_whole(self.path / "config.yaml", to_commented_yaml(config))
            (self.path / "logs").mkdir(exist_ok=True)
            samples.touch()
        except OSError as error:
            raise ConfigError(f"{KEY}: cannot write '{self.path}': {error.strerror}") from None

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def log_of(self, worker: str) -> Path:
        return self.path / "logs" / f"{worker}.log"

    def read(self, num_samples: int) -> list[Answers]:
        """Return the answers so far. A problem with fewer samples, which is the last one if the
        evaluation was killed while writing it, is cut off."""
        answers: list[Answers] = []
        lines: list[dict[str, Any]] = []
        complete_bytes = 0
        for end, line in whole_lines(self.path / SAMPLES):
            lines.append(line)
            if line["problem"] != lines[0]["problem"]:
                raise ConfigError(
                    f"{self.path / SAMPLES}: expected {num_samples} samples of the problem "
                    f"{lines[0]['problem']}, got {len(lines) - 1}. Choose a new folder"
                )
            if len(lines) == num_samples:
                answers.append(Answers.of_lines(lines))
                lines, complete_bytes = [], end
        os.truncate(self.path / SAMPLES, complete_bytes)
        return answers

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of one problem with one call, and add the time since the last one."""
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with (self.path / SAMPLES).open("ab") as file:
            file.write(text.encode())
        now = time.monotonic()
        self.seconds += now - self._clock
        self._clock = now
        self.save_progress()

    def start_clock(self) -> None:
        """Count the seconds from now on."""
        self._clock = time.monotonic()

    def save_progress(self) -> None:
        content = {"model": self._asked_model, "settings": self._settings, "seconds": self.seconds}
        self._write_whole(self._progress, json.dumps(content, indent=2) + "\n")

    def write_results(self, results: Mapping[str, Any]) -> None:
        text = json.dumps(finite(results), indent=2, allow_nan=False) + "\n"
        self._write_whole(self.path / RESULTS, text)
        shutil.rmtree(self.model, ignore_errors=True)

    @staticmethod
    def _write_whole(file: Path, text: str) -> None:
        new = file.with_name(f"{file.name}.unfinished")
        new.write_text(text, encoding="utf-8")
        new.replace(file)


def folder_of(config: Config) -> Path:
    if config.output.dir is not None:
        return Path(config.output.dir).expanduser()
    task = "+".join(Path(name).stem for name in config.data.datasets)
    return Path(f"runs/{time.strftime('%Y%m%d-%H%M%S')}-eval-{task}")


def converted_model(config: Config) -> tuple[Path, dict[str, Any]] | None:
    """The model that an unfinished evaluation has converted its checkpoint or adapter into, and the
    `path` and `files` that identify what it was made of. None if there is none, or if the command
    asks for another model. The training run may have continued since."""
    folder = folder_of(config)
    progress = _read_progress(folder / PROGRESS)
    if progress is None or progress.get("model") != config.model.path:
        return None
    made = folder / "model"
    return (made, progress["settings"][MODEL]) if made.is_dir() else None


def whole_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The complete lines of a `samples.jsonl` without their completions, each with the offset of
    its end in bytes. Raises ConfigError for a line that is not one of an evaluation."""
    end = 0
    with file.open("rb") as content:
        for number, text in enumerate(content, start=1):
            if not text.endswith(b"\n"):
                return
            try:
                line = json.loads(text)
                line["problem"], line["reward"], line["length"]
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{file}:{number}: expected a line of an evaluation (problem, reward, length)"
                ) from None
            line.pop("completion", None)
            line["prompt"] = str(line.get("prompt"))[:PROMPT_CHARACTERS]
            end += len(text)
            yield end, line


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _read_progress(file: Path) -> dict[str, Any] | None:
    """None if there is no such file."""
    try:
        progress: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        progress["settings"], progress["seconds"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{KEY}: cannot read '{file}' ({type(error).__name__}: {error}). Choose a new folder"
        ) from None
    return progress


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each setting that changed."""
    now = json.loads(json.dumps(now))
    return [
        f"{key}: expected {json.dumps(before.get(key))} as in that evaluation, "
        f"got {json.dumps(now.get(key))}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]
