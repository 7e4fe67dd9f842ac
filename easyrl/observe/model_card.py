"""Publish a run's model on the Hugging Face hub, with a model card from the run folder."""

import re
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from easyrl import __version__
from easyrl.config import change_config, keys_marked, to_commented_yaml
from easyrl.config.section import NAMES_FILES
from easyrl.data.datasets import HUB_ID
from easyrl.data.hub import BUILT_IN_MODELS, check_push, is_hub_id, push_model
from easyrl.data.presets import PRESETS
from easyrl.formatting import counted
from easyrl.model.checkpoint_files import read_checkpoint
from easyrl.model.export import find_model
from easyrl.observe.history import History, read_history
from easyrl.rewards.loading import reward_specs

PATHS = keys_marked(NAMES_FILES)
RESULTS = ("reward", "held-out accuracy")


def publish(source: Path, repository: str, *, trust: bool = False) -> str:
    """Push the model of a run or a checkpoint; return a message to print. Raises ConfigError."""
    check_push(repository)
    model = find_model(str(source))
    run = read_history(source if (source / "config.yaml").is_file() else source.parent.parent)
    if model.kind == "checkpoint":
        last = read_checkpoint(Path(model.path), verify=False).state["num_iterations"]
        run.lines = {number: line for number, line in run.lines.items() if number <= last}
        run.summary = {}
    with tempfile.TemporaryDirectory() as scratch:
        path = model.make(Path(scratch) / "model", trust=trust)
        address = push_model(Path(path), model_card(run, repository), repository)
    done = counted(run.num_done, "iteration")
    return f"the model of {source}, after {done}, is published: {address}"


def model_card(run: History, repository: str) -> str:
    """The README.md of the repository. Names of the user's files stand without their folders."""
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
            f"---\n{metadata.to_yaml()}\n---\n\n# {repository.partition('/')[2]}\n",
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
        return [_name(each) for each in value]
    if isinstance(value, dict):
        return {name: _name(each) for name, each in value.items()}
    return Path(value).name if value is not None and value.startswith("/") else value
