"""The mixer of layers with a state: linear attention, Mamba-2, short convolutions.

    a layer's own code ─► hidden states ─► `RecurrentMixer` ─► current layout's `scan`

Such a layer reads its sequence from left to right and keeps a state of fixed size: a recurrent
state, the last inputs of a convolution, or both. A packed row is exact if each node of its tree
begins with the state that its parent ends with:

    mixer(P) ─► state ─► copied to G rows ─► mixer([R1; ...; RG], state) ─► the row's tokens

Gradients flow through the states: nothing is written in place.

The layers are found by what they do: their code asks transformers' cache for a state. They get a
`MixerState` in its place. transformers has these methods of a cache from 5.24 on; with an older
release no layer is found, and such models run as padded batches.

Shapes: T tokens of the packed row, H the model's width; B rows of a batch, L tokens of the longest.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from easyrl.layout.tree import NONE, Ints, TokenTree
from easyrl.model.mixers.interface import CurrentLayout, LayoutWithStates

STATE_GETTERS = {"get_conv_state", "get_recurrent_state"}
"""Methods of transformers' cache that layers with a state call."""
CACHE_ARGUMENT = "cache"
HAS_STATE = True
CHUNK_KEYS = ("chunk_size", "mamba_chunk_size")  # of config.json
USUAL_CHUNK = 64
"""Layers with a state compute this many tokens at once, unless config.json says otherwise."""
CPU_CHUNK = 64
"""The same on a CPU, at most. Forward and backward of a row take 0.44 (Granite 4), 0.49 (Falcon-H1)
and 0.71 (Nemotron-H) of the time with the chunks of 256, 256 and 128 tokens that are meant for a
GPU: scores within a chunk grow with its square."""
SMALLEST_CONTINUATION = 2
"""For a continuation of one token layers use another kernel, which may write the state in place."""
LARGEST_ERROR = 0.01
"""Largest error of a continued sequence, as a part of what its state changes."""
ROUNDING_STEPS = 100
"""The same, in units of the dtype's rounding. Chunks of other lengths add in another order."""
LARGEST_PADDING = 0.5
"""Rows of a batch are at least this part of the longest one."""


KERNEL_LIBRARIES = ("causal-conv1d", "flash-linear-attention", "mamba-ssm")
"""transformers runs the kernels of these where they are installed, whatever their version."""


def kernel_libraries() -> list[str]:
    """Return the installed libraries of kernels with their versions, as "mamba-ssm 2.3"."""
    found: list[str] = []
    for name in KERNEL_LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found


class StateName(NamedTuple):
    """One of the tensors that a layer keeps: it may have several of each kind, which it numbers."""

    kind: Literal["convolution", "recurrent"]
    number: int


class MixerState:
    """The states of one layer behind a batch of B nodes, with the methods of transformers' `Cache`
    that the layer calls (5.24)."""

    def __init__(self, tensors: Mapping[StateName, Tensor] | None = None) -> None:
        self.tensors = dict(tensors or {})
        """Of a convolution [B, channels, kernel size]; recurrent [B, ...]. Empty: a sequence
        begins."""

    def copies(self, number: int) -> MixerState:
        """Return the state for `number` continuations of a batch of one node, without a copy of the
        values."""
        expanded = {}
        for name, state in self.tensors.items():
            own_shape = state.shape[1:]
            expanded[name] = state.expand(number, *own_shape)
        return MixerState(expanded)

    def without_recurrent(self) -> MixerState:
        """Return the state without its recurrent part; of a convolution alone, an empty one."""
        if all(name.kind == "convolution" for name in self.tensors):
            return MixerState()
        kept = {name: state for name, state in self.tensors.items() if name.kind == "convolution"}
        return MixerState(kept)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(StateName("convolution", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(StateName("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        return bool(self.tensors)

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # no kernel may write the convolution's state in place

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """Append inputs [B, channels, L]. Return all that the convolution sees."""
        name = StateName("convolution", state_idx)
        state = self.tensors.get(name)
        if state is None:
            state = new.new_zeros(*new.shape[:-1], conv_kernel_size)
        seen = torch.cat([state, new], dim=-1)
        self.tensors[name] = seen[..., -conv_kernel_size:]
        return seen

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.tensors[StateName("recurrent", state_idx)] = new
        return new


RunLayer = Callable[[Tensor, MixerState], Tensor]
"""A layer's own code: hidden states [B, L, H] and the state before them, which it updates, to
outputs [B, L, H]."""


class RecurrentMixer:
    """The forward of a layer with a state, for packed rows too."""

    def __init__(self, module: nn.Module, current: CurrentLayout) -> None:
        self.own_forward = module.forward
        self.step: RunLayer | None = None
        """Computes one token behind a state, which it may write in place, instead of the layer's
        own code (`engines.fused_delta_rule`)."""
        self._current = current

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layout = self._current.layout
        if layout is None:
            output: Tensor = self.own_forward(hidden_states, *args, **kwargs)
            return output
        assert isinstance(layout, LayoutWithStates), "the layout stores no states"
        row = hidden_states[0]
        return layout.scan(self._run, row).unsqueeze(0)

    def _run(self, hidden: Tensor, state: MixerState) -> Tensor:
        is_step = hidden.shape[1] == 1 and state.tensors
        if self.step is not None and is_step and torch.is_inference_mode_enabled():
            return self.step(hidden, state)
        return self.run(hidden, state)

    def run(self, hidden: Tensor, state: MixerState) -> Tensor:
        """Run the layer's own code (`RunLayer`)."""
        output: Tensor = self.own_forward(
            hidden_states=hidden, attention_mask=None, **{CACHE_ARGUMENT: state}
        )
        return output


def connect_layers(model: nn.Module, current: CurrentLayout) -> None:
    """Let a model's layers with a state find the current layout."""
    for module in find_layers(model):
        forward = module.forward
        if isinstance(forward, RecurrentMixer):  # it is connected with another object
            module.forward = forward.own_forward
        module.forward = RecurrentMixer(module, current)


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose own code reads a state from transformers' cache."""
    found = list[nn.Module]()
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        names_in_code = forward.__code__.co_names
        reads_state = not STATE_GETTERS.isdisjoint(names_in_code)
        takes_cache = CACHE_ARGUMENT in inspect.signature(forward).parameters
        if reads_state and takes_cache:
            found.append(module)
    return found


def shorten_chunks(model: nn.Module) -> None:
    """Let layers compute fewer tokens at once, as is fast on a CPU. The results are the same but
    for rounding."""
    for module in find_layers(model):
        chunk_size = getattr(module, "chunk_size", None)
        if isinstance(chunk_size, int):
            module.chunk_size = min(chunk_size, CPU_CHUNK)  # type: ignore[assignment]


def checked_trees(model: Any) -> list[TokenTree]:
    """Return trees with parts that are longer than what the model's kernels compute at once, and
    with branches behind one token."""
    if not find_layers(model):
        return []
    text_config = model.config.get_text_config()
    chunk = USUAL_CHUNK
    for key in CHUNK_KEYS:
        chunk = max(chunk, getattr(text_config, key, 0))
    across_chunks = TokenTree.of_group(chunk + 6, [chunk + 2, 1, 5])
    # Branches continue nodes of one token: the prompt, and a part of a completion.
    behind_one_token = TokenTree(np.array([1, 2, 1, 2, 1]), np.array([NONE, 0, 1, 2, 2]))
    return [behind_one_token, across_chunks]


def continues_from_state(run: RunLayer, hidden: Tensor) -> bool:
    """Return whether a layer, given a sequence [T, H] in two parts, computes the second part from
    the state after the first one: all of it, as the trainer asks for, and one token, as the engine
    does, for which layers have another kernel.

    Some code ignores the recurrent state where several tokens continue it (Mamba-1 in transformers
    5.24). With small weights that hardly shows in a model's logits. So the error is compared with
    what the state changes.
    """
    sequence = hidden.unsqueeze(0)
    half = len(hidden) // 2
    first = sequence[:, :half]
    second = sequence[:, half:]
    whole = run(sequence, MixerState())
    expected = whole[:, half:]
    state = MixerState()
    run(first, state)
    got = run(second, state.copies(1))
    without_state = run(second, state.without_recurrent())
    next_token = run(second[:, :1], state)  # the last use of the state: it may change in place

    error = max(_largest(got - expected), _largest(next_token - expected[:, :1]))
    effect = _largest(without_state - expected)
    eps = torch.finfo(hidden.dtype).eps
    rounding = ROUNDING_STEPS * eps * _largest(expected)
    return error <= LARGEST_ERROR * effect + rounding


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def exclude_from_compiling(model: nn.Module) -> None:
    """Run the layers with a state as they are in layers that are compiled around them: how they are
    run depends on the tree."""
    disable: Any = torch.compiler.disable
    for module in find_layers(model):
        module.forward = disable(module.forward)


# -- a packed row ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Batch:
    """Nodes that continue the same node, as rows that a layer runs at once, padded on the right."""

    parent: int  # the node whose state they continue; NONE: they begin sequences
    node: int  # the node whose state is kept; NONE: the rows are leaves
    tokens: Tensor  # [B, L] the row's token in each cell; of padding any
    is_output: Tensor  # [B, L] whether the cell's output is that of its token


class TreeScan:
    """Run layers with a state over a packed row whose tokens form a tree.

    A node that others continue runs alone, so that its state is that after its last token. Nodes
    that nothing continues run together. Padding on the right is safe for these only: a state would
    decay through it.

    An inner node of one token does not run alone (`SMALLEST_CONTINUATION`). Instead each node that
    continues it begins with its token.
    """

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self._batches = [_to_device(batch, device) for batch in _batches_of(tree)]
        parts = [batch.tokens[batch.is_output] for batch in self._batches]
        self._order = torch.cat(parts).argsort()

    def scan(self, run: RunLayer, hidden: Tensor) -> Tensor:
        """Return the layer's outputs [T, H] for the row's hidden states [T, H]."""
        states = {NONE: MixerState()}
        outputs = list[Tensor]()
        for batch in self._batches:
            rows = hidden[batch.tokens]
            state = states[batch.parent].copies(len(rows))
            output = run(rows, state)
            outputs.append(output[batch.is_output])
            if batch.node != NONE:
                states[batch.node] = state
        return torch.cat(outputs)[self._order]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Tokens that a layer runs from one state on: those of a node, or its parent's only token and
    these."""

    parent: int  # the node whose state they continue, or NONE
    tokens: Ints
    num_repeated: int  # tokens at the beginning whose outputs another sequence gives


def _batches_of(tree: TokenTree) -> list[_Batch]:
    """Return the batches, each behind that which its rows continue.

    transformers' code continues a state only with SMALLEST_CONTINUATION tokens or more. A shorter
    inner node is not run by itself: each of its children runs its token again, before its own, from
    the state of the grandparent. Only the first child's run gives the output of that token.
    """
    batches = list[_Batch]()
    leaves: dict[int, list[_Sequence]] = {}  # by the node whose state they continue
    run_with_children = set[int]()  # inner nodes of one token
    already_output = set[int]()  # those of them that ran with a child before
    for node, parent in enumerate(tree.parents.tolist()):
        tokens = np.arange(tree.starts[node], tree.stops[node])
        if parent in run_with_children:
            grandparent = int(tree.parents[parent])
            with_parent = np.concatenate([[tree.starts[parent]], tokens])
            num_repeated = 1 if parent in already_output else 0
            sequence = _Sequence(grandparent, with_parent, num_repeated)
            already_output.add(parent)
        else:
            sequence = _Sequence(parent, tokens, num_repeated=0)

        can_run = sequence.parent == NONE or len(sequence.tokens) >= SMALLEST_CONTINUATION
        if not tree.has_children[node]:
            leaves.setdefault(sequence.parent, []).append(sequence)
        elif can_run:
            batches.append(_batch(sequence.parent, [sequence], node))
        else:
            run_with_children.add(node)
    for parent, sequences in leaves.items():
        for together in _of_similar_length(sequences):
            batches.append(_batch(parent, together, NONE))
    return batches


def _of_similar_length(sequences: list[_Sequence]) -> list[list[_Sequence]]:
    """Group sequences so that at most `LARGEST_PADDING` of a row is padding."""
    longest_first = sorted(sequences, key=lambda sequence: -len(sequence.tokens))
    groups = list[list[_Sequence]]()
    shortest_length = math.inf  # that the last group may have
    for sequence in longest_first:
        length = len(sequence.tokens)
        if length < shortest_length:
            groups.append([])
        if not groups[-1]:
            shortest_length = LARGEST_PADDING * length
        groups[-1].append(sequence)
    return groups


def _batch(parent: int, sequences: list[_Sequence], node: int) -> _Batch:
    """Pad sequences that continue `parent` to rows. `node`: see `_Batch`."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    if parent != NONE:
        longest = max(longest, SMALLEST_CONTINUATION)
    shape = (len(sequences), longest)
    tokens = np.zeros(shape, np.int64)
    is_output = np.zeros(shape, np.bool_)
    for row, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        tokens[row] = sequence.tokens[0]  # padding
        tokens[row, :length] = sequence.tokens
        is_output[row, sequence.num_repeated : length] = True
    return _Batch(
        parent=parent,
        node=node,
        tokens=torch.from_numpy(tokens),
        is_output=torch.from_numpy(is_output),
    )


def _to_device(batch: _Batch, device: torch.device) -> _Batch:
    return _Batch(
        parent=batch.parent,
        node=batch.node,
        tokens=batch.tokens.to(device),
        is_output=batch.is_output.to(device),
    )
