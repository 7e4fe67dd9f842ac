"""Rows with pictures are exact: transformers alone, one sequence at a time, is the reference."""

import inspect

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from easyrl.layout.row import Rollout, pack
from easyrl.model.loading import load_policy
from picture_models import (
    FAMILIES,
    PLACEHOLDER,
    arrays_for,
    num_placeholders,
    picture,
    picture_folder,
    picture_input,
)
from tiny_models import largest_gradient_gap

TOLERANCE = 1e-4
BANNED = {"image_token_id", "video_token_id", "audio_token_id"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return picture_folder(tmp_path_factory.mktemp(family), family)


def groups_of(family):
    """Rollouts of three groups: of a prompt with a picture, of one with two, and of text."""
    random = np.random.default_rng(5)

    def draw(number):
        return random.integers(3, 88, number).astype(np.int32)

    rollouts = []
    for index, (shown, lengths) in enumerate(
        [([picture(0)], [5, 11]), ([picture(1), picture(2)], [3, 9, 2]), ([], [4, 6])]
    ):
        parts = [draw(3)]
        for each in shown:
            parts += [np.full(num_placeholders(family, each), PLACEHOLDER, np.int32), draw(4)]
        prompt = np.concatenate(parts)
        for length in lengths:
            rollout = Rollout(
                prompt_index=index,
                prompt_ids=prompt,
                completion_ids=draw(length),
                rollout_logprobs=np.zeros(length, np.float32),
                loss_mask=np.ones(length, np.bool_),
                advantage=1.0,
                pictures=tuple(shown),
            )
            rollouts.append(rollout)
    return rollouts


def logprobs(logits, targets):
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


def packed_logprobs(policy, rollouts, **options):
    batch = pack(rollouts, **options)
    return logprobs(policy.forward(policy.inputs_of(batch)), torch.from_numpy(batch.targets))


def alone_logprobs(model, family, rollouts):
    """Of each rollout alone, by transformers' own forward, without the tokens that are banned."""
    parameters = inspect.signature(model.forward).parameters
    found = []
    for rollout in rollouts:
        prompt, completion = (
            torch.from_numpy(ids).long() for ids in (rollout.prompt_ids, rollout.completion_ids)
        )
        given = {}
        if rollout.pictures:
            arrays = arrays_for(family)(rollout.pictures)
            given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        ids = torch.cat([prompt, completion])[None]
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in parameters and rollout.pictures:
                given[name] = (ids == PLACEHOLDER).int()
        logits = model(input_ids=ids, use_cache=False, **given).logits[0, len(prompt) - 1 : -1]
        for name in BANNED:
            if getattr(model.config, name, None) is not None:
                logits[:, getattr(model.config, name)] = -torch.inf
        found.append(logprobs(logits, completion))
    return torch.cat(found)


def gradients(model, values):
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    (values * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["frozen", "trained"])
def test_groups_with_pictures_are_exact(family, folder, mode):
    is_trained = mode == "trained"
    rollouts = groups_of(family)
    policy = load_policy(folder, pictures=picture_input(family, is_trained=is_trained))
    model = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    expected = alone_logprobs(model, family, rollouts)
    of_expected = gradients(model, expected)
    before = policy.vision.num_encoded
    for options in ({}, {"shares_prompts": False}):
        got = packed_logprobs(policy, rollouts, **options)
        assert float((got - expected).detach().abs().max()) <= TOLERANCE
        of_got = gradients(policy.model, got)
        of_tower = of_expected.keys() - of_got.keys()
        assert of_got.keys() <= of_expected.keys() and bool(of_tower) == (not is_trained)
        of_same = {name: of_expected[name] for name in of_got}
        assert largest_gradient_gap(of_got, of_same) <= TOLERANCE
    num_encoded = policy.vision.num_encoded - before
    assert num_encoded == (2 + 5 if is_trained else 2), "each group's pictures once"
