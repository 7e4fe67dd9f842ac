"""Our losses against TRL's for the same tensors (skipped without TRL).

TRL's trainer computes its loss from a model and a padded batch: here the built-in model, whose
log-probabilities become ours. Compared are the losses and their gradients by the parameters.

Shapes: B completions of one group, T tokens of the longest, P of the prompt.
"""

import functools

import pytest
import torch
from test_losses import config_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from easyrl.algorithm.losses import LossInputs, loss_denominator, policy_loss
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.model.logprobs import token_logprobs

torch.set_num_threads(1)

TINY = BUILT_IN_MODELS["tiny"]
LENGTHS = torch.tensor([5, 2, 7, 3])
B, T, P = 4, 7, 4
CAP = 1.3
IS_TOKEN = torch.arange(T) < LENGTHS.unsqueeze(1)  # [B, T], False: padding
CASES = [
    {"loss_type": loss_type, **changes}
    for loss_type in ("grpo", "dapo", "dr_grpo", "cispo")
    for changes in (
        {"importance_sampling_level": "sequence"},
        {"importance_sampling_correction": "mask"},
        {"beta": 0.3, "importance_sampling_correction": "truncate"},
        # TRL's bonus is the mean over tokens for every loss, ours for these two.
        *([{"entropy_coef": 0.2}] if loss_type in ("dapo", "cispo") else []),
    )
]


@functools.cache
def tiny():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Function that returns TRL's trainer with the settings of a config: one for each loss."""
    trl = pytest.importorskip("trl", reason="needs TRL: pip install 'easyrl-train[peer]'")
    from datasets import Dataset

    @functools.cache
    def make(loss_type, epsilon, epsilon_high, max_completion_length):
        arguments = trl.GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=B,
            num_generations=B,
            max_completion_length=max_completion_length,
            temperature=1.0,
            use_bias_correction_kl=False,  # k3 as in GRPO
            loss_type=loss_type,
            epsilon=epsilon,
            epsilon_high=epsilon_high,
        )
        return trl.GRPOTrainer(
            model=tiny(),
            args=arguments,
            processing_class=AutoTokenizer.from_pretrained(TINY),
            reward_funcs=lambda prompts, **columns: [0.0] * len(prompts),
            train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
        )

    def trainer_for(config):
        algorithm, length = config.algorithm, config.rollout.max_completion_length
        trainer = make(algorithm.loss_type, algorithm.epsilon, algorithm.epsilon_high, length)
        for name in ("beta", "importance_sampling_level", "entropy_coef"):
            assert hasattr(trainer, name)
            setattr(trainer, name, getattr(algorithm, name))
        trainer._entropy_bonus_enabled = algorithm.entropy_coef != 0.0
        # TRL computes the weights with vLLM only; its loss multiplies by those of the batch.
        is_corrected = algorithm.importance_sampling_correction != "none"
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = is_corrected
        trainer.model.eval()  # one batch is the whole update
        return trainer

    return trainer_for


def make_batch(*, mask_truncated):
    """Prompts [B, P], and under the names of LossInputs what each completion token has [B, T]."""
    generator = torch.Generator().manual_seed(7)
    prompts, completions = (
        torch.randint(3, tiny().config.vocab_size, (B, width), generator=generator)
        for width in (P, T)
    )
    mask = IS_TOKEN.clone()
    mask[2] &= not mask_truncated
    logits = tiny()(torch.cat([prompts, completions], dim=1)).logits[:, -T - 1 : -1]
    logprobs = token_logprobs(logits.flatten(0, 1), completions.flatten(), 1.0)[0].view(B, T)
    every = torch.log_softmax(logits, dim=-1)

    def near(values):
        return values.detach() + 0.3 * torch.randn((B, T), generator=generator)

    old_logprobs = near(logprobs)
    return {
        "prompts": prompts,
        "completions": completions,
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "ref_logprobs": near(logprobs),
        "rollout_logprobs": near(old_logprobs),
        "entropy": -(every.exp() * every).sum(-1),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -0.9]).unsqueeze(1).expand(B, T),
        "loss_mask": mask,
        "completion_of_token": torch.arange(B).unsqueeze(1).expand(B, T),
    }


def our_loss(batch, config):
    """Without padding, as in a packed row."""
    tokens = {name: values[IS_TOKEN] for name, values in batch.items() if values.shape == (B, T)}
    tokens.pop("completions")
    outputs = policy_loss(LossInputs(**tokens, num_completions=B), config)
    num_tokens = int(batch["loss_mask"].sum())
    return outputs.loss / loss_denominator(config, num_completions=B, num_tokens=num_tokens)


def trl_loss(trainer, batch, config):
    inputs = {
        "prompt_ids": batch["prompts"],
        "prompt_mask": torch.ones_like(batch["prompts"]),
        "completion_ids": batch["completions"],
        "completion_mask": batch["loss_mask"].long(),
        "advantages": batch["advantages"][:, 0],
        "old_per_token_logps": batch["old_logprobs"],
        "ref_per_token_logps": batch["ref_logprobs"],
        "num_items_in_batch": batch["loss_mask"].sum(),
    }
    # As TRL documents `vllm_importance_sampling_mode`, with our cap.
    weights = torch.exp(batch["old_logprobs"] - batch["rollout_logprobs"])
    match config.algorithm.importance_sampling_correction:
        case "truncate":
            inputs["importance_sampling_ratio"] = weights.clamp(max=CAP)
        case "mask":
            inputs["importance_sampling_ratio"] = weights.masked_fill(weights > CAP, 0.0)
    return trainer.compute_loss(trainer.model, inputs)


def gradient_of(loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(tiny().parameters()))])


@pytest.mark.parametrize("changes", CASES, ids=lambda c: " ".join(map(str, c.values())))
def test_loss_and_gradient_equal_trls(changes, trainers):
    high = 1.2 if changes["loss_type"] == "cispo" else 0.28
    config = config_of(epsilon_high=high, importance_sampling_cap=CAP, **changes)
    trainer = trainers(config)
    for mask_truncated in (False, True):
        batch = make_batch(mask_truncated=mask_truncated)
        ours, theirs = our_loss(batch, config), trl_loss(trainer, batch, config)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        got, expected = gradient_of(ours), gradient_of(theirs)
        assert expected.norm() > 0 and (got - expected).norm() <= 1e-5 * expected.norm()
