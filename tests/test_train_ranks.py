"""Two train ranks have one rank's gradients.

Hand-made groups cross a real ring into two real train workers (processes) on the CPU, over Gloo."""

import copy
import multiprocessing
import os
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest
import test_updates
import torch
from test_updates import BASE, GROUPS, LOSSES, NUM_GROUPS, SHUFFLED, model, train, whole_gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from easyrl.config import load_config
from easyrl.devices import LOOPBACK, network_environment
from easyrl.model.policy import Policy
from easyrl.model.sharding import TrainRanks, own_part, whole
from easyrl.types import MicroBatch
from easyrl.workers.learner import Learner
from easyrl.workers.packing import EMPTY
from easyrl.workers.train import TrainWorker
from own_workers import make_ring, num_free, settings_on_cpu
from tiny_models import largest_gradient_gap

torch.set_num_threads(1)

__all__ = ["model"]  # a fixture

NUM_RANKS = 2
BUDGETS = ("train.max_tokens_per_micro_batch=21", "train.max_tokens_per_micro_batch=4096")
FEW = ("grpo", "dapo, kl")
"""Tested with any number of updates. The other losses, which `test_updates` tests on one rank, have
them only in the long tests."""
HARDER = ("algorithm.beta=0.3", "train.updates_per_iteration=2", "algorithm.loss_type=dapo")
HARD = ("algorithm.beta=0.3", "train.updates_per_iteration=2", "runtime.deterministic=true")


@dataclass
class Outcome:
    gradients: list[dict[str, Tensor]]
    metrics: dict[str, float]
    batches: list[MicroBatch]
    owned_bytes: int  # of trained weights, their gradients and optimizer state
    all_bytes: int  # frozen weights included
    after_one_step: dict[str, Tensor]  # gradients, not normalised yet


def run_case(case, settings, port, producer):
    words, arrivals = case
    theirs, control = multiprocessing.Pipe()
    config = load_config(words=[*BASE, *words])
    worker = TrainWorker(replace(settings, config=config), port, control)
    learner, step = worker.learner, worker.learner.optimizer.step
    accumulate, first = learner.accumulate, dict[str, Tensor]()
    sums_once = config.train.reshard is False

    def note_first(batch):
        accumulate(batch)
        if not sums_once:
            first.update(first or whole_gradients(learner.policy))

    learner.accumulate = note_first
    trained = test_updates.train_iteration(worker, producer, arrivals)
    step()
    theirs.close()
    control.close()
    parameters = learner.policy.trained_parameters()
    states = [t for state in learner.optimizer.state.values() for t in state.values()]
    gradients = [cast(Tensor, p.grad) for p in parameters]
    return Outcome(
        trained.gradients,
        trained.metrics,
        [batch for update in trained.batches for batch, _ in update],
        owned_bytes=sum(own_part(t).nbytes for t in (*parameters, *gradients, *states)),
        all_bytes=sum(own_part(p).nbytes for p in learner.policy.model.parameters()),
        after_one_step=first,
    )


def rank_main(rank, store, ring, pipes, orders):
    os.environ.update(network_environment(LOOPBACK))
    device = torch.device("cpu")
    ranks = TrainRanks.join(store, rank=rank, size=NUM_RANKS, device=device, timeout_seconds=120)
    TrainWorker._join_ranks = lambda self: ranks
    where = {"owner_id": rank, "rank": rank, "store": store, "pipes": pipes}
    where["num_train_ranks"] = NUM_RANKS
    settings = settings_on_cpu(f"train-{rank}", load_config(), **where)
    port, producer = ring.attach(rank), ring.attach(NUM_RANKS)
    while (case := orders.recv()) is not None:
        is_work = callable(case)
        orders.send(case(ranks) if is_work else run_case(case, settings, port, producer))
    os._exit(0)


class Ranks:
    """Both processes; they run one case after another."""

    def __init__(self, ring, store):
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.ring, self.orders, self.processes = ring, [], []
        for rank, pipe in enumerate((ours, theirs)):
            order, end = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, store, ring, (pipe,), end))
            process.start()
            self.orders.append(order)
            self.processes.append(process)
            pipe.close()
            end.close()

    def train(self, *words, order=None, groups=GROUPS):
        arrivals = [groups[index] for index in order or range(NUM_GROUPS)]
        outcomes = self.each_does(((f"model.path={test_updates.MODEL}", *words), arrivals))
        assert num_free(self.ring) == NUM_GROUPS
        return outcomes

    def each_does(self, work):
        for each in self.orders:
            each.send(work)
        return [each.recv() for each in self.orders]


@pytest.fixture(scope="module")
def ranks(model, tmp_path_factory):
    ring = make_ring(NUM_GROUPS, num_owners=NUM_RANKS + 1)
    started = Ranks(ring, str(tmp_path_factory.mktemp("store") / "store"))
    yield started
    for order in started.orders:
        order.send(None)
    for process in started.processes:
        process.join(10)
        process.kill()
    ring.close()


def assert_close(got, expected, names=("kl", "loss", "grad_norm"), rel=1e-4):
    for gradients, others in zip(got.gradients, expected.gradients, strict=True):
        if any(bool(gradient.any()) for gradient in others.values()):
            assert largest_gradient_gap(gradients, others) <= 1e-5
        else:
            assert not any(bool(gradient.any()) for gradient in gradients.values())
    for name in names:
        close = pytest.approx(expected.metrics[name], rel=rel, abs=1e-5, nan_ok=True)
        assert got.metrics[name] == close, name


@pytest.mark.parametrize(
    ("loss", "num_updates"),
    [
        pytest.param(loss, num, marks=() if num == 2 or loss in FEW else pytest.mark.long)
        for loss in LOSSES
        for num in (1, 2, 6)
    ],
)
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
        config = load_config(words=[*BASE, "model.path=tiny", f"train.reshard={reshard}"])
        learner = Learner(Policy.load("tiny"), config, copy.copy(ranks))
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
    stored = AutoModelForCausalLM.from_pretrained(test_updates.MODEL, dtype=torch.bfloat16)
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


def test_a_weight_that_one_rank_does_not_use_gets_the_other_ranks_gradient(ranks):
    """Every rank sums the gradients of the same weights, in the same order."""
    alone = OneExpertEach()
    for token in (0, 1) * 3:
        alone(token).backward()
    for gradients in ranks.each_does(train_own_expert):
        for (name, weight), got in zip(alone.named_parameters(), gradients, strict=True):
            expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
            assert torch.allclose(got, expected, rtol=1e-6), name
