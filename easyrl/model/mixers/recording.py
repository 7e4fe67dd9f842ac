"""A layout that records how a model's layers use it."""

from typing import Any

import torch
from torch import Tensor

from easyrl.layout.tree import TokenTree
from easyrl.model.mixers.interface import LayerSettings, UnsupportedLayer
from easyrl.model.mixers.packed_row import PackedRow


class RecordingLayout(PackedRow):
    """A packed row that records each layer's attention parameters."""

    def __init__(self, tree: TokenTree, device: torch.device | str = "cpu") -> None:
        super().__init__(tree, device)
        self.settings: list[LayerSettings] = []  # of the layers that have run, in order

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings) -> Tensor:
        expected_layer = len(self.settings)
        if settings.layer != expected_layer:
            raise UnsupportedLayer(
                f"layer {settings.layer} calls attention when layer {expected_layer} should, "
                "and the engine needs one call from each layer, in order"
            )
        self.settings.append(settings)
        return super().attend(query, key, value, settings)

    def unsupported_reason(self, model: Any) -> str | None:
        """Return a clause about what the results of a short row do not show, or None: layers
        without attention, and sliding windows that the row is too short for."""
        text_config = model.config.get_text_config()
        num_layers = getattr(text_config, "num_hidden_layers", None) or 0
        num_recorded = len(self.settings)
        if num_recorded < num_layers:
            return f"layer {num_recorded} does not use transformers' attention interface"
        layer_types = getattr(text_config, "layer_types", None)
        if not layer_types:
            has_window = getattr(text_config, "sliding_window", None) is not None
            kind = "sliding_attention" if has_window else "full_attention"
            layer_types = [kind] * num_recorded
        for settings, kind in zip(self.settings, layer_types, strict=False):
            if kind == "sliding_attention" and settings.sliding_window is None:
                return f"layer {settings.layer} does not pass its sliding window to its attention"
        return None
