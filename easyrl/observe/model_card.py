"""Publish a run's model on the Hugging Face hub, with a model card: data, reward, settings and
evaluation, from the files of the run folder.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from easyrl import __version__
from easyrl.config import Config, change_config, load_config, to_commented_yaml
from easyrl.data.datasets import HUB_ID
from easyrl.data.hub import BUILT_IN_MODELS, check_push, is_hub_id, push_model
from easyrl.data.presets import PRESETS
from easyrl.formatting import counted
from easyrl.model.checkpoint_files import find_checkpoint
from easyrl.model.export import export_checkpoint, find_model
from easyrl.observe.text import shown
from easyrl.rewards.loading import reward_specs, reward_weights
from easyrl.runtime.run_folder import read_lines

PATHS = ("model.path", "data.dataset", "eval.dataset", "reward.functions", "algorithm.loss_type")
ENDS = 5  # iterations at either end whose rewards are averaged, in a run of twice as many


@dataclass(frozen=True, slots=True)
class Trained:
    """A run, as far as a model of it was trained."""

    config: Config
    num_iterations: int
    accuracy_before: float | None
    accuracy_after: float | None
    lines: list[dict[str, Any]]
    """Of metrics.jsonl, one for each iteration."""


def publish(source: Path, folder: Path | None, repository: str, *, is_private: bool) -> str:
    """Push the model of a run or a checkpoint, which is also exported to `folder` if that is given;
    return a message for the user. Raises ValueError."""
    check_push(repository)
    trained = read_trained(source)
    card = model_card(trained, repository)
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            path = Path(find_model(str(source)).make(Path(scratch) / "model"))
        else:
            export_checkpoint(source, folder)
            path = folder
            (path / "README.md").write_text(card, encoding="utf-8")
        address = push_model(path, card, repository, is_private=is_private)
    done = counted(trained.num_iterations, "iteration")
    return f"the model of {source}, after {done}, is published: {address}"


def read_trained(source: Path) -> Trained:
    """Read a finished run, or another one or a checkpoint. Raises ValueError if it is neither."""
    is_finished = (source / "summary.json").is_file() and (source / "model").is_dir()
    if is_finished:
        state = json.loads((source / "summary.json").read_text())
        config = load_config(source / "config.yaml")
        run, num_iterations = source, state["iterations"]
    else:
        checkpoint = find_checkpoint(source)
        state = checkpoint.state
        config = Config.model_validate(state["config"])
        run, num_iterations = checkpoint.path.parent.parent, state["num_iterations"]
    metrics = run / "metrics.jsonl"
    lines = read_lines(metrics) if metrics.is_file() else []
    lines = [line for line in lines if line["iteration"] < num_iterations]
    after = state.get("accuracy_after") if is_finished else (lines or [{}])[-1].get("eval/accuracy")
    return Trained(config, num_iterations, state["accuracy_before"], after, lines)


def model_card(trained: Trained, repository: str) -> str:
    """The README.md of the repository: metadata as YAML, and the text. Names of the user's files
    stand without their folders."""
    config = without_folders(trained.config)
    model, rollout, train = config.model, config.rollout, config.train
    rewards = zip(reward_specs(config), reward_weights(config), strict=True)
    settings = to_commented_yaml(config, only_changes=True).splitlines()
    what = "LoRA, merged" if model.lora.rank else "all weights"
    lines = [
        f"# {repository.partition('/')[2]}\n",
        f"`{model.path}`, trained by reinforcement learning ({config.algorithm.loss_type}, {what}, "
        f"{counted(trained.num_iterations, 'iteration')}) with EasyRL {__version__}.\n",
        f"- **Data**: `{config.data.shown}`",
        "- **Reward**: " + ", ".join(f"`{spec}` (weight {weight:g})" for spec, weight in rewards),
        f"- **Sampling**: {rollout.num_generations} completions of each of "
        f"{train.prompts_per_iteration} prompts per iteration, at most "
        f"{rollout.max_completion_length} tokens, temperature {rollout.temperature:g}",
        *_results(trained),
        "\n## Settings\n",
        "Those that differ from the defaults of EasyRL:\n",
        "```yaml",
        *(line for line in settings if line and not line.lstrip().startswith("#")),
        "```\n",
    ]
    metadata = yaml.safe_dump(_metadata(trained.config), sort_keys=False)
    return f"---\n{metadata}---\n\n" + "\n".join(lines)


def _results(trained: Trained) -> Iterator[str]:
    config, lines = trained.config, trained.lines
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    if rewards:
        number = ENDS if len(rewards) >= 2 * ENDS else 1
        first, last = mean(rewards[:number]), mean(rewards[-number:])
        what = f"mean of the first and last {number} iterations" if number > 1 else "first, last"
        yield f"- **Reward of the samples**: {first:.3f} -> {last:.3f} ({what})"
    before, after = trained.accuracy_before, trained.accuracy_after
    if before is not None or after is not None:
        held_out = without_folders(config).eval.dataset or f"held out of {config.data.shown}"
        yield (
            f"- **Evaluation**: accuracy {shown(before, '.3f')} -> {shown(after, '.3f')} on "
            f"problems that were not trained ({held_out}), one completion of each at temperature "
            f"{config.rollout.temperature:g}, correct from a reward of "
            f"{config.eval.correct_reward:g}"
        )


def without_folders(config: Config) -> Config:
    """Return the config with the names of local files alone, and without addresses."""
    changes = {name: _name(reduce(getattr, name.split("."), config)) for name in PATHS}
    return change_config(config, changes | {"output.dir": None, "devices.ray_address": None})


def _name(value: Any) -> Any:
    if isinstance(value, list):
        return [_name(each) for each in value]
    return Path(value).name if value is not None and value.startswith("/") else value


def _metadata(config: Config) -> dict[str, Any]:
    rows = [PRESETS[name].rows if name in PRESETS else name for name in config.data.datasets]
    found = [name.partition(":")[0] for name in rows if name and re.fullmatch(HUB_ID, name)]
    data: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    data["tags"] = ["easyrl", "reinforcement-learning"]
    if config.model.path not in BUILT_IN_MODELS and is_hub_id(config.model.path):
        data["base_model"] = config.model.path
    return data | ({"datasets": found} if found else {})
