"""Measure the policy before any weights are loaded: its size, and what LoRA trains of it."""

from typing import NamedTuple

from easyrl.config import Config
from easyrl.model.files import (
    ModelFiles,
    ModelSize,
    check_positions,
    meta_model,
    model_config_of,
    model_size,
    read_model_files,
)


class Measured(NamedTuple):
    """The policy, by its files."""

    files: ModelFiles
    num_trained: int | None  # elements of LoRA's adapters; None: all weights are trained
    size: ModelSize | None  # None: its configuration does not have the usual names


def measure_model(config: Config, *, is_whole: bool = True) -> Measured:
    """Measure `model.path`. A model that is not downloaded yet is counted by its configuration, and
    unless `is_whole`, weights and tokenizer of a folder may be missing. Raises ConfigError, also
    for too few positions, or LoRA without layers for it."""
    lora, num_trained = config.model.lora, None
    files = read_model_files(config.model.path, is_whole=is_whole)
    check_positions(config, files)
    found, num_weights = files.config, files.num_weights
    if lora.rank is not None or num_weights is None:
        full = model_config_of(config)
        model = meta_model(full, trust_remote_code=config.model.trust_remote_code)
        if num_weights is None:
            num_weights = sum(weight.numel() for weight in model.parameters())
            found = full.to_dict()
    if lora.rank is not None:
        from easyrl.model.lora import check_lora

        num_trained = check_lora(lora, config.model.path, model)
    return Measured(files, num_trained, model_size(found, num_weights, num_trained))
