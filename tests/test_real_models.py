"""Real, pretrained models: engine, trainer and plain transformers agree (`make test-real`).

SmolLM2-135M-Instruct answers chat prompts. Gemma 3 270M has a vocabulary of 262,144 tokens, and
layers that see the last 512 tokens alone: its prompt is longer.
"""

import gc
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from easyrl.config import load_config
from easyrl.config.model import LoraConfig
from easyrl.data.chat import render_prompt
from easyrl.data.reasoning_gym import ReasoningGym
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.layout.row import Rollout, pack
from easyrl.model.loading import load_policy
from easyrl.model.policy import Policy
from easyrl.model.saving import save_policy
from easyrl.runtime.resolve import resolve
from easyrl.runtime.self_test_part import errors, packed
from easyrl.workers.learner import ADAM_BETAS, Learner
from real_models import real_model
from runs import AGENTS, assert_on_policy, lines_of, succeed, write_rows
from tiny_models import largest_gradient_gap, plain_model

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

MODELS = ("smollm2", "gemma3")
LARGEST_GAP = 1e-4  # of a log-probability, in nats
LARGEST_ERROR = 1e-5  # of a tensor, relative
LEARNING_RATE = 1e-4
NUM_GENERATIONS = 3


@dataclass
class Sampled:
    path: str
    policy: Policy
    rollouts: list[Rollout]  # with the engine's log-probabilities


def prompts_of(name: str, tokenizer: Any) -> list[list[int]]:
    task = ReasoningGym("chain_sum", "{}", 1)
    questions = [task.train_row(0, index)["prompt"] for index in range(60)]
    if name == "smollm2":
        chats = [[{"role": "user", "content": question}] for question in questions[:3]]
        return [render_prompt(chat, tokenizer) for chat in chats]
    config = AutoConfig.from_pretrained(real_model(name))
    assert (config.vocab_size, config.sliding_window) == (262_144, 512)
    prompt = render_prompt(" ".join(questions), tokenizer)[:600]
    assert len(prompt) == 600
    return [prompt]


def sample(name: str, dtype: Any = "float32", length: int = 12) -> Sampled:
    path = str(real_model(name))
    tokenizer = AutoTokenizer.from_pretrained(path)
    policy = load_policy(path, dtype=dtype)
    assert policy.no_packing_reason is None and policy.shares_prompts
    prompts = prompts_of(name, tokenizer)
    settings = SamplingSettings(max_prompt_length=700, max_completion_length=length, seed=7)
    engine = EmbeddedEngine(policy, settings, num_rows=6, tokenizer=tokenizer)
    for index, prompt in enumerate(prompts):
        engine.submit(GroupRequest((index,), prompt, NUM_GENERATIONS))
    finished: list[Any] = []
    while engine.has_work:
        finished += engine.step()
    advantages = np.random.default_rng(0).normal(size=(len(prompts), NUM_GENERATIONS))
    rollouts = [
        Rollout(
            request.key[0],
            np.array(request.prompt_ids, np.int32),
            each.token_ids,
            each.logprobs,
            np.ones(len(each.token_ids), np.bool_),
            float(advantages[request.key[0]][number]),
        )
        for request, completions in sorted(finished, key=lambda each: each[0].key)
        for number, each in enumerate(completions)
    ]
    return Sampled(path, policy, rollouts)


@pytest.fixture(scope="module", params=MODELS)
def sampled(request):
    yield sample(request.param)
    gc.collect()


def sequence_logprobs(model: Any, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities of a completion, without packing."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.completion_ids])).long()
    num_prompt = len(rollout.prompt_ids)
    last = model(input_ids=ids[None], use_cache=False, logits_to_keep=len(ids) - num_prompt + 1)
    every = torch.log_softmax(last.logits[0, :-1], dim=-1)
    return every.gather(1, ids[num_prompt:, None])[:, 0]


def all_in_float64() -> Any:
    """Also norms and rotations, which transformers computes in float32 in a model of any dtype:
    their rounding alone changes the gradient of Gemma 3 by 1.7e-4."""
    return patch.object(torch.Tensor, "float", torch.Tensor.double)


def test_engine_trainer_and_transformers_give_the_same_logprobs_and_gradients(sampled):
    model = plain_model(sampled.path, dtype=torch.float64)
    plain = []
    for rollout in sampled.rollouts:
        with all_in_float64():
            logprobs = sequence_logprobs(model, rollout)
            (logprobs.sum() * rollout.advantage).backward()
        plain.append(logprobs.detach())
    expected = torch.cat(plain)
    of_engine = np.concatenate([rollout.rollout_logprobs for rollout in sampled.rollouts])
    gap = float((torch.from_numpy(of_engine) - expected).abs().max())
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    result = packed(sampled.rollouts, sampled.policy)()
    of_logprobs, of_gradients = errors(result, type(result)(expected, gradients))
    print(f"\n{sampled.path}: log-probabilities: engine {gap:.1e}, trainer {of_logprobs:.1e}")
    assert gap <= LARGEST_GAP and of_logprobs <= LARGEST_GAP
    # In float32 the gradient of SmolLM2 in plain transformers has an error of 5e-4 (ours 3e-5).
    sampled.policy.model.double()
    with all_in_float64():
        exact = packed(sampled.rollouts, sampled.policy)()
    _, error = errors(exact, type(result)(expected, gradients))
    print(f"gradients: {of_gradients:.1e} in float32, {error:.1e} in float64")
    assert error <= LARGEST_ERROR


def test_a_step_is_that_of_a_plain_loop_and_the_saved_model_has_the_same_logits(tmp_path):
    """GRPO's first update of an iteration: the ratio of the probabilities is 1. In float64, since
    Adam's first steps have the same size for any gradient, which amplifies rounding."""
    smollm2 = sample("smollm2")
    smollm2.policy.model.double()
    rollouts, before = smollm2.rollouts, plain_model(smollm2.path)
    words = ["algorithm.loss_type=grpo", "algorithm.importance_sampling_correction=none"]
    words += [f"train.learning_rate={LEARNING_RATE}", "train.lr_scheduler_type=constant"]
    words += ["train.warmup_iterations=0", "train.max_grad_norm=0.5"]
    learner = Learner(smollm2.policy, resolve(load_config(words=words)).for_training)
    for start in range(0, len(rollouts), NUM_GENERATIONS):
        learner.accumulate(pack(rollouts[start : start + NUM_GENERATIONS]))
    named = dict(learner.policy.model.named_parameters())
    gradients = {name: weight.grad.clone() / len(rollouts) for name, weight in named.items()}
    num_tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
    learner.step(num_completions=len(rollouts), num_tokens=num_tokens)

    model = plain_model(smollm2.path, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, ADAM_BETAS, weight_decay=0.0)
    for rollout in rollouts:
        logprobs = sequence_logprobs(model, rollout)
        ratio = torch.exp(logprobs - logprobs.detach())
        (-rollout.advantage * ratio.mean() / len(rollouts)).backward()
    plain = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    gap = largest_gradient_gap(gradients, plain)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    assert norm > 0.5 and learner.metrics()["grad_norm"] == pytest.approx(norm, rel=1e-5)
    optimizer.step()
    error = distances(named, model)
    print(f"\ngradient {gap:.1e}, weights {max(error):.1e}")
    assert gap <= LARGEST_ERROR and max(error) <= LARGEST_ERROR
    steps = distances(named, before)
    assert min(steps) > 0 and max(steps) > 100 * LARGEST_ERROR

    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    save_policy(learner.policy, tmp_path / "model", tokenizer, dtype="float32")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(weight, named[name]) for name, weight in loaded.named_parameters())
    saved = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert saved.chat_template == tokenizer.chat_template
    with torch.no_grad():
        got = torch.cat([sequence_logprobs(loaded.eval(), rollout) for rollout in rollouts])
        trained = packed_logprobs(learner.policy, rollouts)
        assert float((got - trained).abs().max()) <= LARGEST_GAP
        first = torch.cat([sequence_logprobs(before, rollout) for rollout in rollouts])
        assert float((first - trained).abs().max()) > 100 * LARGEST_GAP


def distances(named: dict[str, Any], model: Any) -> list[float]:
    return [float((w - named[name]).norm() / w.norm()) for name, w in model.named_parameters()]


def packed_logprobs(policy: Policy, rollouts: list[Rollout]) -> torch.Tensor:
    with torch.enable_grad():
        return packed(rollouts, policy)().logprobs


@pytest.mark.parametrize("name", MODELS)
def test_merged_adapters_give_the_logprobs_of_adapters_beside_the_weights(name):
    sampled = sample(name, length=4)
    policy = sampled.policy
    policy.add_adapter(LoraConfig(rank=8), path=sampled.path, seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in policy.trained_parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.03)
        merged = plain_model(sampled.path)
        before = torch.cat([sequence_logprobs(merged, each) for each in sampled.rollouts])
        weights = {name: weight.clone() for name, weight in policy.named_weights()}
        merged.load_state_dict(weights, strict=False)  # a tied head has one name
        got = torch.cat([sequence_logprobs(merged, each) for each in sampled.rollouts])
    unmerged = packed_logprobs(policy, sampled.rollouts)
    assert float((got - unmerged).abs().max()) <= LARGEST_GAP
    assert float((got - before).abs().max()) > 10 * LARGEST_GAP


@pytest.mark.parametrize("name", MODELS)
def test_the_gap_in_bfloat16_is_reported(name):
    sampled = sample(name, "bfloat16")
    of_engine = np.concatenate([rollout.rollout_logprobs for rollout in sampled.rollouts])
    gap = (packed_logprobs(sampled.policy, sampled.rollouts) - torch.from_numpy(of_engine)).abs()
    print(f"\n{name} in bfloat16: mean {float(gap.mean()):.1e}, largest {float(gap.max()):.1e}")
    assert 0.0 < float(gap.mean()) < 0.05


def test_an_agent_of_a_library_is_trained_as_it_is(tmp_path):
    pytest.importorskip("smolagents")
    rows = write_rows(tmp_path / "rows.jsonl", [{"a": 12, "b": n} for n in range(2, 8)])
    words = ("--model", real_model("smollm2"), "--dataset", str(rows), "--iterations", "3")
    words += ("--agent", f"{AGENTS}:calculate", "rollout.agent_sampling=ignore", "--no-live")
    words += ("rollout.tool_format=hermes", "data.max_prompt_length=2048", "data.num_held_out=0")
    words += ("train.prompts_per_iteration=2", "rollout.num_generations=2", "train.save_every=9")
    run = tmp_path / "run"
    succeed(*words, "rollout.max_completion_length=256", "--output", str(run), timeout=900)
    assert_on_policy(run)
    lines = lines_of(run / "metrics.jsonl")
    assert min(line["episodes/turns"] for line in lines) >= 1
    for sample in lines_of(run / "samples.jsonl"):
        roles = [message["role"] for message in sample["messages"]]
        assert roles[:2] == ["system", "user"] and "assistant" in roles
