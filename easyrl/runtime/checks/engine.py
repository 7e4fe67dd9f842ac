"""The model, measured without its weights, and whether the engine can serve it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from easyrl.config import ConfigError
from easyrl.config.spec import ModelSpec, RunSpec
from easyrl.data.hub import describe_model
from easyrl.data.streams import PromptStream
from easyrl.engines.vllm.platforms import unseen_reason
from easyrl.model.files import (
    NOTHING_KEPT,
    KeptSize,
    ModelFiles,
    ModelSize,
    check_positions,
    load_model_config,
    model_size,
    read_loaded_files,
)
from easyrl.runtime.placement import Placement


class MeasuredModel(NamedTuple):
    files: ModelFiles
    num_trained: int | None  # elements of LoRA's adapters; None: all weights are trained
    size: ModelSize | None  # None: its configuration does not have the usual names
    about_lora: str = ""  # which layers are adapted, and which stay frozen

    @property
    def num_weights(self) -> int:
        """Elements of all weights, also of a model that is not downloaded; 0: unknown."""
        if self.files.num_weights is not None:
            return self.files.num_weights
        return 0 if self.size is None else self.size.num_weights


def measure_model(spec: ModelSpec, *, is_whole: bool = True) -> MeasuredModel:
    """Measure the model. One that is not downloaded yet is counted by its configuration, and unless
    `is_whole`, weights and tokenizer of a folder may be missing. Raises ConfigError, also for LoRA
    if the model has no layers for it."""
    trusts = spec.trust_remote_code
    files = read_loaded_files(spec.path, is_whole=is_whole, trust_remote_code=trusts)
    if spec.has_trained_tower and files.num_weights is not None:
        num_with_tower = files.num_weights + files.kept.num_weights
        files = replace(files, num_weights=num_with_tower, kept=NOTHING_KEPT)
    model_config = files.config
    num_weights = files.num_weights
    num_trained = None
    about_lora = ""
    if spec.lora.rank is not None or num_weights is None:
        from easyrl.model.towers import meta_model

        full_config = load_model_config(spec.path, trust_remote_code=trusts)
        model = meta_model(
            full_config, trust_remote_code=trusts, has_trained_tower=spec.has_trained_tower
        )
        if num_weights is None:
            num_weights = sum(weight.numel() for weight in model.parameters())
            model_config = full_config.to_dict()
        if spec.lora.rank is not None:
            from easyrl.model.lora import check_lora, describe_lora

            num_trained = check_lora(spec.lora, spec.path, model)
            about_lora = describe_lora(spec.lora, spec.path, model)
    size = model_size(model_config, num_weights, num_trained)
    if size is not None and spec.has_pictures:
        frozen = 0 if spec.has_trained_tower else files.kept.num_weights
        can_show = unseen_reason(model_config["model_type"], is_planned=True) is None
        in_vllm = size.is_in_vllm and can_show
        size = replace(size, num_frozen_weights=frozen, is_in_vllm=in_vllm)
    return MeasuredModel(files, num_trained, size, about_lora)


def describe_weights(model: MeasuredModel, spec: ModelSpec) -> str:
    """Say how many weights the model has, and how many of them are trained."""
    text = describe_model(spec.path)
    total = model.files.num_weights
    trained = model.num_trained
    kept = _describe_kept(model.files.kept, has_pictures=spec.has_pictures)
    if trained is None:
        return text if total is None else f"{text}, {total:,} weights, all trained{kept}"
    share = ""
    if total is not None:
        whole = total + trained
        share = f" of {whole:,} ({trained / whole:.1%})"
    rank = spec.lora.rank
    about = f"LoRA of rank {rank} trains {trained:,}{share}, base frozen"
    return f"{text}; {about}{kept}\n{model.about_lora}"


def _describe_kept(kept: KeptSize, *, has_pictures: bool) -> str:
    """Say what of a model's files is not trained, to append."""
    if not kept.num_weights:
        return ""
    modules = ", ".join(kept.modules)
    if has_pictures:
        return f"; {kept.num_weights:,} others ({modules}) are frozen (model.vision)"
    return f"; {kept.num_weights:,} others ({modules}) are not loaded, and kept as they are"


def check_lengths(spec: RunSpec, lengths_section: str, model: MeasuredModel) -> None:
    """Raise ConfigError if sequences may be longer than the model's positions."""
    check_positions(spec.limits, model.files, section=lengths_section)


def check_pictures(spec: RunSpec, prompts: PromptStream) -> Sequence[str]:
    """Raise ConfigError for settings that do not go together with pictures; warn of one that has no
    effect without them."""
    if not prompts.has_pictures and not spec.shows_pictures_in_episodes:
        if spec.model.vision == "trained":
            return ["warning: model.vision=trained has no effect: no prompt shows a picture"]
        return ()
    if spec.optimizer.compile:
        raise ConfigError(
            "train.compile: expected false, because there are pictures, with which layers are "
            "not compiled yet, got true"
        )
    return ()


def check_vllm_weights(placement: Placement, model: MeasuredModel) -> None:
    """Raise ConfigError for a model whose updated weights vLLM would refuse. (An evaluation's
    weights do not change.)"""
    if placement.engine.is_vllm and model.size is not None and not model.size.is_in_vllm:
        raise ConfigError(
            "rollout.engine: expected embedded, because vLLM names weights of "
            f"'{model.files.path}' otherwise than transformers, so it cannot receive updates, got "
            "vllm"
        )


def check_episodes(spec: RunSpec, placement: Placement, model: MeasuredModel) -> None:
    """Raise ConfigError if no engine can run the model's episodes, which need rows that wait."""
    if spec.episodes is None or placement.engine.is_vllm or model.size is None:
        return
    if not model.size.is_batched:
        raise ConfigError(
            f"{spec.episodes.key}: expected a model that the embedded engine or vLLM can serve, "
            f"got '{spec.model.path}', which has layers without attention to all tokens or a window"
        )
