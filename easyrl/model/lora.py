"""LoRA (arXiv 2106.09685): adapters beside a model's linear layers; only they are trained.

    layer(x) = W x + (alpha / rank) B A x       A [rank, in] random, B [out, rank] zero at first

peft puts them into the trainer's modules, whose code is unchanged. A weight leaves the trainer
merged, under its name without an adapter, or in parts that the embedded engine merges: W once, and
A, B and the factor with each update. Of a sharded model merging a weight and saving the adapter are
collective: all ranks call them together.

Adapted are `nn.Linear` and transformers' `Conv1D`, except the head. Experts that transformers fuses
into one tensor stay frozen: peft would have to merge them in every forward.
"""

import warnings
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


class Adapter:
    """The adapters of a model. Creating them modifies the model and freezes everything else."""

    def __init__(self, model: Any, lora: LoraConfig, *, path: str, seed: int) -> None:
        import peft

        assert lora.rank is not None
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha or 2 * lora.rank,
            target_modules=_targets(model, lora, path),
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # old names, and Conv1D's layout
            self._peft: Any = peft.get_peft_model(model, config)
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
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    ]
    # peft maps some names to fused experts: only those that it takes literally remain.
    config: Any = peft.LoraConfig(target_modules=linear)
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    layers = [name for name in linear if name in config.target_modules]
    chosen = layers if lora.target_modules is None else []
    for target in lora.target_modules or ():
        meant = [name for name in layers if f".{name}".endswith(f".{target}")]
        if not meant:
            names = sorted({name.rpartition(".")[2] for name in layers})
            raise ConfigError(
                f"model.lora.target_modules: expected linear layers of {path} that can be adapted "
                f"({', '.join(names)}), got '{target}'"
            )
        chosen += meant
    return chosen
