"""The folder of an evaluation. The same command continues in it after it was stopped or killed.

config.yaml     the config, for --config
settings.json   the settings that must not change once a problem is answered
samples.jsonl   a line per completion, the lines of a problem together
reward_errors.jsonl  reward calls that failed           (only if there are any)
logs/           the workers' output
.model-*/       the model that a checkpoint or an adapter is converted into, until the end
eval.json       the results, written last
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from easyrl import events
from easyrl.config import ConfigError
from easyrl.evaluation.figures import Answers, Lines
from easyrl.runtime import run_folder
from easyrl.runtime.resume import differing
from easyrl.runtime.run_folder import replace_file

SETTINGS = "settings.json"
SAMPLES = "samples.jsonl"
MODEL = ".model-"  # begins the name of the folder with a converted model
KEY = "output.dir (--output)"
KIND = "eval-"  # in the name of a new folder
MAY_DIFFER = ("model", "dataset", "engine", "runtime.seed")
"""Settings that begin so may differ without a warning in two evaluations that are compared."""


class EvalFolder:
    """A folder, locked until `close`, with the answers so far by problem."""

    def __init__(self, path: Path, config_yaml: str, settings: Mapping[str, Any]) -> None:
        """Create the folder, with this config, or continue in it. Raises ConfigError if it has
        other settings."""
        self.path = path
        try:
            self._open(config_yaml, settings)
        except OSError as error:
            raise ConfigError(f"{KEY}: cannot write '{self.path}': {error.strerror}") from None

    def _open(self, config_yaml: str, settings: Mapping[str, Any]) -> None:
        folder = self.path
        folder.mkdir(mode=run_folder.PRIVATE, parents=True, exist_ok=True)
        self.answers = self._complete_answers(settings)
        self._lock = run_folder.lock_folder(folder)
        samples = "".join(map(_as_text, self.answers.values()))
        replace_file(folder / SAMPLES, samples)
        settings_text = json.dumps(settings, indent=2)
        replace_file(folder / SETTINGS, f"{settings_text}\n")
        replace_file(folder / "config.yaml", config_yaml)
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        for left_over in folder.glob(f"{MODEL}*"):
            shutil.rmtree(left_over, ignore_errors=True)

    def _complete_answers(self, settings: Mapping[str, Any]) -> dict[str, Lines]:
        """Return the answers so far, without those of the problem that was being written when the
        evaluation was killed."""
        complete = {}
        for problem, lines in self._read(settings).items():
            if len(lines) == settings["num_samples"]:
                complete[problem] = lines
        return complete

    def _read(self, settings: Mapping[str, Any]) -> Answers:
        """Read the answers that are here. Raises ConfigError for another kind of folder, or other
        settings than those that the answers were given with."""
        is_new = not any(self.path.iterdir()) or run_folder.has_only_inputs(self.path)
        if is_new:
            return {}
        file = self.path / SETTINGS
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if '"model_identity"' not in text:
            raise ConfigError(f"{KEY}: expected a new folder or an evaluation's, got '{self.path}'")
        answers = _by_problem(run_folder.read_lines(self.path / SAMPLES))
        old = json.loads(text)
        changed = differing(old, settings)
        if answers and changed:
            lines = [
                f"{KEY}: '{self.path}' has an evaluation with other settings; repeat its command, "
                "or choose a new folder"
            ]
            for key in changed:
                lines.append(f"{key}: expected {old[key]!r}, got {settings[key]!r}")
            raise ConfigError("\n".join(lines))
        return answers

    def close(self) -> None:
        os.close(self._lock)

    def append(self, problem: str, lines: Lines) -> None:
        with (self.path / SAMPLES).open("ab") as file:
            file.write(_as_text(lines).encode())
        self.answers[problem] = lines

    def observe(self, event: events.Event) -> None:
        """Write the reward calls that failed to reward_errors.jsonl."""
        match event:
            case events.FromWorker(event=events.PromptEvaluated(prompt_index=prompt) as evaluated):
                run_folder.append_errors(self._append_line, evaluated.errors, None, prompt)
            case events.FromWorker(event=events.RewardFailed(call, _, prompt)):
                run_folder.append_errors(self._append_line, [call], None, prompt)

    def _append_line(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.path / name).open("ab") as file:
            file.write(_as_text([run_folder.finite(line)]).encode())

    def write_results(self, results: Mapping[str, Any]) -> None:
        text = json.dumps(run_folder.finite(results), indent=2, allow_nan=False)
        replace_file(self.path / "eval.json", text + "\n")


def _as_text(lines: Lines) -> str:
    texts = []
    for line in lines:
        texts.append(json.dumps(line, allow_nan=False) + "\n")
    return "".join(texts)


def _by_problem(lines: Lines) -> Answers:
    answers: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        answers.setdefault(line["problem"], []).append(line)
    return answers


def read_evaluation(path: Path) -> Answers:
    """Read the answers of an evaluation by problem. Raises ConfigError if there are none."""
    lines = []
    if (path / SETTINGS).is_file():
        lines = run_folder.read_lines(path / SAMPLES)
    if not lines or "problem" not in lines[0]:
        expected = "expected the folder of an evaluation with answers"
        raise ConfigError(f"compare (--compare): {expected}, got '{path}'")
    return _by_problem(lines)


def differing_settings(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """Describe how prompts, sampling and rewards of the evaluation at `path` differ."""
    text = (path / SETTINGS).read_text(encoding="utf-8")
    others = json.loads(text)
    texts = []
    for key in differing(others, settings):
        if not key.startswith(MAY_DIFFER):
            here = settings[key]
            there = others[key]
            texts.append(f"{key}: {here} here, {there} there")
    return texts
