"""A layout that records how a model's layers use it."""

from typing import Any

import torch
from torch import Tensor

from easyrl.layout.tree import TokenTree
from easyrl.model.mixers.interface import LayerSettings, UnsupportedLayer
from easyrl.model.mixers.packed_row import PackedRow
from easyrl.model.mixers.recurrent import RunLayer, continues_from_state


class RecordingLayout(PackedRow):
    """A packed row that records each layer's attention parameters."""

    def __init__(self, tree: TokenTree, device: torch.device | str = "cpu") -> None:
        super().__init__(tree, device)
        self.settings: list[LayerSettings] = []  # of each call of attention, in order
        self.has_states = False

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        settings: LayerSettings,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.settings.append(settings)
        return super().attend(query, key, value, settings, sinks)

    def scan(self, run: RunLayer, hidden: Tensor) -> Tensor:
        self.has_states = True
        if not continues_from_state(run, hidden):
            raise UnsupportedLayer("a layer's own code ignores the state that it is given")
        return super().scan(run, hidden)

    def unsupported_reason(self, model: Any) -> str | None:
        """Return a clause about what the results of a short row do not show, or None: layers
        without attention, and sliding windows that the row is too short for."""
        text_config = model.config.get_text_config()
        num_layers = getattr(text_config, "num_hidden_layers", None) or 0
        recorded = {settings.layer for settings in self.settings}
        for layer in range(num_layers):
            if layer not in recorded and not self.has_states:
                return f"layer {layer} does not use transformers' attention interface"
        layer_types = getattr(text_config, "layer_types", None)
        if not layer_types:
            has_window = getattr(text_config, "sliding_window", None) is not None
            kind = "sliding_attention" if has_window else "full_attention"
            layer_types = [kind] * (1 + max(recorded, default=0))
        for settings in self.settings:
            is_listed = settings.layer < len(layer_types)
            is_sliding = is_listed and layer_types[settings.layer] == "sliding_attention"
            if is_sliding and settings.sliding_window is None:
                return f"layer {settings.layer} does not pass its sliding window to its attention"
        return None
