"""LoRA (arXiv 2106.09685): adapters beside a model's linear layers; only they are trained.

    layer(x) = W x + (alpha / rank) B A x       A [rank, in] random, B [out, rank] zero at first

peft puts them into the trainer's modules, whose code is unchanged. A weight leaves the trainer
merged, under its name without an adapter, or in parts that the embedded engine merges: W once, and
A, B and the factor with each update. Of a sharded model merging a weight and saving the adapter are
collective: all ranks call them together.

Adapted are `nn.Linear` and transformers' `Conv1D`, except the head and layers beside which an
adapter would have no effect, or one that merging cannot express (`_NOT_ADAPTED`). Experts that
transformers fuses into one tensor stay frozen: peft would have to merge them in every forward.

In models with fused experts peft takes every target whose name ends in `gate_proj`, `up_proj` or
`down_proj` for the experts, also those of dense layers and shared experts, which are plain layers.
The trainer injects these by their full names. A saved adapter lists them under `target_parameters`,
whose names peft takes as they are.
"""

import copy
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from easyrl.config import ConfigError
from easyrl.config.model import LoraConfig
from easyrl.data.hub import resolve_model
from easyrl.formatting import require
from easyrl.model.adapter_files import (
    A_SUFFIX,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    B_SUFFIX,
    KEY,
    PREFIX,
    AdapterFiles,
    read_adapter,
)
from easyrl.model.pictures import frozen_tower, tower_parameters
from easyrl.model.sharding import whole
from easyrl.types import Weight, WeightPiece

A = ".lora_A"
B = ".lora_B"
SCALING = ".lora_scaling"
PARTS = (A, B, SCALING)
"""The ends of the names of an adapter's parts, in the order in which they are sent."""
ADAPTER_NAME = "default"  # peft's name of the only adapter


class _NotAdapted(NamedTuple):
    """A reason why a linear layer is left out."""

    note: str  # beside the layer in the start line
    clause: str  # behind the name of a target


_REFUSED = _NotAdapted("peft refuses it", "which peft refuses for this model")
"""Layers such as `out_proj` of Mamba-2, whose weight some kernels read."""
_NOT_CALLED = _NotAdapted(
    "its weight is read without a call", "whose weight the model reads without calling the layer"
)
"""Layers such as `dt_proj` of Mamba: an adapter beside them would have no effect."""
_SHARED = _NotAdapted("several layers share it", "whose weight several layers share")
"""Layers such as those of Zamba2's blocks: each would have an adapter of its own, and one merged
weight cannot equal all of them."""


def check_lora(lora: LoraConfig, path: str, model: Any) -> int:
    """Count the elements that would be trained in the model of `path`, which may be on torch's
    `meta` device. Raises ConfigError if the layers or peft are missing."""
    assert lora.rank is not None
    require("lora", "model.lora.rank: LoRA")
    num_trained = 0
    for name in _select(model, lora, path).targets:
        rows, columns = model.get_submodule(name).weight.shape
        num_trained += lora.rank * (rows + columns)
    return num_trained


def describe_lora(lora: LoraConfig, path: str, model: Any) -> str:
    """Say which kinds of layers of the model of `path` are adapted, and which stay frozen, with
    their counts. The model may be on torch's `meta` device."""
    targets, not_adapted = _select(model, lora, path)
    adapted: Counter[str] = Counter(_kind(name) for name in targets)
    frozen = _other_matrices(model)
    for name in _linear_layers(model):
        if name in not_adapted:
            frozen[f"{_kind(name)} ({not_adapted[name].note})"] += 1
        elif name not in targets:
            frozen[_kind(name)] += 1
    text = f"adapted layers: {_counted(adapted)}; frozen: {_counted(frozen)}"
    if model.get_output_embeddings() is None:
        return text
    return f"{text} and the head" if frozen else f"{text}the head"


def _other_matrices(model: Any) -> Counter[str]:
    """Count the weights, by kind, that are neither in linear layers nor embeddings nor the head:
    fused experts, routers, convolutions."""
    head = model.get_output_embeddings()
    linear = _linear_layers(model)
    found: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        owner_name, _, kind = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if parameter.ndim < 2 or kind.endswith("bias"):
            continue
        if owner_name in linear or owner is head or isinstance(owner, nn.Embedding):
            continue
        if ".experts." in f".{name}":
            found[f"experts.{kind}"] += 1
        elif type(owner).__name__.endswith("Router"):
            found[f"{_kind(owner_name)} (router)"] += 1
        else:
            found[_kind(owner_name) if kind == "weight" else kind] += 1
    return found


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{number} x {kind}" for kind, number in sorted(kinds.items()))


class Adapter:
    """The adapters of a model. Creating them modifies the model and freezes everything else."""

    def __init__(self, model: Any, lora: LoraConfig, *, path: str, seed: int) -> None:
        import peft

        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # old names, and Conv1D's layout
            self._peft = _add_adapters(model, lora, path)
            self._layers: dict[str, Any] = {}
            for name, module in model.named_modules():
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    self._layers[name] = module
            # peft has rounded them to the dtype of the frozen weights.
            torch.default_generator.manual_seed(seed)
            for layer in self._layers.values():
                layer.lora_A[ADAPTER_NAME].reset_parameters()
                layer.lora_B[ADAPTER_NAME].reset_parameters()
                layer.reset_lora_parameters(ADAPTER_NAME, True)
        if lora.adapter is not None:
            self._load(Path(lora.adapter))
        self._peft.peft_config[ADAPTER_NAME].base_model_name_or_path = resolve_model(path)
        self._peft.eval()
        assert all(isinstance(layer, peft.tuners.lora.Linear) for layer in self._layers.values())

    @torch.no_grad()
    def _load(self, folder: Path) -> None:
        """Take the values of a saved adapter of the same layers and rank."""
        saved = load_file(folder / ADAPTER_WEIGHTS)
        for name, layer in self._layers.items():
            for suffix, part in ((A_SUFFIX, layer.lora_A), (B_SUFFIX, layer.lora_B)):
                part[ADAPTER_NAME].weight.copy_(saved[f"{PREFIX}{name}{suffix}"])

    def weights(self, named: Iterable[tuple[str, Tensor]], *, merge: bool = True) -> list[Weight]:
        """Turn the module's parameters into the weights of the model without adapters. Adapted ones
        are merged when they are materialized; unless `merge`, adapters are added in parts."""
        weights = list[Weight]()
        for name, tensor in named:
            layer_name, _, kind = name.rpartition(".base_layer.")
            if layer_name in self._layers:
                plain_name = f"{layer_name}.{kind}"
                if kind == "weight" and merge:
                    merged = partial(_merged, self._layers[layer_name])
                    weights.append(Weight(plain_name, tensor, merged, is_trained=True))
                else:
                    weights.append(Weight.stored(plain_name, tensor, is_trained=False))
            elif name.rpartition(".lora_")[0] not in self._layers:
                weights.append(Weight.stored(name, tensor, is_trained=False))
        if not merge:
            for layer_name, layer in self._layers.items():
                weights += _parts(f"{layer_name}.weight", layer)
        return weights

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the model without its adapters."""
        trained = [parameter for parameter in self._peft.parameters() if parameter.requires_grad]
        with self._peft.disable_adapter():
            for parameter in trained:
                # peft freezes them meanwhile, but FSDP may decide now what is trained.
                parameter.requires_grad_(True)
            yield

    def save(self, folder: Path, *, is_writer: bool = True) -> None:
        """Write them in peft's format. All ranks call this together; one of them `is_writer`."""
        state: dict[str, Tensor] = {}
        for name, weight in self._peft.named_parameters():
            if weight.requires_grad:
                state[name] = whole(weight).cpu()
        if is_writer:  # with embedding layers peft would query the hub
            self._peft.save_pretrained(folder, state_dict=state, save_embedding_layers=False)


def combine(folder: Path, earlier: AdapterFiles) -> None:
    """Rewrite the adapter saved in `folder`, which was trained on a base with another one merged,
    as one for that adapter's own base: [A1; A2] and [f1 B1, f2 B2], where f is alpha / rank. Ranks
    are the sum of the largest ones; layers without an adapter have zeros."""
    later = read_adapter(folder)
    total_rank = earlier.largest_rank + later.largest_rank
    combined: dict[str, Tensor] = {}
    start = 0  # of the adapter's rows of A and columns of B
    for adapter in (earlier, later):
        saved = load_file(adapter.folder / ADAPTER_WEIGHTS)
        for name, shape in adapter.layers.items():
            a_name = f"{PREFIX}{name}{A_SUFFIX}"
            b_name = f"{PREFIX}{name}{B_SUFFIX}"
            if a_name not in combined:
                combined[a_name] = torch.zeros(total_rank, shape.columns)
                combined[b_name] = torch.zeros(shape.rows, total_rank)
            stop = start + shape.rank
            combined[a_name][start:stop] = saved[a_name]
            combined[b_name][:, start:stop] = _factor(adapter, name) * saved[b_name].float()
        start += adapter.largest_rank
    layers = sorted({*earlier.layers, *later.layers})
    config = {
        **later.config,
        "base_model_name_or_path": resolve_model(str(earlier.base)),
        "r": total_rank,
        "lora_alpha": total_rank,  # so that the factor is 1
        "target_modules": layers,
    }
    save_file(combined, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(f"{text}\n", encoding="utf-8")


def _factor(adapter: AdapterFiles, layer: str) -> float:
    """Return what the output of a layer's adapter is multiplied by, as peft computes it."""
    alpha = adapter.config["lora_alpha"]
    for pattern, value in (adapter.config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            alpha = value
            break
    rank = adapter.layers[layer].rank
    return float(alpha / math.sqrt(rank) if adapter.config.get("use_rslora") else alpha / rank)


def _add_adapters(model: Any, lora: LoraConfig, path: str) -> Any:
    """Let peft add adapters to a model; return peft's model of it."""
    import peft
    from peft.utils.constants import DUMMY_TARGET_MODULES

    assert lora.rank is not None
    targets = _select(model, lora, path).targets
    literal = _literal(model, targets)
    others = [name for name in targets if name not in literal]
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,
        target_modules=literal or DUMMY_TARGET_MODULES,
        task_type="CAUSAL_LM",
    )
    adapted: Any = peft.get_peft_model(model, config, adapter_name=ADAPTER_NAME)
    if others:
        saved: Any = adapted.peft_config[ADAPTER_NAME]
        if not literal:
            saved.target_modules = set()
        adapted.base_model.inject_adapter(model, ADAPTER_NAME, state_dict=_keys(others))
        # For whoever loads the adapter.
        saved.target_parameters = [f"{name}.weight" for name in others]
    return adapted


def _parts(weight_name: str, layer: Any) -> list[Weight]:
    """Return the adapter of a layer in parts, which are sorted after the weight."""
    a = layer.lora_A[ADAPTER_NAME].weight
    b = layer.lora_B[ADAPTER_NAME].weight
    scaling = torch.tensor([layer.scaling[ADAPTER_NAME]], device=a.device)
    return [
        Weight.stored(f"{weight_name}{A}", a, is_trained=True),
        Weight.stored(f"{weight_name}{B}", b, is_trained=True),
        Weight.stored(f"{weight_name}{SCALING}", scaling, is_trained=True),
    ]


class Merger:
    """Merge adapters into an engine's weights as their parts arrive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._base: dict[str, Tensor] = {}  # adapted weights, as received
        self._parts: dict[str, Tensor] = {}  # of the adapter that is arriving, by PARTS

    def forget(self, name: str) -> None:
        """Note that a weight arrives without an adapter."""
        self._base.pop(name, None)

    @torch.no_grad()
    def load(self, piece: WeightPiece) -> None:
        """Take a piece of an adapter; merge the adapter once it is complete."""
        name, _, part_name = piece.name.rpartition(".")
        part = f".{part_name}"
        layer: Any = self._model.get_submodule(name.removesuffix(".weight"))
        if piece.start == 0:
            weight = layer.weight.data
            self._parts[part] = weight.new_empty(piece.shape, dtype=piece.values.dtype)
        received = self._parts[part].view(-1)
        stop = piece.start + len(piece.values)
        received[piece.start : stop] = piece.values
        if part == SCALING:  # the last one, of one element
            self._merge_into(layer, name)

    def _merge_into(self, layer: Any, name: str) -> None:
        """Merge the adapter that has arrived into a layer, whose weight has this name."""
        weight = layer.weight.data
        if name not in self._base:
            self._base[name] = weight.clone()
        a, b, scaling = (self._parts[part] for part in PARTS)
        parts = _AdapterParts(a, b, scaling)
        is_transposed = not isinstance(layer, nn.Linear)
        _merge(self._base[name], parts, is_transposed=is_transposed, out=weight)


class _AdapterParts(NamedTuple):
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scaling: Any  # alpha / rank: a number, or a tensor of one


def _merge(weight: Tensor, parts: _AdapterParts, *, is_transposed: bool, out: Tensor) -> Tensor:
    """Write W + (alpha / rank) B A, in the layout and dtype of W, into `out`."""
    delta = (parts.b @ parts.a).mul_(parts.scaling)  # [out, in]
    return torch.add(weight, delta.T if is_transposed else delta, out=out)


@torch.no_grad()
def _merged(layer: Any) -> Tensor:
    """Return a layer's merged weight. Tensors are gathered first, to keep the last bits."""
    weight: Tensor = whole(layer.base_layer.weight)
    parts = _AdapterParts(
        a=whole(layer.lora_A[ADAPTER_NAME].weight),
        b=whole(layer.lora_B[ADAPTER_NAME].weight),
        scaling=layer.scaling[ADAPTER_NAME],
    )
    out = torch.empty_like(weight)
    return _merge(weight, parts, is_transposed=layer.fan_in_fan_out, out=out)


# -- which layers are adapted ----------------------------------------------------------------------


class _Selection(NamedTuple):
    """Which layers are adapted."""

    targets: list[str]  # names of the layers to adapt, in the model's order
    not_adapted: dict[str, _NotAdapted]  # by name: linear layers that cannot be


def _select(model: Any, lora: LoraConfig, path: str) -> _Selection:
    """Select the layers to adapt. Raises ConfigError for a target without layers."""
    not_adapted = _not_adapted(model)
    linear = _linear_layers(model)
    layers = [name for name in linear if name not in not_adapted]
    if lora.adapter is not None:
        adapter = read_adapter(Path(lora.adapter))
        _check_layers(adapter, linear, layers, path)
        return _Selection([name for name in layers if name in adapter.layers], not_adapted)
    if lora.target_modules is None:
        return _Selection(layers, not_adapted)
    chosen = set[str]()
    for target in lora.target_modules:
        meant = {name for name in layers if _is_meant(name, target)}
        if not meant:
            kinds = ", ".join(sorted({_kind(name) for name in layers}))
            reason = ""
            for name, left_out in not_adapted.items():
                if _is_meant(name, target):
                    reason = f", {left_out.clause}"
            raise ConfigError(
                f"model.lora.target_modules: expected linear layers of {path} that can be adapted "
                f"({kinds}), got '{target}'{reason}"
            )
        chosen |= meant
    return _Selection([name for name in layers if name in chosen], not_adapted)


def _check_layers(
    adapter: AdapterFiles, linear: Mapping[str, Any], layers: Collection[str], path: str
) -> None:
    """Raise ConfigError unless the layers of an adapter are layers of the model that can be
    adapted, with the same sizes."""
    for name, shape in adapter.layers.items():
        expected = (
            f"{KEY}: expected an adapter of {path}, got '{adapter.folder}', whose layer {name}"
        )
        if name not in linear:
            raise ConfigError(f"{expected} it does not have")
        if name not in layers:
            raise ConfigError(f"{expected} cannot be adapted there")
        rows, columns = linear[name].weight.shape
        if not isinstance(linear[name], nn.Linear):  # Conv1D has the transposed matrix
            rows, columns = columns, rows
        if (shape.rows, shape.columns) != (rows, columns):
            raise ConfigError(
                f"{expected} has {shape.rows} x {shape.columns} weights, and there {rows} x "
                f"{columns}"
            )


def _is_meant(name: str, target: str) -> bool:
    """Return whether a target, such as `q_proj` or `self_attn.q_proj`, means this layer."""
    return f".{name}".endswith(f".{target}")


def _kind(name: str) -> str:
    """Return the last part of a name, which layers of one kind share, such as `q_proj`."""
    return name.rpartition(".")[2]


def _linear_layers(model: Any) -> dict[str, nn.Module]:
    """Return the linear layers except the head, and those of a frozen tower, by their names, in the
    model's order."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    frozen = set(frozen_tower(model))
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)) or module is head:
            continue
        if module.weight not in frozen and _is_plain(module):
            found[name] = module
    return found


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    """Return whether a subclass of a linear layer returns what a linear layer does. Routers may
    return several tensors (Llama 4, Phi-3.5-MoE)."""
    if type(module).forward is nn.Linear.forward or not isinstance(module, nn.Linear):
        return True
    weight = module.weight
    try:
        output = module(
            torch.zeros((1, module.in_features), dtype=weight.dtype, device=weight.device)
        )
    except Exception:  # any: it expects another input
        return False
    return isinstance(output, Tensor) and output.shape == (1, module.out_features)


def _not_adapted(model: Any) -> dict[str, _NotAdapted]:
    """Return the linear layers that are left out by their names, with the reason."""
    linear = _linear_layers(model)
    kinds = {_kind(name) for name in linear}
    reason_of_kind = dict.fromkeys(_uncalled_kinds(model, kinds), _NOT_CALLED)
    reason_of_kind |= dict.fromkeys(_refused_kinds(model, kinds), _REFUSED)
    num_uses: Counter[int] = Counter()  # by id of the parameter
    for module in model.modules():
        num_uses.update(id(parameter) for parameter in module.parameters(recurse=False))
    of_tower = set(tower_parameters(model))
    found: dict[str, _NotAdapted] = {}
    for name, module in linear.items():
        reason = reason_of_kind.get(_kind(name))
        # A text does not show which layers of a tower are called.
        if reason is _NOT_CALLED and module.weight in of_tower:
            reason = None
        if reason is not None:
            found[name] = reason
        elif num_uses[id(module.weight)] > 1:
            found[name] = _SHARED
    return found


def _refused_kinds(model: Any, kinds: Collection[str]) -> set[str]:
    """Return the kinds of layers that peft refuses in models of this type. peft decides itself,
    about a module of each kind with the model's config."""
    import peft

    refused = set[str]()
    for kind in sorted(kinds):
        probe: Any = nn.Module()
        probe.config = model.config
        probe.add_module(kind, nn.Linear(1, 1, device="meta"))
        config = peft.LoraConfig(r=1, target_modules=["by the state dict"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the config names other modules
            try:
                peft.inject_adapter_in_model(config, probe, state_dict=_keys([kind]))
            except ValueError:
                refused.add(kind)
    return refused


def _uncalled_kinds(model: Any, kinds: Collection[str]) -> set[str]:
    """Return the kinds of layers that a forward of such a model never calls. It is run without
    values, on torch's `meta` device; a model whose code needs values counts as calling all."""
    config = copy.deepcopy(model.config)
    called = set[str]()
    try:
        with torch.device("meta"), torch.no_grad():
            probe: Any = type(model)._from_config(config, attn_implementation="eager")
            for name, module in probe.named_modules():
                kind = _kind(name)
                module.register_forward_pre_hook(lambda *_, kind=kind: called.add(kind))
            tokens = torch.zeros((1, 2), dtype=torch.int64)
            probe(input_ids=tokens, use_cache=False)
    except Exception:  # any, depending on the model's code
        return set()
    return set(kinds) - called


def _keys(layers: Iterable[str]) -> dict[str, Tensor]:
    """Return a state dict with which peft adapts exactly these layers. It reads the keys only."""
    return {f"{name}.lora_A.weight": torch.empty(0) for name in layers}


def _literal(model: Any, targets: Iterable[str]) -> list[str]:
    """Return the targets that peft takes as they are, and not for fused experts."""
    is_literal: dict[str, bool] = {}  # by kind
    literal = list[str]()
    for name in targets:
        kind = _kind(name)
        if kind not in is_literal:
            is_literal[kind] = _is_literal(model, kind)
        if is_literal[kind]:
            literal.append(name)
    return literal


def _is_literal(model: Any, kind: str) -> bool:
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config: Any = peft.LoraConfig(target_modules=[kind])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # it is fused with another kind
        return False
    return kind in config.target_modules
