"""The train worker's gradient: the same in any order of arrival, and of the right weights.

Hand-made groups cross a real ring into a real train worker."""

import multiprocessing
import sys
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from test_logprobs import plain_logprobs
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

import own_workers
from easyrl import devices
from easyrl.algorithm.losses import LossInputs, loss_denominator, policy_loss
from easyrl.config import Config, load_config
from easyrl.model import tri_model
from easyrl.model.policy import Policy
from easyrl.model.sharding import own_part, whole
from easyrl.model.tri_model import OtherWeights
from easyrl.types import MicroBatch
from easyrl.workers.train import TrainWorker
from own_workers import NUM_GENERATIONS, VOCABULARY, make_ring, settings_on_cpu
from tiny_models import largest_gradient_gap, plain_model, tiny_model

torch.set_num_threads(1)

NUM_GROUPS = 6
TEMPERATURE = 0.8
MODEL = ""
BASE = (
    f"train.prompts_per_iteration={NUM_GROUPS}",
    f"rollout.num_generations={NUM_GENERATIONS}",
    f"rollout.max_completion_length={own_workers.LONGEST_COMPLETION}",
    f"rollout.temperature={TEMPERATURE}",
    f"data.max_prompt_length={own_workers.LONGEST_PROMPT}",
    "train.max_grad_norm=1e9",
    "train.learning_rate=0.02",
    "train.lr_scheduler_type=constant",
)
SHUFFLED = (3, 5, 0, 4, 2, 1)


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
    """`MODEL` is the folder of a tiny random model."""
    folder = tmp_path_factory.mktemp("model")
    changes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2}
    tiny_model("qwen3", **changes).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "MODEL", str(folder))
        yield


GROUPS = [make_group(index) for index in range(NUM_GROUPS)]


@dataclass
class Trained:
    config: Config
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
    ring = make_ring(NUM_GROUPS)
    theirs, ours = multiprocessing.Pipe()
    try:
        worker = TrainWorker(settings_on_cpu("train-0", config), ring.attach(0), ours)
        arrivals = [GROUPS[index] for index in order or range(NUM_GROUPS)]
        return train_iteration(worker, ring.attach(1), arrivals)
    finally:
        ring.close()
        theirs.close()
        ours.close()


def train_iteration(worker, producer, arrivals):
    """Groups arrive one for each wait. Steps are plain descent: Adam's first steps have the same
    size for any gradient, which amplifies rounding."""
    learner, trained = worker.learner, Trained(worker.config)
    loss_inputs = learner._loss_inputs

    def arrive():
        assert producer.put(arrivals.pop(0), 0.0), "the ring is full"

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
    assert event.policy_version == worker.config.train.updates_per_iteration
    trained.batches.pop()
    return trained


def sequence_logprobs(model, prompt, completion):
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return plain_logprobs(logits, ids[0, len(prompt) :], TEMPERATURE)


def gradient_by_definition(trained, update):
    """Sequence by sequence, with three separate models, nothing left out."""
    config = trained.config
    weights = (trained.weights_before[update], trained.weights_before[0], None)
    policy, old, reference = (plain_model(MODEL, each, torch.float64) for each in weights)
    per_update = NUM_GROUPS // config.train.updates_per_iteration
    groups = GROUPS[update * per_update : (update + 1) * per_update]
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        prompt = group.prompt_ids.tolist()
        for number, where in enumerate(group.completion_slices()):
            completion = group.completion_ids[where].tolist()
            is_masked = bool(
                config.algorithm.mask_truncated_completions and group.truncated[number]
            )
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
            total = total + policy_loss(inputs, config).loss
    denominator = loss_denominator(
        config, num_completions=len(groups) * NUM_GENERATIONS, num_tokens=num_tokens
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
WAYS = [
    (("train.max_tokens_per_micro_batch=21",), None),
    (("train.max_tokens_per_micro_batch=70", "model.attention=repeated"), SHUFFLED),
    (("runtime.schedule=sync", "train.offload=[old]"), SHUFFLED),
    (("runtime.deterministic=true", "train.max_tokens_per_micro_batch=45"), SHUFFLED),
    (("train.offload=[reference, old]",), None),
]


@pytest.mark.parametrize("num_updates", [1, 2, 3])
@pytest.mark.parametrize("loss", LOSSES)
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
    policy = Policy.load(MODEL)
    weight = next(policy.model.parameters())
    policy.device = torch.device("meta")  # stands for an accelerator
    monkeypatch.setattr(tri_model, "is_sharded", lambda parameter: True)
    other = OtherWeights(policy, offload=False)
    shake(policy, 0.1)
    own, seen = weight.detach().clone(), []
    monkeypatch.setattr(devices, "synchronize", lambda device: seen.append(weight.detach().clone()))
    with other.in_place():
        others = weight.detach().clone()
    assert not torch.equal(own, others) and torch.equal(weight, own)
    torch.testing.assert_close(seen, [own, others], rtol=0, atol=0)
