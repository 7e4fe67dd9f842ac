"""Model cards, from the folder of a run: of an exported checkpoint, and of a run's adapter."""

import re
from pathlib import Path

from huggingface_hub import ModelCardData

from easyrl import __version__, events
from easyrl.config import INPUTS, ConfigError
from easyrl.data.datasets import HUB_ID
from easyrl.data.hub import BUILT_IN_MODELS, is_hub_id
from easyrl.data.presets import PRESETS
from easyrl.formatting import counted
from easyrl.model.adapter_files import ADAPTER_CONFIG, AdapterFiles, read_adapter
from easyrl.model.checkpoint_files import CHECKPOINTS, Checkpoint
from easyrl.model.export import ADAPTER
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


class AdapterCard:
    """An observer that writes the card of a finished run's adapter."""

    def __init__(self) -> None:
        self._folder = Path()

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.RunStarted(folder=folder):
                self._folder = folder
            case events.RunFinished() if (self._folder / ADAPTER / ADAPTER_CONFIG).is_file():
                run = read_history(self._folder)
                name = self._folder.absolute().name
                card = model_card(run, name, read_adapter(self._folder / ADAPTER))
                file = self._folder / ADAPTER / "README.md"
                file.write_bytes(card.encode(errors="replace"))


def model_card(run: History, title: str, adapter: AdapterFiles | None = None) -> str:
    """Return the README.md of a model, or of an adapter, without the folders of the user's
    files."""
    data = run.spec.rewards.datasets
    on_hub = []
    for name in data:
        rows = PRESETS[name].rows if name in PRESETS else name
        if rows and re.fullmatch(HUB_ID, rows):
            on_hub.append(rows.partition(":")[0])
    path = run.spec.model.path
    if adapter is not None and adapter.base:
        path = adapter.base
    is_on_hub = path not in BUILT_IN_MODELS and is_hub_id(path)
    tags = ["easyrl", "reinforcement-learning"]
    if adapter is not None:
        tags.append("lora")
    metadata = ModelCardData(
        base_model=path if is_on_hub else None,
        datasets=on_hub or None,
        library_name="transformers" if adapter is None else "peft",
        pipeline_tag="text-generation",
        tags=tags,
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
    if adapter is not None:
        text += _about_adapter(adapter, path, title)
    return text


def _about_adapter(adapter: AdapterFiles, base: str, title: str) -> str:
    """Say what an adapter fits, and how it is loaded."""
    text = f"\nA LoRA adapter of rank {adapter.rank} for {_short(base)}.\n"
    if Path(base).parent.name == INPUTS:
        text += (
            f"That base is the model of the checkpoint or adapter {Path(base).name}, which the run "
            "has written to its own folder (`inputs/`): publish the base too, or the run's "
            "`model/`, which has both in one.\n"
        )
    text += "\n```python\nfrom peft import AutoPeftModelForCausalLM\n\n"
    text += f'model = AutoPeftModelForCausalLM.from_pretrained("{title}")\n```\n'
    return text


def _short(name: str) -> str:
    """Return the name of a file without its folder."""
    return name.rpartition("/")[2] if name.startswith("/") else name
