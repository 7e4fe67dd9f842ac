"""The kinds of layers that have a mixer, and what the rest of the package asks of all of them.

A kind is a module of this package with these functions:

    find_layers(model)               the model's layers of this kind
    connect_layers(model, current)   let them ask `current` for the layout
    exclude_from_compiling(model)    run them as they are in layers that are compiled around them
    checked_trees(model)             trees that show whether they are exact (`model.exactness`)

and `HAS_STATE`: whether such a layer keeps a state of fixed size, instead of something for each
token.
"""

from typing import Protocol

from torch import nn

from easyrl.layout.tree import TokenTree
from easyrl.model.mixers import attention, recurrent
from easyrl.model.mixers.interface import CurrentLayout


class Kind(Protocol):
    """A module as described above."""

    HAS_STATE: bool

    def find_layers(self, model: nn.Module) -> list[nn.Module]: ...

    def connect_layers(self, model: nn.Module, current: CurrentLayout) -> None: ...

    def exclude_from_compiling(self, model: nn.Module) -> None: ...

    def checked_trees(self, model: nn.Module) -> list[TokenTree]: ...


KINDS: tuple[Kind, ...] = (attention, recurrent)


def connect(model: nn.Module) -> CurrentLayout:
    """Connect the layers of a model, of every kind, with one object: its current layout."""
    current = CurrentLayout()
    for kind in KINDS:
        kind.connect_layers(model, current)
    return current


def exclude_from_compiling(model: nn.Module) -> None:
    """Run all mixers as they are in layers that are compiled around them: how they are run depends
    on the tree."""
    for kind in KINDS:
        kind.exclude_from_compiling(model)


def checked_tree(model: nn.Module) -> TokenTree:
    """Return a tree that shows whether the model's layers of every kind are exact."""
    trees = list[TokenTree]()
    for kind in KINDS:
        trees += kind.checked_trees(model)
    return TokenTree.joined(trees)


def has_states(model: nn.Module) -> bool:
    """Return whether layers of the model keep a state."""
    return any(kind.HAS_STATE and kind.find_layers(model) for kind in KINDS)
