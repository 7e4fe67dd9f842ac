"""Where a run's files are, so that a run that goes on finds them from whichever folder."""

from __future__ import annotations

from pathlib import Path

from easyrl.config import Config
from easyrl.hub import BUILT_IN_MODELS
from easyrl.tasks import TASKS


def with_whole_paths(config: Config) -> Config:
    """The config with the whole path of each file and folder that its model, data and rewards name.

    What is none that is there (hub ids, built-in names, modules, mistakes) stays as it is.
    """
    model, data, reward = config.model, config.data, config.reward
    sections = {
        "model": model.model_copy(
            update={"path": model.path if model.path in BUILT_IN_MODELS else _whole(model.path)}
        ),
        "data": data.model_copy(
            update={"dataset": data.dataset if data.dataset in TASKS else _whole(data.dataset)}
        ),
        "reward": reward.model_copy(
            update={
                "functions": reward.functions and [_whole_reward(spec) for spec in reward.functions]
            }
        ),
    }
    return config.model_copy(update=sections)


def _whole_reward(spec: str) -> str:
    where, colon, name = spec.rpartition(":")
    return _whole(where) + colon + name if where.endswith(".py") else spec


def _whole(path: str) -> str:
    """Links in it are kept: they may be set anew."""
    whole = Path(path).expanduser()
    return str(whole.absolute()) if whole.exists() else path
