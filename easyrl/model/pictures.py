"""The pictures of packed rows: each encoded once, and put at its placeholders by the model's code.

    files ──processor──► arrays ──the model's tower──► features ──┐
    token ids, grids ──the model's `get_rope_index`──► positions ─┴─► arguments of its own forward

A prompt stands in the row once, so its pictures are encoded once for all of its completions. They
are encoded alone, never together with those of other prompts: what the tower gives is a function of
the prompt's pictures, whatever row it is in. So features of a frozen tower may be kept and used
again, by the policy, the old policy and the reference, without any effect on the bits. A picture
that a tool or an agent shows is encoded by itself; it may stand at any node of the row's tree.

A tower that is trained runs once for a group, even if several micro-batches share the group:

    tower ─► features ─ ─ detached ─ ─► leaves ─► micro-batch 1 ─► loss, backward ─┐
       ▲                                   └────► micro-batch 2 ─► loss, backward ─┤
       └──── backward, once, when the next micro-batch is of other pictures ◄──────┘ gradients

No family is named here. What the tower gets, and what positions depend on, are parameters of the
model's own methods (transformers 5.24).

Shapes: T tokens of the row, P of a prompt, V tokens of the vocabulary; A axes of positions.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from easyrl.model import FEATURES_BYTES
from easyrl.model.mixers.interface import Spans
from easyrl.types import Picture, RowPictures

SpanMode = Literal["none", "sliding", "all"]
"""In which layers a picture's tokens see each other in both directions."""
Arrays = Mapping[str, np.ndarray]
"""A processor's arrays for the pictures of one prompt, by the names of the model's arguments."""
ArraysOf = Callable[[Sequence[Picture]], Arrays]
Digests = tuple[str, ...]
"""Digests of the pictures of a prompt, by which their features are found again."""

PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
"""Names in configurations of the tokens that stand for something else than text."""
MAX_DELTAS = 10_000  # of pictures, that are remembered
TOWER_STATES = ("last_hidden_state", "hidden_states", "attentions")
"""Parts of a tower's output that the model's forward does not read."""


class Encoded(NamedTuple):
    """What the model needs of the pictures of one prompt."""

    features: Any  # the tower's output, as transformers' class, without its inner states
    grids: Mapping[str, Tensor]  # arguments of `get_rope_index`; empty: positions have one axis


class _Open(NamedTuple):
    """Features of a trained tower in the current update, while more micro-batches may use them."""

    encoded: Encoded  # with the graph of the tower
    leaves: Encoded  # the same values, which collect the gradients of the micro-batches

    def send_back(self) -> None:
        """Run the tower's backward pass with the gradients that have been collected."""
        outputs = list[Tensor]()
        gradients = list[Tensor]()
        computed = tensors_of(self.encoded.features)
        leaves = tensors_of(self.leaves.features)
        for output, leaf in zip(computed, leaves, strict=True):
            if output.requires_grad and leaf.grad is not None:
                outputs.append(output)
                gradients.append(leaf.grad)
        if outputs:
            torch.autograd.backward(outputs, gradients)


class Vision:
    """The tower of a model, and how the model uses what it gives."""

    def __init__(
        self,
        model: Any,
        arrays_of: ArraysOf,
        *,
        is_trained: bool,
        spans: SpanMode = "none",
        placeholder_ids: Collection[int] = (),
    ) -> None:
        """Freeze the tower unless it `is_trained`. `placeholder_ids`: those of the processor."""
        self.is_trained = is_trained
        self.num_encoded = 0  # prompts that the tower has run for
        self._model = model
        self._base = model.base_model  # the model without its head
        self._arrays_of = arrays_of
        self._spans = spans
        self.placeholder_id = int(model.config.image_token_id)
        self._encoder_arguments = _parameters(self._base.get_image_features)
        self._position_arguments = set[str]()
        if hasattr(self._base, "get_rope_index"):
            self._position_arguments = _parameters(self._base.get_rope_index)
        self._banned = placeholders_of(model.config) | set(placeholder_ids)
        self._shown_deltas: dict[str, int] = {}  # by the digest of a picture that is encoded alone
        self._kept: OrderedDict[Digests, Encoded] = OrderedDict()  # oldest first
        self._num_kept_bytes = 0
        self.sends_back = False
        """Whether gradients of a trained tower are collected over micro-batches: then
        `begin_batch` and `finish_batches` are called. Else every forward runs the tower."""
        self._open: dict[Digests, _Open] = {}
        for parameter in tower_parameters(model):
            parameter.requires_grad_(is_trained)

    @property
    def has_axes(self) -> bool:
        """Whether the positions of a picture's tokens have several axes."""
        return bool(self._position_arguments)

    # -- what the model's forward gets -------------------------------------------------------------

    def arguments(
        self, ids: Tensor, positions: Tensor, pictures: Sequence[RowPictures]
    ) -> dict[str, Any]:
        """Return the model's arguments for a row with pictures: ids and positions [T], both those
        of the text alone."""
        every = [self._encode(prompt) for prompt in pictures]
        features = join_features([encoded.features for encoded in every])
        if self.has_axes:
            rows = self._with_axes(ids, positions, pictures, every)  # [A, T]
            position_ids = rows[:, None]
        else:
            position_ids = positions[None]
        return {
            "input_ids": ids[None],
            "position_ids": position_ids,
            "mm_encoder_outputs": {"image": features},
        }

    def _with_axes(
        self,
        ids: Tensor,
        positions: Tensor,
        pictures: Sequence[RowPictures],
        every: Sequence[Encoded],
    ) -> Tensor:
        """Return the positions [A, T] of a row. Those of a prompt, or a picture, begin where the
        tokens before it end; behind it they continue its largest one. So each picture moves all
        that stands behind it on its path, also later pictures."""
        rows = positions[None]
        for shown, encoded in zip(pictures, every, strict=True):
            here = slice(shown.start, shown.stop)
            behind = slice(shown.stop, shown.end)
            own = self._prompt_positions(ids[here], encoded.grids)  # [A, P]
            num_axes = len(own)
            if len(rows) != num_axes:
                rows = rows.repeat(num_axes, 1)
            # What is shown before it, in the row's order, has moved its first position already.
            first = int(rows[0, shown.start])
            rows[:, here] = own + first
            rows[:, behind] += _delta(own)
        return rows

    def position_delta(self, ids: Sequence[int], arrays: Arrays) -> int:
        """Return what is added to the positions of the tokens behind a prompt with pictures."""
        if not self.has_axes:
            return 0
        tokens = torch.tensor(ids, dtype=torch.int64)
        grids = _chosen(_as_tensors(arrays), self._position_arguments)
        return _delta(self._prompt_positions(tokens, grids))

    def shown_delta(self, ids: np.ndarray, picture: Picture) -> int:
        """Return what is added to the positions of the tokens behind a picture, which has these
        tokens and is encoded by itself."""
        known = self._shown_deltas.get(picture.digest)
        if known is None:
            arrays = self._arrays_of((picture,))
            known = self.position_delta(ids.tolist(), arrays)
            self._shown_deltas[picture.digest] = known
            if len(self._shown_deltas) > MAX_DELTAS:
                oldest = next(iter(self._shown_deltas))
                del self._shown_deltas[oldest]
        return known

    def _prompt_positions(self, ids: Tensor, grids: Mapping[str, Tensor]) -> Tensor:
        """Return the positions [A, P] of a prompt's tokens [P]."""
        kinds = (ids == self.placeholder_id).int()
        batch_of_one = ids[None]
        found, *_ = self._base.get_rope_index(batch_of_one, mm_token_type_ids=kinds[None], **grids)
        positions: Tensor = found[:, 0]  # of [A, 1, P]
        return positions

    def spans_of(self, ids: np.ndarray, pictures: Iterable[RowPictures]) -> Spans | None:
        """Return the runs of a row's tokens [T] that see each other in both directions."""
        if self._spans == "none":
            return None
        places = list[tuple[int, int]]()
        for prompt in pictures:
            tokens = ids[prompt.start : prompt.stop]
            places += _runs_of(self.placeholder_id, tokens, offset=prompt.start)
        if not places:
            return None
        return Spans(tuple(places), only_sliding=self._spans == "sliding")

    def ban(self, logits: Tensor) -> Tensor:
        """Give the placeholders in logits [..., V] no probability, in place: one that is sampled
        would stand for a picture that is not there."""
        for token in sorted(self._banned):
            if token < logits.shape[-1]:
                logits[..., token] = -torch.inf
        return logits

    def features_of(self, prompt: RowPictures) -> Any:
        """Return what the tower gives for a prompt's pictures."""
        return self._encode(prompt).features

    # -- the tower ---------------------------------------------------------------------------------

    def _encode(self, prompt: RowPictures) -> Encoded:
        """Return what the model needs of a prompt's pictures; of a frozen tower without gradient,
        and from what is kept if it can be."""
        pictures = _digests(prompt)
        if self.is_trained:
            # Without gradient it runs for other weights: of the old policy, or the reference.
            if not self.sends_back or not torch.is_grad_enabled():
                return self._run_tower(prompt)
            if pictures not in self._open:
                encoded = self._run_tower(prompt)
                leaves = encoded._replace(features=_detached(encoded.features))
                self._open[pictures] = _Open(encoded, leaves)
            return self._open[pictures].leaves
        kept = self._kept.get(pictures)
        if kept is not None:
            self._kept.move_to_end(pictures)
            return kept
        with torch.no_grad():
            encoded = self._run_tower(prompt)
        self._keep(pictures, encoded)
        return encoded

    def begin_batch(self, pictures: Iterable[RowPictures]) -> None:
        """Send the gradients of features back that the next micro-batch does not use."""
        used = {_digests(prompt) for prompt in pictures}
        for key in list(self._open):
            if key not in used:
                done = self._open.pop(key)
                done.send_back()

    def finish_batches(self) -> None:
        """Send all gradients back, before the optimizer's step."""
        self.begin_batch(())

    def drop_batches(self) -> None:
        """Forget the micro-batches of an update that is not finished."""
        self._open.clear()

    def _run_tower(self, prompt: RowPictures) -> Encoded:
        arrays = prompt.arrays
        if arrays is None:
            arrays = self._arrays_of(prompt.pictures)
        tensors = _as_tensors(arrays, self._model.device)
        self.num_encoded += 1
        encoder_arguments = _chosen(tensors, self._encoder_arguments)
        grids = _chosen(tensors, self._position_arguments)
        features = self._base.get_image_features(**encoder_arguments, return_dict=True)
        return Encoded(without_tower_states(features), grids)

    def _keep(self, pictures: Digests, encoded: Encoded) -> None:
        """Keep features, and drop those that were not used for longest beyond FEATURES_BYTES."""
        self._kept[pictures] = encoded
        self._num_kept_bytes += _num_bytes(encoded)
        while self._num_kept_bytes > FEATURES_BYTES:
            _, dropped = self._kept.popitem(last=False)
            self._num_kept_bytes -= _num_bytes(dropped)


def tower_parameters(model: Any) -> list[nn.Parameter]:
    """Return the parameters that the logits of a text do not need: those of towers, and of what
    brings their output to the width of the text model."""
    of_text = set[nn.Parameter]()
    for part in text_parts(model):
        of_text.update(part.parameters())
    return [parameter for parameter in model.parameters() if parameter not in of_text]


def frozen_tower(model: Any) -> list[nn.Parameter]:
    """Return the parameters of a model's towers, if these are not trained. (With adapters the text
    model is frozen, too.)"""
    return [parameter for parameter in tower_parameters(model) if not parameter.requires_grad]


def text_parts(model: Any) -> list[nn.Module]:
    """Return the decoder, the head and the embedding of a model with a text model inside."""
    parts = (model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings())
    return [part for part in parts if part is not None]


def _digests(prompt: RowPictures) -> Digests:
    return tuple(picture.digest for picture in prompt.pictures)


def _detached(value: Any) -> Any:
    """Return a part of a tower's output, or the whole, as leaves of another graph."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_()
    if isinstance(value, Mapping):
        parts = {name: _detached(part) for name, part in value.items()}
        return type(value)(**parts)
    return [_detached(part) for part in value]


def without_tower_states(features: Any) -> Any:
    """Return a tower's output without the states of its own layers, which take memory."""
    needed = {name: value for name, value in features.items() if name not in TOWER_STATES}
    return type(features)(**needed)


def join_features(every: Sequence[Any]) -> Any:
    """Join the outputs of a tower for several prompts, as if it had run for all their pictures."""
    first = every[0]
    joined = {}
    for name in first:
        of_prompts = [each[name] for each in every]
        joined[name] = _joined(of_prompts)
    return type(first)(**joined)


def _joined(values: Sequence[Any]) -> Any:
    """Join the same part of several outputs: tensors of pictures' tokens, sequences with a tensor
    for each picture, or sequences of these with one for each layer of the tower."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first[0], Tensor):
        return [tensor for value in values for tensor in value]
    return [_joined(of_layer) for of_layer in zip(*values, strict=True)]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a part of a tower's output, or of the whole."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value
    return [tensor for part in parts for tensor in tensors_of(part)]


def _runs_of(token: int, ids: np.ndarray, *, offset: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of a token in ids [P], which begin at `offset` in a row."""
    is_token = (ids == token).astype(np.int8)
    edges = np.diff(is_token, prepend=0, append=0)
    first_tokens = np.flatnonzero(edges == 1)
    behind_last_tokens = np.flatnonzero(edges == -1)
    runs = list[tuple[int, int]]()
    for first, behind in zip(first_tokens, behind_last_tokens, strict=True):
        start = offset + int(first)
        stop = offset + int(behind)
        runs.append((start, stop))
    return runs


def _as_tensors(arrays: Arrays, device: torch.device | None = None) -> dict[str, Tensor]:
    """Return a processor's arrays as tensors on the device; None: the CPU."""
    tensors = {}
    for name, array in arrays.items():
        tensors[name] = torch.from_numpy(array).to(device)
    return tensors


def _delta(positions: Tensor) -> int:
    """Return what is added to the positions of the tokens behind a prompt with these [A, P]."""
    return int(positions.max()) + 1 - positions.shape[1]


def _num_bytes(encoded: Encoded) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(encoded.features))


def placeholders_of(config: Any) -> set[int]:
    """Return the ids of a configuration's placeholders."""
    ids = [getattr(config, name, None) for name in PLACEHOLDERS]
    return {int(token) for token in ids if token is not None}


def _parameters(method: Callable[..., Any]) -> set[str]:
    """Return the names of a method's parameters."""
    return set(inspect.signature(method).parameters)


def _chosen(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name in names}
