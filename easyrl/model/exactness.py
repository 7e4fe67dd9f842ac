"""Whether a model's layers may attend in packed rows, found out when it is loaded.

    config: kinds of layers ─► class ─► what every layer asks of its attention ─► logits, compared

The last step decides: a packed row of two small groups through EasyRL's attention must give what
each of its sequences gives alone through transformers' plain one. What cannot share is not refused
but runs another way (`padded`); only what is no causal model at all is (`check_causal`).

Shapes: T tokens of the packed row, H the model's width, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from easyrl.config import ConfigError
from easyrl.hub import KEY
from easyrl.model.attention import ATTENTION_NAME, PackedGroups, UnservableLayer
from easyrl.model.attention_kernels import AttentionSettings
from easyrl.model.pretrained import OTHER_MODEL, class_obstacle, layer_obstacle

GROUPS = [(3, [2, 4]), (2, [3, 1])]
"""The row that is looked at: of each group its P, and the R of its completions."""
EAGER = "eager"
"""transformers' plain attention: what a model's layers are by definition."""
NUM_DRAWS = 3
"""Rows of random tokens, one of which must agree: in one of them a mixture of experts may send a
token the other way at the last bit, but none agrees by chance."""


def attend_packed(model: Any) -> str | None:
    """Let a model that is loaded with transformers' own attention attend through EasyRL's.

    Returns None; where that would not be exact the model keeps transformers' attention, and what
    comes back is the layer and the reason, as a clause.
    """
    of_class = class_obstacle(type(model))
    reason = layer_obstacle(model.config) or of_class
    if reason is None:
        reason = _best_of_draws(lambda tokens: _difference(model, tokens), model)
    if reason is None:
        model.set_attn_implementation(ATTENTION_NAME)
    elif of_class is None and _best_of_draws(lambda tokens: _gap_to_eager(model, tokens), model):
        model.set_attn_implementation(EAGER)
    return reason


def check_causal(model: Any, path: str) -> None:
    """Raise ConfigError unless, through transformers' own attention, what follows a token changes
    nothing of its logits, and running the model changes nothing of its weights."""
    before = [parameter._version for parameter in model.parameters()]

    def looks_ahead(tokens: Tensor) -> str | None:
        whole, part = _alone(model, tokens), _alone(model, tokens[: len(tokens) // 2])
        return None if _agree(whole[-1][: len(tokens) // 2], part[-1]) else "looks ahead"

    if _best_of_draws(looks_ahead, model):
        raise ConfigError(
            f"{KEY}: in {path} ({type(model).__name__}) the logits of a token depend on those "
            f"after it, so it is no causal language model; {OTHER_MODEL}"
        )
    if before != [parameter._version for parameter in model.parameters()]:
        raise ConfigError(
            f"{KEY}: {path} ({type(model).__name__}) changes its weights as it runs, so they "
            f"cannot be kept in step with the engine's; {OTHER_MODEL}"
        )


def _best_of_draws(reason_of: Callable[[Tensor], str | None], model: Any) -> str | None:
    """What `reason_of` says of random tokens; None as soon as it does."""
    generator = torch.Generator().manual_seed(0)
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    num_tokens = sum(prompt + sum(completions) for prompt, completions in GROUPS)
    reason = None
    with torch.no_grad():
        for _ in range(NUM_DRAWS):
            drawn = torch.randint(vocabulary_size, (num_tokens,), generator=generator)
            reason = reason_of(drawn.to(model.device))
            if reason is None:
                break
    return reason


def _difference(model: Any, tokens: Tensor) -> str | None:
    """How the packed row `tokens` [T] differs from its sequences alone; None: in nothing."""
    positions, sequences = _sequences()
    places = torch.cat(sequences).to(tokens.device)
    with _attending(model, EAGER):
        alone = [_alone(model, tokens[sequence]) for sequence in sequences]
    expected = [torch.cat(states) for states in zip(*alone, strict=True)]
    layout = _Noting()
    try:
        with _attending(model, ATTENTION_NAME):
            got = _states(
                model(
                    input_ids=tokens[None],
                    position_ids=positions.to(tokens.device)[None],
                    use_cache=False,
                    output_hidden_states=True,
                    attention_layout=layout,
                )
            )
    except UnservableLayer as layer:
        return str(layer)
    except Exception as error:  # of whatever a model's code expects of its attention
        return f"EasyRL's attention does not fit its layers ({type(error).__name__}: {error})"
    reason = layout.unservable(model)
    if reason is not None or _agree(got[-1][places], expected[-1]):
        return reason
    depth = next(
        i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not _agree(a[places], b)
    )
    where = f"layer {depth - 1}" if 0 < depth < len(got) - 1 else "the model"
    if depth == 0:
        where = "the embedding"
    return f"{where} gives another result in a packed row than for each sequence alone"


def _sequences() -> tuple[Tensor, list[Tensor]]:
    """Positions [T] of the row of GROUPS, and of each of its sequences the places there."""
    positions, sequences, start = [], [], 0
    for num_prompt, completions in GROUPS:
        prompt = torch.arange(start, start + num_prompt)
        positions.append(torch.arange(num_prompt))
        start += num_prompt
        for length in completions:
            sequences.append(torch.cat([prompt, torch.arange(start, start + length)]))
            positions.append(num_prompt + torch.arange(length))
            start += length
    return torch.cat(positions), sequences


def _alone(model: Any, tokens: Tensor) -> list[Tensor]:
    return _states(model(input_ids=tokens[None], use_cache=False, output_hidden_states=True))


def _states(output: Any) -> list[Tensor]:
    """What the embedding and each layer give [T, H], where the model tells; last the logits."""
    logits: Tensor = output.logits
    of_layers = output.get("hidden_states") or ()
    return [state[0] for state in of_layers if state.shape[:2] == logits.shape[:2]] + [logits[0]]


def _agree(got: Tensor, expected: Tensor) -> bool:
    """To half of the digits that their type has."""
    got, expected = got.nan_to_num(), expected.nan_to_num()
    tolerance: float = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.abs().max())
    return float((got - expected).abs().max()) <= tolerance


def _gap_to_eager(model: Any, tokens: Tensor) -> str | None:
    """transformers' faster kernels leave out what they do not know (5.17's the soft-capping)."""
    own = _alone(model, tokens)
    with _attending(model, EAGER):
        eager = _alone(model, tokens)
    return None if _agree(own[-1], eager[-1]) else "its kernel gives another result"


@contextmanager
def _attending(model: Any, name: str) -> Iterator[None]:
    own = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


class _Noting:
    """The layout of GROUPS, which notes the window that each layer asks for."""

    def __init__(self) -> None:
        self._layout: PackedGroups | None = None
        self.windows: list[int | None] = []

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        if settings.layer != len(self.windows):
            raise UnservableLayer(
                f"attention of layer {settings.layer} comes where that of layer "
                f"{len(self.windows)} is due, and the engine needs each layer's once and in order"
            )
        self.windows.append(settings.sliding_window)
        if self._layout is None:
            self._layout = PackedGroups(GROUPS, query.device)
        return self._layout.attend(query, key, value, settings)

    def unservable(self, model: Any) -> str | None:
        """What the row is too short to show: windows, and layers that have no attention.

        (Some model classes make windows only in the mask that transformers builds for them.)
        """
        text = model.config.get_text_config()
        num_layers = getattr(text, "num_hidden_layers", 0) or 0
        if len(self.windows) < num_layers:
            return (
                f"layer {len(self.windows)} asks for no attention through transformers' interface"
            )
        has_window = getattr(text, "sliding_window", None) is not None
        every = ["sliding_attention" if has_window else "full_attention"] * len(self.windows)
        kinds = getattr(text, "layer_types", None) or every
        for layer, (window, kind) in enumerate(zip(self.windows, kinds, strict=False)):
            if kind == "sliding_attention" and window is None:
                return f"layer {layer} has a sliding window that it does not tell its attention"
        return None
