"""The model card of an exported checkpoint, from the folder of its run."""

import re

from huggingface_hub import ModelCardData

from easyrl import __version__
from easyrl.config import ConfigError
from easyrl.data.datasets import HUB_ID
from easyrl.data.hub import BUILT_IN_MODELS, is_hub_id
from easyrl.data.presets import PRESETS
from easyrl.formatting import counted
from easyrl.model.checkpoint_files import CHECKPOINTS, Checkpoint
from easyrl.observe.history import History, read_history

RESULTS = ("reward", "held-out accuracy")


def card_of(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the card of a checkpoint's model; None outside the folder of its run."""
    folder = checkpoint.path.absolute().parent
    try:
        run = read_history(folder.parent if folder.name == CHECKPOINTS else folder)
    except ConfigError:
        return None
    for number in list(run.lines):
        if number > checkpoint.state["num_iterations"]:
            del run.lines[number]
    run.summary = {}
    return model_card(run, name)


def model_card(run: History, title: str) -> str:
    """Return the README.md of a model, without the folders of the user's files."""
    data = run.spec.rewards.datasets
    on_hub = []
    for name in data:
        rows = PRESETS[name].rows if name in PRESETS else name
        if rows and re.fullmatch(HUB_ID, rows):
            on_hub.append(rows.partition(":")[0])
    path = run.spec.model.path
    is_on_hub = path not in BUILT_IN_MODELS and is_hub_id(path)
    metadata = ModelCardData(
        base_model=path if is_on_hub else None,
        datasets=on_hub or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["easyrl", "reinforcement-learning"],
    )
    facts = {"data": ", ".join(map(_short, data))}
    facts["reward functions"] = ", ".join(map(_short, run.spec.rewards.functions))
    results = run.results()
    for name in RESULTS:
        if name in results:
            facts[name] = results[name]
    done = f"({counted(run.num_done, 'iteration')}) with EasyRL {__version__}"
    text = f"---\n{metadata.to_yaml()}\n---\n\n# {title}\n\n"
    text += f"Trained by reinforcement learning {done}.\n\n"
    for name, fact in facts.items():
        text += f"- {name}: {fact}\n"
    return text


def _short(name: str) -> str:
    """Return the name of a file without its folder."""
    return name.rpartition("/")[2] if name.startswith("/") else name
