"""A causal language model: packed tokens in, logits of chosen tokens out.

Loads any Hugging Face causal-LM folder or hub id. If its layers cannot attend in packed rows
exactly (`exactness`), the row's sequences run through transformers' own code as a padded batch:

    [s1 s1 s1 | s2 | s3 s3] ──► [[s1 s1 s1] [s2 . .] [s3 s3 .]] ──model──► [B, L, H] ──► [T, H]

Shapes: T tokens of the packed row, K of them with logits, H the model's width, V tokens of the
vocabulary; B sequences, L the longest of them.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from easyrl.config import ConfigError
from easyrl.config.model import AttentionMode, DType, LoraConfig
from easyrl.data.hub import loadable_model
from easyrl.layout.tree import TokenTree
from easyrl.model.exactness import attend_packed, check_causal, checked_once
from easyrl.model.files import eos_token_ids, load_model_config, read_model_files
from easyrl.model.inputs import ModelInputs, real_tokens
from easyrl.model.lora import Adapter, Merger
from easyrl.model.mixers.attention import register_attention
from easyrl.model.mixers.packed_row import AttentionKernels, PackedRow, connect
from easyrl.model.sharding import whole
from easyrl.types import MicroBatch, Weight, WeightPiece

CHECKED_WORDS = 512


class Policy:
    def __init__(
        self,
        model: Any,
        device: torch.device,
        *,
        no_packing_reason: str | None = None,
        attention: AttentionMode = "auto",
    ) -> None:
        self.model = model
        self.device = device
        self.no_packing_reason = no_packing_reason
        """Reason why its layers cannot attend in packed rows exactly; None: they can."""
        self.shares_prompts = no_packing_reason is None and attention != "repeated"
        """Whether the trainer packs a group's prompt once."""
        self.kernels = AttentionKernels(may_use_flex=attention != "without_flex")
        self._current_layout = connect(model)
        self.adapter: Adapter | None = None
        self._merger = Merger(model)
        self.eos_token_ids = eos_token_ids(model.generation_config, model.config)
        decoder = model.get_decoder()  # the model without its head; of Llama 4 the model itself
        self._layers: Any = decoder if decoder is not model else getattr(model, "model", model)
        self._base_output: Any = None  # the class of the layers' output, once they have run

    @classmethod
    def load(
        cls,
        path: str,
        device: torch.device | str = "cpu",
        *,
        trust_remote_code: bool = False,
        attention: AttentionMode = "auto",
        dtype: DType | None = "float32",
    ) -> Self:
        """Load a folder, a hub id or a built-in model, with its weights in `dtype`; None: as they
        are stored, for `TrainRanks.shard`. Raises ConfigError if weights are missing, if it is no
        causal language model, or if `attention` asks for prompts that cannot be shared exactly."""
        register_attention()
        model = _load(path, dtype, trust_remote_code=trust_remote_code)

        def check() -> tuple[str | None, str]:
            with _in_float32(model):
                reason = attend_packed(model)
                if reason is not None:
                    check_causal(model, path)
                cls(model, model.device, no_packing_reason=reason)._check_head(path)
                return reason, model.config._attn_implementation

        # A model's own code is not part of its fingerprint.
        reason, kernel = check() if trust_remote_code else checked_once(path, check)
        if reason is not None and attention == "shared_prompt":
            raise ConfigError(
                "model.attention: expected auto or repeated, because prompts cannot be "
                f"shared exactly: {reason} ({path}); got shared_prompt"
            )
        if kernel != model.config._attn_implementation:
            model.set_attn_implementation(kernel)
        model.to(device)
        return cls(model, torch.device(device), no_packing_reason=reason, attention=attention)

    def checkpoint_activations(self) -> None:
        """Recompute each decoder layer from its input in the backward pass from now on."""
        for block in self.blocks:
            # Beneath the hooks that gather a sharded layer's weights.
            block.forward = self._recomputed(block.forward)

    def _recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's `forward` that keeps only its input, and its layout, for backward."""
        current = self._current_layout

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            layout = current.layout

            def run(*args: Any, **kwargs: Any) -> Any:
                with current.use(layout):
                    return forward(*args, **kwargs)

            how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(run, *args, **how, **kwargs)

        return checkpointed

    def compile(self) -> None:
        """Compile each decoder layer around its attention, before `checkpoint_activations`."""
        register_attention(is_compiled=True)
        # Each mode, kind of row and number of threads, which changes with shared cores, counts.
        torch._dynamo.config.recompile_limit = 64
        for block in self.blocks:
            block.forward = torch.compile(block.forward, dynamic=True)

    def before_each_block(self, callback: Callable[[], None]) -> None:
        """Call `callback` before the forward and before the backward of each decoder layer."""
        for block in self.blocks:
            block.register_forward_pre_hook(lambda *_: callback())
            block.register_full_backward_pre_hook(lambda *_: callback())

    def inputs_of(self, batch: MicroBatch) -> ModelInputs:
        """Move a micro-batch's row to the device, for logits that predict its completion tokens."""
        return ModelInputs.of_row(
            torch.from_numpy(batch.input_ids).to(self.device),
            batch.tree,
            torch.from_numpy(batch.logits_at).to(self.device),
            self.kernels,
        )

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Return logits [K, V] of the tokens `inputs.logits_at` of the packed row."""
        return self.head(self.hidden_states(inputs))

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Return the head's inputs [K, H] for the tokens `inputs.logits_at` of the packed row."""
        arguments, row = self._arguments(inputs)
        with self._current_layout.use(inputs.layout):
            output = self.run_layers(**arguments, use_cache=False)
        hidden: Tensor = output.last_hidden_state[row]
        return hidden[inputs.logits_at]

    def run_layers(self, **inputs: Any) -> Any:
        """Run the model without its head, with transformers' arguments and output."""
        output = self._layers(**inputs)
        self._base_output = type(output)
        return output

    def layers_accept(self, argument: str) -> bool:
        """Return whether `run_layers` has a parameter of this name. Many models also swallow
        arguments that they do not know, as `**kwargs`."""
        return argument in inspect.signature(self._layers.forward).parameters

    def _arguments(self, inputs: ModelInputs) -> tuple[dict[str, Any], Any]:
        """Return the arguments of transformers' model, and the index in its outputs that gives the
        packed row's tokens."""
        if self.no_packing_reason is None:
            return {"input_ids": inputs.ids[None], "position_ids": inputs.positions[None]}, 0
        assert isinstance(inputs.layout, PackedRow)
        is_real = real_tokens(inputs.layout.tree, inputs.ids.device)
        padded = torch.zeros_like(is_real, dtype=inputs.ids.dtype)
        padded.masked_scatter_(is_real, inputs.ids)
        return {"input_ids": padded}, is_real

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [K, V] of `hidden_states` [K, H] by the model's own forward, with its
        layers' replaced by their result. Meanwhile no other thread and no hook may run the model.
        """
        given = self._base_output(last_hidden_state=hidden.unsqueeze(0))
        self._layers.forward = lambda *_, **__: given  # shadows the class's method
        try:
            # Some models read the shape of their input tokens.
            tokens = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        finally:
            del self._layers.forward
        return logits

    @property
    def blocks(self) -> list[nn.Module]:
        return _blocks_of(self.model)

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @torch.no_grad()
    def _check_head(self, path: str) -> None:
        tokens = torch.arange(min(4, self.vocabulary_size), device=self.device)
        inputs = ModelInputs.of_row(tokens, TokenTree.of_sequences([len(tokens)]))
        arguments, row = self._arguments(inputs)
        with self._current_layout.use(inputs.layout):
            expected = self.model(**arguments, use_cache=False).logits[row]
        with suppress(Exception):  # any, depending on what the model's code expects
            got = self.forward(inputs)
            if torch.allclose(got, expected, rtol=1e-5, atol=1e-5):
                return
        raise ConfigError(
            f"model.path: the logits of {type(self.model).__name__} ({path}) are not a function of "
            "its last hidden states alone, as computing them in chunks requires; use another model"
        )

    def stop_at(self, token_id: int | None) -> None:
        """Also end completions at this token: a chat model's config may lack that of a turn."""
        if token_id is not None and token_id not in self.eos_token_ids:
            self.eos_token_ids.append(token_id)

    def add_adapter(self, lora: LoraConfig, *, path: str, seed: int) -> None:
        """Train only LoRA adapters from now on (`lora.Adapter`)."""
        self.adapter = Adapter(self.model, lora, path=path, seed=seed)

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def weights(self, *, only_trained: bool = False, merge: bool = True) -> list[Weight]:
        """Return every weight once (tied ones under their first name), in name order, with
        adapters merged or beside them. `only_trained`: only those that training changes."""
        every = self._exported(self.model.named_parameters(), merge=merge)
        chosen = [weight for weight in every if weight.is_trained or not only_trained]
        return sorted(chosen, key=lambda weight: weight.name)

    def _exported(self, named: Iterable[tuple[str, Tensor]], *, merge: bool = True) -> list[Weight]:
        if self.adapter is not None:
            return self.adapter.weights(named, merge=merge)
        return [Weight.stored(name, w, is_trained=w.requires_grad) for name, w in named]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((weight.name, weight.materialize()) for weight in self.weights())

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Overwrite weights, or merge adapters into them, piece by piece."""
        own = {name: weight.data.view(-1) for name, weight in self.model.named_parameters()}
        for piece in pieces:
            if piece.name not in own:
                self._merger.load(piece)
                continue
            self._merger.base.pop(piece.name, None)
            own[piece.name][piece.start : piece.start + len(piece.values)] = piece.values

    def weights_sha256(self) -> str:
        """Return the SHA-256 of all weights' bytes, in name order. Collective, like `save`."""
        digest = hashlib.sha256()
        for name, tensor in self.named_weights():
            digest.update(name.encode())
            bytes_ = whole(tensor).cpu().reshape(-1).view(torch.uint8)
            digest.update(bytes_.numpy().tobytes())
        return digest.hexdigest()

    def save(
        self, folder: Path, tokenizer: Any, *, is_writer: bool = True, dtype: str | None = None
    ) -> None:
        """Write a Hugging Face folder, adapters merged. All ranks call this; one `is_writer`. With
        `dtype` the weights are rounded to it, the policy's own too."""
        gathered: dict[int, Tensor] = {}  # by id of the parameter: tied weights share one
        state = {}
        rounded = None if dtype is None else getattr(torch, dtype)
        for weight in self._exported(self.model.state_dict(keep_vars=True).items()):
            parameter = id(weight.reference)
            if parameter not in gathered:
                values = whole(weight.materialize())
                values = values.to(rounded or values.dtype)
                gathered[parameter] = values.cpu() if is_writer else values.new_empty(0)
            state[weight.name] = gathered[parameter]
        if is_writer:
            if rounded is not None:
                self.model.to(rounded)  # config.json names it
            self.model.save_pretrained(folder, state_dict=state)
            tokenizer.save_pretrained(folder)


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules of the list that holds most weights: the decoder layers."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [*max(lists, key=lambda each: sum(w.numel() for w in each.parameters()), default=[])]


def _load(path: str, dtype: DType | None, *, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    config = load_model_config(path, trust_remote_code=trust_remote_code)
    name = dtype or read_model_files(path, is_whole=False).stored_dtype
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        loadable_model(path),
        config=config,
        dtype=getattr(torch, name),
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported by _check_complete
    )
    model, found = loaded
    _check_complete(path, found)
    rounded = {torch.bfloat16, torch.float16} & {buffer.dtype for buffer in model.buffers()}
    if dtype is None and rounded:  # a constant of the model (Gemma's scale of embeddings)
        return _load(path, "float32", trust_remote_code=trust_remote_code)
    for weight in model.parameters():  # transformers keeps some weights in float32
        weight.data = weight.data.to(getattr(torch, name))
    return model


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Run the model in float32 although its weights may be narrower: those of a decoder layer are
    float32 only while it runs. A wide vocabulary has CHECKED_WORDS random words meanwhile."""
    kept = {weight: weight.data for weight in model.parameters()}
    padding = {each: each.padding_idx for each in model.modules() if isinstance(each, nn.Embedding)}

    def widen(block: nn.Module, _: Any) -> None:
        for weight in block.parameters():
            weight.data = weight.data.float()

    def narrow(block: nn.Module, *_: Any) -> None:
        for weight in block.parameters():
            weight.data = kept[weight]

    blocks = _blocks_of(model)
    in_blocks = {weight for block in blocks for weight in block.parameters()}
    size = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    words = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:CHECKED_WORDS]
    for weight in kept.keys() - in_blocks:
        if len(weight) == size and weight.dtype != torch.float32:  # embeddings, head
            weight.data = weight.data[words]
        weight.data = weight.data.float()
    for embedding in padding:
        embedding.padding_idx = None
    hooks = [block.register_forward_pre_hook(widen) for block in blocks]
    hooks += [block.register_forward_hook(narrow, always_call=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for embedding, index in padding.items():
            embedding.padding_idx = index
        narrow(model)


def _check_complete(path: str, found: Mapping[str, Any]) -> None:
    """Raise ConfigError for missing weights, which transformers would initialize at random."""
    problems = [
        f"weight {name}: expected shape {list(expected)} by config.json, got {list(got)}"
        for name, got, expected in sorted(found["mismatched_keys"])
    ] + [f"weight {name} is missing" for name in sorted(found["missing_keys"])]
    if problems:
        raise ConfigError(
            f"model.path: {path}: {problems[0]} ({len(problems)} such weights); download or save "
            "the model again, or use another model"
        )
