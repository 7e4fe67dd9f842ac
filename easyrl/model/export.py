"""Export a model as a Hugging Face folder: weights in checkpoint names, tokenizer and configs.

Writes a run's `model/` and the output of `easyrl export`. Mixtures of experts, whose experts
transformers fuses in memory, are written under their published names.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.model.checkpoint import read_tensors
from easyrl.model.checkpoint_files import find_checkpoint
from easyrl.model.files import fingerprint, load_tokenizer, read_model_files
from easyrl.model.policy import Policy

ADAPTER = "adapter"
"""Name of the adapter's folder beside a LoRA run's `model/`."""


def export_model(policy: Policy, tokenizer: Any, folder: Path, *, is_writer: bool = True) -> None:
    """Write or replace `folder`, which never holds an incomplete model. All ranks of a sharded
    policy call this together, and one of them `is_writer`."""
    if is_writer:
        replace_folder(folder, lambda new: policy.save(new, tokenizer))
    else:
        policy.save(folder, tokenizer, is_writer=False)


def export_adapter(policy: Policy, folder: Path, *, is_writer: bool = True) -> None:
    """Write the adapters alone, in peft's format, like `export_model`."""
    assert policy.adapter is not None
    if is_writer:
        replace_folder(folder, policy.adapter.save)
    else:
        policy.adapter.save(folder, is_writer=False)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    new, old = (folder.with_name(folder.name + end) for end in (".unfinished", ".old"))
    for left_over in (new, old):
        shutil.rmtree(left_over, ignore_errors=True)
    write(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def export_checkpoint(source: Path, folder: Path) -> str:
    """Export a checkpoint, or the newest complete one of a run folder; return a message for the
    user. Raises ValueError for user errors."""
    if folder.exists():
        raise ValueError(f"expected a folder that does not exist, got '{folder}'")
    checkpoint, broken = find_checkpoint(source)
    config = Config.model_validate(checkpoint.state["config"])
    model = config.model
    read_model_files(model.path)
    if checkpoint.state["identity"]["model.path"] != fingerprint(model.path):
        raise ConfigError(
            f"model.path: the files of {model.path} have changed since the run of "
            f"'{checkpoint.path}' started; restore them"
        )
    quieten_transformers()
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    policy = Policy.load(model.path, trust_remote_code=model.trust_remote_code)
    if model.lora.rank is not None:
        policy.add_adapter(model.lora, path=model.path, seed=config.runtime.seed)
    read_tensors(checkpoint.path, policy.model)
    try:
        export_model(policy, tokenizer, folder)
    except OSError as error:
        raise ValueError(f"'{folder}' cannot be written: {error}") from None
    lines = [f"skipped {path}: {why}" for path, why in broken.items()]
    done = (
        f"{checkpoint.path}, iteration {checkpoint.state['num_iterations']}, is exported to "
        f"{folder} (weights: sha256 {policy.weights_sha256()})"
    )
    return "\n".join([*lines, done])


def quieten_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
