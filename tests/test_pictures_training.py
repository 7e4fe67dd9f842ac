"""Training on pictures: how often the tower runs, and what becomes of its weights."""

import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from easyrl.config import load_config
from easyrl.config.model import LoraConfig
from easyrl.data.hub import resolve_model
from easyrl.layout.row import EMPTY, Rollout, pack
from easyrl.model.loading import load_policy
from easyrl.model.pictures import tower_parameters
from easyrl.model.saving import save_policy
from easyrl.model.sharding import whole
from easyrl.model.towers import find_kept_parts
from easyrl.runtime.resolve import resolve
from easyrl.types import Picture
from easyrl.workers.learner import Learner
from multimodal_models import same_bits, stored
from own_training import model, ranks
from picture_models import (
    PLACEHOLDER,
    in_prompt,
    num_placeholders,
    picture,
    picture_folder,
    picture_input,
)
from tiny_models import largest_gradient_gap

__all__ = ["model", "ranks"]  # fixtures

NUM_GROUPS = 8
NUM_GENERATIONS = 4
HARDER = ("algorithm.beta=0.05", "train.updates_per_iteration=2")


def groups_of(family, num_of_text=0):
    """The rollouts of each of 8 groups, each with a picture of its own, but for the last ones."""
    random = np.random.default_rng(5)

    def draw(number):
        return random.integers(3, 88, number).astype(np.int32)

    groups = []
    for index in range(NUM_GROUPS):
        prompt = draw(7)
        shown = list[Picture]()
        if index < NUM_GROUPS - num_of_text:
            shown = [picture(index)]
            number = num_placeholders(family, picture(index))
            placeholders = np.full(number, PLACEHOLDER, np.int32)
            prompt = np.concatenate([prompt[:3], placeholders, prompt[3:]])
        group = []
        for number in range(NUM_GENERATIONS):
            length = int(random.integers(2, 9))
            rollout = Rollout(
                prompt_index=index,
                prompt_ids=prompt,
                completion_ids=draw(length),
                rollout_logprobs=np.full(length, -4.0, np.float32),
                loss_mask=np.ones(length, np.bool_),
                advantage=(-1.0) ** number,
                pictures=in_prompt(shown, prompt),
            )
            group.append(rollout)
        groups.append(group)
    return groups


def learner_for(folder, family, vision, *words, ranks=None):
    pictures = picture_input(family, is_trained=vision == "trained")
    policy = load_policy(folder, pictures=pictures)
    config = load_config(words=[f"model.path={folder}", f"model.vision={vision}", *words])
    spec = resolve(config).with_pictures(True)
    return Learner(policy, spec.for_training, ranks)


def train(learner, batches):
    """Train an update; return its gradients, without the optimizer's step."""
    learner.begin_iteration(0)
    for rollouts in batches:
        learner.accumulate(pack(rollouts) if rollouts else EMPTY)
    learner.tri_model.finish_gradients(EMPTY)
    return {
        name: whole(parameter.grad).clone()
        for name, parameter in learner.policy.model.named_parameters()
        if parameter.grad is not None
    }


def train_share(make_learner, shares, ranks):
    """Train an update on this rank, with its micro-batches."""
    return train(make_learner(ranks=copy.copy(ranks)), shares[ranks.rank])


def names_in_tower(model):
    of_tower = set(tower_parameters(model))
    return {name for name, parameter in model.named_parameters() if parameter in of_tower}


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm", "gemma3"])
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_the_tower_runs_once_per_group_however_it_is_split(tmp_path, family, vision):
    folder = picture_folder(tmp_path, family)
    groups = groups_of(family)
    rollouts = [rollout for group in groups for rollout in group]
    learner = learner_for(folder, family, vision)
    counted = learner.policy.vision.num_encoded
    whole = train(learner, [rollouts])
    assert learner.policy.vision.num_encoded - counted == NUM_GROUPS
    split = learner_for(folder, family, vision)
    # Five rollouts each: nearly all groups are divided.
    batches = [rollouts[start : start + 5] for start in range(0, len(rollouts), 5)]
    counted = split.policy.vision.num_encoded
    of_split = train(split, batches)
    assert split.policy.vision.num_encoded - counted == NUM_GROUPS
    assert largest_gradient_gap(of_split, whole) <= 1e-4
    recomputed = learner_for(folder, family, vision, "train.activation_checkpointing=true")
    assert largest_gradient_gap(train(recomputed, [rollouts]), whole) <= 1e-5
    in_tower = names_in_tower(learner.policy.model)
    assert in_tower and (in_tower <= whole.keys()) == (vision == "trained")
    if vision == "trained":
        assert sum(float(whole[name].norm()) for name in in_tower) > 0.0
        return
    # Known pictures, and the reference and the old policy, need no further run.
    harder = learner_for(folder, family, vision, *HARDER)
    for number in range(2):
        counted = harder.policy.vision.num_encoded
        harder.begin_iteration(number)
        for _ in range(2):
            harder.accumulate(pack(rollouts))
            harder.step(num_completions=len(rollouts), num_tokens=100)
        expected = NUM_GROUPS if number == 0 else 0
        assert harder.policy.vision.num_encoded - counted == expected


SHARES = {
    "a divided group": ((0, 1, 2), (2, 3)),
    "only text on the second rank": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "nothing on the second rank": ((0, 4, 5), ()),
}
"""The groups of each of two ranks, of which the last four have no pictures. A group that both have
is divided."""


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl",
        pytest.param("gemma3", marks=pytest.mark.long),
        pytest.param("qwen3_5", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("share", SHARES)
def test_two_ranks_have_the_gradients_of_one(ranks, tmp_path, family, vision, share):
    """Also of the tower, which a rank without pictures does not run."""
    folder = picture_folder(tmp_path, family)
    groups = groups_of(family, num_of_text=4)
    first, second = SHARES[share]
    both = set(first) & set(second)
    shares = []
    for number, own in enumerate((first, second)):
        batches = []
        for index in own:
            group = groups[index]
            if index in both:
                group = group[number::2]
            batches.append(group)
        batches += [[]] * (len(first) - len(own))  # ranks run equally many micro-batches
        shares.append(batches)
    rollouts = [rollout for index in sorted({*first, *second}) for rollout in groups[index]]
    alone = learner_for(folder, family, vision)
    expected = train(alone, [rollouts])
    in_tower = names_in_tower(alone.policy.model)
    assert in_tower and (in_tower <= expected.keys()) == (vision == "trained")
    if vision == "trained":
        assert any(bool(expected[name].any()) for name in in_tower)
    for words in ((), ("train.reshard=false",), ("train.activation_checkpointing=true",)):
        make_learner = partial(learner_for, folder, family, vision, *words)
        for gradients in ranks.each_does(partial(train_share, make_learner, shares)):
            assert largest_gradient_gap(gradients, expected) <= 1e-5


def test_reference_and_old_policy_have_their_own_trained_tower(tmp_path):
    folder = picture_folder(tmp_path, "qwen2_5_vl")
    rollouts = [rollout for group in groups_of("qwen2_5_vl") for rollout in group]
    learner = learner_for(folder, "qwen2_5_vl", "trained", *HARDER, "train.learning_rate=0.1")
    learner.begin_iteration(0)
    batch = pack(rollouts)
    first = learner.tri_model.logprobs(batch, policy_is_old=True)
    assert torch.equal(first.logprobs, first.ref_logprobs)
    learner.policy.vision.drop_batches()
    learner.accumulate(batch)
    learner.step(num_completions=len(rollouts), num_tokens=100)
    counted = learner.policy.vision.num_encoded
    second = learner.tri_model.logprobs(batch, policy_is_old=False)
    assert learner.policy.vision.num_encoded - counted == 3 * NUM_GROUPS
    assert torch.equal(second.old_logprobs, first.logprobs)
    assert torch.equal(second.ref_logprobs, first.logprobs)
    assert not torch.equal(second.logprobs, first.logprobs)


@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("rank", [None, 2])
def test_a_saved_model_has_every_weight(tmp_path, vision, rank):
    family = "qwen2_5_vl"
    source = tmp_path / "source"
    picture_folder(source, family)
    (source / "preprocessor_config.json").write_text('{"patch_size": 4}')
    # The tower is stored in another dtype than the text model.
    weights = load_file(source / "model.safetensors")
    narrowed = {n: w.bfloat16() if "visual" in n else w for n, w in weights.items()}
    from safetensors.torch import save_file

    save_file(narrowed, source / "model.safetensors", {"format": "pt"})
    before = stored(source)
    pictures = picture_input(family, is_trained=vision == "trained")
    policy = load_policy(str(source), pictures=pictures)
    kept = find_kept_parts(str(source), policy.model)
    if rank is not None:
        policy.add_adapter(LoraConfig(rank=rank), path=str(source), seed=0)
    trained = policy.trained_parameters()
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.01)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    target = tmp_path / "model"
    save_policy(policy, target, tokenizer, kept=kept)
    after = stored(target)
    assert after.keys() == before.keys()
    changed = {name for name, weight in before.items() if not same_bits(weight, after[name])}
    of_tower = {name for name in before if "visual" in name}
    if vision == "frozen":
        assert not changed & of_tower and changed
    else:
        assert changed & of_tower
    assert (target / "preprocessor_config.json").is_file()
    model, info = AutoModelForImageTextToText.from_pretrained(
        target, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    again = dict(model.named_parameters())
    for weight in policy.weights():
        torch.testing.assert_close(again[weight.name], weight.materialize())


def test_adapters_are_beside_the_layers_that_are_trained(tmp_path):
    folder = picture_folder(tmp_path, "gemma3")
    for is_trained in (False, True):
        policy = load_policy(folder, pictures=picture_input("gemma3", is_trained=is_trained))
        policy.add_adapter(LoraConfig(rank=2), path=folder, seed=0)
        names = {name for name, weight in policy.model.named_parameters() if weight.requires_grad}
        assert any("vision_tower" in name for name in names) == is_trained
        assert any("language_model" in name for name in names)
        assert all(".lora_" in name for name in names)
        assert Path(folder).is_dir()
