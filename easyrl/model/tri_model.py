"""Policy, old policy and reference: three sets of weights for one module, one packed input.

                     ┌─ a teacher's own module (no gradient) ─► what `distillation` compares
                     ├─ reference's weights (no gradient) ─► ref_logprobs
    MicroBatch ──────┼─ old policy's weights (no gradient) ─► old_logprobs
                     └─ the policy's own ──────────────────► logprobs, entropy

A micro-batch is moved and packed once. Only the old policy's trained weights are kept, and with a
new LoRA adapter the reference is the policy without it. The policy runs last, so that its
activations do not exist while the others run, and its weights are in place when backward
recomputes.

Shapes: T tokens of the packed row, K completion tokens in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from easyrl import devices
from easyrl.algorithm.losses import TeacherScores
from easyrl.config.spec import TrainSpec
from easyrl.model.distillation import Teacher
from easyrl.model.inputs import ModelInputs
from easyrl.model.logprobs import chunked_token_logprobs
from easyrl.model.lora import Adapter
from easyrl.model.policy import Policy
from easyrl.model.sharding import TrainRanks, is_sharded, own_part
from easyrl.types import MicroBatch

T = TypeVar("T")


class TokenScores(NamedTuple):
    """What a loss needs of each completion token."""

    logprobs: Tensor  # [K] the policy's, with gradient
    entropy: Tensor  # [K] in nats, the policy's; with gradient if the loss has a term of it
    old_logprobs: Tensor  # [K] of the policy before the iteration's first update
    ref_logprobs: Tensor | None  # [K]; None: there is no reference
    teacher: TeacherScores | None  # None: there is no teacher


class _Outputs(NamedTuple):
    """What the module returns. (FSDP needs a tuple.)"""

    hidden: Tensor | None = None  # [K, H] inputs of the head; None where it has been run
    logprobs: Tensor | None = None  # [K]; None without the head, as the others
    entropy: Tensor | None = None  # [K]
    teacher: TeacherScores | None = None  # None without a teacher, too


class TriModel:
    def __init__(
        self, policy: Policy, spec: TrainSpec, ranks: TrainRanks, teacher: Policy | None
    ) -> None:
        """Reference and old policy start as copies of `policy`, which is sharded over `ranks`, as
        `teacher` is."""
        kept_on_host = spec.optimizer.offload
        self.policy = policy
        self._ranks = ranks
        self._teacher: Teacher | None = None
        if spec.teacher is not None:
            own = policy if teacher is None else teacher
            self._teacher = Teacher(own, spec.teacher, ranks)
        self._forward = _Forward(policy, self._teacher, spec)
        if ranks.mesh is not None:
            dtype = getattr(torch, spec.model.dtype)
            offload = "optimizer" in kept_on_host
            ranks.shard(self._forward, policy.blocks, dtype=dtype, offload=offload)
            policy.device = ranks.device
        elif policy.vision is not None:
            # A sharded tower's weights are only there while the module runs.
            policy.vision.sends_back = policy.vision.is_trained
        self.old: OtherWeights | None = None
        """The policy before the iteration's first update; None: there is one update."""
        if spec.batches.updates_per_iteration > 1:
            self.old = OtherWeights(policy, offload="old" in kept_on_host)
        self._reference: OtherWeights | Adapter | None = None
        if spec.loss.beta > 0.0:
            # With new adapters it is the policy without them.
            self._reference = policy.adapter
            if policy.adapter is None or spec.model.lora.adapter is not None:
                self._reference = OtherWeights(policy, offload="reference" in kept_on_host)

    def logprobs(self, batch: MicroBatch, *, policy_is_old: bool) -> TokenScores:
        """Score a micro-batch's completion tokens at the sampling temperature. `policy_is_old`: the
        policy has made no step in this iteration."""
        if self.policy.vision is not None:
            self.policy.vision.begin_batch(batch.pictures)
        inputs = self.policy.inputs_of(batch)
        targets = self._targets_of(batch)
        ref_logprobs = None
        if self._reference is not None:
            ref_logprobs = self._logprobs_with(self._reference, inputs, targets)
        old_logprobs = None
        if not policy_is_old:
            assert self.old is not None
            old_logprobs = self._logprobs_with(self.old, inputs, targets)
        of_teacher = None
        if self._teacher is not None:
            for_teacher = inputs
            if batch.for_teacher is not None:
                for_teacher = self.policy.inputs_of(batch.for_teacher)
            of_teacher = self._hidden_of_teacher(self._teacher, for_teacher)
        own: _Outputs = self._forward(inputs, targets, of_teacher)
        logprobs = _given(own.logprobs)
        if old_logprobs is None:
            old_logprobs = logprobs.detach()
        return TokenScores(logprobs, _given(own.entropy), old_logprobs, ref_logprobs, own.teacher)

    def _targets_of(self, batch: MicroBatch) -> Tensor:
        """Return the completion tokens [K] that the logits predict."""
        return torch.from_numpy(batch.targets).to(self.policy.device)

    @torch.no_grad()
    def _logprobs_with(
        self, weights: OtherWeights | Adapter, inputs: ModelInputs, targets: Tensor
    ) -> Tensor:
        """Return the log-probabilities [K] of the model with these weights."""
        writes_parts = isinstance(weights, OtherWeights)
        self._drop_gathered(writes_parts=writes_parts)
        with weights.in_place():
            outputs: _Outputs = self._forward(inputs, targets)
            self._drop_gathered(writes_parts=writes_parts)
        return _given(outputs.logprobs)

    @torch.no_grad()
    def _hidden_of_teacher(self, teacher: Teacher, inputs: ModelInputs) -> Tensor:
        """Return the inputs of the teacher's head [K, Ht]."""
        if teacher.policy is not self.policy:
            hidden: Tensor = teacher(inputs)
            return hidden
        self._drop_gathered(writes_parts=False)
        outputs: _Outputs = self._forward(inputs)
        self._drop_gathered(writes_parts=False)
        return _given(outputs.hidden)

    def _drop_gathered(self, *, writes_parts: bool) -> None:
        """Free gathered weights, unless they stay gathered for the whole update. `writes_parts`:
        each rank's parts of them are read or overwritten, which gathered ones would not show."""
        if writes_parts or not self._ranks.keeps_gathered:
            self._ranks.drop_gathered()

    def finish_gradients(self, empty: MicroBatch) -> None:
        """Complete the gradients of an update: of a trained tower, and their sums over the ranks
        where these are computed once per update.

        FSDP sums them in the backward pass of a micro-batch. Which one is the last is not known
        when it runs, so the sum is left to the backward pass of `empty`, which adds nothing.
        """
        if self.policy.vision is not None:
            self.policy.vision.finish_batches()
        if not self._ranks.keeps_gathered:
            return
        root: Any = self._forward
        root.set_requires_gradient_sync(True)
        outputs: _Outputs = self._forward(self.policy.inputs_of(empty), self._targets_of(empty))
        logprobs = _given(outputs.logprobs)
        logprobs.backward(torch.zeros_like(logprobs))  # type: ignore[no-untyped-call]
        root.set_requires_gradient_sync(False)
        self._ranks.drop_gathered()


def _given(value: T | None) -> T:
    """Return a value that the module has computed in this call."""
    assert value is not None
    return value


class _Forward(nn.Module):
    """Micro-batch -> log-probabilities [K] and entropies [K], as one module to shard."""

    def __init__(self, policy: Policy, teacher: Teacher | None, spec: TrainSpec) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = policy
        self._distil = None if teacher is None else teacher.distil  # no submodule of this one
        self._temperature = spec.temperature
        self._has_entropy_gradient = spec.loss.entropy_coef > 0.0

    def forward(
        self,
        inputs: ModelInputs,
        targets: Tensor | None = None,
        of_teacher: Tensor | None = None,
    ) -> _Outputs:
        """Score `targets`; without them return the inputs of the head. `of_teacher`: the inputs of
        the teacher's head."""
        hidden = self._policy.hidden_states(inputs)
        if targets is None:
            return _Outputs(hidden=hidden)
        logprobs, entropy = chunked_token_logprobs(
            self._policy,
            hidden,
            targets,
            self._temperature,
            entropy_gradient=self._has_entropy_gradient,
        )
        teacher = None
        if of_teacher is not None and self._distil is not None:
            teacher = self._distil(self._policy, hidden, of_teacher, targets)
        logprobs = logprobs.clone()  # not a view: FSDP registers a hook on it
        return _Outputs(logprobs=logprobs, entropy=entropy, teacher=teacher)


class OtherWeights:
    """A second set of a policy's trained weights, swapped into its module while needed.

    The parameter objects stay the same and only point to other memory. A sharded policy's parts are
    overwritten and written back instead, because gathering reads them in place.
    """

    def __init__(self, policy: Policy, *, offload: bool) -> None:
        self._parameters = policy.trained_parameters()
        parts = [own_part(parameter) for parameter in self._parameters]
        self._values = [_copy(part, offload) for part in parts]
        self._device = policy.device
        self._is_read_remotely = any(part.device.type != policy.device.type for part in parts)

    @torch.no_grad()
    def copy_from_policy(self) -> None:
        for value, parameter in zip(self._values, self._parameters, strict=True):
            value.copy_(own_part(parameter))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the policy's module with these weights."""
        policys_own = list[Tensor]()
        for parameter in self._parameters:
            if is_sharded(parameter):
                policys_own.append(own_part(parameter).clone())
            else:
                policys_own.append(parameter.data)
        try:
            self._write(self._values)
            yield
        finally:
            self._write(policys_own)

    def _write(self, values: Sequence[Tensor]) -> None:
        if self._is_read_remotely:  # a device reads CPU memory when it reaches the layer
            devices.synchronize(self._device)
        for parameter, value in zip(self._parameters, values, strict=True):
            if is_sharded(parameter):
                own_part(parameter).copy_(value, non_blocking=True)
            else:
                parameter.data = value.to(parameter.device, non_blocking=True)


def _copy(weight: Tensor, offload: bool) -> Tensor:
    if not offload or weight.device.type == "cpu":
        return weight.clone()
    return weight.cpu().pin_memory()  # pinned memory is moved several times faster
