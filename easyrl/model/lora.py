"""LoRA (arXiv 2106.09685): adapters beside a model's linear layers; only they are trained.

    layer(x) = W x + (alpha / rank) B A x       A [rank, in] random, B [out, rank] zero at first

peft puts them into the trainer's modules, whose code is unchanged. A weight leaves the trainer
merged, under its name without an adapter, or in parts that the embedded engine merges: W once, and
A, B and the factor with each update. Of a sharded model merging a weight and saving the adapter are
collective: all ranks call them together.

Adapted are `nn.Linear` and transformers' `Conv1D`, except the head and what peft refuses: layers
whose model reads their weight without calling them, such as `out_proj` of Mamba-2. Experts that
transformers fuses into one tensor stay frozen: peft would have to merge them in every forward.

In models with fused experts peft takes every target whose name ends in `gate_proj`, `up_proj` or
`down_proj` for the experts, also those of dense layers and shared experts, which are plain layers.
The trainer injects these by their full names. A saved adapter lists them under `target_parameters`,
whose names peft takes as they are.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from easyrl.config import ConfigError
from easyrl.config.model import LoraConfig
from easyrl.data.hub import resolve_model
from easyrl.formatting import require
from easyrl.model.sharding import whole
from easyrl.types import Weight, WeightPiece

PARTS = (".lora_A", ".lora_B", ".lora_scaling")
"""The ends of the names of an adapter's parts, in the order in which they are sent."""


def check_lora(lora: LoraConfig, path: str, model: Any) -> int:
    """Count the elements that would be trained in the model of `path`, which may be on torch's
    `meta` device. Raises ConfigError if the layers or peft are missing."""
    assert lora.rank is not None
    require("lora", "model.lora.rank: LoRA")
    shapes = [model.get_submodule(name).weight.shape for name in _targets(model, lora, path)]
    return lora.rank * sum(map(sum, shapes))


def describe_lora(lora: LoraConfig, path: str, model: Any) -> str:
    """Say which kinds of layers of the model of `path` are adapted, and which stay frozen, with
    their counts. The model may be on torch's `meta` device."""
    adapted = set(_targets(model, lora, path))
    linear = _linear_layers(model)
    refused = _refused_kinds(model, linear)
    frozen = Counter(
        f"{_kind(name)} (peft refuses it)" if _kind(name) in refused else _kind(name)
        for name in linear
        if name not in adapted
    )
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        is_router = type(model.get_submodule(owner)).__name__.endswith("Router")
        if parameter.ndim == 3 and ".experts." in f".{name}":
            frozen[f"experts.{kind}"] += 1
        elif parameter.ndim == 2 and is_router:
            frozen[f"{_kind(owner)} (router)"] += 1
    head = " and the head" if model.get_output_embeddings() is not None else ""
    text = f"adapted layers: {_counted(Counter(map(_kind, adapted)))}"
    return f"{text}; frozen: {_counted(frozen)}{head if frozen else head.removeprefix(' and ')}"


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{number} x {kind}" for kind, number in sorted(kinds.items()))


class Adapter:
    """The adapters of a model. Creating them modifies the model and freezes everything else."""

    def __init__(self, model: Any, lora: LoraConfig, *, path: str, seed: int) -> None:
        import peft
        from peft.utils.constants import DUMMY_TARGET_MODULES

        assert lora.rank is not None
        targets = _targets(model, lora, path)
        literal = _literal(model, targets)
        others = [name for name in targets if name not in literal]
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha or 2 * lora.rank,
            target_modules=literal or DUMMY_TARGET_MODULES,
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # old names, and Conv1D's layout
            self._peft: Any = peft.get_peft_model(model, config)
            if others:
                saved: Any = self._peft.peft_config["default"]
                if not literal:
                    saved.target_modules = set()
                tuner: Any = self._peft.base_model
                tuner.inject_adapter(model, "default", state_dict=_keys(others))
                # For whoever loads the adapter.
                saved.target_parameters = [f"{name}.weight" for name in others]
            self._layers: dict[str, Any] = {
                name: module
                for name, module in model.named_modules()
                if isinstance(module, peft.tuners.lora.LoraLayer)
            }
            # peft has rounded them to the dtype of the frozen weights.
            torch.default_generator.manual_seed(seed)
            for layer in self._layers.values():
                layer.lora_A["default"].reset_parameters()
                layer.lora_B["default"].reset_parameters()
                layer.reset_lora_parameters("default", True)
        self._peft.peft_config["default"].base_model_name_or_path = resolve_model(path)
        self._peft.eval()
        assert all(isinstance(layer, peft.tuners.lora.Linear) for layer in self._layers.values())

    def weights(self, named: Iterable[tuple[str, Tensor]], *, merge: bool = True) -> list[Weight]:
        """Turn the module's parameters into the weights of the model without adapters. Adapted ones
        are merged when they are materialized; unless `merge`, adapters are added in parts."""
        weights = []
        for name, tensor in named:
            of_layer, _, kind = name.rpartition(".base_layer.")
            if of_layer in self._layers:
                plain = f"{of_layer}.{kind}"
                if kind == "weight" and merge:
                    merged = partial(_merged, self._layers[of_layer])
                    weights.append(Weight(plain, tensor, merged, is_trained=True))
                else:
                    weights.append(Weight.stored(plain, tensor, is_trained=False))
            elif name.rpartition(".lora_")[0] not in self._layers:
                weights.append(Weight.stored(name, tensor, is_trained=False))
        for layer, module in self._layers.items() if not merge else ():
            parts = [part["default"].weight for part in (module.lora_A, module.lora_B)]
            parts.append(torch.tensor([module.scaling["default"]], device=parts[0].device))
            names = [f"{layer}.weight{part}" for part in PARTS]  # sorted, after the weight
            weights += map(partial(Weight.stored, is_trained=True), names, parts)
        return weights

    @contextmanager
    def in_place(self) -> Iterator[None]:
        trained = [parameter for parameter in self._peft.parameters() if parameter.requires_grad]
        with self._peft.disable_adapter():
            for parameter in trained:
                # peft freezes them meanwhile, but FSDP may decide now what is trained.
                parameter.requires_grad_(True)
            yield

    def save(self, folder: Path, *, is_writer: bool = True) -> None:
        """Write them in peft's format. All ranks call this together; one of them `is_writer`."""
        named = self._peft.named_parameters()
        state = {name: whole(weight).cpu() for name, weight in named if weight.requires_grad}
        if is_writer:  # with embedding layers peft would query the hub
            self._peft.save_pretrained(folder, state_dict=state, save_embedding_layers=False)


class Merger:
    """Merge adapters into an engine's weights as their parts arrive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.base: dict[str, Tensor] = {}  # adapted weights, as received
        self._parts: dict[str, Tensor] = {}  # of the adapter that is arriving

    def forget(self, name: str) -> None:
        """Note that a new base weight arrives."""
        self.base.pop(name, None)

    @torch.no_grad()
    def load(self, piece: WeightPiece) -> None:
        """Take a piece of an adapter; merge the adapter once it is complete."""
        name, _, part = piece.name.rpartition(".lora_")
        layer: Any = self._model.get_submodule(name.removesuffix(".weight"))
        weight = layer.weight.data
        if piece.start == 0:
            self._parts[part] = weight.new_empty(piece.shape, dtype=piece.values.dtype)
        end = piece.start + len(piece.values)
        self._parts[part].view(-1)[piece.start : end] = piece.values
        if f".lora_{part}" == PARTS[-1]:  # it has one element
            if name not in self.base:
                self.base[name] = weight.clone()
            _merge(self.base[name], self._parts.values(), not isinstance(layer, nn.Linear), weight)


def _merge(weight: Tensor, parts: Iterable[Any], is_transposed: bool, out: Tensor) -> Tensor:
    """Write W + (alpha / rank) B A, in the layout and dtype of W, into `out`."""
    a, b, scaling = parts
    delta = (b @ a).mul_(scaling)  # [out, in]
    return torch.add(weight, delta.T if is_transposed else delta, out=out)


@torch.no_grad()
def _merged(layer: Any) -> Tensor:
    """Return a layer's merged weight. Tensors are gathered first, to keep the last bits."""
    weight: Tensor = whole(layer.base_layer.weight)
    a, b = whole(layer.lora_A["default"].weight), whole(layer.lora_B["default"].weight)
    parts = a, b, layer.scaling["default"]
    return _merge(weight, parts, layer.fan_in_fan_out, torch.empty_like(weight))


def _targets(model: Any, lora: LoraConfig, path: str) -> list[str]:
    """Return the names of the layers to adapt. Raises ConfigError for a target without layers."""
    linear = _linear_layers(model)
    refused = _refused_kinds(model, linear)
    layers = [name for name in linear if _kind(name) not in refused]
    if lora.target_modules is None:
        return layers
    chosen = []
    for target in lora.target_modules:
        meant = [name for name in layers if f".{name}".endswith(f".{target}")]
        if not meant:
            kinds = ", ".join(sorted({_kind(name) for name in layers}))
            reason = ", which peft refuses for this model" if _kind(target) in refused else ""
            raise ConfigError(
                f"model.lora.target_modules: expected linear layers of {path} that can be adapted "
                f"({kinds}), got '{target}'{reason}"
            )
        chosen += meant
    return chosen


def _kind(name: str) -> str:
    """Return the last part of a name, which layers of one kind share, such as `q_proj`."""
    return name.rpartition(".")[2]


def _linear_layers(model: Any) -> list[str]:
    """Return the names of the linear layers except the head, in the model's order."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    ]


def _refused_kinds(model: Any, layers: Iterable[str]) -> set[str]:
    """Return the kinds of layers that peft refuses in models of this type, such as `out_proj` of
    Mamba-2. peft decides itself, about a module of each kind with the model's config."""
    import peft

    refused = set()
    for kind in sorted({_kind(name) for name in layers}):
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


def _keys(layers: Iterable[str]) -> dict[str, Tensor]:
    """Return a state dict with which peft adapts exactly these layers. It reads the keys only."""
    return {f"{name}.lora_A.weight": torch.empty(0) for name in layers}


def _literal(model: Any, targets: Iterable[str]) -> list[str]:
    """Return the targets that peft takes as they are, and not for fused experts."""
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_literal(kind: str) -> bool:
        config: Any = peft.LoraConfig(target_modules=[kind])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # it is fused with another kind
            return False
        return kind in config.target_modules

    targets = list(targets)
    kinds = {kind for kind in {*map(_kind, targets)} if is_literal(kind)}
    return [name for name in targets if _kind(name) in kinds]
