"""Resolve `--model` for evaluation: find a folder that engines can load, or make one.

    built-in, folder, hub id   unchanged
    run folder                 its model/; for an unfinished run its newest checkpoint
    checkpoint                 exported     (`export`)
    adapter (peft's)           merged into the model that it was trained on

Finding imports no torch; making does.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from easyrl.config import ConfigError
from easyrl.data.hub import BUILT_IN_MODELS, KEY, is_hub_id
from easyrl.model.checkpoint_files import (
    CHECKPOINTS,
    STATE,
    BrokenCheckpoint,
    newest_checkpoint,
    read_checkpoint,
)
from easyrl.model.files import fingerprint, read_model_files

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class ModelSource:
    kind: Literal["model", "checkpoint", "adapter"]
    path: str
    """The folder or hub id."""
    base: str
    """The model with its configuration and tokenizer: itself, or the one it was trained from."""

    def identity(self) -> str:
        """Return an identity of the content, which changes if the files change."""
        if self.kind == "model":
            return fingerprint(self.path)
        digest = hashlib.sha256(fingerprint(self.base).encode())
        name = STATE if self.kind == "checkpoint" else ADAPTER_WEIGHTS
        try:
            digest.update((Path(self.path) / name).read_bytes())
        except FileNotFoundError:
            raise self._deleted() from None
        return digest.hexdigest()

    def _deleted(self) -> ConfigError:
        return ConfigError(
            f"{KEY}: the {self.kind} '{self.path}' was removed while it was read. A running "
            "training removes older checkpoints (train.keep_checkpoints). Repeat the command: it "
            "takes the newest"
        )

    def make(self, folder: Path) -> str:
        """Return the path of a complete model, made in `folder` if necessary. Raises ConfigError if
        it cannot be made."""
        if self.kind == "model":
            return self.path
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            if self.kind == "checkpoint":
                from easyrl.model.export import export_checkpoint

                try:
                    export_checkpoint(Path(self.path), unfinished)
                except (OSError, ValueError):
                    if Path(self.path).is_dir():
                        raise
                    raise self._deleted() from None
            else:
                _merge(self, unfinished)
            unfinished.rename(folder)
        return str(folder)


def find_model(path: str, base: str | None = None) -> ModelSource:
    """Find the model of `path`. Raises ConfigError if it, or an adapter's base, is missing.

    `base`: the model that an adapter belongs to, if not the one that it names."""
    folder = Path(path).expanduser()
    if path not in BUILT_IN_MODELS and folder.is_dir():
        if (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors")):
            return _adapter(folder, base)
        if (folder / STATE).is_file():
            found = _checkpoint(folder)
        elif (folder / "config.yaml").is_file():
            found = _of_run(folder)
        else:
            found = ModelSource("model", path, path)
    else:
        found = ModelSource("model", path, path)
    if base is not None:
        raise ConfigError(
            f"--base: expected with an adapter only, got '{base}', but '{path}' has no "
            f"{ADAPTER_CONFIG}; leave it out"
        )
    read_model_files(found.base)
    return found


def _of_run(folder: Path) -> ModelSource:
    """Use the final model if the run has ended: its summary exists only then."""
    model = folder / "model"
    if model.is_dir() and (folder / "summary.json").is_file():
        return ModelSource("model", str(model), str(model))
    checkpoint, broken = newest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        reasons = "".join(f"\n{path}: {why}" for path, why in broken.items())
        raise ConfigError(
            f"{KEY}: the run folder '{folder}' has neither a final model nor a complete "
            f"checkpoint{reasons or '; wait until it has one'}"
        )
    return _checkpoint(checkpoint.path)


def _checkpoint(folder: Path) -> ModelSource:
    if folder.is_symlink():  # `best` may change later
        folder = folder.parent / folder.readlink()
    try:
        checkpoint = read_checkpoint(folder)
    except BrokenCheckpoint as error:
        raise ConfigError(f"{KEY}: '{folder}' is not complete: {error}; use another one") from None
    return ModelSource("checkpoint", str(folder), checkpoint.state["config"]["model"]["path"])


def _adapter(folder: Path, base: str | None) -> ModelSource:
    try:
        named = json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    except (ValueError, OSError, AttributeError) as error:
        raise ConfigError(f"{KEY}: '{folder / ADAPTER_CONFIG}' cannot be read: {error}") from None
    what = f"{KEY}: '{folder}' is an adapter, which needs the model that it was trained on"
    accepted = "use --base MODEL, or the model/ folder of its run, which has the adapter merged"
    chosen = base or named
    if not chosen:
        raise ConfigError(f"{what}, but it names none; {accepted}")
    if not (chosen in BUILT_IN_MODELS or Path(chosen).expanduser().is_dir() or is_hub_id(chosen)):
        raise ConfigError(f"{what}: '{chosen}' does not exist; {accepted}")
    try:
        read_model_files(chosen)
    except ConfigError as error:
        raise ConfigError(f"{what}: '{chosen}'; {accepted}\n{error}") from None
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"{KEY}: the adapter '{folder}' has no weights ({ADAPTER_WEIGHTS})")
    from importlib.util import find_spec

    if find_spec("peft") is None:
        raise ConfigError(
            f"{KEY}: merging the adapter '{folder}' needs peft: pip install 'easyrl[lora]', or use "
            "the model/ folder of its run"
        )
    return ModelSource("adapter", str(folder), chosen)


def _merge(source: ModelSource, folder: Path) -> None:
    """Write the base model with the adapter merged, in float32."""
    import warnings

    import peft
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from easyrl.data.hub import resolve_model
    from easyrl.model.files import load_tokenizer

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    base = AutoModelForCausalLM.from_pretrained(resolve_model(source.base), dtype=torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old names
            merged = peft.PeftModel.from_pretrained(base, source.path).merge_and_unload()
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{KEY}: the adapter '{source.path}' cannot be merged into '{source.base}': {reason}; "
            "use the model that it was trained on (--base)"
        ) from error
    merged.save_pretrained(folder)
    load_tokenizer(source.base).save_pretrained(folder)
