"""The learner of a train worker: accumulates gradients of micro-batches and steps the optimizer.

    begin_iteration ─► accumulate, accumulate, … ─► step ─► accumulate, … ─► step ─► metrics

An update's gradient is a function of its micro-batches alone. Every train rank has a learner. All
make the same calls, each with its own micro-batches, and get the same gradient, norm and metrics.
"""

import math
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from easyrl import devices
from easyrl.algorithm.losses import LossInputs, load_loss
from easyrl.config import ConfigError
from easyrl.config.spec import OptimizerSpec, TrainSpec
from easyrl.layout.row import EMPTY
from easyrl.model.checkpoint import copy_of_training, read_tensors
from easyrl.model.policy import Policy
from easyrl.model.sharding import TrainRanks, own_part
from easyrl.model.tri_model import TriModel
from easyrl.types import MicroBatch

MEANS = {
    "entropy": "entropy",
    "clip_ratio/low_mean": "clipped_low",
    "clip_ratio/high_mean": "clipped_high",
    "sampling/sampling_logp_difference/mean": "logp_difference",
    "kl": "kl",
    "sampling/importance_sampling_ratio/mean": "importance_sampling_ratio",
    "sampling/importance_sampling_ratio/capped": "importance_sampling_capped",
    "teacher/kl": "teacher_kl",
    "teacher/top_token_agreement": "teacher_agrees",
}
"""Metrics of an iteration that are means over its tokens, with the sum that each is made of."""
ADAM_BETAS = (0.9, 0.99)


class Learner:
    """A policy, its optimizer, and the gradient of the current update."""

    def __init__(
        self,
        policy: Policy,
        spec: TrainSpec,
        ranks: TrainRanks | None = None,
        teacher: Policy | None = None,
    ) -> None:
        """The policy is sharded over `ranks`, and becomes the reference if there is one."""
        self.policy = policy
        self.ranks = ranks or TrainRanks()
        is_gathered_once = spec.optimizer.reshard is False
        self.ranks.keeps_gathered = is_gathered_once and self.ranks.mesh is not None
        self.policy_version = 0  # number of optimizer updates, dropped ones included
        self._spec = spec
        if spec.optimizer.compile:
            policy.compile()
        if spec.optimizer.activation_checkpointing:
            policy.checkpoint_activations()
        self.tri_model = TriModel(policy, spec, self.ranks, teacher)
        self._parameters = policy.trained_parameters()
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            spec.optimizer.learning_rate,
            ADAM_BETAS,
            weight_decay=0.0,
            fused=True,
        )
        self._functions = load_loss(spec.loss)
        summed = {*self._functions.metrics, "logp_difference"}
        self._means: dict[str, str] = {}  # as MEANS, with the sums of this loss
        for metric, name in MEANS.items():
            if name in summed:
                self._means[metric] = name
        for name in sorted(summed - {"tokens", *MEANS.values()}):
            self._means[f"loss/{name}"] = name
        self._zero_gradients()
        self.begin_iteration(0)

    def state(self, earlier: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return a copy of the training state for a checkpoint (`model.checkpoint`)."""
        copy = copy_of_training(self.policy.model, self.optimizer, earlier)
        devices.synchronize(self.policy.device)
        return copy

    def restore(self, checkpoint: Path, policy_version: int) -> None:
        """Load a checkpoint. The reference stays the model at the run's start."""
        read_tensors(checkpoint, self.policy.model, self.optimizer, self.ranks.group_for_files)
        self.policy_version = policy_version

    def begin_iteration(self, iteration: int) -> None:
        """Keep the current policy as the old policy of this iteration's updates."""
        self._iteration = iteration
        if self.policy.vision is not None:
            self.policy.vision.drop_batches()
        if self.tri_model.old is not None:
            self.tri_model.old.copy_from_policy()
        self._sums = {"tokens": self._zero()}
        for name in self._means.values():
            self._sums[name] = self._zero()
        self._largest_difference = self._zero()
        self._updates: list[dict[str, float]] = []
        self._loss = self._zero()

    def accumulate(self, batch: MicroBatch) -> None:
        """Run forward and backward. Raises ConfigError if a layer cannot be compiled."""
        try:
            inputs = self._loss_inputs(batch)
            outputs = self._functions.policy_loss(inputs, self._spec.loss)
            outputs.loss.backward()  # type: ignore[no-untyped-call]
        except torch._dynamo.exc.TorchDynamoException as error:
            if not self._spec.optimizer.compile:
                raise
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                "train.compile: expected false, because torch.compile cannot compile this model's "
                f"layers on this machine: {reason}"
            ) from error
        self._loss += outputs.loss.detach()
        of_engine = inputs.old_logprobs - inputs.rollout_logprobs
        difference = torch.where(inputs.loss_mask, of_engine.abs(), 0.0)
        sums = outputs.metrics | {"logp_difference": difference.sum()}
        for name, value in sums.items():
            self._sums[name] += value
        self._largest_difference = torch.maximum(self._largest_difference, difference.max())

    def _loss_inputs(self, batch: MicroBatch) -> LossInputs:
        scores = self.tri_model.logprobs(batch, policy_is_old=not self._updates)

        def on_device(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(self.policy.device)

        return LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=scores.old_logprobs,
            ref_logprobs=scores.ref_logprobs,
            entropy=scores.entropy,
            num_completions=batch.num_completions,
            teacher=scores.teacher,
            rollout_logprobs=on_device(batch.rollout_logprobs),
            advantages=on_device(batch.advantages),
            loss_mask=on_device(batch.loss_mask),
            completion_of_token=on_device(batch.completion_of_token),
        )

    def step(self, *, num_completions: int, num_tokens: int) -> None:
        """Step the optimizer with the gradient; drop and count one that is not finite."""
        optimizer = self._spec.optimizer
        self.tri_model.finish_gradients(EMPTY)
        denominator = self._functions.loss_denominator(
            self._spec.loss, num_completions=num_completions, num_tokens=num_tokens
        )
        gradients: list[Tensor] = []
        for parameter in self._parameters:
            if parameter.grad is not None:
                gradients.append(own_part(parameter.grad))
        own_norm = float(torch.nn.utils.get_total_norm(gradients))
        square, loss_sum = self.ranks.reduce([own_norm * own_norm, float(self._loss)])
        norm = math.sqrt(square) / denominator
        loss = loss_sum / denominator
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        learning_rate = optimizer.learning_rate * learning_rate_factor(self._iteration, optimizer)
        if is_finite:
            # Normalise and clip in one pass; the factor is that of torch's clip_grad_norm_.
            factor = min(1.0, optimizer.max_grad_norm / (norm + 1e-6)) / denominator
            for gradient in gradients:
                gradient.mul_(factor)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self._zero_gradients()
        devices.synchronize(self.policy.device)
        self.policy_version += 1
        self._loss = self._zero()
        update = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "num_updates_not_finite": 0.0 if is_finite else 1.0,
        }
        self._updates.append(update)

    def metrics(self) -> dict[str, float]:
        """Return the iteration's metrics under TRL's names: means over its tokens or its updates.
        Rollouts without a gradient are not included; if there are no others, the means are NaN."""
        own_sums = [float(total) for total in self._sums.values()]
        sums_of_all = self.ranks.reduce(own_sums)
        sums = dict(zip(self._sums, sums_of_all, strict=True))
        own_largest = float(self._largest_difference)
        (largest,) = self.ranks.reduce([own_largest], ReduceOp.MAX)
        num_tokens = sums["tokens"] or math.nan
        metrics: dict[str, float] = {}
        for metric, name in self._means.items():
            metrics[metric] = sums[name] / num_tokens
        has_tokens = num_tokens > 0  # not if it is NaN
        metrics["sampling/sampling_logp_difference/max"] = largest if has_tokens else math.nan
        for name in self._updates[0]:
            total = sum(update[name] for update in self._updates)
            is_count = name.startswith("num_")
            metrics[name] = total if is_count else total / len(self._updates)
        return metrics

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self.policy.device)

    def _zero_gradients(self) -> None:
        """Set gradients to 0, not None: an iteration without a gradient is still a step."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                own_part(parameter.grad).zero_()


def learning_rate_factor(iteration: int, optimizer: OptimizerSpec) -> float:
    """Return the factor of the peak learning rate in `iteration` (from 0). Warm-up rises linearly
    to 1 in iteration `warmup_iterations`; `linear` and `cosine` then fall to 0 just after the
    end."""
    warmup = optimizer.warmup_iterations
    if iteration < warmup:
        return (iteration + 1) / (warmup + 1)
    progress = (iteration - warmup) / max(1, optimizer.iterations - warmup)
    if optimizer.lr_scheduler_type == "constant":
        return 1.0
    if optimizer.lr_scheduler_type == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
