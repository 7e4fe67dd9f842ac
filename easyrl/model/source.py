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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from easyrl.config import ConfigError
from easyrl.data.hub import BUILT_IN_MODELS, KEY, resolve_model
from easyrl.model.checkpoint_files import STATE, find_checkpoint
from easyrl.model.files import fingerprint, load_tokenizer, read_model_files

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
        with self._reporting_removal():
            digest.update((Path(self.path) / name).read_bytes())
        return digest.hexdigest()

    def make(self, folder: Path) -> str:
        """Return the path of a complete model, made in `folder` if necessary. Raises ConfigError if
        it cannot be made."""
        if self.kind == "model":
            return self.path
        if not folder.exists():
            from easyrl.model.export import export_checkpoint, replace_folder

            with self._reporting_removal():
                if self.kind == "checkpoint":
                    export_checkpoint(Path(self.path), folder)
                else:
                    replace_folder(folder, self._write_merged)
        return str(folder)

    @contextmanager
    def _reporting_removal(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):
            if Path(self.path).is_dir():
                raise
            raise ConfigError(
                f"{KEY}: the {self.kind} '{self.path}' was removed while it was read. A running "
                "training removes older checkpoints (train.keep_checkpoints). Repeat the command: "
                "it takes the newest"
            ) from None

    def _write_merged(self, folder: Path) -> None:
        """Write the base model with the adapter merged, in float32."""
        import peft
        import torch
        from transformers import AutoModelForCausalLM

        from easyrl.model.export import quieten_transformers

        quieten_transformers()
        path = resolve_model(self.base)
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old names
                merged = peft.PeftModel.from_pretrained(base, self.path).merge_and_unload()
        except (ValueError, RuntimeError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{KEY}: the adapter '{self.path}' cannot be merged into '{self.base}', use the "
                f"model that it was trained on (--base): {error}"
            ) from error
        merged.save_pretrained(folder)
        load_tokenizer(self.base).save_pretrained(folder)


def find_model(path: str, base: str | None = None) -> ModelSource:
    """Find the model of `path`. Raises ConfigError if it, or an adapter's base, is missing.

    `base`: the model that an adapter belongs to, if not the one that it names."""
    folder = Path(path).expanduser()
    found = ModelSource("model", path, path)
    if path not in BUILT_IN_MODELS and folder.is_dir():
        if (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors")):
            return _adapter(folder, base)
        # A run has ended once its summary exists.
        if (folder / "model").is_dir() and (folder / "summary.json").is_file():
            found = ModelSource("model", str(folder / "model"), str(folder / "model"))
        elif (folder / STATE).is_file() or (folder / "config.yaml").is_file():
            try:
                checkpoint, _ = find_checkpoint(folder)
            except ValueError as error:
                raise ConfigError(f"{KEY}: {error}") from None
            trained_from = checkpoint.state["config"]["model"]["path"]
            found = ModelSource("checkpoint", str(checkpoint.path), trained_from)
    if base is not None:
        raise ConfigError(f"--base: '{path}' is no adapter (it has no {ADAPTER_CONFIG}); omit it")
    read_model_files(found.base)
    return found


def _adapter(folder: Path, base: str | None) -> ModelSource:
    try:
        content = json.loads((folder / ADAPTER_CONFIG).read_text())
        base = base or content.get("base_model_name_or_path")
        if not base:
            raise ValueError("it names none")
        read_model_files(base)
    except ValueError as error:
        raise ConfigError(
            f"{KEY}: the adapter '{folder}' needs the model that it was trained on; use --base "
            f"MODEL, or the model/ folder of its run, which has the adapter merged\n{error}"
        ) from None
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"{KEY}: the adapter '{folder}' has no weights ({ADAPTER_WEIGHTS})")
    if find_spec("peft") is None:
        raise ConfigError(
            f"{KEY}: merging the adapter '{folder}' needs peft: pip install 'easyrl[lora]'"
        )
    return ModelSource("adapter", str(folder), base)
