"""The embedded engine with pictures: each group's is encoded once, and sampled as trained."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from easyrl.engines import prefixes
from easyrl.engines.base import GroupRequest
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.sampling import SamplingSettings
from easyrl.engines.shown import with_placeholders
from easyrl.layout.row import Rollout, pack
from easyrl.model.loading import load_policy
from easyrl.model.logprobs import token_logprobs
from easyrl.types import PromptMedia
from picture_models import (
    FAMILIES,
    PLACEHOLDER,
    arrays_for,
    in_prompt,
    num_placeholders,
    picture,
    picture_folder,
    picture_input,
)

TOLERANCE = 1e-4
TEMPERATURE = 0.7
NUM_GENERATIONS = 3


def requests_for(family, shown=((0,), (1, 2), (), (3,))):
    """A request for a prompt with each of these tuples of pictures, by their numbers."""
    random = np.random.default_rng(5)
    requests = []
    for index, numbers in enumerate(shown):
        pictures = tuple(picture(number) for number in numbers)
        ids = random.integers(3, 88, 3).tolist()
        for each in pictures:
            ids += [PLACEHOLDER] * num_placeholders(family, each)
            ids += random.integers(3, 88, 4).tolist()
        media = None
        if pictures:
            media = PromptMedia(pictures, arrays_for(family)(pictures))
        requests.append(GroupRequest((0, 0, index), ids, NUM_GENERATIONS, media=media))
    return requests


def make_engine(policy, num_rows=4):
    sampling = SamplingSettings(
        max_prompt_length=100, max_completion_length=20, temperature=TEMPERATURE
    )
    return EmbeddedEngine(policy, sampling, num_rows=num_rows)


def generate(engine, requests):
    finished = []
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        finished += engine.step()
    return finished


def rollouts_of(finished):
    rollouts = []
    for request, completions in finished:
        for completion in completions:
            rollout = Rollout(
                prompt_index=request.key[-1],
                prompt_ids=np.array(request.prompt_ids, np.int32),
                completion_ids=completion.token_ids,
                rollout_logprobs=completion.logprobs,
                loss_mask=completion.is_sampled,
                advantage=1.0,
                pictures=in_prompt(request.media.pictures, request.prompt_ids)
                if request.media
                else (),
            )
            rollouts.append(rollout)
    return rollouts


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_samples_as_the_trainer_computes(tmp_path, family):
    folder = picture_folder(tmp_path, family)
    policy = load_policy(folder, pictures=picture_input(family))
    engine = make_engine(policy)
    before = policy.vision.num_encoded
    finished = generate(engine, requests_for(family))
    assert policy.vision.num_encoded - before == 3, "a prompt's pictures are encoded once"
    # The row of the trainer, which makes the arrays again.
    trainer = load_policy(folder, pictures=picture_input(family))
    batch = pack(rollouts_of(finished))
    with torch.no_grad():
        logits = trainer.forward(trainer.inputs_of(batch))
    expected = token_logprobs(logits, torch.from_numpy(batch.targets), TEMPERATURE).logprobs
    got = torch.from_numpy(batch.rollout_logprobs)
    assert len(got) > 50 and PLACEHOLDER not in batch.targets
    assert float((got - expected).abs().max()) <= TOLERANCE
    # Known pictures of a frozen tower are not encoded again, and give the same bits.
    counted = policy.vision.num_encoded
    again = generate(engine, requests_for(family))
    assert policy.vision.num_encoded == counted
    for one, other in zip(rollouts_of(finished), rollouts_of(again), strict=True):
        assert np.array_equal(one.completion_ids, other.completion_ids)
        assert one.rollout_logprobs.tobytes() == other.rollout_logprobs.tobytes()


def test_placeholders_are_never_sampled(tmp_path):
    """Not even where the model gives them nearly all of the probability."""
    folder = picture_folder(tmp_path, "qwen2_5_vl")
    policy = load_policy(folder, pictures=picture_input("qwen2_5_vl"))
    requests = requests_for("qwen2_5_vl")
    with torch.no_grad():
        head = policy.model.get_output_embeddings().weight
        head[PLACEHOLDER] = 50 * head[5]
        head[91] = -50 * head[5]
    finished = generate(make_engine(policy), requests)
    sampled = np.concatenate([rollout.completion_ids for rollout in rollouts_of(finished)])
    assert not np.isin(sampled, [PLACEHOLDER, 91]).any()
    batch = pack(rollouts_of(finished))
    expected = token_logprobs(
        policy.forward(policy.inputs_of(batch)), torch.from_numpy(batch.targets), TEMPERATURE
    ).logprobs
    gap = torch.from_numpy(batch.rollout_logprobs) - expected.detach()
    assert float(gap.abs().max()) <= TOLERANCE


def test_fused_decoder_serves_rows_behind_pictures(tmp_path):
    folder = picture_folder(tmp_path, "qwen3_vl")
    policy = load_policy(folder, pictures=picture_input("qwen3_vl"))
    engine = make_engine(policy)
    assert engine._decoder is not None
    finished = generate(engine, requests_for("qwen3_vl"))
    engine = make_engine(policy)
    engine._run_model = policy.forward
    for one, other in zip(finished, generate(engine, requests_for("qwen3_vl")), strict=True):
        for own, plain in zip(one[1], other[1], strict=True):
            assert np.array_equal(own.token_ids, plain.token_ids)


def test_prompts_with_equal_tokens_and_other_pictures_share_nothing(tmp_path, monkeypatch):
    for name in ("MIN_PREFIX_TOKENS", "MIN_TOKENS_OF_LEVEL"):
        monkeypatch.setattr(prefixes, name, 2)
    family = "qwen2_5_vl"
    num_tokens = num_placeholders(family, picture(0))
    number = next(n for n in range(1, 50) if num_placeholders(family, picture(n)) == num_tokens)
    one, other = requests_for(family, ((0,), (number,)))
    other = replace(other, prompt_ids=one.prompt_ids)
    policy = load_policy(picture_folder(tmp_path, family), pictures=picture_input(family))
    together = {request.key: each for request, each in generate(make_engine(policy), [one, other])}
    for request in (one, other):
        ((_, alone),) = generate(make_engine(policy), [request])
        for got, expected in zip(together[request.key], alone, strict=True):
            assert got.token_ids.tolist() == expected.token_ids.tolist()
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)


class Episode:
    """A sequence that is continued with pictures, and branches of it."""

    def __init__(self, family, engine, seed):
        self.family = family
        self.engine = engine
        self.random = np.random.default_rng(seed)
        self.owner = (seed,)
        self.finished = []

    def text(self, number):
        return self.random.integers(3, 88, number).tolist()

    def show(self, number):
        """Tokens around a picture."""
        shown = picture(number)
        num_tokens = num_placeholders(self.family, shown)
        picture_id = self.engine.shown.add(shown, num_tokens, self.owner).picture_id
        return [*self.text(2), *[picture_id] * num_tokens, *self.text(3)]

    def submit(self, number, ids, num_generations=1):
        request = GroupRequest(
            (*self.owner, number),
            ids,
            num_generations,
            has_turns=True,
            max_turn_tokens=4,
            family=self.owner,
        )
        self.engine.submit(request)

    def run(self):
        """Step until every sequence waits; return its turns."""
        turns = []
        while not turns or self.engine.can_step:
            self.finished += self.engine.step()
            turns += self.engine.take_turns()
        return turns

    def end(self, turns):
        for turn in turns:
            self.engine.end(turn, "stop", may_continue=True)
        self.finished += self.engine.step()


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_behind_answers_and_in_branches_are_sampled_as_trained(tmp_path, family):
    folder = picture_folder(tmp_path, family)
    policy = load_policy(folder, pictures=picture_input(family))
    sampling = SamplingSettings(
        max_prompt_length=200, max_completion_length=90, temperature=TEMPERATURE
    )
    engine = EmbeddedEngine(policy, sampling, num_rows=4)
    before = policy.vision.num_encoded
    episode = Episode(family, engine, 6)
    prompt = episode.show(0)
    episode.submit(0, prompt, num_generations=2)
    first, second = episode.run()
    engine.resume(first, episode.show(1), 4)
    engine.resume(second, episode.show(2), 4)
    turns = episode.run()
    so_far = [*prompt, *first.token_ids.tolist()]
    engine.resume(turns[0], [*episode.show(1), *episode.show(3)], 4)  # one that was shown before
    engine.resume(turns[1], episode.text(3), 4)
    episode.end(episode.run())
    # Branches behind the first answer: with another picture, and two that begin with the same one.
    episode.submit(1, [*so_far, *episode.show(3)])
    common = [*so_far, *episode.show(0), *episode.text(40)]
    episode.submit(2, [*common, *episode.text(2)])
    episode.submit(3, [*common, *episode.show(2)])
    # The same tokens but for the picture: nothing of it is stored.
    other = [*prompt]
    place = prompt.index(min(prompt))
    same_size = next(
        number
        for number in range(4, 50)
        if num_placeholders(family, picture(number)) == prompt.count(min(prompt))
    )
    own = episode.show(same_size)
    other[place : place + own.count(min(own))] = [min(own)] * own.count(min(own))
    episode.submit(4, other)
    episode.end(episode.run())
    assert not engine.has_work
    if family not in ("qwen3_5", "lfm2_vl"):  # layers with a state continue whole nodes alone
        assert policy.vision.num_encoded - before == 5, "the tower is frozen: each picture once"
    trainer = load_policy(folder, pictures=picture_input(family))
    num_compared = 0
    for request, completions in episode.finished:
        for completion in completions:
            placed = engine.shown.placed(request.prompt_ids, [completion])
            rollout = Rollout(
                prompt_index=0,
                prompt_ids=with_placeholders(np.array(request.prompt_ids, np.int32), PLACEHOLDER),
                completion_ids=with_placeholders(completion.token_ids, PLACEHOLDER),
                rollout_logprobs=completion.logprobs,
                loss_mask=completion.is_sampled,
                advantage=1.0,
                pictures=tuple(placed),
            )
            batch = pack([rollout])
            with torch.no_grad():
                logits = trainer.forward(trainer.inputs_of(batch))
            targets = torch.from_numpy(batch.targets)
            expected = token_logprobs(logits, targets, TEMPERATURE).logprobs
            got = torch.from_numpy(batch.rollout_logprobs)
            gap = (got - expected)[torch.from_numpy(batch.loss_mask)]
            assert float(gap.abs().max()) <= TOLERANCE
            num_compared += len(gap)
    assert num_compared > 25
    engine.shown.forget(episode.owner)
    with pytest.raises(KeyError):
        engine.shown.find(prompt)
