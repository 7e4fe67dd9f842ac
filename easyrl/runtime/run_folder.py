"""The run folder: what a run leaves behind (DESIGN.md, section 8)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from easyrl.config import Config, ConfigError, to_commented_yaml
from easyrl.records import IterationFinished, Record, RewardFailed, RunFinished, Sampled


class RunFolder:
    """`config.yaml` at the start, a line of `metrics.jsonl` per iteration, `summary.json` last."""

    def __init__(self, config: Config) -> None:
        """Make the folder. Raises ConfigError where it exists or cannot be made, and leaves
        nothing of it then."""
        self.path = folder_of(config)
        parents = [parent for parent in self.path.parents if not os.path.lexists(parent)]
        is_made = False
        try:
            self.path.mkdir(parents=True)
            is_made = True
            (self.path / "logs").mkdir()
            (self.path / "config.yaml").write_text(to_commented_yaml(config))
        except FileExistsError:
            raise _exists(self.path) from None
        except OSError as error:
            if is_made:
                shutil.rmtree(self.path, ignore_errors=True)
            for parent in parents:
                with contextlib.suppress(OSError):  # never made, or not empty any more
                    parent.rmdir()
            raise ConfigError(
                f"output.dir (--output): '{self.path}' cannot be made: {error.strerror}; "
                "accepted: a folder on a disk that can be written and has room"
            ) from None

    @property
    def model(self) -> Path:
        """Where the final model goes: a Hugging Face folder."""
        return self.path / "model"

    def log_of(self, worker: str) -> Path:
        """Where a worker's output goes."""
        return self.path / "logs" / f"{worker}.log"

    def observe(self, record: Record) -> None:
        """Write what the folder keeps of a run."""
        match record:
            case IterationFinished(metrics=metrics):
                self._append("metrics.jsonl", metrics)
            case Sampled(sample):
                self._append("samples.jsonl", sample)
            case RunFinished(summary=summary):
                text = json.dumps(_finite(summary), indent=2, allow_nan=False)
                (self.path / "summary.json").write_text(text + "\n")
            case RewardFailed(_, iteration, prompt_index, message):
                line = {"iteration": iteration, "prompt_index": prompt_index, "error": message}
                self._append("reward_errors.jsonl", line)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.path / name).open("a") as file:  # whole lines, also when the run is cut off
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")


def folder_of(config: Config) -> Path:
    """Where the run folder will be."""
    return Path(config.output.dir or _default_name(config)).expanduser()


def refuse_existing(folder: Path) -> None:
    """Raise ConfigError where something is there already."""
    if os.path.lexists(folder):
        raise _exists(folder)


def _exists(folder: Path) -> ConfigError:
    return ConfigError(
        f"output.dir (--output): '{folder}' exists; accepted: a folder that does not, "
        "so that no run is overwritten"
    )


def _finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: null stands for what is not finite."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }


def _default_name(config: Config) -> str:
    task = Path(config.data.dataset).stem
    name = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{task}"
    suffix = 1
    while Path(name + ("" if suffix == 1 else f"-{suffix}")).exists():
        suffix += 1
    return name + ("" if suffix == 1 else f"-{suffix}")
