"""Publish a run's model on the Hugging Face hub, with a model card: data, reward, settings and
evaluation, from the files of the run folder.
"""

import re
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from easyrl import __version__
from easyrl.config import Config, change_config, to_commented_yaml
from easyrl.data.datasets import HUB_ID
from easyrl.data.hub import BUILT_IN_MODELS, check_push, is_hub_id, push_model
from easyrl.data.presets import PRESETS
from easyrl.formatting import counted
from easyrl.model.checkpoint_files import read_checkpoint
from easyrl.model.export import find_model
from easyrl.observe.history import History, read_history
from easyrl.rewards.loading import reward_specs, reward_weights

PATHS = ("model.path", "data.dataset", "eval.dataset", "reward.functions", "algorithm.loss_type")


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
    config = change_config(run.config, names | {"output.dir": None, "devices.ray_address": None})
    model, rollout, train = config.model, config.rollout, config.train
    rewards = zip(reward_specs(config), reward_weights(config), strict=True)
    changes = to_commented_yaml(config, only_changes=True).splitlines()
    settings = [line for line in changes if line and not line.lstrip().startswith("#")]
    what = "LoRA, merged" if model.lora.rank else "all weights"
    results = run.results()
    held_out = config.eval.dataset or f"held out of {config.data.shown}"
    accuracy = f"Accuracy on problems that were not trained ({held_out}), correct from a reward of "
    accuracy += f"{config.eval.correct_reward:g}"
    measured = {"reward": "Reward of the samples", "held-out accuracy": accuracy}
    lines = [
        f"# {repository.partition('/')[2]}\n",
        f"`{model.path}`, trained by reinforcement learning ({config.algorithm.loss_type}, {what}, "
        f"{counted(run.num_done, 'iteration')}) with EasyRL {__version__}.\n",
        f"- **Data**: `{config.data.shown}`",
        "- **Reward**: " + ", ".join(f"`{spec}` (weight {weight:g})" for spec, weight in rewards),
        f"- **Sampling**: {rollout.num_generations} completions of each of "
        f"{train.prompts_per_iteration} prompts per iteration, at most "
        f"{rollout.max_completion_length} tokens, temperature {rollout.temperature:g}",
        *(f"- **{what}**: {results[name]}" for name, what in measured.items() if name in results),
    ]
    if settings:
        lines += ["\n## Settings\n", "Those that differ from the defaults of EasyRL:\n"]
        lines += ["```yaml", *settings, "```\n"]
    return f"---\n{_metadata(run.config)}\n---\n\n" + "\n".join(lines)


def _name(value: Any) -> Any:
    if isinstance(value, list):
        return [_name(each) for each in value]
    return Path(value).name if value is not None and value.startswith("/") else value


def _metadata(config: Config) -> str:
    rows = [PRESETS[name].rows if name in PRESETS else name for name in config.data.datasets]
    found = [name.partition(":")[0] for name in rows if name and re.fullmatch(HUB_ID, name)]
    is_on_hub = config.model.path not in BUILT_IN_MODELS and is_hub_id(config.model.path)
    return ModelCardData(
        base_model=config.model.path if is_on_hub else None,
        datasets=found or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["easyrl", "reinforcement-learning"],
    ).to_yaml()
