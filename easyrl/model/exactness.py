"""Decide, when a model is loaded, whether its layers can attend in packed rows exactly.

    config: kinds of layers ─► class ─► each layer's attention arguments ─► logits, compared

The last step is decisive: a packed row of a small group and a small tree through EasyRL's attention
must give what each of its sequences gives alone through transformers' eager attention. A model that
cannot share prompts runs as padded batches (`inputs.real_tokens`); only a non-causal model is
refused.

Shapes: T tokens of the packed row, H the model's width, V tokens of the vocabulary.
"""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from easyrl.config import ConfigError
from easyrl.data.hub import KEY, loadable_model
from easyrl.layout.tree import NONE, TokenTree
from easyrl.model.files import fingerprint
from easyrl.model.mixers import unsupported_layer
from easyrl.model.mixers.attention import ATTENTION_NAME
from easyrl.model.mixers.interface import UnsupportedLayer
from easyrl.model.mixers.packed_row import connect
from easyrl.model.mixers.recording import RecordingLayout

CHECKED_TREE = TokenTree.joined(
    [
        TokenTree.of_group(3, [2, 4]),
        TokenTree(np.array([2, 3, 1, 2]), np.array([NONE, 0, 1, 1])),
    ]
)
"""The packed row of the check: a group, and a tree in which a completion branches."""
SEQUENCES = [
    CHECKED_TREE.tokens_of(CHECKED_TREE.path(leaf)).tolist() for leaf in CHECKED_TREE.leaves
]
"""The numbers of the tokens of each of its sequences."""
CHECKED_CODE = ("layout", "model")  # packages of EasyRL on which the outcome depends
NUM_DRAWS = 3  # rows of random tokens; one must agree, since rounding may change a token's experts


def checked_once(path: str, check: Callable[[], Any]) -> Any:
    """Return the outcome of `check` on the model of `path`, in JSON's types. It is run once for the
    same files, code and libraries; other processes wait meanwhile. An error is not kept."""
    import transformers

    key = f"{fingerprint(loadable_model(path))} {torch.__version__} {transformers.__version__}"
    package = Path(__file__).parents[1]
    files = sorted(file for room in CHECKED_CODE for file in (package / room).rglob("*.py"))
    code = b"".join(file.read_bytes() for file in files)
    name = hashlib.sha256(key.encode() + code).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "easyrl", "checked")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = (cache / f"{name}.json").open("a+")
    except OSError:  # there is no place for it
        return check()
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        try:
            outcome = json.load(file)
        except ValueError:  # it is new, or its process was killed
            outcome = check()
            file.truncate(0)
            json.dump(outcome, file)
        return outcome


def attend_packed(model: Any) -> str | None:
    """Switch a model to EasyRL's attention; return None, or a clause why that is not exact."""
    reason = _unsupported_reason(model) or _best_of_draws(_difference, model)
    if reason is None:
        model.set_attn_implementation(ATTENTION_NAME)
    elif model._supports_attention_backend and _best_of_draws(_gap_to_eager, model):
        model.set_attn_implementation("eager")
    return reason


def check_causal(model: Any, path: str) -> None:
    """Raise ConfigError if logits depend on later tokens, or a forward changes the weights."""
    before = [parameter._version for parameter in model.parameters()]
    reason = _best_of_draws(_looks_ahead, model)
    if before != [parameter._version for parameter in model.parameters()]:
        reason = "its forward changes its weights, so the engine's could not be kept equal"
    if reason is not None:
        raise ConfigError(f"{KEY}: {path} ({type(model).__name__}): {reason}; use another model")


def _unsupported_reason(model: Any) -> str | None:
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    reason = unsupported_layer(layer_types)
    if reason is not None:
        return reason
    if model._supports_attention_backend:
        return None
    return f"no layer of {type(model).__name__} uses transformers' attention interface"


@torch.no_grad()
def _best_of_draws(reason_of: Callable[[Any, Tensor], str | None], model: Any) -> str | None:
    """Return `reason_of`'s first None for rows of random tokens. Raises ConfigError."""
    generator = torch.Generator().manual_seed(0)
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    reason = None
    for _ in range(NUM_DRAWS):
        drawn = torch.randint(vocabulary_size, (CHECKED_TREE.num_tokens,), generator=generator)
        try:
            if (reason := reason_of(model, drawn.to(model.device))) is None:
                break
        except Exception as error:  # any, depending on what the model's code expects
            name = f"{model.name_or_path} ({type(model).__name__})"
            raise ConfigError(f"{KEY}: transformers cannot run {name}: {error}") from error
    return reason


def _looks_ahead(model: Any, tokens: Tensor) -> str | None:
    half = len(tokens) // 2
    if _agree(_logits(model, tokens)[:half], _logits(model, tokens[:half])):
        return None
    return "the logits of a token depend on later tokens, so it is no causal language model"


def _gap_to_eager(model: Any, tokens: Tensor) -> str | None:
    """Compare with eager attention: kernels may ignore arguments (transformers 5.17: softcap)."""
    own = _logits(model, tokens)
    with _attending(model, "eager"):
        eager = _logits(model, tokens)
    return None if _agree(own, eager) else "its kernel gives other results"


def _difference(model: Any, tokens: Tensor) -> str | None:
    """Return how the packed row `tokens` [T] differs from its sequences alone, or None."""
    positions = torch.from_numpy(CHECKED_TREE.positions)[None].to(tokens.device)
    indices = [index for sequence in SEQUENCES for index in sequence]
    with _attending(model, "eager"):
        expected = torch.cat([_logits(model, tokens[sequence]) for sequence in SEQUENCES])
    layout = RecordingLayout(CHECKED_TREE, tokens.device)
    numbering = _NumberingFinder()
    current = connect(model)
    try:
        with _attending(model, ATTENTION_NAME), current.use(layout), numbering:
            got = _logits(model, tokens, position_ids=positions)
    except UnsupportedLayer as layer:
        return str(layer)
    except Exception as error:  # any, depending on what the model's code expects
        return f"EasyRL's attention does not fit its layers ({type(error).__name__}: {error})"
    reason = layout.unsupported_reason(model) or numbering.reason
    if reason is None and not _agree(got[indices], expected):
        reason = "a packed row gives other results than its sequences alone"
    return reason


def _logits(model: Any, tokens: Tensor, **arguments: Any) -> Tensor:
    logits: Tensor = model(input_ids=tokens[None], use_cache=False, **arguments).logits[0]
    return logits


def _agree(got: Tensor, expected: Tensor) -> bool:
    """Compare to half of the dtype's digits."""
    got, expected = got.nan_to_num(), expected.nan_to_num()
    tolerance: float = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.abs().max())
    return float((got - expected).abs().max()) <= tolerance


@contextmanager
def _attending(model: Any, name: str) -> Iterator[None]:
    own = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


class _NumberingFinder(TorchFunctionMode):
    """Find code that numbers a packed row's tokens instead of using their positions: it may show
    only in rows longer than the check's (llama4_text from `floor_scale` on)."""

    reason: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, caller = func(*args, **(kwargs or {})), sys._getframe(1).f_code
        sorts_by_experts = caller.co_filename.endswith("transformers/integrations/moe.py")
        if func is torch.arange and len(result) == CHECKED_TREE.num_tokens and not sorts_by_experts:
            self.reason = f"{caller.co_qualname} uses a token's index in the row"
        return result
