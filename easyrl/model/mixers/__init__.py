"""Mixers: how each kind of layer lets a token see its path in a tree of tokens.

Most of a model treats every token alone: embeddings, norms, MLPs, experts and the head see a packed
row as it is, and their code is not touched. Only a *mixer* moves information from one token to
another. So a mixer decides whether a row of several sequences is exact.

    model's layer ──► mixer ──► the current `Layout` ──► what the token may see
                                   trainer: `packed_row.PackedRow`
                                   engine:  a step's layout, with the cache (`engines`)

There are two kinds:

    attention   `Layout.attend(query, key, value, settings)`: softmax over the keys of the path
    recurrent   `LayoutWithStates.scan(run, hidden)`: each node begins with its parent's final state

A new kind of layer has to provide:

1. A file in this package with the functions that `kinds` lists. It finds such layers by what their
   modules do, and lets them ask the model's `interface.CurrentLayout`. It does not rely on keyword
   arguments: some decoders do not pass them to their layers.
2. Its entry in `kinds.KINDS`.
3. In this file, the names of its layers in `config.json`.

A layer with a state of another form gives its own run to `scan`, as `recurrent` does. Only a layer
that needs another method of the layout touches `interface`, `packed_row` and `recording` too. The
embedded engine serves it once a store of `engines.cache` keeps what it needs of a node.

Whether a model as a whole is exact is decided once, by measuring (`model.exactness`). What is in
this file needs neither torch nor weights: a plan reads it.
"""

from collections.abc import Sequence

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")
"""Entries of `layer_types` in config.json whose layers the attention mixer supports. (`attention`
and `mamba` are names from before transformers 5.24.)"""
RECURRENT_LAYERS = ("linear_attention", "conv", "mamba", "hybrid")
"""The same for the recurrent mixer. A `hybrid` layer has attention too."""
LAYERS_WITHOUT_MIXER = ("mlp", "moe")


def unsupported_layer(layer_types: Sequence[str], *, may_have_states: bool = True) -> str | None:
    """Return a clause that names the first layer that no mixer supports; None if all may be
    supported. `layer_types`: of config.json; empty where a model does not list them. Without
    `may_have_states` layers with a state are unsupported."""
    supported = [*ATTENTION_LAYERS, *LAYERS_WITHOUT_MIXER]
    if may_have_states:
        supported += RECURRENT_LAYERS
    for layer, kind in enumerate(layer_types):
        if kind not in supported:
            return f"layer {layer} is of type {kind}"
    return None


def elements_per_token(num_layers: int, num_key_value_heads: int, head_size: int) -> int:
    """Return how many elements an engine stores for each token: a key and a value in each layer."""
    return 2 * num_layers * num_key_value_heads * head_size
