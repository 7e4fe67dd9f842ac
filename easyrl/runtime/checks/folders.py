"""Checks of the run folder: nothing is overwritten, and a resumed run is the one that started."""

from collections.abc import Mapping
from pathlib import Path
from shlex import join
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.config.algorithm import TEACHER_KEY
from easyrl.config.spec import RunSpec
from easyrl.model.files import has_fingerprint
from easyrl.runtime.resume import check_resumed, differing
from easyrl.runtime.run_folder import free_name, refuse_existing


def check_new(folder: Path, is_resumed: bool) -> None:
    """Raise ConfigError if the folder of a new run exists."""
    if not is_resumed:
        refuse_existing(folder)


def check_resumed_settings(config: Config, folder: Path, is_resumed: bool) -> None:
    """Raise ConfigError if the settings do not fit the checkpoint that the run resumes from."""
    if is_resumed:
        check_resumed(config, folder)


def check_unchanged_files(
    spec: RunSpec, folder: Path, saved_identity: Mapping[str, Any], identity: Mapping[str, Any]
) -> None:
    """Raise ConfigError if model, data or functions have changed since the run started."""
    paths = {"model.path": spec.model.path}
    if spec.teacher is not None and spec.teacher.path is not None:
        paths[TEACHER_KEY] = spec.teacher.path
    changed = []
    for key in differing(saved_identity, identity):
        if key not in paths or not has_fingerprint(paths[key], saved_identity[key]):
            changed.append(key)
    if changed:
        new_run = [
            "easyrl",
            "grpo",
            "--config",
            str(folder / "config.yaml"),
            "--model",
            str(folder),
        ]
        new_run += ["--output", free_name(folder), "--seed", str(spec.schedule.seed + 1)]
        raise ConfigError(
            f"{', '.join(changed)}: the files have changed since the run in '{folder}' started; "
            f"restore them, or train its newest weights on in a new run: {join(new_run)}"
        )
