"""A causal language model as EasyRL uses it: packed tokens in, logits at chosen places out.

Loads any Hugging Face causal-LM folder or hub id whose attention goes through transformers'
attention interface, and refuses what it could not compute exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from easyrl.hub import resolve_model
from easyrl.model.attention import (
    ATTENTION_NAME,
    AttentionLayout,
    register_attention,
)
from easyrl.model.attention_kernels import AttentionSettings
from easyrl.model.linear import speed_up_linear_layers
from easyrl.model.pretrained import load_model_config
from easyrl.types import WeightPiece


class Policy:
    """The model on its device. `forward` takes T packed tokens without a batch dimension."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.eos_token_ids = _eos_token_ids(model)
        self._base_output: Any = None  # the class of what the layers return, once they have run

    @classmethod
    def load(
        cls,
        path: str,
        device: torch.device | str = "cpu",
        *,
        trust_remote_code: bool = False,
    ) -> Policy:
        """Load in float32. Raises ValueError for a model that cannot be served exactly."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

        register_attention()
        config = load_model_config(path, trust_remote_code=trust_remote_code)
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:  # else its class comes with the model
            _check_interface(path, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            resolve_model(path),
            config=config,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, in words
        )
        model, found = loaded
        _check_complete(path, found["missing_keys"], found["mismatched_keys"])
        _check_interface(path, type(model))
        if torch.device(device).type == "cpu":
            speed_up_linear_layers(model)
        policy = cls(model.to(device), torch.device(device))
        policy._check_layers(path)
        policy._check_head(path)
        return policy

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, layout: AttentionLayout, logits_at: Tensor
    ) -> Tensor:
        """Logits [K, V] at the places `logits_at` [K] of the packed row `input_ids` [T]."""
        output = self.model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_at,
            attention_layout=layout,
        )
        logits: Tensor = output.logits[0]
        return logits

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, layout: AttentionLayout, at: Tensor
    ) -> Tensor:
        """What the head is given [K, H] at the places `at` [K] of the packed row [T]."""
        output = self.model.base_model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            attention_layout=layout,
        )
        self._base_output = type(output)
        hidden: Tensor = output.last_hidden_state[0][at]
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [K, V] of `hidden_states` [K, H].

        It is the model's own code, whatever that does besides a matrix product: its forward,
        with the layers below replaced by their result.
        """
        name, modules = self.model.base_model_prefix, self.model._modules
        layers = modules[name]
        modules[name] = _Given(self._base_output(last_hidden_state=hidden.unsqueeze(0)))
        try:
            # Some look at the shape of the tokens that their hidden states are of.
            tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        finally:
            modules[name] = layers
        return logits

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @torch.no_grad()
    def _check_head(self, path: str) -> None:
        """Log-probabilities are computed in chunks: layers and head apart must be the model."""
        tokens = torch.arange(min(4, self.vocabulary_size), device=self.device)
        expected = self.forward(tokens, tokens, _Probe(), logits_at=tokens)
        try:
            got = self.head(self.hidden_states(tokens, tokens, _Probe(), at=tokens))
            is_same = torch.allclose(got, expected, rtol=1e-5, atol=1e-5)
        except (AttributeError, KeyError, TypeError, RuntimeError):
            is_same = False
        if not is_same:
            raise ValueError(
                f"model.path: the logits of {type(self.model).__name__} ({path}) do not follow "
                "from its last hidden states alone, which EasyRL relies on to compute them a part "
                "at a time; choose another model"
            )

    @torch.no_grad()
    def _check_layers(self, path: str) -> None:
        """One token through all layers: each must ask for the attention its config describes.

        (Some model classes make windows only in the mask that transformers builds for them.)
        """
        probe, zero = _Probe(), torch.zeros(1, dtype=torch.int64, device=self.device)
        self.forward(zero, zero, probe, logits_at=zero)
        text = self.model.config.get_text_config()
        window = getattr(text, "sliding_window", None)
        every = ["full_attention" if window is None else "sliding_attention"] * len(probe.windows)
        kinds = getattr(text, "layer_types", None) or every
        for layer, (asked, kind) in enumerate(zip(probe.windows, kinds, strict=False)):
            if kind == "sliding_attention" and asked is None:
                raise ValueError(
                    f"model.path: layer {layer} of {path} has a sliding window, but "
                    f"{type(self.model).__name__} does not tell its attention function, so EasyRL "
                    "cannot serve it exactly; choose another model"
                )

    def stop_at(self, token_id: int | None) -> None:
        """Also end completions at this token: a chat model's config may not name the one that its
        tokenizer ends turns with."""
        if token_id is not None and token_id not in self.eos_token_ids:
            self.eos_token_ids.append(token_id)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once (tied ones under their first name), in name order."""
        yield from sorted(self.model.named_parameters())

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        own = {name: tensor.data.view(-1) for name, tensor in self.model.named_parameters()}
        for piece in pieces:
            own[piece.name][piece.start : piece.start + len(piece.values)].copy_(piece.values)

    def weights_sha256(self) -> str:
        """SHA-256 over the bytes of all weights, in name order."""
        digest = hashlib.sha256()
        for name, tensor in self.named_weights():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write a Hugging Face folder that transformers and vLLM load as it is."""
        self.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


class _Given(nn.Module):
    """Stands in for layers whose result is known."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.result


class _Probe:
    """An attention layout that notes the window each layer asks for."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        if settings.layer != len(self.windows):
            raise ValueError(
                f"model.path: attention of layer {settings.layer} came where that of layer "
                f"{len(self.windows)} was due; EasyRL needs each layer's once and in order. "
                "Choose another model"
            )
        self.windows.append(settings.sliding_window)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def _check_complete(
    path: str, missing: Collection[str], mismatched: Collection[tuple[str, Any, Any]]
) -> None:
    """transformers draws at random what a folder has no weights for."""
    for name, found, wanted in sorted(mismatched):
        raise ValueError(
            f"model.path: in the files of {path} the weight {name} has the shape {list(found)}, "
            f"but by its config.json it has {list(wanted)}; fetch or save the model again"
        )
    if missing:
        raise ValueError(
            f"model.path: the files of {path} lack {len(missing)} of the model's weights "
            f"({', '.join(sorted(missing)[:3])}{', ...' if len(missing) > 3 else ''}); fetch or "
            "save the model again, or choose another model"
        )


def _check_interface(path: str, model_class: Any) -> None:
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ValueError(
            f"model.path: {model_class.__name__} ({path}) does not go through transformers' "
            "attention interface, so EasyRL cannot serve it exactly; choose another model"
        )


def _eos_token_ids(model: Any) -> list[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]
