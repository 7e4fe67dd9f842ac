"""Make the paths in a config absolute, so that a run can be resumed from any folder."""

from __future__ import annotations

from pathlib import Path

from easyrl.config import Config
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.data.presets import PRESETS


def with_whole_paths(config: Config, *, is_resumed: bool = False) -> Config:
    """Return the config with absolute paths of the files and folders that it names.

    Other names (hub ids, built-in models, modules, missing files) stay as they are. A folder wins
    over a built-in model of the same name; but in the config of a resumed run, whose folders are
    absolute paths already, such a name is the built-in model.
    """
    model, data, functions = config.model.path, config.data, config.reward.functions
    is_built_in = is_resumed and model in BUILT_IN_MODELS
    if not is_built_in and Path(model).expanduser().is_dir():
        model = _whole(model)
    whole = [_whole_data(name) for name in data.datasets]
    sections = {
        "model": config.model.model_copy(update={"path": model}),
        "data": data.model_copy(
            update={"dataset": whole[0] if isinstance(data.dataset, str) else whole}
        ),
        "eval": config.eval.model_copy(
            update={"dataset": config.eval.dataset and _whole_data(config.eval.dataset)}
        ),
        "reward": config.reward.model_copy(
            update={"functions": functions and [_whole_reward(spec) for spec in functions]}
        ),
    }
    return config.model_copy(update=sections)


def _whole_data(name: str) -> str:
    return _whole(name) if name not in PRESETS and Path(name).expanduser().exists() else name


def _whole_reward(spec: str) -> str:
    where, colon, name = spec.rpartition(":")
    is_file = where.endswith(".py") and Path(where).expanduser().is_file()
    return _whole(where) + colon + name if is_file else spec


def _whole(path: str) -> str:
    """Symbolic links are kept, because they may change."""
    return str(Path(path).expanduser().absolute())
