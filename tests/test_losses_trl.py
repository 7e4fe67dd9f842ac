"""Our losses against TRL's for the same tensors: `pip install 'easyrl[trl]'`, else it is skipped.

TRL's trainer computes its loss from a model and a padded batch. It is given the built-in model and
a batch, and its log-probabilities become ours, so that both see the same tensors; then the losses
and their gradients by the model's parameters are compared.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from easyrl.algorithm.losses import LossInputs, LossSettings, loss_denominator, policy_loss
from easyrl.model.logprobs import token_logprobs
from easyrl.tasks import arithmetic

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'easyrl[trl]'")

torch.set_num_threads(1)

TINY = Path(arithmetic.__file__).parent / "tiny"
LENGTHS = (5, 2, 7, 3)  # of the completions; the padded batch is 7 wide
TRUNCATED = 2  # the completion that a mask of truncated completions takes out
PROMPT_LENGTH, LONGEST, MAX_COMPLETION_LENGTH = 4, 7, 12
CAP = 1.3

PLAIN = LossSettings(
    loss_type="grpo",
    importance_sampling_level="token",
    epsilon=0.2,
    epsilon_high=0.28,
    delta=None,
    beta=0.0,
    entropy_coef=0.0,
    importance_sampling_correction="none",
    importance_sampling_cap=CAP,
    max_completion_length=MAX_COMPLETION_LENGTH,
)
CASES = [
    {"loss_type": loss_type, **changes}
    for loss_type in ("grpo", "dapo", "dr_grpo", "cispo")
    for changes in (
        {},
        {"importance_sampling_level": "sequence"},
        {"delta": 1.5},
        {"beta": 0.3},
        {"importance_sampling_correction": "truncate"},
        {"importance_sampling_correction": "mask"},
        {"beta": 0.3, "delta": 1.5, "importance_sampling_correction": "truncate"},
        # TRL's bonus is the mean over tokens whatever the loss: as ours of these two.
        *([{"entropy_coef": 0.2}] if loss_type in ("dapo", "cispo") else []),
    )
    if not (loss_type == "cispo" and "delta" in changes)
]


@functools.cache
def tiny() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def trl_trainer(settings: LossSettings, folder: Path) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer

    config = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=len(LENGTHS),
        num_generations=len(LENGTHS),
        max_completion_length=MAX_COMPLETION_LENGTH,
        temperature=1.0,
        loss_type=settings.loss_type,
        importance_sampling_level=settings.importance_sampling_level,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        delta=settings.delta,
        beta=settings.beta,
        entropy_coef=settings.entropy_coef,
        use_bias_correction_kl=False,  # k3 as GRPO has it
        vllm_importance_sampling_correction=settings.importance_sampling_correction != "none",
    )
    trainer = trl.GRPOTrainer(
        model=tiny(),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(TINY),
        reward_funcs=lambda prompts, **columns: [0.0] * len(prompts),
        train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
    )
    # The correction belongs to vLLM there; the loss itself only multiplies by the batch's weights.
    trainer.use_vllm = settings.importance_sampling_correction != "none"
    trainer.model.eval()  # one batch is the whole update, nothing is accumulated
    return trainer


@dataclasses.dataclass
class Batch:
    """Padded to [B, T] = [4, 7]."""

    prompts: Tensor  # [B, P]
    completions: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    logprobs: Tensor  # [B, T], with gradient
    entropy: Tensor  # [B, T], with gradient
    old_logprobs: Tensor  # [B, T]
    ref_logprobs: Tensor  # [B, T]
    rollout_logprobs: Tensor  # [B, T]
    advantages: Tensor  # [B]


def make_batch(*, mask_truncated: bool) -> Batch:
    generator = torch.Generator().manual_seed(7)
    vocabulary = tiny().config.vocab_size
    shape = (len(LENGTHS), LONGEST)
    prompts = torch.randint(3, vocabulary, (len(LENGTHS), PROMPT_LENGTH), generator=generator)
    completions = torch.randint(3, vocabulary, shape, generator=generator)
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS).unsqueeze(1)
    if mask_truncated:
        mask[TRUNCATED] = False
    logits = tiny()(torch.cat([prompts, completions], dim=1)).logits[:, -LONGEST - 1 : -1]
    logprobs, _ = token_logprobs(logits.flatten(0, 1), completions.flatten(), 1.0)
    all_logprobs = torch.log_softmax(logits, dim=-1)

    def near(values: Tensor) -> Tensor:
        return values.detach() + 0.3 * torch.randn(shape, generator=generator)

    logprobs = logprobs.view(shape)
    old_logprobs = near(logprobs)
    return Batch(
        prompts=prompts,
        completions=completions,
        mask=mask,
        logprobs=logprobs,
        entropy=-(all_logprobs.exp() * all_logprobs).sum(-1),
        old_logprobs=old_logprobs,
        ref_logprobs=near(logprobs),
        rollout_logprobs=near(old_logprobs),
        advantages=torch.tensor([1.2, -0.7, 0.4, -0.9]),
    )


def our_loss(batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Padding left out, as in a packed row."""
    there = torch.arange(LONGEST) < torch.tensor(LENGTHS).unsqueeze(1)
    completion_of_token = torch.arange(len(LENGTHS)).unsqueeze(1).expand_as(there)[there]
    outputs = policy_loss(
        LossInputs(
            logprobs=batch.logprobs[there],
            old_logprobs=batch.old_logprobs[there],
            rollout_logprobs=batch.rollout_logprobs[there],
            ref_logprobs=batch.ref_logprobs[there] if settings.beta > 0 else None,
            entropy=batch.entropy[there],
            advantages=batch.advantages[completion_of_token],
            loss_mask=batch.mask[there],
            completion_of_token=completion_of_token,
            num_completions=len(LENGTHS),
        ),
        settings,
    )
    denominator = loss_denominator(
        settings, num_completions=len(LENGTHS), num_tokens=int(batch.mask.sum())
    )
    return outputs.loss / denominator, outputs.metrics


def trl_weights(batch: Batch, kind: str) -> Tensor:
    """As its documentation of `vllm_importance_sampling_mode` has them, with our cap."""
    weights = torch.exp(batch.old_logprobs - batch.rollout_logprobs)
    if kind == "truncate":
        return weights.clamp(max=CAP)
    return weights.masked_fill(weights > CAP, 0.0)


def trl_loss(trainer: Any, batch: Batch, settings: LossSettings) -> Tensor:
    inputs = {
        "prompt_ids": batch.prompts,
        "prompt_mask": torch.ones_like(batch.prompts),
        "completion_ids": batch.completions,
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
        "num_items_in_batch": batch.mask.sum(),
    }
    kind = settings.importance_sampling_correction
    if kind != "none":
        inputs["importance_sampling_ratio"] = trl_weights(batch, kind)
    return trainer.compute_loss(trainer.model, inputs)


def gradient_of(loss: Tensor) -> Tensor:
    parameters = list(tiny().parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("changes", CASES, ids=lambda c: " ".join(map(str, c.values())))
def test_loss_and_gradient_are_trls(
    changes: dict[str, Any], mask_truncated: bool, tmp_path: Path
) -> None:
    high = {"epsilon_high": 1.2} if changes["loss_type"] == "cispo" else {}
    settings = dataclasses.replace(PLAIN, **high, **changes)
    batch = make_batch(mask_truncated=mask_truncated)
    ours, metrics = our_loss(batch, settings)
    trainer = trl_trainer(settings, tmp_path)
    theirs = trl_loss(trainer, batch, settings)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    got, expected = gradient_of(ours), gradient_of(theirs)
    assert (got - expected).norm() <= 1e-5 * expected.norm()
    assert expected.norm() > 0
    logged = trainer._metrics["eval"]
    means = {name: float(value / metrics["tokens"]) for name, value in metrics.items()}
    assert means["entropy"] == pytest.approx(logged["entropy"][0], rel=1e-4)
    if settings.beta > 0:
        assert means["kl"] == pytest.approx(logged["kl"][0], rel=1e-4)
    if settings.loss_type != "cispo" and settings.importance_sampling_level == "token":
        assert means["clipped_low"] == pytest.approx(logged["clip_ratio/low_mean"][0])
        assert means["clipped_high"] == pytest.approx(logged["clip_ratio/high_mean"][0])
