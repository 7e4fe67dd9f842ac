"""Policy, old policy and reference: three sets of weights for one module, one packed input.

                     ┌─ a teacher's own module (no gradient) ─► what `distillation` compares
                     ├─ reference's weights (no gradient) ─► ref_logprobs
    MicroBatch ──────┼─ old policy's weights (no gradient) ─► old_logprobs
                     └─ the policy's own ──────────────────► logprobs, entropy

A micro-batch is moved and packed once. Only the old policy's trained weights are kept, and with
LoRA the reference is the policy without its adapters. The policy runs last, so that its activations
do not exist while the others run, and its weights are in place when backward recomputes.

Shapes: T tokens of the packed row, K completion tokens in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

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


class TokenScores(NamedTuple):
    """What a loss needs of each completion token."""

    logprobs: Tensor  # [K] the policy's, with gradient
    entropy: Tensor  # [K] in nats, the policy's; with gradient if the loss has a term of it
    old_logprobs: Tensor  # [K] of the policy before the iteration's first update
    ref_logprobs: Tensor | None  # [K]; None: there is no reference
    teacher: TeacherScores | None  # None: there is no teacher


class _Outputs(NamedTuple):
    """What the module returns, with and without its head. (FSDP needs a tuple.)"""

    hidden: Tensor | None = None  # [K, H] inputs of the head
    logprobs: Tensor | None = None  # [K]
    entropy: Tensor | None = None  # [K]
    teacher: TeacherScores | None = None


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
            dtype, offload = getattr(torch, spec.model.dtype), "optimizer" in kept_on_host
            ranks.shard(self._forward, policy.blocks, dtype=dtype, offload=offload)
            policy.device = ranks.device
        self.old: OtherWeights | None = None
        """The policy before the iteration's first update; None: there is one update."""
        if spec.batches.updates_per_iteration > 1:
            self.old = OtherWeights(policy, offload="old" in kept_on_host)
        self._reference: OtherWeights | Adapter | None = None
        if spec.loss.beta > 0.0:
            offload = "reference" in kept_on_host
            self._reference = policy.adapter or OtherWeights(policy, offload=offload)

    def logprobs(self, batch: MicroBatch, *, policy_is_old: bool) -> TokenScores:
        """Score a micro-batch's completion tokens at the sampling temperature. `policy_is_old`: the
        policy has made no step in this iteration."""
        assert policy_is_old or self.old is not None
        inputs, targets = self._inputs_of(batch)
        reference, old = self._reference, None if policy_is_old else self.old
        ref_logprobs = None if reference is None else self._run_other(reference, inputs, targets)
        old_logprobs = None if old is None else self._run_other(old, inputs, targets)
        for_teacher = inputs
        if batch.for_teacher is not None:
            for_teacher = self._inputs_of(batch.for_teacher)[0]
        if self._teacher is None:
            of_teacher = None
        elif self._teacher.policy is self.policy:
            of_teacher = self._run_other(None, for_teacher, targets, has_head=False)
        else:
            of_teacher = self._teacher(for_teacher)
        own: _Outputs = self._forward(inputs, targets, of_teacher)
        assert own.logprobs is not None and own.entropy is not None
        if old_logprobs is None:
            old_logprobs = own.logprobs.detach()
        return TokenScores(own.logprobs, own.entropy, old_logprobs, ref_logprobs, own.teacher)

    def _inputs_of(self, batch: MicroBatch) -> tuple[ModelInputs, Tensor]:
        """Return the model's inputs and the targets [K]."""
        targets = torch.from_numpy(batch.targets).to(self.policy.device)
        return self.policy.inputs_of(batch), targets

    @torch.no_grad()
    def _run_other(
        self,
        weights: OtherWeights | Adapter | None,
        inputs: ModelInputs,
        targets: Tensor,
        *,
        has_head: bool = True,
    ) -> Tensor:
        """Run the module with these weights (None: its own). Return the log-probabilities [K], or
        without a head its inputs [K, H]."""
        drops = isinstance(weights, OtherWeights) or not self._ranks.keeps_gathered
        if drops:
            self._ranks.drop_gathered()
        with nullcontext() if weights is None else weights.in_place():
            outputs: _Outputs = self._forward(inputs, targets, has_head=has_head)
            if drops:
                self._ranks.drop_gathered()
        wanted = outputs.logprobs if has_head else outputs.hidden
        assert wanted is not None
        return wanted

    def finish_gradients(self, empty: MicroBatch) -> None:
        """Sum the gradients over the ranks if that is still to be done, in the backward pass of a
        micro-batch that adds nothing: when the last one runs, none knows that it is the last."""
        if self._ranks.keeps_gathered:
            root: Any = self._forward
            root.set_requires_gradient_sync(True)
            logprobs = self._forward(*self._inputs_of(empty)).logprobs
            logprobs.backward(torch.zeros_like(logprobs))
            root.set_requires_gradient_sync(False)
            self._ranks.drop_gathered()


class _Forward(nn.Module):
    """Micro-batch -> log-probabilities [K] and entropies [K], as one module to shard."""

    def __init__(self, policy: Policy, teacher: Teacher | None, spec: TrainSpec) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = policy
        self._distil = None if teacher is None else teacher.distil  # no submodule of this one
        self._logprobs = partial(
            chunked_token_logprobs,
            policy,
            temperature=spec.temperature,
            entropy_gradient=spec.loss.entropy_coef > 0.0,
        )

    def forward(
        self,
        inputs: ModelInputs,
        targets: Tensor,
        of_teacher: Tensor | None = None,
        *,
        has_head: bool = True,
    ) -> _Outputs:
        """`of_teacher`: the inputs of the teacher's head. Without `has_head` only the inputs of the
        policy's head are returned."""
        hidden = self._policy.hidden_states(inputs)
        if not has_head:
            return _Outputs(hidden=hidden)
        logprobs, entropy = self._logprobs(hidden, targets)
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
        self._values = [_copy(own_part(parameter), offload) for parameter in self._parameters]
        self._device = policy.device
        kinds = {own_part(parameter).device.type for parameter in self._parameters}
        self._is_read_remotely = kinds != {policy.device.type}

    @torch.no_grad()
    def copy_from_policy(self) -> None:
        for value, parameter in zip(self._values, self._parameters, strict=True):
            value.copy_(own_part(parameter))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        own = [
            own_part(parameter).clone() if is_sharded(parameter) else parameter.data
            for parameter in self._parameters
        ]
        try:
            self._write(self._values)
            yield
        finally:
            self._write(own)

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
