"""The train worker's gradient, in any order of arrival, on one rank and on two; and its step."""

import copy
import math
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import own_training
import own_workers
from easyrl import devices
from easyrl.algorithm.losses import LossInputs, loss_denominator, policy_loss
from easyrl.config import load_config
from easyrl.layout.row import EMPTY
from easyrl.model import tri_model
from easyrl.model.loading import load_policy
from easyrl.model.sharding import whole
from easyrl.model.tri_model import OtherWeights
from easyrl.runtime.resolve import resolve
from easyrl.workers.learner import Learner
from own_training import GROUPS, HARDER, NUM_RANKS, SHUFFLED, model, ranks, train
from own_workers import NUM_GENERATIONS, REINFORCE
from tiny_models import SPREAD, largest_gradient_gap, plain_logprobs, plain_model, tiny_model

__all__ = ["model", "ranks"]  # fixtures


def sequence_logprobs(model, prompt, completion):
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return plain_logprobs(logits, ids[0, len(prompt) :], own_training.TEMPERATURE)


def gradient_by_definition(trained, update):
    """Sequence by sequence, with three separate models, nothing left out."""
    spec = trained.spec
    weights = (trained.weights_before[update], trained.weights_before[0], None)
    policy, old, reference = (
        plain_model(own_training.MODEL, each, torch.float64) for each in weights
    )
    per_update = len(GROUPS) // spec.batches.updates_per_iteration
    groups = GROUPS[update * per_update : (update + 1) * per_update]
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        prompt = group.prompt_ids.tolist()
        for number, where in enumerate(group.completion_slices()):
            completion = group.completion_ids[where].tolist()
            is_masked = bool(spec.batches.mask_truncated_completions and group.truncated[number])
            mask = torch.from_numpy(group.loss_mask[where] & (not is_masked))
            num_tokens += int(mask.sum())
            logprobs, entropy = sequence_logprobs(policy, prompt, completion)
            with torch.no_grad():
                old_logprobs, _ = sequence_logprobs(old, prompt, completion)
                ref_logprobs, _ = sequence_logprobs(reference, prompt, completion)
            inputs = LossInputs(
                logprobs=logprobs,
                old_logprobs=old_logprobs,
                rollout_logprobs=torch.tensor(group.rollout_logprobs[where]).double(),
                ref_logprobs=ref_logprobs,
                entropy=entropy,
                advantages=torch.full((len(mask),), float(group.advantages[number])).double(),
                loss_mask=mask,
                completion_of_token=torch.zeros(len(mask), dtype=torch.int64),
                num_completions=1,
            )
            total = total + policy_loss(inputs, spec.loss).loss
    denominator = loss_denominator(
        spec.loss, num_completions=len(groups) * NUM_GENERATIONS, num_tokens=num_tokens
    )
    (total / denominator).backward()
    return {name: p.grad.float() for name, p in policy.named_parameters()}


LOSSES = {
    "grpo": (),
    "dapo": ("algorithm.loss_type=dapo",),
    "dr_grpo": ("algorithm.loss_type=dr_grpo",),
    "cispo": ("algorithm.loss_type=cispo",),
    "gspo": ("algorithm.importance_sampling_level=sequence",),
    "kl": ("algorithm.beta=0.3",),
    "dapo, kl": ("algorithm.loss_type=dapo", "algorithm.beta=0.3"),
    "entropy bonus": ("algorithm.entropy_coef=0.2",),
    "correction": ("algorithm.importance_sampling_correction=truncate",),
    "truncated masked": ("algorithm.mask_truncated_completions=true", "algorithm.loss_type=dapo"),
}
FEW = ("grpo", "dapo, kl")
"""Tested with any number of updates; the other losses have most of them in the long tests alone."""


def losses_with(*numbers, always):
    return pytest.mark.parametrize(
        ("loss", "num_updates"),
        [
            pytest.param(loss, n, marks=() if loss in FEW or n in always else pytest.mark.long)
            for loss in LOSSES
            for n in numbers
        ],
    )


WAYS = [
    (("train.max_tokens_per_micro_batch=21", "train.offload=[reference, old]"), None),
    (("train.max_tokens_per_micro_batch=70", "model.attention=repeated"), SHUFFLED),
    (("runtime.schedule=sync", "train.offload=[old]"), SHUFFLED),
    (("runtime.deterministic=true", "train.max_tokens_per_micro_batch=45"), SHUFFLED),
]


@losses_with(1, 2, 3, always=(1, 2))
def test_the_gradient_is_that_of_the_formula_in_any_order(loss, num_updates):
    words = (*LOSSES[loss], f"train.updates_per_iteration={num_updates}")
    expected = train(*words, "runtime.schedule=sync")
    assert len(expected.gradients) == num_updates
    norms = [torch.stack([g.norm() for g in each.values()]).norm() for each in expected.gradients]
    mean = float(sum(norms)) / num_updates
    assert expected.metrics["grad_norm"] == pytest.approx(mean, rel=1e-4)
    assert ("kl" in expected.metrics) == ("kl" in loss)
    for update, gradient in enumerate(expected.gradients):
        assert largest_gradient_gap(gradient, gradient_by_definition(expected, update)) <= 1e-5
    for more, order in WAYS:
        got = train(*words, *more, order=order)
        for gradient, other in zip(got.gradients, expected.gradients, strict=True):
            assert largest_gradient_gap(gradient, other) <= 1e-5, (more, order)
        for name, value in expected.metrics.items():
            assert got.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name


def test_offloaded_weights_are_not_written_before_the_device_has_read_them(monkeypatch):
    """The device reads parts of a sharded model after the forward has returned on the host."""
    policy = load_policy(own_training.MODEL)
    weight = next(policy.model.parameters())
    policy.device = torch.device("meta")  # stands for an accelerator
    monkeypatch.setattr(tri_model, "is_sharded", lambda parameter: True)
    other = OtherWeights(policy, offload=False)
    own_training.shake(policy, 0.1)
    own, seen = weight.detach().clone(), []
    monkeypatch.setattr(devices, "synchronize", lambda device: seen.append(weight.detach().clone()))
    with other.in_place():
        others = weight.detach().clone()
    assert not torch.equal(own, others) and torch.equal(weight, own)
    torch.testing.assert_close(seen, [own, others], rtol=0, atol=0)


BUDGETS = ("train.max_tokens_per_micro_batch=21", "train.max_tokens_per_micro_batch=4096")
HARD = ("algorithm.beta=0.3", "train.updates_per_iteration=2", "runtime.deterministic=true")


def assert_close(got, expected, names=("kl", "loss", "grad_norm"), rel=1e-4):
    for gradients, others in zip(got.gradients, expected.gradients, strict=True):
        if any(bool(gradient.any()) for gradient in others.values()):
            assert largest_gradient_gap(gradients, others) <= 1e-5
        else:
            assert not any(bool(gradient.any()) for gradient in gradients.values())
    for name in names:
        close = pytest.approx(expected.metrics[name], rel=rel, abs=1e-5, nan_ok=True)
        assert got.metrics[name] == close, name


@losses_with(1, 2, 6, always=(2,))
def test_two_ranks_have_the_gradients_and_metrics_of_one(ranks, loss, num_updates):
    """Updates of six groups, three, and one, of which the fifth has no gradient at all, and the
    sixth has only one rollout, of the first rank."""
    words = (*LOSSES[loss], f"train.updates_per_iteration={num_updates}")
    expected = train(*words)
    for number, budget in enumerate(BUDGETS):
        outcomes = ranks.train(*words, budget, order=SHUFFLED if number == 0 else None)
        for outcome in outcomes:
            assert len(outcome.gradients) == num_updates
            assert_close(outcome, expected, expected.metrics, rel=1e-3)
        assert outcomes[0].metrics == pytest.approx(outcomes[1].metrics, rel=0, nan_ok=True)
        if (loss, num_updates) == ("grpo", 6):
            assert [bool(each.batches[-1].loss_mask.any()) for each in outcomes] == [True, False]


def test_every_rank_uses_the_loss_of_a_file(ranks, tmp_path):
    (tmp_path / "own.py").write_text(REINFORCE)
    own = f"algorithm.loss_type={tmp_path}/own.py:loss"
    expected = train(own)
    for outcome in ranks.train(own, BUDGETS[0]):
        assert_close(outcome, expected, ("loss", "grad_norm", "loss/probability", "entropy"))
        assert 0.0 < outcome.metrics["loss/probability"] <= 1.0
        assert "clip_ratio/low_mean" not in outcome.metrics


LORA = {
    "all layers": ("model.lora.rank=3",),
    "fewer rows than ranks": ("model.lora.rank=1", "model.lora.target_modules=[q_proj, up_proj]"),
    "little memory": (
        *("model.lora.rank=3", "train.activation_checkpointing=true"),
        "train.offload=[old, optimizer]",
    ),
}


@pytest.mark.parametrize("lora", LORA)
def test_two_ranks_have_the_gradients_of_one_with_lora(ranks, lora):
    words = (*HARDER, *LORA[lora])
    expected = train(*words)
    for outcome in ranks.train(*words, BUDGETS[0], order=SHUFFLED):
        for one in expected.gradients:
            assert all(".lora_" in name and bool(one[name].any()) for name in one)
        assert_close(outcome, expected)


@pytest.mark.parametrize(
    "words", [("model.lora.rank=3",), (), ("model.dtype=bfloat16",)], ids=["LoRA", "", "bfloat16"]
)
def test_ranks_that_gather_once_per_update_have_the_gradients_of_others(ranks, words):
    # Adam's first steps have one size whatever the gradient's: each update amplifies rounding.
    words = (*HARDER, "train.updates_per_iteration=3", BUDGETS[0], *words)
    expected = ranks.train(*words)
    for outcome, other in zip(ranks.train(*words, "train.reshard=false"), expected, strict=True):
        assert len(outcome.gradients) == 3 and outcome.owned_bytes == other.owned_bytes
        assert_close(outcome, other)


class Counted(TorchDispatchMode):
    gathers = reductions = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.gathers += "allgather" in str(operator)
        self.reductions += "reduce_scatter" in str(operator)
        return operator(*args, **(kwargs or {}))


def gathers_and_reductions(ranks):
    """One update has three micro-batches. Gathered weights are dropped, or kept to its end."""
    found = []
    for reshard in ("true", "false"):
        words = [*own_training.BASE, "model.path=tiny", f"train.reshard={reshard}"]
        spec = resolve(load_config(words=words)).for_training
        learner = Learner(load_policy("tiny"), spec, copy.copy(ranks))
        with Counted() as counted:
            for _ in range(3):
                learner.accumulate(EMPTY)
            learner.step(num_completions=1, num_tokens=1)
        found.append((counted.gathers, counted.reductions))
    return len(learner.policy.blocks), *found


def test_kept_weights_are_gathered_and_summed_once_per_update(ranks):
    for layers, dropped, kept in ranks.each_does(gathers_and_reductions):
        assert kept == (layers + 1, layers + 1)
        # The root's weights stay from forward to backward.
        assert dropped == (3 * (2 * layers + 1), 3 * (layers + 1))


@pytest.mark.parametrize("lora", [(), LORA["all layers"]])
def test_weights_stored_in_bfloat16_are_sharded_without_loss(ranks, lora, tmp_path):
    stored = AutoModelForCausalLM.from_pretrained(own_training.MODEL, dtype=torch.bfloat16)
    stored.save_pretrained(tmp_path)
    words = (f"model.path={tmp_path}", *HARDER, *lora)
    expected = train(*words)
    for outcome in ranks.train(*words):
        assert all(g.dtype == torch.float32 for got in outcome.gradients for g in got.values())
        assert_close(outcome, expected, ())


@pytest.mark.parametrize(
    ("words", "order"),
    [
        ((), SHUFFLED),
        # On the CPU the same memory, but the same code: gathered from there, stepped on there.
        (("train.offload=[reference, old, optimizer]",), None),
    ],
    ids=["order of arrival", "offloading"],
)
def test_in_deterministic_mode_no_bit_depends_on(ranks, words, order):
    budget = "train.max_tokens_per_micro_batch=30"
    expected, got = ranks.train(*HARD, budget), ranks.train(*HARD, budget, *words, order=order)
    for a, b in zip(expected, got, strict=True):
        assert a.metrics == b.metrics
        rows = [[x.input_ids.tolist() for x in outcome.batches] for outcome in (a, b)]
        assert rows[0] == rows[1]
        for x, y in zip(a.gradients, b.gradients, strict=True):
            assert all(torch.equal(x[name], y[name]) for name in x)


def test_all_ranks_drop_an_update_that_is_not_finite_on_one(ranks):
    poisoned = copy.deepcopy(GROUPS)
    poisoned[1].rollout_logprobs[:] = -np.inf  # the correction's weight: infinite
    outcomes = ranks.train(
        "algorithm.importance_sampling_correction=truncate",
        "algorithm.importance_sampling_cap=1e38",
        "train.updates_per_iteration=2",
        groups=poisoned,
    )
    for outcome in outcomes:
        assert len(outcome.gradients) == 1  # of the second update alone
        assert outcome.metrics["num_updates_not_finite"] == 1
        assert all(bool(g.isfinite().all()) for g in outcome.gradients[0].values())


@pytest.mark.parametrize("lora", [(), ("model.lora.rank=4",)], ids=["all weights", "lora"])
def test_each_rank_owns_half_of_weights_gradients_and_optimizer_state(ranks, lora):
    outcomes = ranks.train(*lora)
    num_trained = sum(gradient.numel() for gradient in outcomes[0].gradients[0].values())
    for outcome in outcomes:  # 4 numbers of 4 bytes per weight; rows are cut as evenly as possible
        assert outcome.owned_bytes == pytest.approx(16 * num_trained / NUM_RANKS, rel=0.05)
    if lora:  # frozen weights are sharded too
        adapter_bytes = outcomes[0].all_bytes - ranks.train()[0].all_bytes
        assert adapter_bytes == pytest.approx(4 * num_trained / NUM_RANKS, rel=0.05)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_number = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(NUM_RANKS + 1))

    def forward(self, hidden, number):
        return self.of_number[number](hidden)


class OneExpertEach(nn.Module):
    """Each token uses only the expert of its number; no token uses the last one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.experts = nn.Embedding(NUM_RANKS, 3), Experts()

    def forward(self, token):
        chosen = self.experts(self.embedding(torch.tensor([token])), token)
        return chosen.square().sum()


def train_own_expert(ranks):
    own = OneExpertEach()
    ranks.shard(own, [own.experts], dtype=torch.float32, offload=False)
    for step in (0, 0, 1):
        own((ranks.rank + step) % NUM_RANKS).backward()
    return [whole(cast(Tensor, weight.grad)) for weight in own.parameters()]


def test_sinks_are_gathered_with_their_layer(ranks, tmp_path, monkeypatch):
    changes = {"vocab_size": own_workers.VOCABULARY}
    tiny_model("gpt_oss", None, SPREAD, **changes).save_pretrained(tmp_path)
    monkeypatch.setattr(own_training, "MODEL", str(tmp_path))
    (expected,) = train("runtime.schedule=sync").gradients
    assert all(expected[f"model.layers.{layer}.self_attn.sinks"].any() for layer in range(3))
    for outcome in ranks.train("runtime.schedule=sync"):
        assert largest_gradient_gap(outcome.gradients[0], expected) <= 1e-5


def test_a_weight_that_one_rank_does_not_use_gets_the_other_ranks_gradient(ranks):
    """Every rank sums the gradients of the same weights, in the same order."""
    alone = OneExpertEach()
    for token in (0, 1) * 3:
        alone(token).backward()
    for gradients in ranks.each_does(train_own_expert):
        for (name, weight), got in zip(alone.named_parameters(), gradients, strict=True):
            expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
            assert torch.allclose(got, expected, rtol=1e-6), name


@pytest.fixture
def learner():
    config = load_config(words=["train.learning_rate=1e-2", "train.max_grad_norm=1.0"])
    return Learner(load_policy("tiny"), resolve(config).for_training)


def step_alone(learner, iteration):
    """The iteration's only update, and its metrics."""
    learner.step(num_completions=1, num_tokens=1)
    metrics = learner.metrics()
    learner.begin_iteration(iteration + 1)
    return metrics


@pytest.mark.parametrize(("what", "poison"), [("gradient", math.inf), ("loss", math.nan)])
def test_a_loss_or_gradient_that_is_not_finite_is_dropped_and_counted(learner, what, poison):
    policy = learner.policy
    before = policy.weights_sha256()
    parameter = next(policy.model.parameters())
    parameter.grad.view(-1)[0] = poison if what == "gradient" else 1.0
    learner._loss += poison if what == "loss" else 0.0
    assert step_alone(learner, 0)["num_updates_not_finite"] == 1
    assert policy.weights_sha256() == before
    assert learner.policy_version == 1  # everything stays in step
    # The next update is a whole one: nothing of the bad one is left.
    parameter.grad.view(-1)[0] = 1.0
    assert step_alone(learner, 1)["num_updates_not_finite"] == 0
    assert policy.weights_sha256() != before
    assert all(bool(p.isfinite().all()) for p in policy.model.parameters())
