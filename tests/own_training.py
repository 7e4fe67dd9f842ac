"""Train workers that a test runs itself: hand-made groups cross a real ring into one in this
process (`train`), or into two processes on the CPU, over Gloo (the fixture `ranks`)."""

import faulthandler
import multiprocessing
import os
import sys
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

import own_workers
from easyrl.algorithm.losses import LossInputs
from easyrl.config import load_config
from easyrl.config.spec import TrainSpec
from easyrl.devices import LOOPBACK, network_environment
from easyrl.model.sharding import TrainRanks, own_part, whole
from easyrl.runtime.resolve import resolve
from easyrl.types import MicroBatch
from easyrl.workers.train import TrainWorker
from tiny_models import tiny_model

torch.set_num_threads(1)

NUM_GROUPS = 6
NUM_RANKS = 2
TEMPERATURE = 0.8
MODEL = ""
BASE = (
    f"train.prompts_per_iteration={NUM_GROUPS}",
    f"rollout.num_generations={own_workers.NUM_GENERATIONS}",
    f"rollout.max_completion_length={own_workers.LONGEST_COMPLETION}",
    f"rollout.temperature={TEMPERATURE}",
    f"data.max_prompt_length={own_workers.LONGEST_PROMPT}",
    "train.max_grad_norm=1e9",
    "train.learning_rate=0.02",
    "train.lr_scheduler_type=constant",
)
SHUFFLED = (3, 5, 0, 4, 2, 1)
HARDER = ("algorithm.beta=0.3", "train.updates_per_iteration=2", "algorithm.loss_type=dapo")


def make_group(index):
    """Ragged, with masked tokens and completions of advantage 0: group 4 has no others, and group 5
    only one."""
    group = own_workers.make_group(own_workers.FIRST + index, policy_version=0)
    group.advantages[: (0, 1, 0, 1, 3, 2)[index]] = 0.0
    group.truncated[1] = index == 3
    group.rollout_logprobs[:] *= 4
    return group


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    changes = {"vocab_size": own_workers.VOCABULARY, "num_hidden_layers": 2}
    tiny_model("qwen3", **changes).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "MODEL", str(folder))
        yield


GROUPS = [make_group(index) for index in range(NUM_GROUPS)]


@dataclass
class Trained:
    spec: TrainSpec
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    batches: list[list[tuple[MicroBatch, LossInputs]]] = field(default_factory=lambda: [[]])
    weights_before: list[dict[str, Tensor]] = field(default_factory=list)  # and after the last
    metrics: dict[str, float] = field(default_factory=dict)


def state_of(policy):
    return {name: weight.detach().clone() for name, weight in policy.named_weights()}


def shake(policy, scale):
    """Move the policy, which may be sharded, away from its reference."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in policy.model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if isinstance(weight, DTensor):
                noise = distribute_tensor(noise, weight.device_mesh, weight.placements)
            weight.add_(noise, alpha=scale)


def whole_gradients(policy):
    named = policy.model.named_parameters()
    return {n: whole(cast(Tensor, p.grad)).clone() for n, p in named if p.requires_grad}


def train(*words, order=None):
    config = load_config(words=[f"model.path={MODEL}", *BASE, *words])
    ring = own_workers.make_ring(NUM_GROUPS)
    theirs, ours = multiprocessing.Pipe()
    try:
        worker = TrainWorker(own_workers.settings_on_cpu("train-0", config), ring.attach(0), ours)
        arrivals = [GROUPS[index] for index in order or range(NUM_GROUPS)]
        return train_iteration(worker, ring.attach(1), arrivals)
    finally:
        ring.close()
        theirs.close()
        ours.close()


def train_iteration(worker, producer, arrivals):
    """Groups arrive one for each wait. Steps are plain descent: Adam's first steps have the same
    size for any gradient, which amplifies rounding."""
    learner, trained = worker.learner, Trained(worker.spec)
    loss_inputs = learner._loss_inputs

    def arrive():
        assert producer.put(arrivals.pop(0)), "the ring is full"

    def note_batch(batch):
        inputs = loss_inputs(batch)
        trained.batches[-1].append((batch, inputs))
        return inputs

    def descend():
        trained.gradients.append(whole_gradients(learner.policy))
        with torch.no_grad():
            for weight in learner.policy.trained_parameters():
                own_part(weight).sub_(own_part(cast(Tensor, weight.grad)), alpha=0.02)
        trained.weights_before.append(state_of(learner.policy))
        trained.batches.append([])

    worker._wait_for_group = arrive
    learner._loss_inputs = note_batch
    learner.optimizer.step = descend
    shake(learner.policy, 0.02)
    trained.weights_before.append(state_of(learner.policy))
    event = worker._train(own_workers.ITERATION)
    trained.metrics = dict(event.metrics)
    is_reader = worker.is_first_rank  # of the ring
    assert event.groups_trained == (NUM_GROUPS if is_reader else 0) and is_reader != bool(arrivals)
    assert event.policy_version == worker.spec.batches.updates_per_iteration
    trained.batches.pop()
    return trained


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
    spec = resolve(load_config(words=[*BASE, *words])).for_training
    worker = TrainWorker(replace(settings, spec=spec), port, control)
    learner, step = worker.learner, worker.learner.optimizer.step
    accumulate, first = learner.accumulate, dict[str, Tensor]()
    sums_once = spec.optimizer.reshard is False

    def note_first(batch):
        accumulate(batch)
        if not sums_once:
            first.update(first or whole_gradients(learner.policy))

    learner.accumulate = note_first
    trained = train_iteration(worker, producer, arrivals)
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
    faulthandler.enable(file=2)  # a fault in native code says where
    os.environ.update(network_environment(LOOPBACK))
    device = torch.device("cpu")
    ranks = TrainRanks.join(store, rank=rank, size=NUM_RANKS, device=device, timeout_seconds=120)
    TrainWorker._join_ranks = lambda self: ranks
    where = {"owner_id": rank, "rank": rank, "store": store, "pipes": pipes}
    where["num_train_ranks"] = NUM_RANKS
    settings = own_workers.settings_on_cpu(f"train-{rank}", load_config(), **where)
    port, producer = ring.attach(rank), ring.attach(NUM_RANKS)
    while (case := orders.recv()) is not None:
        is_work = callable(case)
        orders.send(case(ranks) if is_work else run_case(case, settings, port, producer))
    os._exit(0)


class Ranks:
    def __init__(self, ring, store, context):
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
        outcomes = self.each_does(((f"model.path={MODEL}", *words), arrivals))
        assert own_workers.num_free(self.ring) == NUM_GROUPS
        return outcomes

    def each_does(self, work):
        for each in self.orders:
            each.send(work)
        return [each.recv() for each in self.orders]


@pytest.fixture(scope="module")
def ranks(model, tmp_path_factory):
    ring = own_workers.make_ring(NUM_GROUPS, num_owners=NUM_RANKS + 1)
    with own_workers.fork_server() as context:
        started = Ranks(ring, str(tmp_path_factory.mktemp("store") / "store"), context)
        try:
            yield started
        finally:
            for process in started.processes:
                process.kill()
                process.join()
    ring.close()
