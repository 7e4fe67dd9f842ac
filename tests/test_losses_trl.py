"""Our losses against TRL's for the same tensors (skipped unless TRL is installed).

TRL's trainer computes its loss from a model and a padded batch. It gets the built-in model and a
batch, whose log-probabilities become ours, so that both see the same tensors. Compared are the
losses and their gradients by the model's parameters.

Shapes: B completions of one group, T tokens of the longest, P of the prompt.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import test_losses
import torch
from torch import Tensor

from easyrl.algorithm.losses import LossInputs, LossSettings, loss_denominator, policy_loss
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.model.logprobs import token_logprobs

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'easyrl[trl]'")

torch.set_num_threads(1)

TINY = BUILT_IN_MODELS["tiny"]
LENGTHS = torch.tensor([5, 2, 7, 3])
B, T, P, MAX_COMPLETION_LENGTH = 4, 7, 4, 12
TRUNCATED = 2  # the completion that a mask of truncated completions removes
CAP = 1.3
IS_TOKEN = torch.arange(T) < LENGTHS.unsqueeze(1)  # [B, T], False: padding

PLAIN = dataclasses.replace(
    test_losses.PLAIN,
    epsilon_high=0.28,
    importance_sampling_cap=CAP,
    max_completion_length=MAX_COMPLETION_LENGTH,
)
CASES = [
    {"loss_type": loss_type, **changes}
    for loss_type in ("grpo", "dapo", "dr_grpo", "cispo")
    for changes in (
        {},
        {"importance_sampling_level": "sequence"},
        {"beta": 0.3},
        {"importance_sampling_correction": "truncate"},
        {"importance_sampling_correction": "mask"},
        {"beta": 0.3, "importance_sampling_correction": "truncate"},
        # TRL's bonus is the mean over tokens for every loss, ours for these two.
        *([{"entropy_coef": 0.2}] if loss_type in ("dapo", "cispo") else []),
    )
]


@functools.cache
def tiny() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def trl_trainer(settings: LossSettings, folder: Path) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer

    names = ("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "beta")
    config = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=B,
        num_generations=B,
        max_completion_length=MAX_COMPLETION_LENGTH,
        temperature=1.0,
        entropy_coef=settings.entropy_coef,
        use_bias_correction_kl=False,  # k3 as in GRPO
        vllm_importance_sampling_correction=settings.importance_sampling_correction != "none",
        **{name: getattr(settings, name) for name in names},
    )
    trainer = trl.GRPOTrainer(
        model=tiny(),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(TINY),
        reward_funcs=lambda prompts, **columns: [0.0] * len(prompts),
        train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
    )
    # TRL computes the weights with vLLM only; its loss multiplies by those of the batch.
    trainer.use_vllm = settings.importance_sampling_correction != "none"
    trainer.model.eval()  # one batch is the whole update
    return trainer


@dataclasses.dataclass
class Batch:
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
    prompts, completions = (
        torch.randint(3, tiny().config.vocab_size, (B, width), generator=generator)
        for width in (P, T)
    )
    mask = IS_TOKEN.clone()
    mask[TRUNCATED] &= not mask_truncated
    logits = tiny()(torch.cat([prompts, completions], dim=1)).logits[:, -T - 1 : -1]
    logprobs, _ = token_logprobs(logits.flatten(0, 1), completions.flatten(), 1.0)
    logprobs = logprobs.view(B, T)
    all_logprobs = torch.log_softmax(logits, dim=-1)

    def near(values: Tensor) -> Tensor:
        return values.detach() + 0.3 * torch.randn((B, T), generator=generator)

    old_logprobs = near(logprobs)
    return Batch(
        prompts,
        completions,
        mask,
        logprobs,
        entropy=-(all_logprobs.exp() * all_logprobs).sum(-1),
        old_logprobs=old_logprobs,
        ref_logprobs=near(logprobs),
        rollout_logprobs=near(old_logprobs),
        advantages=torch.tensor([1.2, -0.7, 0.4, -0.9]),
    )


def our_loss(batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Without padding, as in a packed row."""
    completion_of_token = torch.arange(B).unsqueeze(1).expand(B, T)[IS_TOKEN]
    outputs = policy_loss(
        LossInputs(
            logprobs=batch.logprobs[IS_TOKEN],
            old_logprobs=batch.old_logprobs[IS_TOKEN],
            rollout_logprobs=batch.rollout_logprobs[IS_TOKEN],
            ref_logprobs=batch.ref_logprobs[IS_TOKEN] if settings.beta > 0 else None,
            entropy=batch.entropy[IS_TOKEN],
            advantages=batch.advantages[completion_of_token],
            loss_mask=batch.mask[IS_TOKEN],
            completion_of_token=completion_of_token,
            num_completions=B,
        ),
        settings,
    )
    num_tokens = int(batch.mask.sum())
    denominator = loss_denominator(settings, num_completions=B, num_tokens=num_tokens)
    return outputs.loss / denominator, outputs.metrics


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
    # As TRL documents `vllm_importance_sampling_mode`, with our cap.
    weights = torch.exp(batch.old_logprobs - batch.rollout_logprobs)
    match settings.importance_sampling_correction:
        case "truncate":
            inputs["importance_sampling_ratio"] = weights.clamp(max=CAP)
        case "mask":
            inputs["importance_sampling_ratio"] = weights.masked_fill(weights > CAP, 0.0)
    return trainer.compute_loss(trainer.model, inputs)


def gradient_of(loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(tiny().parameters()))])


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("changes", CASES, ids=lambda c: " ".join(map(str, c.values())))
def test_loss_and_gradient_equal_trls(
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
