"""The interface between a model's layers and the layout of the row that they run.

Shapes: T tokens of the row, Hq query heads, Hkv key/value heads, D head size, H the model's width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from easyrl.model.mixers.recurrent import RunLayer


class UnsupportedLayer(Exception):
    """A mixer cannot compute a layer exactly. The message is a clause that says why."""


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """A layer's attention parameters."""

    layer: int  # its index in the model
    scaling: float  # factor of the scores
    sliding_window: int | None  # a token sees itself and the `sliding_window - 1` tokens before it
    softcap: float | None  # scores become softcap * tanh(score / softcap)


@dataclass(frozen=True, slots=True)
class Spans:
    """Runs of a row's tokens that see each other in both directions, as those of a picture do in
    some models."""

    places: tuple[tuple[int, int], ...]  # each one's first token, and the one behind its last
    only_sliding: bool  # whether only layers with a sliding window compute them so

    def within(self, first: int, end: int) -> "Spans | None":
        """Return the spans among tokens `first : end`, with their places counted from `first` on.
        None: there are none."""
        places = list[tuple[int, int]]()
        for start, stop in self.places:
            if first <= start and stop <= end:
                places.append((start - first, stop - first))
        return Spans(tuple(places), self.only_sliding) if places else None


class Layout(Protocol):
    """How the tokens of one forward see each other."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        settings: LayerSettings,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention over the row: [T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D].

        `sinks` [Hq]: a learned score of each head that takes part in the softmax of every token,
        like that of one more key, whose value is 0 (gpt-oss).
        """


@runtime_checkable
class LayoutWithStates(Layout, Protocol):
    """How the tokens of one forward see each other, in layers with a state too."""

    def scan(self, run: "RunLayer", hidden: Tensor) -> Tensor:
        """Run a layer over the row's hidden states: [T, H] -> [T, H]. Each node begins with the
        state that its parent ends with."""


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
