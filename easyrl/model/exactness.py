"""Decide, when a model is loaded, whether its layers run packed rows exactly.

    config: kinds of layers ─► class ─► each layer's attention arguments ─► logits, compared
                                                 with pictures: a row with one, too ─┘

The last step is decisive: a packed row of a small group and a small tree through EasyRL's mixers
must give what each of its sequences gives alone through transformers' eager attention. A model that
cannot share prompts runs as padded batches (`inputs.real_tokens`); only a non-causal model is
refused, and with pictures one that cannot run packed rows.

Shapes: T tokens of the packed row, V tokens of the vocabulary.
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

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from easyrl.config import ConfigError
from easyrl.data.hub import KEY, loadable_model
from easyrl.model.files import fingerprint
from easyrl.model.mixers import recurrent, unsupported_layer
from easyrl.model.mixers.attention import ATTENTION_NAME
from easyrl.model.mixers.interface import UnsupportedLayer
from easyrl.model.mixers.kinds import checked_tree, connect, has_states
from easyrl.model.mixers.recording import RecordingLayout
from easyrl.model.policy import decoder_layers
from easyrl.model.towers import Tower

NUM_DRAWS = 3  # rows of random tokens; one must agree, since rounding may change a token's experts
CHECKED_WORDS = 512
"""Size of the vocabulary, if the model's is larger, while a narrow model is checked in float32."""
CHECKED_CODE = ("layout", "model")  # packages of EasyRL on which the outcome depends
SORTS_BY_EXPERTS = "transformers/integrations/moe.py"


def checked_once(path: str, check: Callable[[], Any], kind: str = "") -> Any:
    """Return the outcome of `check` on the model of `path`, in JSON's types. It is run once for the
    same files, code and libraries, and for each `kind` of check; other processes wait meanwhile. An
    error is not kept."""
    try:
        file = _outcome_file(path, kind).open("a+")
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


def _outcome_file(path: str, kind: str) -> Path:
    """Return where the outcome for a model is kept, in a folder that exists. Raises OSError."""
    import transformers

    versions = f"{torch.__version__} {transformers.__version__} {recurrent.kernel_libraries()}"
    checked = f"{fingerprint(loadable_model(path))} {versions}{kind}"
    digest = hashlib.sha256(checked.encode())
    package = Path(__file__).parents[1]
    for name in CHECKED_CODE:
        for source in sorted((package / name).rglob("*.py")):
            digest.update(source.read_bytes())
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache_folder, "easyrl", "checked")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{digest.hexdigest()}.json"


@contextmanager
def in_float32(model: nn.Module, *, may_cut_vocabulary: bool = True) -> Iterator[None]:
    """Run the model in float32 although its weights may be narrower: those of a decoder layer are
    float32 only while it runs. A wide vocabulary has CHECKED_WORDS random words meanwhile, unless
    tokens with a meaning are needed."""
    kept = {weight: weight.data for weight in model.parameters()}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    padding_indices = [embedding.padding_idx for embedding in embeddings]

    def widen(block: nn.Module, _: Any) -> None:
        for weight in block.parameters():
            weight.data = weight.data.float()

    def restore(module: nn.Module, *_: Any) -> None:
        for weight in module.parameters():
            weight.data = kept[weight]

    blocks = decoder_layers(model)
    in_blocks = {weight for block in blocks for weight in block.parameters()}
    vocabulary_size = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    generator = torch.Generator().manual_seed(0)
    words = torch.randperm(vocabulary_size, generator=generator)[:CHECKED_WORDS]
    for weight in kept.keys() - in_blocks:
        is_by_word = len(weight) == vocabulary_size  # an embedding, or the head
        if is_by_word and may_cut_vocabulary and weight.dtype != torch.float32:
            weight.data = weight.data[words]
        weight.data = weight.data.float()
    for embedding in embeddings:
        embedding.padding_idx = None
    hooks = [block.register_forward_pre_hook(widen) for block in blocks]
    hooks += [block.register_forward_hook(restore, always_call=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for embedding, index in zip(embeddings, padding_indices, strict=True):
            embedding.padding_idx = index
        restore(model)


def choose_attention(model: Any) -> str | None:
    """Switch a model to EasyRL's attention and return None; or to an exact one of transformers, and
    return a clause why EasyRL's is not."""
    reason = _unsupported_reason(model)
    if reason is None:
        reason = _best_of_draws(_difference, model)
    if reason is None:
        set_attention(model, ATTENTION_NAME)
        return None
    set_attention(model, own_attention(model))
    return reason + _kernels_of(model)


def own_attention(model: Any) -> str:
    """Return the name of transformers' attention for a model that runs without a layout: the one
    that it has, or `eager` if that gives other results."""
    name = attention_of(model)
    if _uses_interface(model) and _best_of_draws(_gap_to_eager, model) is not None:
        return "eager"
    return name


def check_causal(model: Any, path: str) -> None:
    """Raise ConfigError if logits depend on later tokens, or a forward changes the weights."""
    versions = _versions_of_weights(model)
    reason = _best_of_draws(_looks_ahead, model)
    if _versions_of_weights(model) != versions:
        reason = "its forward changes its weights, so the engine's could not be kept equal"
    if reason is not None:
        raise ConfigError(f"{KEY}: {path} ({type(model).__name__}): {reason}; use another model")


def _versions_of_weights(model: Any) -> list[int]:
    """Return torch's count of the changes in place of each weight."""
    return [parameter._version for parameter in model.parameters()]


def _uses_interface(model: Any) -> bool:
    """Return whether a model's layers call transformers' attention interface. A multimodal class
    may not say it of its text model."""
    return bool(
        model._supports_attention_backend or model.get_decoder()._supports_attention_backend
    )


def _unsupported_reason(model: Any) -> str | None:
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    keeps_states = has_states(model)
    reason = unsupported_layer(layer_types, may_have_states=keeps_states)
    if reason is not None:
        return reason
    if _uses_interface(model) or keeps_states:
        return None
    return f"no layer of {type(model).__name__} uses transformers' attention interface"


@torch.no_grad()
def _best_of_draws(reason_of: Callable[[Any, Tensor], str | None], model: Any) -> str | None:
    """Call `reason_of` with the model and rows of random tokens. Return None if that is its result
    for one of them, else its last result. Raises ConfigError."""
    generator = torch.Generator().manual_seed(0)
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    num_tokens = checked_tree(model).num_tokens
    reason = None
    for _ in range(NUM_DRAWS):
        drawn = torch.randint(vocabulary_size, (num_tokens,), generator=generator)
        try:
            reason = reason_of(model, drawn.to(model.device))
        except Exception as error:  # any, depending on what the model's code expects
            name = f"{model.name_or_path} ({type(model).__name__})"
            reason = f"{error}{_kernels_of(model)}"
            raise ConfigError(f"{KEY}: transformers cannot run {name}: {reason}") from error
        if reason is None:
            return None
    return reason


def _looks_ahead(model: Any, tokens: Tensor) -> str | None:
    half = len(tokens) // 2
    with_later_tokens = _logits(model, tokens)[:half]
    if agree(with_later_tokens, _logits(model, tokens[:half])):
        return None
    return "the logits of a token depend on later tokens, so it is no causal language model"


def _gap_to_eager(model: Any, tokens: Tensor) -> str | None:
    """Compare with eager attention: kernels may ignore arguments (transformers 5.17: softcap)."""
    own = _logits(model, tokens)
    with attending(model, "eager"):
        eager = _logits(model, tokens)
    return None if agree(own, eager) else "its kernel gives other results"


def _difference(model: Any, tokens: Tensor) -> str | None:
    """Return how the packed row `tokens` [T] differs from its sequences alone, or None."""
    tree = checked_tree(model)
    sequences = [tree.tokens_of(tree.path(leaf)) for leaf in tree.leaves]
    with attending(model, "eager"):
        alone = [_logits(model, tokens[sequence]) for sequence in sequences]
    positions = torch.from_numpy(tree.positions)[None].to(tokens.device)
    layout = RecordingLayout(tree, tokens.device)
    numbering = _NumberingFinder(tree.num_tokens)
    current = connect(model)
    try:
        with attending(model, ATTENTION_NAME), current.use(layout), numbering:
            packed = _logits(model, tokens, position_ids=positions)
    except UnsupportedLayer as layer:
        return str(layer)
    except Exception as error:  # any, depending on what the model's code expects
        return f"EasyRL's attention does not fit its layers ({type(error).__name__}: {error})"
    reason = layout.unsupported_reason(model) or numbering.reason
    if reason is not None:
        return reason
    for sequence, expected in zip(sequences, alone, strict=True):
        if not agree(packed[sequence], expected):
            return "a packed row gives other results than its sequences alone"
    return None


def _kernels_of(model: Any) -> str:
    """Return a clause about the libraries whose kernels a model's layers may use, "" for none."""
    libraries = recurrent.kernel_libraries() if recurrent.find_layers(model) else []
    if not libraries:
        return ""
    names = ", ".join(libraries)
    return f" (its layers may use kernels of {names}: try another version, or none)"


def _logits(model: Any, tokens: Tensor, **arguments: Any) -> Tensor:
    """Return logits [T, V] of tokens [T]."""
    logits: Tensor = model(input_ids=tokens[None], use_cache=False, **arguments).logits[0]
    return logits


def agree(got: Tensor, expected: Tensor) -> bool:
    """Compare to half of the dtype's digits."""
    got = got.nan_to_num()
    expected = expected.nan_to_num()
    precision: float = torch.finfo(expected.dtype).eps ** 0.5
    tolerance = precision * float(expected.abs().max())
    return float((got - expected).abs().max()) <= tolerance


def attention_of(model: Any) -> str:
    """Return transformers' name of the attention of a model, or of the text model inside."""
    config = model.config
    if _text_key(model) is not None:
        config = config.get_text_config()
    name: str = config._attn_implementation
    return name


def set_attention(model: Any, name: str) -> None:
    """Let a model use the attention that transformers calls `name`; its towers keep their own."""
    key = _text_key(model)
    model.set_attn_implementation(name if key is None else {key: name})


def _text_key(model: Any) -> str | None:
    """Return the key, in the configuration of a model with towers, of the text model's."""
    if any(isinstance(module, Tower) for module in model.modules()):
        return None  # there is nothing but the text model
    text_config = model.config.get_text_config()
    for key in model.config.sub_configs:
        if getattr(model.config, key) is text_config:
            return str(key)
    return None


@contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """Use the attention function that transformers calls `name`."""
    before = attention_of(model)
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, before)


class _NumberingFinder(TorchFunctionMode):
    """Find code that numbers a packed row's tokens instead of using their positions: it may show
    only in rows longer than the check's (llama4_text from `floor_scale` on)."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.reason: str | None = None
        self._num_tokens = num_tokens  # of the row

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.arange and len(result) == self._num_tokens:
            caller = sys._getframe(1).f_code  # nothing else says who numbers the tokens
            if not caller.co_filename.endswith(SORTS_BY_EXPERTS):
                self.reason = f"{caller.co_qualname} uses a token's index in the row"
        return result
