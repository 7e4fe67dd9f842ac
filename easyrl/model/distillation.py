"""The teacher of on-policy distillation (`algorithm.teacher`): it scores the student's own tokens.

    [P' | R1 | …] ─► teacher's layers ─► hidden [K, Ht] ─┐  a chunk of positions at a time
    [P  | R1 | …] ─► policy's layers ──► hidden [K, H] ──┴► both heads ─► both distributions

The teacher's prompt P' is the policy's P, or one of its own (`algorithm.teacher_prompt`).

Both distributions are at the sampling temperature. Of a teacher that pads its vocabulary further
the common part counts. Logits of both exist for a chunk alone, and again in its backward pass.

On-policy distillation: Agarwal et al. 2023 (arXiv 2306.13649); Gu et al. 2023, MiniLLM
(arXiv 2306.08543).

Shapes: K completion tokens, n of them in a chunk, H and Ht the models' widths, V common tokens.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from easyrl.algorithm.losses import TeacherScores
from easyrl.config.spec import TeacherSpec
from easyrl.model import CHUNK_BYTES, CPU_CHUNK_BYTES
from easyrl.model.files import FLOAT_BYTES
from easyrl.model.inputs import ModelInputs
from easyrl.model.logprobs import LEAST_LOGPROB, block_sums, shifted_scores
from easyrl.model.policy import Policy
from easyrl.model.sharding import TrainRanks

FORWARD = 0.0
REVERSE = 1.0
"""Weights of `divergence` that give KL(teacher || student) and KL(student || teacher)."""


class Teacher(nn.Module):
    """A frozen model, sharded as the policy is; or the policy itself, which the caller runs."""

    def __init__(self, teacher: Policy, spec: TeacherSpec, ranks: TrainRanks) -> None:
        super().__init__()
        self.policy = teacher
        self._spec = spec
        if spec.path is None:
            return
        teacher.model.requires_grad_(False)
        self.model = teacher.model
        if ranks.mesh is not None:
            own = copy.copy(ranks)  # whose parts are the teacher's
            own.keeps_gathered = False
            own.shard(self, teacher.blocks, dtype=getattr(torch, spec.dtype), offload=False)
            teacher.device = ranks.device

    @torch.no_grad()
    def forward(self, inputs: ModelInputs) -> Tensor:
        """Return the head's inputs [K, Ht]. The head's weights then stay gathered."""
        return self.policy.hidden_states(inputs)

    def distil(self, policy: Policy, hidden: Tensor, own: Tensor, targets: Tensor) -> TeacherScores:
        """Compare both distributions of all tokens. `hidden` [K, H] and `own` [K, Ht] are the
        inputs of the heads of policy and teacher, `targets` [K] the sampled tokens."""
        size = min(policy.vocabulary_size, self.policy.vocabulary_size)
        temperature = self._spec.temperature
        weight = self._spec.divergence
        has_gradient = weight is not None and torch.is_grad_enabled()
        trained_weight = REVERSE if weight is None else weight

        def compare(rows: Tensor, of_teacher: Tensor, chosen: Tensor) -> TeacherScores:
            with torch.no_grad():
                teacher_logits = self.policy.head(of_teacher)[:, :size]
                teacher = log_distribution(teacher_logits, temperature)
            student = log_distribution(policy.head(rows)[:, :size], temperature)
            return TeacherScores(
                logprobs=teacher.gather(1, chosen.unsqueeze(1)).squeeze(1),
                divergence=divergence(student, teacher, trained_weight),
                kl=divergence(student.detach(), teacher, REVERSE),
                agrees=student.argmax(dim=-1) == teacher.argmax(dim=-1),
            )

        chunk_bytes = CPU_CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES
        both_rows_bytes = 2 * FLOAT_BYTES * size  # logits of policy and teacher for one token
        num_rows = max(1, chunk_bytes // both_rows_bytes)
        chunks = zip(
            torch.split(hidden, num_rows),
            torch.split(own, num_rows),
            torch.split(targets, num_rows),
            strict=True,
        )
        parts = list[TeacherScores]()
        with torch.set_grad_enabled(has_gradient):
            for rows, of_teacher, chosen in chunks:
                part: Any = checkpoint(
                    compare,
                    rows,
                    of_teacher,
                    chosen,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                parts.append(part)
        return TeacherScores(
            logprobs=torch.cat([part.logprobs for part in parts]),
            divergence=torch.cat([part.divergence for part in parts]),
            kl=torch.cat([part.kl for part in parts]),
            agrees=torch.cat([part.agrees for part in parts]),
        )


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Return log softmax(logits / temperature) [n, V] in float32, also of a long tail."""
    scores = shifted_scores(logits, temperature)
    total = block_sums(scores.exp()).sum(dim=-1, keepdim=True)
    return (scores - total.log()).clamp(min=LEAST_LOGPROB)


def divergence(student: Tensor, teacher: Tensor, weight: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence [n] in nats of the log-distributions of
    student p and teacher q [n, V], with weight w:

        w KL(q || m) + (1 - w) KL(p || m),  m = w q + (1 - w) p
        KL(q || p) at w = 0 and KL(p || q) at w = 1, which it approaches, divided by w or 1 - w

    arXiv 2306.13649, section 2 and equation 1."""
    if weight == FORWARD:
        return _kl(teacher, student)
    if weight == REVERSE:
        return _kl(student, teacher)
    middle = torch.logaddexp(teacher + math.log(weight), student + math.log1p(-weight))
    return weight * _kl(teacher, middle) + (1.0 - weight) * _kl(student, middle)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) [n] of log-distributions [n, V]."""
    return (first.exp() * (first - second)).sum(dim=-1)
