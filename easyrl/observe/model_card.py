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
    last = checkpoint.state["num_iterations"]
    run.lines = {number: line for number, line in run.lines.items() if number <= last}
    run.summary = {}
    return model_card(run, name)


def model_card(run: History, title: str) -> str:
    """The README.md of a model, without the folders of the user's files."""
    data, path, results = run.spec.rewards.datasets, run.spec.model.path, run.results()
    rows = [PRESETS[name].rows if name in PRESETS else name for name in data]
    on_hub = [name.partition(":")[0] for name in rows if name and re.fullmatch(HUB_ID, name)]
    metadata = ModelCardData(
        base_model=path if path not in BUILT_IN_MODELS and is_hub_id(path) else None,
        datasets=on_hub or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["easyrl", "reinforcement-learning"],
    )
    facts = {"data": ", ".join(map(_short, data))}
    facts["reward functions"] = ", ".join(map(_short, run.spec.rewards.functions))
    facts |= {name: results[name] for name in RESULTS if name in results}
    done = f"({counted(run.num_done, 'iteration')}) with EasyRL {__version__}"
    text = f"---\n{metadata.to_yaml()}\n---\n\n# {title}\n\n"
    text += f"Trained by reinforcement learning {done}.\n\n"
    return text + "".join(f"- {name}: {fact}\n" for name, fact in facts.items())


def _short(name: str) -> str:
    return name.rpartition("/")[2] if name.startswith("/") else name
