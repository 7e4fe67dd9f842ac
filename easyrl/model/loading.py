"""Load a policy: read its weights, check that it computes exactly, and choose its attention.

files ──transformers──► model ──► complete? ──► packed rows exact? causal? head? ──► Policy
                                                └──── once per machine and model ────┘

Of a model with a text model inside, only this is loaded (`towers`), unless prompts have pictures.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from easyrl.config import ConfigError
from easyrl.config.model import AttentionMode, DType
from easyrl.config.spec import ModelSpec
from easyrl.data.hub import KEY, loadable_model
from easyrl.layout.tree import TokenTree
from easyrl.model.exactness import (
    attention_of,
    check_causal,
    checked_once,
    choose_attention,
    in_float32,
    set_attention,
)
from easyrl.model.files import load_model_config, read_loaded_files
from easyrl.model.inputs import ModelInputs
from easyrl.model.mixers import recurrent
from easyrl.model.mixers.attention import register_attention
from easyrl.model.picture_check import choose_spans
from easyrl.model.pictures import ArraysOf, SpanMode, Vision
from easyrl.model.policy import Policy
from easyrl.model.processor import load_processor
from easyrl.model.text_part import picture_class
from easyrl.model.towers import model_class

MOST_CHECKED_TOKENS = 4  # of the check of the head
HALF_PRECISION = {torch.bfloat16, torch.float16}


class _Checked(NamedTuple):
    """The outcome of the checks, in JSON's types."""

    no_packing_reason: str | None
    attention: str  # transformers' name of the attention function that the model uses
    spans: SpanMode = "none"  # with pictures: in which layers they are seen in both directions


@dataclass(frozen=True, slots=True)
class PictureInput:
    """How a model gets pictures."""

    arrays_of: ArraysOf  # of the checkpoint's processor
    placeholder_ids: frozenset[int]  # tokens that the processor puts in the place of pictures
    is_trained: bool = False  # whether the tower is trained
    settings: str = ""  # of the processor: models are checked once for each of them

    def vision_of(self, model: Any, spans: SpanMode) -> Vision:
        return Vision(
            model,
            self.arrays_of,
            is_trained=self.is_trained,
            spans=spans,
            placeholder_ids=self.placeholder_ids,
        )


def picture_input(model: ModelSpec, teacher: str | None = None) -> PictureInput | None:
    """Load the processor of a model, or of the model of a `teacher`, whose tower is frozen; None if
    prompts have no pictures. Raises ConfigError."""
    if not model.has_pictures:
        return None
    path = model.path if teacher is None else teacher
    processor = load_processor(
        path,
        max_image_pixels=model.max_image_pixels,
        trust_remote_code=model.trust_remote_code,
    )
    if processor is None:
        raise _reads_no_pictures(path)
    return PictureInput(
        processor.arrays,
        processor.placeholder_ids,
        is_trained=model.has_trained_tower and teacher is None,
        settings=f"of {model.max_image_pixels} pixels",
    )


def _reads_no_pictures(path: str) -> ConfigError:
    return ConfigError(
        f"{KEY}: expected a model that reads pictures, as the data has some, got '{path}', which "
        "does not; use another model, or data.image_column= to leave pictures out"
    )


def load_policy(
    path: str,
    device: torch.device | str = "cpu",
    *,
    trust_remote_code: bool = False,
    attention: AttentionMode = "auto",
    dtype: DType | None = "float32",
    pictures: PictureInput | None = None,
) -> Policy:
    """Load a folder, a hub id or a built-in model, with its weights in `dtype`; None: as they are
    stored, for `TrainRanks.shard`. With `pictures` it has its tower. Raises ConfigError if weights
    are missing, if it is no causal language model, if it cannot read pictures, or if `attention`
    asks for prompts that cannot be shared exactly."""
    register_attention()
    has_pictures = pictures is not None
    model = _load_model(path, dtype, trust_remote_code=trust_remote_code, has_pictures=has_pictures)
    if torch.device(device).type == "cpu":
        recurrent.shorten_chunks(model)
    if trust_remote_code:  # a model's own code is not part of its fingerprint
        checked = _check(model, path, pictures)
    else:
        kind = "" if pictures is None else f" with pictures {pictures.settings}"
        checked = _Checked(*checked_once(path, lambda: _check(model, path, pictures), kind))
    reason = checked.no_packing_reason
    if reason is not None and attention == "shared_prompt":
        raise ConfigError(
            "model.attention: expected auto or repeated, because prompts cannot be "
            f"shared exactly: {reason} ({path}); got shared_prompt"
        )
    if checked.attention != attention_of(model):
        set_attention(model, checked.attention)
    model.to(device)
    vision = None if pictures is None else pictures.vision_of(model, checked.spans)
    return Policy(
        model,
        torch.device(device),
        no_packing_reason=reason,
        attention=attention,
        vision=vision,
    )


def _check(model: Any, path: str, pictures: PictureInput | None) -> _Checked:
    """Choose the model's attention, and check the rest of it. Raises ConfigError."""
    with in_float32(model):
        reason = choose_attention(model)
        if pictures is None:
            if reason is not None:
                check_causal(model, path)
            check_head(Policy(model, model.device, no_packing_reason=reason), path)
            return _Checked(reason, attention_of(model))
    if reason is not None:
        raise ConfigError(
            f"{KEY}: expected a model whose layers run packed rows exactly, as prompts with "
            f"pictures need, got '{path}': {reason}"
        )
    with in_float32(model, may_cut_vocabulary=False):
        spans = choose_spans(model, pictures.vision_of, pictures.arrays_of, path)
        vision = pictures.vision_of(model, spans)
        check_head(Policy(model, model.device, vision=vision), path)
        return _Checked(None, attention_of(model), spans)


@torch.no_grad()
def check_head(policy: Policy, path: str) -> None:
    """Raise ConfigError if the head is not a function of the last hidden states alone."""
    num_tokens = min(MOST_CHECKED_TOKENS, policy.vocabulary_size)
    tokens = torch.arange(num_tokens, device=policy.device)
    inputs = ModelInputs.of_row(tokens, TokenTree.of_sequences([num_tokens]))
    expected = policy.logits_by_own_forward(inputs)
    with suppress(Exception):  # any, depending on what the model's code expects
        got = policy.forward(inputs)
        if torch.allclose(got, expected, rtol=1e-5, atol=1e-5):
            return
    raise ConfigError(
        f"model.path: the logits of {type(policy.model).__name__} ({path}) are not a function of "
        "its last hidden states alone, as computing them in chunks requires; use another model"
    )


def _load_model(
    path: str, dtype: DType | None, *, trust_remote_code: bool, has_pictures: bool
) -> Any:
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    loaded_class = model_class(config, trust_remote_code=trust_remote_code)
    if has_pictures:
        loaded_class = picture_class(config)
        if loaded_class is None:
            raise _reads_no_pictures(path)
    dtype_name: str | None = dtype
    if dtype_name is None:
        files = read_loaded_files(path, is_whole=False, trust_remote_code=trust_remote_code)
        dtype_name = files.stored_dtype
    loaded: Any = loaded_class.from_pretrained(
        loadable_model(path),
        config=config,
        dtype=getattr(torch, dtype_name),
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported by _check_complete
    )
    model, found = loaded
    _check_complete(path, found)
    if dtype is None:
        buffer_dtypes = {buffer.dtype for buffer in model.buffers()}
        if buffer_dtypes & HALF_PRECISION:
            # A constant of the model (Gemma's scale of embeddings) was rounded.
            return _load_model(
                path, "float32", trust_remote_code=trust_remote_code, has_pictures=has_pictures
            )
    for weight in model.parameters():  # transformers keeps some weights in float32
        weight.data = weight.data.to(getattr(torch, dtype_name))
    return model


def _check_complete(path: str, found: Mapping[str, Any]) -> None:
    """Raise ConfigError for missing weights, which transformers would initialize at random."""
    problems = list[str]()
    for name, got, expected in sorted(found["mismatched_keys"]):
        problems.append(
            f"weight {name}: expected shape {list(expected)} by config.json, got {list(got)}"
        )
    for name in sorted(found["missing_keys"]):
        problems.append(f"weight {name} is missing")
    if problems:
        raise ConfigError(
            f"model.path: {path}: {problems[0]} ({len(problems)} such weights); download or save "
            "the model again, or use another model"
        )
