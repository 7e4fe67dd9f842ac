"""Check, when a model is loaded, that rows with pictures are exact (see `exactness`).

    [ text . picture . text | completion | completion ]   packed, features given to the model
                            compared with
    each completion behind the prompt, alone, by transformers' own forward with the arrays

Some models let the tokens of a picture see each other in both directions, in all layers or in those
with a sliding window. Which of these a model does is found by measuring.
"""

import inspect
import io
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from easyrl.config import ConfigError
from easyrl.data.hub import KEY
from easyrl.layout.tree import TokenTree
from easyrl.model.exactness import NUM_DRAWS, agree, attending
from easyrl.model.inputs import ModelInputs
from easyrl.model.pictures import ArraysOf, SpanMode, Vision, placeholders_of, tensors_of
from easyrl.model.policy import Policy
from easyrl.types import Picture, RowPictures

NUM_TEXT_TOKENS = 5  # before the picture, and behind it
COMPLETION_LENGTHS = (6, 2)
PICTURE_SIZE = (64, 48)  # width and height of the picture, in pixels
KIND_ARGUMENTS = ("mm_token_type_ids", "token_type_ids")
"""Names of the argument that says which tokens stand for pictures."""


@torch.no_grad()
def choose_spans(
    model: Any, vision_of: Callable[[Any, SpanMode], Vision], arrays_of: ArraysOf, path: str
) -> SpanMode:
    """Return in which layers the tokens of a picture see each other in both directions. Raises
    ConfigError if rows with pictures are exact in neither way."""
    pictures = (_random_picture(),)
    try:
        arrays = arrays_of(pictures)
        generator = torch.Generator().manual_seed(0)
        num_placeholders = _count_placeholders(model, vision_of(model, "none"), arrays, pictures)
        for _ in range(NUM_DRAWS):
            tokens = _draw_row(model, num_placeholders, generator)
            for spans in get_args(SpanMode):
                policy = Policy(model, model.device, vision=vision_of(model, spans))
                if _is_exact(policy, tokens, num_placeholders, pictures, arrays):
                    mode: SpanMode = spans
                    return mode
    except ConfigError:
        raise
    except Exception as error:  # any, depending on what the model's code expects
        raise ConfigError(
            f"{KEY}: transformers cannot run {path} ({type(model).__name__}) with a picture: "
            f"{type(error).__name__}: {error}"
        ) from error
    raise ConfigError(
        f"{KEY}: expected a model that computes a packed row with pictures as its sequences alone, "
        f"got {path} ({type(model).__name__}), which does not; use another model"
    )


def _random_picture() -> Picture:
    from PIL import Image

    width, height = PICTURE_SIZE
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Picture(file.getvalue())


def _count_placeholders(
    model: Any, vision: Vision, arrays: Mapping[str, np.ndarray], pictures: tuple[Picture, ...]
) -> int:
    """Return how many tokens stand for the picture, by the features that the tower gives."""
    features = vision.features_of(RowPictures(pictures, 0, 0, 0, arrays))
    width = model.get_input_embeddings().weight.shape[1]
    num_elements = sum(tensor.numel() for tensor in tensors_of(features.pooler_output))
    return int(num_elements // width)


def _draw_row(model: Any, num_placeholders: int, generator: torch.Generator) -> Tensor:
    """Return the tokens [T] of a prompt with a picture and of its completions."""
    num_text = 2 * NUM_TEXT_TOKENS + sum(COMPLETION_LENGTHS)
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    text = torch.randint(vocabulary_size, (num_text,), generator=generator)
    banned = torch.tensor(sorted(placeholders_of(model.config)))
    text[torch.isin(text, banned)] = 0

    placeholder_id = int(model.config.image_token_id)
    picture = torch.full((num_placeholders,), placeholder_id)
    before = text[:NUM_TEXT_TOKENS]
    behind = text[NUM_TEXT_TOKENS:]
    return torch.cat([before, picture, behind]).to(model.device)


def _is_exact(
    policy: Policy,
    tokens: Tensor,
    num_placeholders: int,
    pictures: tuple[Picture, ...],
    arrays: Mapping[str, np.ndarray],
) -> bool:
    num_prompt = 2 * NUM_TEXT_TOKENS + num_placeholders
    tree = TokenTree.of_group(num_prompt, COMPLETION_LENGTHS)
    shown = (RowPictures(pictures, 0, num_prompt, len(tokens), arrays),)
    assert policy.vision is not None
    spans = policy.vision.spans_of(tokens.cpu().numpy(), shown)
    inputs = ModelInputs.of_row(tokens, tree, pictures=shown, spans=spans)
    packed = policy.logits_by_own_forward(inputs)
    for leaf in tree.leaves:
        sequence = tree.tokens_of(tree.path(leaf))
        alone = policy.ban(_logits_alone(policy.model, tokens[sequence], num_prompt, arrays))
        is_finite = alone.isfinite()
        if not agree(packed[sequence][is_finite], alone[is_finite]):
            return False
    return True


def _logits_alone(
    model: Any, tokens: Tensor, num_prompt: int, arrays: Mapping[str, np.ndarray]
) -> Tensor:
    """Return the logits [T, V] of a sequence by transformers' own forward, with the arrays."""
    parameters = inspect.signature(model.forward).parameters
    arguments = dict[str, Any]()
    for name, array in arrays.items():
        if name in parameters:
            arguments[name] = torch.from_numpy(array).to(model.device)
    kinds = (tokens == model.config.image_token_id).int()
    kinds[num_prompt:] = 0
    for name in KIND_ARGUMENTS:
        if name in parameters:
            arguments[name] = kinds[None]
    with attending(model, "eager"):
        logits: Tensor = model(input_ids=tokens[None], use_cache=False, **arguments).logits[0]
    return logits
