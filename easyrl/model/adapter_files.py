"""Adapters in peft's format: what their files say, and whether a run can train one further.

    ADAPTER/adapter_config.json          base, rank, alpha, …
    ADAPTER/adapter_model.safetensors    base_model.model.<layer>.lora_A.weight [rank, in], lora_B …

Imports no torch.
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from easyrl.config import ConfigError
from easyrl.config.model import LoraConfig
from easyrl.data.hub import is_hub_id, resolve_model
from easyrl.model.files import fingerprint
from easyrl.model.weight_files import read_header, read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
KEY = "model.lora.adapter"
PREFIX = "base_model.model."  # of the names of weights
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"
OTHER_KINDS = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
)
"""Settings of peft with which an adapter has more than two matrices beside each linear layer."""
OTHER_FACTORS = ("use_rslora", "rank_pattern", "alpha_pattern")
"""Settings of peft with which layers have a rank or a factor of their own."""


class LayerShape(NamedTuple):
    """Sizes of an adapter's matrices beside one layer."""

    rank: int
    columns: int  # inputs of the layer
    rows: int  # outputs


class AdapterFiles(NamedTuple):
    folder: Path
    config: Mapping[str, Any]  # adapter_config.json
    layers: Mapping[str, LayerShape]  # by the layer's name in its base
    others: tuple[str, ...]  # weights that are no pair of matrices

    @property
    def base(self) -> str | None:
        """Its base, as its configuration names it."""
        return self.config.get("base_model_name_or_path")

    @property
    def rank(self) -> Any:
        return self.config.get("r")

    @property
    def largest_rank(self) -> int:
        """The largest rank of its layers, which may have ranks of their own."""
        return max(shape.rank for shape in self.layers.values())

    @property
    def other_kind(self) -> str:
        """Why it is more than two matrices beside linear layers; empty if it is not."""
        if self.config.get("peft_type") != "LORA":
            return f"it is of peft's type {self.config.get('peft_type')}"
        for key in OTHER_KINDS:
            if self.config.get(key):
                return f"its {ADAPTER_CONFIG} has {key}"
        if self.config.get("bias", "none") != "none":
            return f"its {ADAPTER_CONFIG} has bias={self.config['bias']}"
        if self.others:
            return f"it has other weights ({self.others[0]})"
        return ""


def read_adapter(folder: Path) -> AdapterFiles:
    """Read an adapter's configuration and the header of its weights. Raises ConfigError."""
    from safetensors import SafetensorError

    config = read_json(folder / ADAPTER_CONFIG)
    try:
        shapes = {weight.name: weight.shape for weight in read_header(folder / ADAPTER_WEIGHTS)}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{KEY}: expected a complete {ADAPTER_WEIGHTS} in '{folder}', got {error}; download or "
            "save the adapter again"
        ) from None
    layers: dict[str, LayerShape] = {}
    others: list[str] = []
    for name, shape in shapes.items():
        stem = name.removesuffix(A_SUFFIX)
        is_pair = name.startswith(PREFIX) and len(shape) == 2
        if is_pair and name.endswith(A_SUFFIX) and f"{stem}{B_SUFFIX}" in shapes:
            rank, columns = shape
            rows, _ = shapes[f"{stem}{B_SUFFIX}"]
            layers[stem.removeprefix(PREFIX)] = LayerShape(rank, columns, rows)
        elif not (is_pair and name.endswith(B_SUFFIX)):
            others.append(name)
    return AdapterFiles(folder, config, layers, tuple(others))


def reason_for_new(adapter: AdapterFiles, lora: LoraConfig) -> str:
    """Return why a run with these settings cannot train the adapter further; "" if it can."""
    if lora.rank != adapter.rank:
        return f"its rank is {adapter.rank}, and model.lora.rank is {lora.rank}"
    alpha = adapter.config.get("lora_alpha")
    if lora.alpha not in (None, alpha) or not isinstance(alpha, int):
        return f"its alpha is {alpha}, and model.lora.alpha is {lora.alpha}"
    if adapter.other_kind:
        return adapter.other_kind
    other_factors = [key for key in OTHER_FACTORS if adapter.config.get(key)]
    if other_factors:
        return f"its {ADAPTER_CONFIG} has {other_factors[0]}"
    if lora.target_modules is not None:
        missing = [name for name in adapter.layers if not _is_target(name, lora.target_modules)]
        unused = [target for target in lora.target_modules if not _has_layer(adapter, target)]
        if missing or unused:
            return f"model.lora.target_modules are not its layers ({[*missing, *unused][0]})"
    return ""


def _is_target(name: str, targets: list[str]) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _has_layer(adapter: AdapterFiles, target: str) -> bool:
    return any(_is_target(name, [target]) for name in adapter.layers)


def check_base(adapter: AdapterFiles, path: str) -> None:
    """Raise ConfigError if the adapter was trained on another model than that of `path`, as far as
    names and files show; the layers' shapes are compared with the model (`lora`)."""
    base = adapter.base
    if not base or base == path:
        return
    is_here = Path(resolve_model(base)).is_dir()
    if is_here:
        is_other = fingerprint(base) != fingerprint(path)
    else:
        is_other = is_hub_id(base) and is_hub_id(path)
    if is_other:
        raise ConfigError(
            f"{KEY}: expected an adapter of model.path (--model) {path}, got '{adapter.folder}', "
            f"which was trained on {base}"
        )


def copy_adapter(source: Path, folder: Path) -> None:
    """Copy the two files that an adapter consists of."""
    folder.mkdir()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        shutil.copyfile(source / name, folder / name)


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of an adapter's weights."""
    with (folder / ADAPTER_WEIGHTS).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
