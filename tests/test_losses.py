"""Losses, advantages and learning rates, against numbers computed by hand and definitions."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.algorithm import losses
from easyrl.algorithm.advantages import group_advantages
from easyrl.algorithm.losses import LossInputs, kl_k3, load_loss, loss_denominator, policy_loss
from easyrl.config import Config, ConfigError, load_config
from easyrl.config.train import TrainConfig
from easyrl.workers.learner import learning_rate_factor
from runs import SMALL, finish, lines_of

torch.set_num_threads(1)

LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "cispo")
LEVELS = ("token", "sequence")


def config_of(**algorithm: Any) -> Config:
    """Clipped at 0.8 and 1.3, corrected at most by 3."""
    high = 5.0 if algorithm.get("loss_type") == "cispo" else 0.3
    algorithm = {"epsilon_high": high, "importance_sampling_correction": "none", **algorithm}
    return Config.model_validate({"algorithm": algorithm, "rollout": {"max_completion_length": 8}})


def make_inputs(
    ratios: list[float],
    advantages: list[float],
    *,
    completions: list[int] | None = None,
    mask: list[bool] | None = None,
    ref_ratios: list[float] | None = None,
    weights: list[float] | None = None,
) -> LossInputs:
    """Tokens at these probability ratios of the policy to the old policy, of the reference to the
    policy, and of the trainer to the engine (old policy)."""
    old = torch.linspace(-3.0, -0.1, len(ratios), dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    ones = [1.0] * len(ratios)
    completions = completions or [0] * len(ratios)
    ref_ratio = torch.tensor(ref_ratios or ones, dtype=torch.float64)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=old - torch.tensor(weights or ones, dtype=torch.float64).log(),
        ref_logprobs=None if ref_ratios is None else logprobs.detach() + ref_ratio.log(),
        entropy=torch.linspace(0.5, 2.0, len(ratios), dtype=torch.float64).requires_grad_(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        loss_mask=torch.tensor(mask or [True] * len(ratios)),
        completion_of_token=torch.tensor(completions),
        num_completions=max(completions) + 1,
    )


def check(
    given: dict[str, Any], algorithm: dict[str, Any], loss: float, gradient: list[float], **others
) -> None:
    """The loss, its gradient by log-probability, and `others`: metrics, or the gradient by
    entropy."""
    inputs = make_inputs(**given)
    outputs = policy_loss(inputs, config_of(**algorithm))
    outputs.loss.backward()
    got = {name: value.item() for name, value in outputs.metrics.items()}
    if inputs.entropy.grad is not None:
        got["entropy_gradient"] = inputs.entropy.grad.tolist()
    assert outputs.loss.item() == pytest.approx(loss)
    assert inputs.logprobs.grad.tolist() == pytest.approx(gradient)
    for name, value in others.items():
        assert got.get(name) == pytest.approx(value), name


# By hand: one token.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES[:3])
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, (0, 0)),
        (1.0, -2.0, 2.0, 2.0, (0, 0)),
        (1.2, 2.0, -2.4, -2.4, (0, 0)),  # inside 1 + epsilon_high
        (1.5, 2.0, -2.6, 0.0, (0, 1)),  # clipped at 1.3: no gradient
        (1.5, -2.0, 3.0, 3.0, (0, 0)),  # never clipped upward for a negative advantage
        (0.9, -2.0, 1.8, 1.8, (0, 0)),  # inside 1 - epsilon
        (0.5, -2.0, 1.6, 0.0, (1, 0)),  # clipped at 0.8: no gradient
        (0.5, 2.0, -1.0, -1.0, (0, 0)),  # never clipped downward for a positive advantage
        (3.0, 0.0, 0.0, 0.0, (0, 0)),
    ],
)
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


@pytest.mark.parametrize(
    ("loss_type", "loss", "scales"),
    [
        ("grpo", -3.1 / 3 + 2.0 - 0.5, [1 / 3] * 3 + [1.0] + [0.5] * 2),
        ("dapo", -3.1 + 2.0 - 1.0, [1.0] * 6),
        ("dr_grpo", -3.1 + 2.0 - 1.0, [1.0] * 6),
        ("cispo", OF_CISPO, [1.0] * 6),
    ],
)
def test_three_completions(loss_type, loss, scales):
    each = [-1.0, -1.2, -0.9, 2.0, -0.5, -0.5]
    gradient = [value * scale for value, scale in zip(each, scales, strict=True)]
    check(THREE, {"loss_type": loss_type}, loss, gradient)


@pytest.mark.parametrize(
    ("loss_type", "num_tokens", "expected"),
    [
        ("grpo", 20, 6.0),
        ("dapo", 20, 20.0),
        ("cispo", 20, 20.0),
        ("dr_grpo", 20, 48.0),
        ("dapo", 0, 1.0),  # all tokens are masked
        ("cispo", 0, 1.0),
    ],
)
def test_the_denominator_of_an_update(loss_type, num_tokens, expected):
    """Six completions of at most 8 tokens each."""
    chosen = config_of(loss_type=loss_type)
    assert loss_denominator(chosen, num_completions=6, num_tokens=num_tokens) == expected


def test_a_small_kl_keeps_its_digits():
    """d²/2 at a difference of 1e-4: in float32 exp(d) - d - 1 would lose it in rounding."""
    kl = kl_k3(torch.tensor([-1e-4]), torch.zeros(1))
    assert kl.item() == pytest.approx(0.5e-8, rel=1e-3)


# Masks.

TENSORS = (
    *("logprobs", "old_logprobs", "rollout_logprobs"),
    *("ref_logprobs", "entropy", "advantages"),
)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("name", TENSORS)
def test_values_at_masked_tokens_do_not_matter(name, loss_type, level):
    """A tool's token may be one that the policy would never have sampled."""
    chosen = config_of(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.1,
        entropy_coef=0.1,
        importance_sampling_correction="truncate",
        importance_sampling_cap=1.5,
    )
    found = []
    for value in (-0.5, math.nan, math.inf, -math.inf, -1e4, 1e4):
        inputs = make_inputs(
            [1.1, 1.0, 0.9],
            [1.0, 1.0, 1.0],
            mask=[True, False, True],
            ref_ratios=[1.5, 1.0, 1.0],
            weights=[2.0, 1.0, 0.7],
        )
        tensor = getattr(inputs, name).detach().clone()
        tensor[1] = value
        tensor.requires_grad_(name in ("logprobs", "entropy"))
        inputs = dataclasses.replace(inputs, **{name: tensor})
        outputs = policy_loss(inputs, chosen)
        outputs.loss.backward()
        gradients = inputs.logprobs.grad.tolist(), inputs.entropy.grad.tolist()
        metrics = {name: value.item() for name, value in outputs.metrics.items()}
        found.append((outputs.loss.item(), gradients, metrics))
    assert all(each == found[0] for each in found)
    assert math.isfinite(found[0][0])
    assert found[0][1][0][1] == found[0][1][1][1] == 0.0


# By definition, and in pieces.


def by_definition(inputs: LossInputs, config: Config) -> torch.Tensor:
    """Completion by completion, token by token, as in the formula."""
    chosen, high = config.algorithm, config.algorithm.resolved_epsilon_high
    total = torch.zeros((), dtype=torch.float64)
    for completion in range(inputs.num_completions):
        is_mine = (inputs.completion_of_token == completion) & inputs.loss_mask
        tokens = is_mine.nonzero().flatten().tolist()
        losses = []
        for t in tokens:
            ratio = torch.exp(inputs.logprobs[t] - inputs.old_logprobs[t])
            if chosen.importance_sampling_level == "sequence":
                logs = [inputs.logprobs[u] - inputs.old_logprobs[u] for u in tokens]
                ratio = torch.exp(sum(logs) / len(tokens))
            advantage = inputs.advantages[t]
            if chosen.loss_type == "cispo":
                weight = min(ratio.item(), high)
                loss = -weight * advantage * inputs.logprobs[t]
            else:
                clip = torch.clamp(ratio, 1 - chosen.epsilon, 1 + high)
                loss = -torch.minimum(ratio * advantage, clip * advantage)
            weight = math.exp((inputs.old_logprobs[t] - inputs.rollout_logprobs[t]).item())
            if chosen.importance_sampling_correction == "truncate":
                loss = loss * min(weight, chosen.importance_sampling_cap)
            elif chosen.importance_sampling_correction == "mask":
                loss = loss * (0.0 if weight > chosen.importance_sampling_cap else weight)
            if chosen.beta > 0:
                difference = inputs.ref_logprobs[t] - inputs.logprobs[t]
                loss = loss + chosen.beta * (torch.exp(difference) - difference - 1)
            losses.append(loss - chosen.entropy_coef * inputs.entropy[t])
        scale = max(1, len(tokens)) if chosen.loss_type == "grpo" else 1
        total = total + sum(losses, torch.zeros((), dtype=torch.float64)) / scale
    return total


def random_inputs(lengths: list[int], seed: int) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def near(values: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
        return values + 0.4 * noise

    old = -3 * torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    completion_of_token = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    # The tokens of a completion need not be adjacent.
    completion_of_token = completion_of_token[torch.randperm(num_tokens, generator=generator)]
    return LossInputs(
        logprobs=near(old).requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=near(old),
        ref_logprobs=near(old),
        entropy=torch.rand(num_tokens, generator=generator, dtype=torch.float64).requires_grad_(),
        advantages=advantages[completion_of_token],
        loss_mask=torch.rand(num_tokens, generator=generator) < 0.8,
        completion_of_token=completion_of_token,
        num_completions=len(lengths),
    )


SETTINGS = st.builds(
    config_of,
    loss_type=st.sampled_from(LOSS_TYPES),
    importance_sampling_level=st.sampled_from(LEVELS),
    beta=st.sampled_from([0.0, 0.3]),
    entropy_coef=st.sampled_from([0.0, 0.2]),
    importance_sampling_correction=st.sampled_from(["none", "truncate", "mask"]),
    importance_sampling_cap=st.just(1.2),
)
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**31)


def gradients(inputs: LossInputs, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.autograd.grad(loss, (inputs.logprobs, inputs.entropy), materialize_grads=True)
    return found[0], found[1]


@settings(max_examples=150)
@given(LENGTHS, SETTINGS, SEEDS)
def test_loss_and_gradient_are_those_of_the_definition(lengths, chosen, seed):
    inputs = random_inputs(lengths, seed)
    got, expected = policy_loss(inputs, chosen).loss, by_definition(inputs, chosen)
    torch.testing.assert_close(got, expected)
    if inputs.loss_mask.any():
        torch.testing.assert_close(gradients(inputs, got), gradients(inputs, expected))


def part_of(inputs: LossInputs, completions: list[int]) -> LossInputs:
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


# -- a loss of the user's own ----------------------------------------------------------------------

REINFORCE = """
from easyrl.algorithm.losses import LossOutputs
def loss(inputs):
    per_token = -inputs.advantages * inputs.logprobs
    likely = inputs.logprobs.detach().exp() * inputs.loss_mask
    return LossOutputs(per_token.sum(), {"probability": likely.sum()})
"""
WORDS = (*SMALL, "rollout.max_completion_length=80", "train.iterations=2", "data.num_held_out=0")


def copy_of(loss_type: str) -> str:
    """The source of the built-in losses, for one of them."""
    functions = inspect.getsource(losses.policy_loss) + inspect.getsource(losses.loss_denominator)
    functions = functions.replace("config.algorithm.loss_type", repr(loss_type))
    return (
        "from easyrl.algorithm.losses import *\n"
        "from easyrl.algorithm.losses import _surrogate, _sum_over_completion, _zero_masked\n"
        + functions.replace("algorithm.loss_type", repr(loss_type))
    )


def own_config(tmp_path: Path, source: str, name: str = "loss") -> Config:
    file = tmp_path / "my_loss.py"
    file.write_text(source)
    return load_config(None, {"algorithm.loss_type": f"{file}:{name}", "algorithm.beta": 0.3})


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_copy_of_a_built_in_loss_gives_the_same_bits(loss_type: str, tmp_path: Path) -> None:
    own = load_loss(own_config(tmp_path, copy_of(loss_type), "policy_loss"))
    config = config_of(loss_type=loss_type, beta=0.3)
    found = []
    for loss in (own, load_loss(config)):
        inputs = random_inputs([3, 5, 1], seed=0)
        outputs = loss.policy_loss(inputs, config)
        outputs.loss.backward()
        found.append([outputs.loss, inputs.logprobs.grad, *outputs.metrics.values()])
        assert loss.loss_denominator(config, num_completions=3, num_tokens=7) in (3.0, 7.0)
    assert all(map(torch.equal, *found)) and found[0][1].any()


def test_every_train_worker_uses_it_and_a_changed_file_is_not_resumed(tmp_path: Path) -> None:
    file, folder = tmp_path / "my_loss.py", tmp_path / "run"
    file.write_text(REINFORCE)
    words = ("--output", str(folder), *WORDS, "--train-devices", "cpu:2")
    code, _, err = finish(*words, f"algorithm.loss_type={file}:loss")
    assert code == 0, err
    line = lines_of(folder / "metrics.jsonl")[0]
    assert 0.0 < line["loss/probability"] <= 1.0 and "clip_ratio/low_mean" not in line
    assert line["entropy"] > 0 and line["grad_norm"] > 0
    file.write_text(REINFORCE.replace("-inputs", "-2.0 * inputs"))
    code, _, err = finish("--resume", str(folder), "--iterations", "3")
    assert code == 2 and "algorithm.loss_type" in err and "changed" in err


def test_the_divisor_is_the_number_of_completions_or_that_of_the_file(tmp_path: Path) -> None:
    config = own_config(tmp_path, REINFORCE)
    assert load_loss(config).loss_denominator(config, num_completions=8, num_tokens=70) == 8.0
    (tmp_path / "other").mkdir()
    own = "\ndef loss_denominator(config, num_completions, num_tokens): return 2 * num_tokens"
    config = own_config(tmp_path / "other", REINFORCE + own)
    assert load_loss(config).loss_denominator(config, num_completions=8, num_tokens=70) == 140.0


OUTPUTS = "from easyrl.algorithm.losses import LossOutputs\ndef loss(inputs, config): return "


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("def other(inputs): pass", "loss"),
        ("def loss(): return 1", "loss()"),
        ("def loss(inputs): return inputs.logits", "logits"),
        ("def loss(inputs): return inputs.logprobs.sum()", "LossOutputs"),
        (f"{OUTPUTS}LossOutputs(inputs.logprobs, {{}})", "scalar"),
        (f"{OUTPUTS}LossOutputs(inputs.logprobs.sum(), {{'a': inputs.logprobs}})", "scalar"),
        (f"{OUTPUTS}LossOutputs(inputs.advantages.sum(), {{}})", "gradient"),
        (f"{REINFORCE}def loss_denominator(config, **numbers): return 0", "loss_denominator"),
        ("import no_such_module", "no_such_module"),
    ],
)
def test_a_loss_that_cannot_work_is_refused(source: str, shown: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss_type") as caught:
        load_loss(own_config(tmp_path, source))
    assert shown in str(caught.value)


# -- advantages and learning rate ------------------------------------------------------------------


def rewards(*values):
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("values", "scale", "estimator", "expected"),
    [
        ([1, 2, 6], "none", "group", [-2, -1, 3]),
        # Mean 0.25; squares 3 * 0.0625 + 0.5625 = 0.75; by n - 1 = 3: 0.25, whose root is 0.5.
        ([0, 0, 0, 1], "group", "group", np.array([-0.25, -0.25, -0.25, 0.75]) / 0.5001),
        # 1 - (2 + 6) / 2; 2 - (1 + 6) / 2; 6 - (1 + 2) / 2.
        ([1, 2, 6], "none", "rloo", [-3, -1.5, 4.5]),
        # Exactly zero: a rounding error divided by a tiny deviation would be large.
        *(
            ([value] * 7, scale, estimator, [0] * 7)
            for value in (1.0, 0.1, -1e6, 1e-8)
            for scale in ("group", "none")
            for estimator in ("group", "rloo")
        ),
        # The others' means are 1/3 and 0.
        ([0, 0, 0, 1], "group", "rloo", np.array([-1, -1, -1, 3]) / 3 / 0.5001),
    ],
)
def test_advantages(values, scale, estimator, expected):
    got = group_advantages(rewards(*values), scale, estimator)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=0.0)
    assert got.dtype == np.float32


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16), st.floats(-50, 50, width=32)
)
def test_advantages_sum_to_zero_and_do_not_move_with_the_rewards(values, shift):
    got = group_advantages(rewards(*values), "none")
    assert abs(got.astype(np.float64).sum()) <= 1e-4
    moved = group_advantages((rewards(*values) + np.float32(shift)).astype(np.float32), "none")
    np.testing.assert_allclose(moved, got, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 3, [0.25, 0.5, 0.75, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.5]),
        ("cosine", 0, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        ("linear", 4, [0.2, 0.4, 0.6, 0.8]),
        ("cosine", 9, [0.1, 0.2, 0.3, 0.4]),  # the run ends before its warm-up does
    ],
)
def test_learning_rate(kind, warmup, expected):
    train = TrainConfig(iterations=4, warmup_iterations=warmup, lr_scheduler_type=kind)
    factors = [learning_rate_factor(iteration, train) for iteration in range(4)]
    assert factors == pytest.approx(expected)
