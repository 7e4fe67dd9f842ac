"""A model as others load it: a Hugging Face folder with weights in checkpoint names, tokenizer and
generation config.

A run's `model/` and what `easyrl export` writes come from here. Mixtures of experts, whose experts
transformers fuses in memory, are written in the names they were published in.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.model.checkpoint import read_tensors
from easyrl.model.checkpoint_files import (
    CHECKPOINTS,
    STATE,
    BrokenCheckpoint,
    Checkpoint,
    newest_checkpoint,
    read_checkpoint,
)
from easyrl.model.files import fingerprint, read_model_files
from easyrl.model.policy import Policy
from easyrl.model.pretrained import load_tokenizer

ADAPTER = "adapter"
"""Beside a run's `model/`, where LoRA has trained it."""


def export_model(policy: Policy, tokenizer: Any, folder: Path, *, is_writer: bool = True) -> None:
    """Write `folder`, or what is there anew; under its name there is never half a model. All ranks
    of a sharded policy come here together, and one of them `is_writer`."""
    if is_writer:
        _write_anew(folder, lambda new: policy.save(new, tokenizer))
    else:
        policy.save(folder, tokenizer, is_writer=False)


def export_adapter(policy: Policy, folder: Path, *, is_writer: bool = True) -> None:
    """The same for a policy's adapters alone, in peft's format."""
    assert policy.adapter is not None
    if is_writer:
        _write_anew(folder, policy.adapter.save)
    else:
        policy.adapter.save(folder, is_writer=False)


def _write_anew(folder: Path, write: Callable[[Path], None]) -> None:
    new, old = (folder.with_name(folder.name + end) for end in (".unfinished", ".old"))
    for left_over in (new, old):
        shutil.rmtree(left_over, ignore_errors=True)
    write(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def export_checkpoint(source: Path, folder: Path) -> str:
    """Export a checkpoint, or the newest whole one of a run folder; returns what was done, in
    words. Raises ValueError for what the user can mend."""
    if folder.exists():
        raise ValueError(f"'{folder}' exists; accepted: a folder that does not")
    checkpoint, skipped = _find(source)
    config = Config.model_validate(checkpoint.state["config"])
    model = config.model
    read_model_files(model.path)
    if checkpoint.state["identity"]["model.path"] != fingerprint(model.path):
        raise ConfigError(
            f"model.path: the files of {model.path} are not those that the run of "
            f"'{checkpoint.path}' started from; accepted: the same again, in the same place"
        )
    _quieten_transformers()
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    policy = Policy.load(model.path, trust_remote_code=model.trust_remote_code)
    if model.lora.rank is not None:
        policy.add_adapter(model.lora, path=model.path, seed=config.runtime.seed)
    read_tensors(checkpoint.path, policy.model)
    try:
        export_model(policy, tokenizer, folder)
    except OSError as error:
        raise ValueError(f"'{folder}' cannot be written: {error.strerror or error}") from None
    done = (
        f"{checkpoint.path}, iteration {checkpoint.state['num_iterations']}, is exported to "
        f"{folder} (weights: sha256 {policy.weights_sha256()})"
    )
    return "\n".join([*skipped, done])


def _find(source: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint, and what was skipped on the way to it."""
    if (source / CHECKPOINTS).is_dir():
        found, broken = newest_checkpoint(source / CHECKPOINTS)
        skipped = [f"skipped {path}: {why}" for path, why in broken.items()]
        if found is not None:
            return found, skipped
        raise ValueError("\n".join([f"'{source}' has no whole checkpoint", *skipped]))
    if not (source / STATE).is_file():
        what = "is neither" if source.is_dir() else "is no folder"
        raise ValueError(
            f"'{source}' {what}; accepted: a checkpoint (RUN/checkpoints/<version>), or a run "
            "folder that has one"
        )
    try:
        return read_checkpoint(source), []
    except BrokenCheckpoint as error:
        raise ValueError(f"'{source}' is not whole: {error}; choose another one") from None


def _quieten_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
