"""The interface between a model's layers and the layout of the row that they run.

Shapes: T tokens of the row, Hq query heads, Hkv key/value heads, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class UnsupportedLayer(Exception):
    """A mixer cannot compute a layer exactly. The message is a clause that says why."""


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """A layer's attention parameters."""

    layer: int  # its index in the model
    scaling: float  # factor of the scores
    sliding_window: int | None  # a token sees itself and the `sliding_window - 1` tokens before it
    softcap: float | None  # scores become softcap * tanh(score / softcap)


class Layout(Protocol):
    """How the tokens of one forward see each other, in layers of every kind."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings) -> Tensor:
        """Compute attention over the row: [T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D]."""


class CurrentLayout:
    """The layout of the forward that a model runs now, which all mixers of the model share."""

    def __init__(self) -> None:
        self.layout: Layout | None = None  # None: the model runs its sequences one by one

    @contextmanager
    def use(self, layout: Layout | None) -> Iterator[None]:
        """Let the model's layers use `layout`. Layers that are recomputed in the backward pass need
        it again then."""
        before = self.layout
        self.layout = layout
        try:
            yield
        finally:
            self.layout = before
