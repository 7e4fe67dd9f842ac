"""A causal language model: packed tokens in, logits of chosen tokens out.

`loading.load_policy` makes one from any Hugging Face causal-LM folder or hub id. If its layers
cannot run packed rows exactly (`exactness`), the row's sequences run through transformers' own code
as a padded batch:

    [s1 s1 s1 | s2 | s3 s3] ──► [[s1 s1 s1] [s2 . .] [s3 s3 .]] ──model──► [B, L, H] ──► [T, H]

Shapes: T tokens of the packed row, K of them with logits, H the model's width, V tokens of the
vocabulary; B sequences, L the longest of them.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from easyrl.config.model import AttentionMode, LoraConfig
from easyrl.model.files import eos_token_ids
from easyrl.model.inputs import ModelInputs, real_tokens
from easyrl.model.lora import Adapter, Merger
from easyrl.model.mixers.interface import CurrentLayout, Layout
from easyrl.model.mixers.kinds import connect, exclude_from_compiling, has_states
from easyrl.model.mixers.packed_row import AttentionKernels, PackedRow
from easyrl.model.pictures import Vision
from easyrl.model.sharding import whole
from easyrl.types import MicroBatch, Weight, WeightPiece


class _Call(NamedTuple):
    """How transformers' model is called for a packed row."""

    arguments: dict[str, Any]
    row: Any
    """Index in its outputs, [1, T, ...] or [B, L, ...], that gives the row's tokens [T, ...]."""


class Policy:
    def __init__(
        self,
        model: Any,
        device: torch.device,
        *,
        no_packing_reason: str | None = None,
        attention: AttentionMode = "auto",
        vision: Vision | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.no_packing_reason = no_packing_reason
        """Reason why its layers cannot run packed rows exactly; None: they can."""
        self.shares_prompts = no_packing_reason is None and attention != "repeated"
        """Whether the trainer packs a group's prompt once."""
        self.has_states = has_states(model)
        """Whether layers keep a state of fixed size, instead of something for each token."""
        self.kernels = AttentionKernels(may_use_flex=attention != "without_flex")
        self.vision = vision
        """The tower of pictures; None: the model gets text alone."""
        self.adapter: Adapter | None = None
        self.eos_token_ids = eos_token_ids(model.generation_config, model.config)
        self._current_layout = connect(model)
        self._merger = Merger(model)
        # Of a model that gets pictures, all that is not its head.
        self._layers = _without_head(model) if vision is None else model.base_model
        self._layers_output: Any = None  # class of the layers' output, once they have run

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers."""
        return decoder_layers(self.model)

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def stop_at(self, token_id: int | None) -> None:
        """Also end completions at this token: a chat model's config may lack that of a turn."""
        if token_id is not None and token_id not in self.eos_token_ids:
            self.eos_token_ids.append(token_id)

    # -- how its layers run ------------------------------------------------------------------------

    def checkpoint_activations(self) -> None:
        """Recompute each decoder layer from its input in the backward pass from now on."""
        for block in self.blocks:
            # Beneath the hooks that gather a sharded layer's weights.
            block.forward = _recomputed(block.forward, self._current_layout)

    def compile(self) -> None:
        """Compile each decoder layer around its attention, before `checkpoint_activations`."""
        exclude_from_compiling(self.model)
        # Each mode, kind of row and number of threads, which changes with shared cores, counts.
        torch._dynamo.config.recompile_limit = 64
        for block in self.blocks:
            block.forward = torch.compile(block.forward, dynamic=True)

    def before_each_block(self, callback: Callable[[], None]) -> None:
        """Call `callback` before the forward and before the backward of each decoder layer."""
        for block in self.blocks:
            block.register_forward_pre_hook(lambda *_: callback())
            block.register_full_backward_pre_hook(lambda *_: callback())

    # -- forward -----------------------------------------------------------------------------------

    def inputs_of(self, batch: MicroBatch) -> ModelInputs:
        """Move a micro-batch's row to the device, for logits that predict its completion tokens."""
        ids = torch.from_numpy(batch.input_ids).to(self.device)
        logits_at = torch.from_numpy(batch.logits_at).to(self.device)
        spans = None
        if self.vision is not None:
            spans = self.vision.spans_of(batch.input_ids, batch.pictures)
        return ModelInputs.of_row(
            ids,
            batch.tree,
            logits_at,
            self.kernels,
            pictures=batch.pictures,
            spans=spans,
        )

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Return logits [K, V] of the tokens `inputs.logits_at` of the packed row."""
        return self.head(self.hidden_states(inputs))

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Return the head's inputs [K, H] for the tokens `inputs.logits_at` of the packed row."""
        call = self._call(inputs)
        with self._current_layout.use(self._layout_of(inputs)):
            output = self.run_layers(**call.arguments, use_cache=False)
        hidden: Tensor = output.last_hidden_state[call.row]
        return hidden[inputs.logits_at]

    def run_layers(self, **arguments: Any) -> Any:
        """Run the model without its head, with transformers' arguments and output."""
        output = self._layers(**arguments)
        self._layers_output = type(output)
        return output

    def layers_accept(self, argument: str) -> bool:
        """Return whether `run_layers` has a parameter of this name. Many models also swallow
        arguments that they do not know, as `**kwargs`."""
        return argument in inspect.signature(self._layers.forward).parameters

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [K, V] of `hidden_states` [K, H] by the model's own forward, with its
        layers' replaced by their result. Meanwhile no other thread and no hook may run the model.
        """
        given = self._layers_output(last_hidden_state=hidden.unsqueeze(0))
        self._layers.forward = lambda *_, **__: given  # shadows the class's method
        try:
            # Some models read the shape of their input tokens.
            tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        finally:
            del self._layers.forward
        return self.ban(logits)

    def ban(self, logits: Tensor) -> Tensor:
        """Give tokens that are never sampled no probability, in place: logits [..., V]."""
        return logits if self.vision is None else self.vision.ban(logits)

    def logits_by_own_forward(self, inputs: ModelInputs) -> Tensor:
        """Return logits [T, V] of the whole row by the model's own forward, layers and head."""
        call = self._call(inputs)
        with self._current_layout.use(self._layout_of(inputs)):
            logits: Tensor = self.model(**call.arguments, use_cache=False).logits[call.row]
        return self.ban(logits)

    def _layout_of(self, inputs: ModelInputs) -> Layout | None:
        """Return the layout for the model's layers; None: they run its sequences one by one."""
        return inputs.layout if self.no_packing_reason is None else None

    def _call(self, inputs: ModelInputs) -> _Call:
        if inputs.pictures:
            assert self.vision is not None, "the model is loaded without its tower"
            assert self.no_packing_reason is None, "checked when the model was loaded"
            arguments = self.vision.arguments(inputs.ids, inputs.positions, inputs.pictures)
            return _Call(arguments, row=0)
        if self.no_packing_reason is None:
            arguments = {"input_ids": inputs.ids[None], "position_ids": inputs.positions[None]}
            return _Call(arguments, row=0)
        assert isinstance(inputs.layout, PackedRow)
        is_real = real_tokens(inputs.layout.tree, inputs.ids.device)
        padded = torch.zeros_like(is_real, dtype=inputs.ids.dtype)
        padded.masked_scatter_(is_real, inputs.ids)
        return _Call({"input_ids": padded}, row=is_real)

    # -- weights -----------------------------------------------------------------------------------

    def add_adapter(self, lora: LoraConfig, *, path: str, seed: int) -> None:
        """Train only LoRA adapters from now on (`lora.Adapter`)."""
        self.adapter = Adapter(self.model, lora, path=path, seed=seed)

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def weights(self, *, only_trained: bool = False, merge: bool = True) -> list[Weight]:
        """Return every weight once (tied ones under their first name), in name order, with
        adapters merged or beside them. `only_trained`: only those that training changes."""
        every = self.exported(self.model.named_parameters(), merge=merge)
        chosen = [weight for weight in every if weight.is_trained or not only_trained]
        return sorted(chosen, key=lambda weight: weight.name)

    def exported(self, named: Iterable[tuple[str, Tensor]], *, merge: bool = True) -> list[Weight]:
        """Return parameters or buffers under the names that checkpoints and engines use."""
        if self.adapter is not None:
            return self.adapter.weights(named, merge=merge)
        return [Weight.stored(name, w, is_trained=w.requires_grad) for name, w in named]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for weight in self.weights():
            yield weight.name, weight.materialize()

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Overwrite weights, or merge adapters into them, piece by piece."""
        flat = {name: weight.data.view(-1) for name, weight in self.model.named_parameters()}
        for piece in pieces:
            if piece.name not in flat:
                self._merger.load(piece)
                continue
            self._merger.forget(piece.name)
            stop = piece.start + len(piece.values)
            flat[piece.name][piece.start : stop] = piece.values

    def weights_sha256(self) -> str:
        """Return the SHA-256 of all weights' bytes, in name order. All ranks of a sharded model
        call this together."""
        digest = hashlib.sha256()
        for name, tensor in self.named_weights():
            digest.update(name.encode())
            content = whole(tensor).cpu().reshape(-1).view(torch.uint8)
            digest.update(content.numpy().tobytes())
        return digest.hexdigest()


def _without_head(model: Any) -> Any:
    """Return the module of the model without its head."""
    decoder = model.get_decoder()
    is_model = hasattr(decoder, "get_output_embeddings")  # ModernBERT calls its head `decoder`
    if decoder is not model and is_model and decoder.get_output_embeddings() is not None:
        return _without_head(decoder)  # a multimodal model has a whole causal one inside
    if decoder is not model:
        return decoder
    return getattr(model, "model", model)  # Llama 4 returns itself


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers of a model, which may have a larger tower beside them."""
    return _largest_list(model.get_decoder()) or _largest_list(model)


def _largest_list(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the list that holds most weights; none if there is no list."""
    largest = list[nn.Module]()
    most_weights = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            num_weights = sum(weight.numel() for weight in module.parameters())
            if num_weights > most_weights:
                largest = [*module]
                most_weights = num_weights
    return largest


def _recomputed(forward: Callable[..., Any], current: CurrentLayout) -> Callable[..., Any]:
    """Return a layer's `forward` that keeps only its input, and the row's layout, for backward."""

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        layout = current.layout

        def run(*args: Any, **kwargs: Any) -> Any:
            with current.use(layout):  # in the backward pass another row may be the current one
                return forward(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return checkpointed
