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

from collections.abc import Mapping, Sequence
from typing import Any

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")
"""Entries of `layer_types` in config.json whose layers the attention mixer supports. (`attention`
and `mamba` are names from before transformers 5.24.)"""
RECURRENT_LAYERS = ("linear_attention", "conv", "mamba", "hybrid")
"""The same for the recurrent mixer. A `hybrid` layer has attention too."""
LAYERS_WITHOUT_MIXER = ("mlp", "moe")
LAYER_LISTS = ("layer_types", "layers_block_type")
"""Keys of config.json that list the kinds of all layers."""
# Keys of config.json for the sizes of Mamba-2, which each family names in its own way.
MAMBA_STATE_SIZES = ("mamba_d_state", "ssm_state_size", "state_size")
MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
MAMBA_HEAD_SIZES = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
MAMBA_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
MAMBA_KERNELS = ("mamba_d_conv", "conv_kernel")


def unsupported_layer(layer_types: Sequence[str], *, may_have_states: bool = True) -> str | None:
    """Return a clause that names the first layer that no mixer supports; None if all may be
    supported. `layer_types`: of config.json; empty where a model does not list them. Without
    `may_have_states` layers with a state are unsupported: transformers' code of this model does
    not ask a cache for it."""
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


def num_attention_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers store keys and values; all of them if config.json does not list
    its layers."""
    return _num_layers_of(config, [*ATTENTION_LAYERS, "hybrid", "chunked_attention"])


def elements_of_states(config: Mapping[str, Any]) -> int:
    """Return how many elements the states of a sequence have, in all layers: the last inputs of
    convolutions, and recurrent states. 0 without such layers, or if config.json does not name their
    sizes."""
    elements_of_layer = _elements_of_state(config)
    if elements_of_layer == 0:  # some of these models do not give their number of layers either
        return 0
    return _num_layers_of(config, RECURRENT_LAYERS) * elements_of_layer


def count_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers. Raises KeyError if config.json neither gives nor lists them."""
    listed = _listed_layers(config)
    if listed and "num_hidden_layers" not in config:
        return len(listed)
    return int(config["num_hidden_layers"])


def _num_layers_of(config: Mapping[str, Any], kinds: Sequence[str]) -> int:
    listed = _listed_layers(config)
    if not listed:
        return count_layers(config)
    of_these = [kind for kind in listed if kind in kinds]
    return len(of_these)


def _listed_layers(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the kinds of all layers; empty if config.json does not list them."""
    for key in LAYER_LISTS:
        layers: Sequence[str] | None = config.get(key)
        if layers:
            return layers
    return ()


def _elements_of_state(config: Mapping[str, Any]) -> int:
    """Return the elements of one layer's state."""
    if "linear_num_value_heads" in config:  # a gated delta rule
        num_value_heads = config["linear_num_value_heads"]
        key_size = config["linear_key_head_dim"]
        value_size = config["linear_value_head_dim"]
        keys = config["linear_num_key_heads"] * key_size
        values = num_value_heads * value_size
        channels = 2 * keys + values  # queries are as wide as keys
        convolution = channels * config["linear_conv_kernel_dim"]
        return int(convolution + num_value_heads * key_size * value_size)
    if "conv_L_cache" in config:  # a short convolution
        return int(config["hidden_size"] * config["conv_L_cache"])
    state_size = _first_of(config, MAMBA_STATE_SIZES)
    if state_size is None:
        return 0
    num_heads = _first_of(config, MAMBA_HEADS) or 0
    head_size = _first_of(config, MAMBA_HEAD_SIZES) or 0
    groups = _first_of(config, MAMBA_GROUPS) or 1
    kernel_size = _first_of(config, MAMBA_KERNELS) or 0
    inner = num_heads * head_size
    channels = inner + 2 * groups * state_size  # of the convolution
    return inner * state_size + channels * kernel_size


def _first_of(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """Return the value of the first of these keys that is there and is a number."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int):
            return value
    return None
