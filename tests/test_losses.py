"""Losses, advantages and learning rates, against numbers computed by hand, definitions, and TRL."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from easyrl.algorithm.advantages import group_advantages
from easyrl.algorithm.losses import LossInputs, kl_k3, load_loss, loss_denominator, policy_loss
from easyrl.config import ConfigError, change_config, load_config
from easyrl.config.train import TrainConfig
from easyrl.model.logprobs import token_logprobs
from easyrl.runtime.resolve import resolve
from easyrl.workers.learner import learning_rate_factor
from mistakes import TINY
from own_workers import REINFORCE
from own_workers import loss_config as config_of
from own_workers import loss_options as options_of

LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "cispo")
LEVELS = ("token", "sequence")


def make_inputs(ratios, advantages, *, completions=None, mask=None, ref_ratios=None, weights=None):
    """Tokens at these probability ratios of the policy to the old policy, of the reference to the
    policy, and of the trainer to the engine (old policy)."""
    old = torch.linspace(-3.0, -0.1, len(ratios), dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    ones = [1.0] * len(ratios)
    completions = completions or [0] * len(ratios)
    ref_ratio = torch.tensor(ref_ratios or ones, dtype=torch.float64)
    rollout_logprobs = old - torch.tensor(weights or ones, dtype=torch.float64).log()
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=rollout_logprobs,
        ref_logprobs=None if ref_ratios is None else logprobs.detach() + ref_ratio.log(),
        entropy=torch.linspace(0.5, 2.0, len(ratios), dtype=torch.float64).requires_grad_(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor([True] * len(ratios) if mask is None else mask),
        completion_of_token=torch.tensor(completions),
        num_completions=max(completions) + 1,
    )


def check(given, algorithm, loss, gradient, **others):
    """`gradient`: by log-probability; `others`: metrics, or the gradient by entropy."""
    inputs = make_inputs(**given)
    outputs = policy_loss(inputs, options_of(**algorithm))
    outputs.loss.backward()
    got = {name: value.item() for name, value in outputs.metrics.items()}
    if inputs.entropy.grad is not None:
        got["entropy_gradient"] = inputs.entropy.grad.tolist()
    assert outputs.loss.item() == pytest.approx(loss)
    assert inputs.logprobs.grad.tolist() == pytest.approx(gradient)
    for name, value in others.items():
        assert got.get(name) == pytest.approx(value), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES[:3])
@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped"), [
    (1.0, 2.0, -2.0, -2.0, (0, 0)),
    (1.0, -2.0, 2.0, 2.0, (0, 0)),
    (1.2, 2.0, -2.4, -2.4, (0, 0)),  # inside 1 + epsilon_high
    (1.5, 2.0, -2.6, 0.0, (0, 1)),  # clipped at 1.3: no gradient
    (1.5, -2.0, 3.0, 3.0, (0, 0)),  # never clipped upward for a negative advantage
    (0.9, -2.0, 1.8, 1.8, (0, 0)),  # inside 1 - epsilon
    (0.5, -2.0, 1.6, 0.0, (1, 0)),  # clipped at 0.8: no gradient
    (0.5, 2.0, -1.0, -1.0, (0, 0)),  # never clipped downward for a positive advantage
    (3.0, 0.0, 0.0, 0.0, (0, 0)),
])  # fmt: skip
def test_one_token(*, level, loss_type, ratio, advantage, loss, gradient, clipped):
    """All clipped losses, at both levels, are the same for a completion of one token."""
    algorithm = {"loss_type": loss_type, "importance_sampling_level": level}
    counted = {"clipped_low": clipped[0], "clipped_high": clipped[1], "tokens": 1}
    check({"ratios": [ratio], "advantages": [advantage]}, algorithm, loss, [gradient], **counted)


# Surrogates: -1.0, -1.2, -0.9; +2; -0.5, -0.5. Log-probabilities of the old policy: -3.0, -2.42,
# -1.84, -1.26, -0.68, -0.1.
THREE = {
    "ratios": [1.0, 1.2, 0.9, 1.0, 1.0, 1.0],
    "advantages": [1.0, 1.0, 1.0, -2.0, 0.5, 0.5],
    "completions": [0, 0, 0, 1, 2, 2],
}
OF_CISPO = 3.0 + 1.2 * (2.42 - math.log(1.2)) + 0.9 * (1.84 - math.log(0.9)) - 2 * 1.26 + 0.39


@pytest.mark.parametrize(("loss_type", "loss", "scales"), [
    ("grpo", -3.1 / 3 + 2.0 - 0.5, [1 / 3] * 3 + [1.0] + [0.5] * 2),
    ("dapo", -3.1 + 2.0 - 1.0, [1.0] * 6),
    ("dr_grpo", -3.1 + 2.0 - 1.0, [1.0] * 6),
    ("cispo", OF_CISPO, [1.0] * 6),
])  # fmt: skip
def test_three_completions(loss_type, loss, scales):
    each = [-1.0, -1.2, -0.9, 2.0, -0.5, -0.5]
    gradient = [value * scale for value, scale in zip(each, scales, strict=True)]
    check(THREE, {"loss_type": loss_type}, loss, gradient)
    entropies = zip([0.5, 0.8, 1.1, 1.4, 1.7, 2.0], scales, strict=True)
    with_bonus = loss - 0.3 * sum(entropy * scale for entropy, scale in entropies)
    of_entropy = {"entropy_gradient": [-0.3 * scale for scale in scales]}
    check(THREE, {"loss_type": loss_type, "entropy_coef": 0.3}, with_bonus, gradient, **of_entropy)


@pytest.mark.parametrize(("loss_type", "num_tokens", "expected"), [
    ("grpo", 20, 6.0),
    ("dapo", 20, 20.0),
    ("cispo", 20, 20.0),
    ("dr_grpo", 20, 48.0),
    ("dapo", 0, 1.0),  # all tokens are masked
    ("cispo", 0, 1.0),
])  # fmt: skip
def test_the_denominator_of_an_update(loss_type, num_tokens, expected):
    """Six completions of at most 8 tokens each."""
    chosen = options_of(loss_type=loss_type)
    assert loss_denominator(chosen, num_completions=6, num_tokens=num_tokens) == expected


def test_a_small_kl_keeps_its_digits():
    """d²/2 at a difference of 1e-4: in float32 exp(d) - d - 1 would lose it in rounding."""
    kl = kl_k3(torch.tensor([-1e-4]), torch.zeros(1))
    assert kl.item() == pytest.approx(0.5e-8, rel=1e-3)


TENSORS = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy", "advantages")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("name", TENSORS)
def test_values_at_masked_tokens_do_not_matter(name, loss_type, level):
    """A tool's token may be one that the policy would never have sampled."""
    correction = {"importance_sampling_correction": "truncate", "importance_sampling_cap": 1.5}
    terms = {"beta": 0.1, "entropy_coef": 0.1, **correction}
    chosen = options_of(loss_type=loss_type, importance_sampling_level=level, **terms)
    others = {"mask": [True, False, True], "ref_ratios": [1.5, 1, 1], "weights": [2.0, 1.0, 0.7]}
    found = []
    for value in (-0.5, math.nan, math.inf, -math.inf, -1e4, 1e4):
        inputs = make_inputs([1.1, 1.0, 0.9], [1.0, 1.0, 1.0], **others)
        with torch.no_grad():
            getattr(inputs, name)[1] = value
        outputs = policy_loss(inputs, chosen)
        outputs.loss.backward()
        gradients = inputs.logprobs.grad.tolist(), inputs.entropy.grad.tolist()
        metrics = {name: value.item() for name, value in outputs.metrics.items()}
        found.append((outputs.loss.item(), gradients, metrics))
    assert all(each == found[0] for each in found)
    assert math.isfinite(found[0][0])
    assert found[0][1][0][1] == found[0][1][1][1] == 0.0


def random_inputs(lengths, seed):
    """The tokens of a completion need not be adjacent."""
    rng = np.random.default_rng(seed)
    completions = rng.permutation(np.repeat(np.arange(len(lengths)), lengths))
    ratios, references, weights = np.exp(0.4 * rng.standard_normal((3, len(completions)))).tolist()
    advantages, mask = rng.standard_normal(len(lengths)), rng.random(len(completions)) < 0.8
    more = {"completions": completions.tolist(), "ref_ratios": references, "weights": weights}
    return make_inputs(ratios, advantages[completions], mask=mask, **more)


SETTINGS = st.builds(
    options_of,
    loss_type=st.sampled_from(LOSS_TYPES),
    importance_sampling_level=st.sampled_from(LEVELS),
    beta=st.sampled_from([0.0, 0.3]),
    entropy_coef=st.sampled_from([0.0, 0.2]),
    importance_sampling_correction=st.sampled_from(["none", "truncate", "mask"]),
    importance_sampling_cap=st.just(1.2),
)
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**31)


def gradients(inputs, loss):
    found = torch.autograd.grad(loss, (inputs.logprobs, inputs.entropy), materialize_grads=True)
    return found[0], found[1]


def part_of(inputs, completions):
    """These completions alone, renumbered, as another micro-batch would hold them."""
    tokens = torch.isin(inputs.completion_of_token, torch.tensor(completions))
    index_of = torch.zeros(inputs.num_completions, dtype=torch.int64)
    index_of[completions] = torch.arange(len(completions))
    return LossInputs(
        **{name: getattr(inputs, name)[tokens] for name in (*TENSORS, "loss_mask")},
        completion_of_token=index_of[inputs.completion_of_token[tokens]],
        num_completions=len(completions),
    )


@settings(max_examples=150)
@given(LENGTHS, SETTINGS, SEEDS, st.randoms(), st.integers(1, 4))
def test_any_split_into_micro_batches_has_the_same_sums(lengths, chosen, seed, random, num_parts):
    inputs = random_inputs(lengths, seed)
    whole = policy_loss(inputs, chosen)
    order = random.sample(range(len(lengths)), len(lengths))
    parts = [policy_loss(part_of(inputs, order[i::num_parts]), chosen) for i in range(num_parts)]
    summed = sum(part.loss for part in parts)
    torch.testing.assert_close(summed, whole.loss)
    torch.testing.assert_close(gradients(inputs, summed), gradients(inputs, whole.loss))
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name] for part in parts), value)


def own_config(tmp_path, source):
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "my_loss.py"
    file.write_text(source)
    return load_config(None, {"algorithm.loss_type": f"{file}:loss"})


def test_the_divisor_is_the_number_of_completions_or_that_of_the_file(tmp_path):
    own = "\ndef loss_denominator(config, num_completions, num_tokens): return 2 * num_tokens"
    for number, (source, expected) in enumerate([(REINFORCE, 8.0), (REINFORCE + own, 140.0)]):
        config = own_config(tmp_path / str(number), source)
        options = resolve(config).loss
        found = load_loss(options).loss_denominator(options, num_completions=8, num_tokens=70)
        assert found == expected


@pytest.mark.parametrize(("parameter", "attribute"), [
    ("config", "algorithm.epsilon"),
    ("settings", "algorithm.epsilon"),
    ("options", "epsilon"),
])  # fmt: skip
def test_a_loss_gets_all_settings_or_those_of_the_loss(parameter, attribute, tmp_path):
    source = REINFORCE.replace("loss(inputs)", f"loss(inputs, {parameter})")
    source = source.replace("per_token.sum()", f"per_token.sum() * {parameter}.{attribute}")
    source += f"\ndef loss_denominator({parameter}, **counts): return {parameter}.{attribute}"
    options = resolve(own_config(tmp_path, source)).loss
    found = load_loss(options)
    assert found.loss_denominator(options, num_completions=8, num_tokens=70) == 0.2


def test_a_loss_may_be_a_teachers_divergence_alone(tmp_path):
    source = REINFORCE.replace("-inputs.advantages * inputs.logprobs", "inputs.teacher.divergence")
    own = own_config(tmp_path, source)
    own = change_config(own, {"algorithm.teacher": "tiny", "algorithm.teacher_divergence": 0.5})
    shown = {"probability", "tokens", "entropy", "teacher_kl", "teacher_agrees"}
    assert load_loss(resolve(own).loss).metrics == shown
    without = change_config(own, {"algorithm.teacher_divergence": None})  # it has no gradient
    with pytest.raises(ConfigError, match="gradient"):
        load_loss(resolve(without).loss)


@pytest.mark.parametrize(("source", "shown"), [
    ("def other(inputs): pass", "loss"),
    ("def loss(inputs): return inputs.logits", "logits"),
    ("def loss(inputs): return inputs.logprobs.sum()", "LossOutputs"),
    (REINFORCE.replace("inputs.logprobs", "inputs.advantages"), "gradient"),
    (f"{REINFORCE}def loss_denominator(config, **numbers): return 0", "loss_denominator"),
    ("import no_such_module", "no_such_module"),
])  # fmt: skip
def test_a_loss_that_cannot_work_is_refused(source, shown, tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm\.loss_type") as caught:
        load_loss(resolve(own_config(tmp_path, source)).loss)
    assert shown in str(caught.value)


@pytest.mark.parametrize(("values", "scale", "estimator", "expected"), [
    ([1, 2, 6], "none", "group", [-2, -1, 3]),
    # Mean 0.25; squares 3 * 0.0625 + 0.5625 = 0.75; by n - 1 = 3: 0.25, whose root is 0.5.
    ([0, 0, 0, 1], "group", "group", np.array([-0.25, -0.25, -0.25, 0.75]) / 0.5001),
    # 1 - (2 + 6) / 2; 2 - (1 + 6) / 2; 6 - (1 + 2) / 2.
    ([1, 2, 6], "none", "rloo", [-3, -1.5, 4.5]),
    # The others' means are 1/3 and 0.
    ([0, 0, 0, 1], "group", "rloo", np.array([-1, -1, -1, 3]) / 3 / 0.5001),
    # Exactly zero: a rounding error divided by a tiny deviation would be large.
    *(
        ([value] * 7, "group", name, [0] * 7)
        for value in (0.1, -1e6)
        for name in ("group", "rloo")
    ),
])  # fmt: skip
def test_advantages(values, scale, estimator, expected):
    got = group_advantages(np.array(values, dtype=np.float32), scale, estimator)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=0.0)
    assert got.dtype == np.float32


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16), st.floats(-50, 50, width=32)
)
def test_advantages_sum_to_zero_and_do_not_move_with_the_rewards(values, shift):
    rewards = np.array(values, dtype=np.float32)
    got, moved = (group_advantages(each, "none") for each in (rewards, rewards + np.float32(shift)))
    assert abs(got.astype(np.float64).sum()) <= 1e-4
    np.testing.assert_allclose(moved, got, atol=1e-4)


@pytest.mark.parametrize(("kind", "warmup", "expected"), [
    ("constant", 0, [1, 1, 1, 1]),
    ("constant", 3, [0.25, 0.5, 0.75, 1]),
    ("linear", 2, [1 / 3, 2 / 3, 1, 0.5]),
    ("cosine", 0, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ("cosine", 9, [0.1, 0.2, 0.3, 0.4]),  # the run ends before its warm-up does
])  # fmt: skip
def test_learning_rate(kind, warmup, expected):
    train = TrainConfig(iterations=4, warmup_iterations=warmup, lr_scheduler_type=kind)
    factors = [learning_rate_factor(iteration, train) for iteration in range(4)]
    assert factors == pytest.approx(expected)


# -- against TRL for the same tensors (skipped without it) -----------------------------------------
#
# TRL's trainer computes its loss from a model and a padded batch: here the built-in model, whose
# log-probabilities become ours. Compared are the losses and their gradients by the parameters.
# Shapes: B completions of one group, T tokens of the longest, P of the prompt.

TRL_LENGTHS = torch.tensor([5, 2, 7, 3])
B, T, P = 4, 7, 4
CAP = 1.3
IS_TOKEN = torch.arange(T) < TRL_LENGTHS.unsqueeze(1)  # [B, T], False: padding
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
    options = resolve(config).loss
    outputs = policy_loss(LossInputs(**tokens, num_completions=B), options)
    num_tokens = int(batch["loss_mask"].sum())
    return outputs.loss / loss_denominator(options, num_completions=B, num_tokens=num_tokens)


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
