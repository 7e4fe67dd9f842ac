"""Groups, a ring and settings for workers that a test runs itself."""

import dataclasses
import multiprocessing
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from easyrl.channels.ring_buffer import RingBuffer, RingLayout
from easyrl.config import Config, load_config
from easyrl.layout.tree import TokenTree
from easyrl.runtime.fleet import Fleet
from easyrl.runtime.local_launcher import LocalLauncher
from easyrl.runtime.resolve import resolve
from easyrl.types import RolloutGroup
from easyrl.workers.settings import WorkerSettings

ITERATION, VERSION, FIRST = 4, 9, 40
VOCABULARY = 31
NUM_GENERATIONS = 3
LONGEST_PROMPT, LONGEST_COMPLETION = 9, 12
REINFORCE = """
from easyrl.algorithm.losses import LossOutputs

def loss(inputs):
    per_token = -inputs.advantages * inputs.logprobs * inputs.loss_mask
    likely = inputs.logprobs.detach().exp() * inputs.loss_mask
    return LossOutputs(per_token.sum(), {"probability": likely.sum()})
"""


def make_group(index, **changes):
    """A group that depends on its prompt's index alone, with masked tokens."""
    rng = np.random.default_rng(index)
    lengths = rng.integers(1, LONGEST_COMPLETION + 1, NUM_GENERATIONS)
    tokens = int(lengths.sum())
    group = RolloutGroup(
        iteration=ITERATION,
        policy_version=VERSION,
        group_index=index - FIRST,
        prompt_index=index,
        prompt_ids=rng.integers(3, VOCABULARY, rng.integers(1, LONGEST_PROMPT + 1), dtype=np.int32),
        completion_lengths=lengths.astype(np.int32),
        completion_ids=rng.integers(3, VOCABULARY, tokens, dtype=np.int32),
        rollout_logprobs=-rng.random(tokens, dtype=np.float32),
        loss_mask=rng.random(tokens) < 0.8,
        rewards=rng.random(NUM_GENERATIONS, dtype=np.float32),
        advantages=rng.standard_normal(NUM_GENERATIONS, dtype=np.float32),
        truncated=np.zeros(NUM_GENERATIONS, dtype=np.bool_),
        node_lengths=np.zeros(0, np.int32),
        node_parents=np.zeros(0, np.int32),
    )
    group = dataclasses.replace(group, **changes)
    if len(group.node_lengths):
        return group
    tree = TokenTree.of_group(len(group.prompt_ids), group.completion_lengths.tolist())
    nodes = {"node_lengths": tree.lengths, "node_parents": tree.parents}
    arrays = {name: array.astype(np.int32) for name, array in nodes.items()}
    return dataclasses.replace(group, **arrays)


def assert_same(got, expected):
    for field in dataclasses.fields(RolloutGroup):
        one, other = (getattr(group, field.name) for group in (got, expected))
        np.testing.assert_array_equal(one, other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)


def zeroed(group, which):
    advantages = group.advantages.copy()
    advantages[which] = 0.0
    return dataclasses.replace(group, advantages=advantages)


def make_ring(num_slots, num_owners=2, num_groups=64):
    limits = NUM_GENERATIONS, LONGEST_PROMPT, LONGEST_COMPLETION
    return RingBuffer(RingLayout(num_slots, *limits, num_owners, num_groups, 5))


def num_free(ring):
    free = ring.free_pipe.drain()
    for slot in free:
        ring.free_pipe.send(slot)
    assert len({*free}) == len(free)
    return len(free)


def loss_config(**algorithm):
    """Clipped at 0.8 and 1.3, corrected at most by 3."""
    high = 5.0 if algorithm.get("loss_type") == "cispo" else 0.3
    algorithm = {"epsilon_high": high, "importance_sampling_correction": "none", **algorithm}
    return Config.model_validate({"algorithm": algorithm, "rollout": {"max_completion_length": 8}})


def loss_options(**algorithm):
    return resolve(loss_config(**algorithm)).loss


def settings_on_cpu(name, config, **changes):
    spec = resolve(config)
    settings = {
        "spec": spec.for_rollout if name.startswith("rollout") else spec.for_training,
        "timeout_seconds": spec.faults.timeout_seconds,
        "is_deterministic": spec.schedule.is_deterministic,
        "owner_id": 0,
        "device": "cpu",
        "weights_cross_on_cpu": True,
        "num_threads": 1,
        "max_concurrent_groups": 1,
        "store": "",
        "log_file": None,
    }
    return WorkerSettings(name=name, **(settings | changes))


@contextmanager
def fork_server():
    """A context whose processes are copies of one that has imported torch, and that is gone
    afterwards: other tests look for children of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "hypothesis", "easyrl.workers.train"])
    try:
        yield context
    finally:
        forkserver._forkserver._stop()


def spawned_settings(placement):
    spawned = {}

    def spawn(name, target, settings, *_, **__):
        spawned[name] = settings
        return SimpleNamespace(name=name)

    supervisor = SimpleNamespace(spawn=spawn)
    with LocalLauncher(placement) as launcher:
        spec = resolve(load_config())
        Fleet(spec, placement, supervisor, launcher, log_of=Path, notify=lambda event: None)
    return spawned
