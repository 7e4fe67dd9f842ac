"""The model card of an exported checkpoint, from the folder of its run."""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from easyrl import __version__
from easyrl.config import ConfigError, change_config, keys_marked, to_commented_yaml
from easyrl.config.section import NAMES_FILES
from easyrl.data.datasets import HUB_ID
from easyrl.data.hub import BUILT_IN_MODELS, is_hub_id
from easyrl.data.presets import PRESETS
from easyrl.formatting import counted
from easyrl.model.checkpoint_files import CHECKPOINTS, Checkpoint
from easyrl.observe.history import History, read_history
from easyrl.rewards.loading import reward_specs

PATHS = keys_marked(NAMES_FILES)
RESULTS = ("reward", "held-out accuracy")


def card_of(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the card of a checkpoint's model; None outside the folder of its run."""
    folder = checkpoint.path.absolute().parent
    try:
        run = read_history(folder.parent if folder.name == CHECKPOINTS else folder)
    except ConfigError:
        return None
    last = checkpoint.state["num_iterations"]
    run.lines = {number: line for number, line in run.lines.items() if number <= last}
    run.summary = {}
    return model_card(run, name)


def model_card(run: History, title: str) -> str:
    """The README.md of a model. Names of the user's files stand without their folders."""
    names = {key: _name(attrgetter(key)(run.config)) for key in PATHS}
    private: dict[str, Any] = {"output.dir": None, "devices.ray_address": None}
    if run.config.reward.judge.url is not None:
        private |= {"reward.judge.url": "http://localhost", "reward.judge.key_variable": None}
    config = change_config(run.config, names | private)
    path, results = run.config.model.path, run.results()
    rows = [PRESETS[name].rows if name in PRESETS else name for name in config.data.datasets]
    on_hub = [name.partition(":")[0] for name in rows if name and re.fullmatch(HUB_ID, name)]
    metadata = ModelCardData(
        base_model=path if path not in BUILT_IN_MODELS and is_hub_id(path) else None,
        datasets=on_hub or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["easyrl", "reinforcement-learning"],
    )
    settings = to_commented_yaml(config, only_changes=True).splitlines()
    return "\n".join(
        [
            f"---\n{metadata.to_yaml()}\n---\n\n# {title}\n",
            f"`{config.model.path}`, trained by reinforcement learning "
            f"({counted(run.num_done, 'iteration')}) with EasyRL {__version__}.\n",
            f"- data: `{config.data.shown}`",
            f"- reward functions: `{', '.join(reward_specs(config))}`",
            *(f"- {name}: {results[name]}" for name in results if name in RESULTS),
            "\nSettings that differ from the defaults:\n\n```yaml",
            *(line for line in settings if line and not line.lstrip().startswith("#")),
            "```\n",
        ]
    )


def _name(value: Any) -> Any:
    if isinstance(value, list):
        names = [_name(each) for each in value]
        is_unique = len({*map(str, names)}) == len(names)
        return names if is_unique else [f"{n}-{name}" for n, name in enumerate(names, 1)]
    if isinstance(value, dict):
        return {name: _name(each) for name, each in value.items()}
    return Path(value).name if value is not None and value.startswith("/") else value
