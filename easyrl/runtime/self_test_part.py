"""A part of the self-test (`runtime.self_test`), in a process of its own; an error if it fails.

Shapes: P prompt tokens, R completion tokens, G completions; T tokens of a row, K of completions.
"""

import copy
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from easyrl import devices, events
from easyrl.channels.weights import WeightChannel, WeightEndpoint
from easyrl.config import load_config
from easyrl.config.model import AttentionMode
from easyrl.config.spec import RunSpec
from easyrl.layout.row import Rollout, pack
from easyrl.model.logprobs import chunked_token_logprobs
from easyrl.model.mixers.attention import ATTENTION_NAME, register_attention
from easyrl.model.policy import Policy
from easyrl.model.sharding import gathered
from easyrl.processes import environment_of_children, pin
from easyrl.runtime.fleet import worker_settings
from easyrl.runtime.placement import Placement, resolve_placement
from easyrl.runtime.resolve import resolve
from easyrl.runtime.run import run
from easyrl.runtime.supervisor import Supervisor
from easyrl.runtime.worker_process import run_worker, with_environment
from easyrl.workers.settings import WorkerSettings

SMALL = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
HEAD_SIZES = (64, 128)
SIZE = SMALL | {"num_hidden_layers": 2}
HYBRID_SIZE = SMALL | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

# Largest errors against float64 that pass. In bfloat16 on a CPU they are 0.007 and 0.023.
MAX_LOGPROB_ERROR = 0.05
MAX_GRAD_ERROR = 0.1

LEARNING_RATE = 0.003
MAX_GAP = 0.02
"""Largest mean difference of log-probabilities between engine and trainer that passes. It is 0.07
after an update with this learning rate if the engine keeps its first weights."""


class GroupLengths(NamedTuple):
    """Tokens of a group's prompt, and of each completion."""

    prompt: int
    completions: Sequence[int]


GROUPS = (GroupLengths(20, [5, 25]), GroupLengths(200, [40, 130, 77]))


class Errors(NamedTuple):
    """Largest errors of a result."""

    logprob: float  # in nats
    gradient: float  # of a weight's gradient g, relative to max(|g|, 1e-4 |all gradients|)


class Result(NamedTuple):
    logprobs: Tensor  # [K]
    gradients: dict[str, Tensor]


def random_model(size: Mapping[str, Any], **more: Any) -> Any:
    """Return a float32 Qwen3. `size`, `more`: arguments of its config."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**size, **more, max_position_embeddings=4096))


def check_attention(words: Sequence[str]) -> None:
    """Compare short and long packed rows, forward and backward, with each sequence alone."""
    kind, _ = devices.accelerator()
    mode = load_config(None, {}, words).model.attention
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    for lengths, head_size in product(GROUPS, HEAD_SIZES):
        size = SIZE | {"head_dim": head_size}
        policy = random_policy(size, dtype, kind, mode)
        _check_group(policy, lengths, f"head size {head_size}")


def check_states(words: Sequence[str]) -> None:
    """Compare packed rows of a hybrid, whose layers have a state, with each sequence alone. Where
    transformers finds kernels for such layers, these are tested."""
    kind, _ = devices.accelerator()
    mode = load_config(None, {}, words).model.attention
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    config = AutoConfig.for_model("qwen3_5_text", **HYBRID_SIZE, max_position_embeddings=4096)
    for lengths in GROUPS:
        policy = policy_of(lambda: random_weights(config), dtype, kind, mode)
        _check_group(policy, lengths, "gated delta rule")


def _check_group(policy: Policy, lengths: GroupLengths, model: str) -> None:
    """Compare a packed group, forward and backward, with each sequence alone."""
    group = draw_rollouts(lengths.prompt, lengths.completions, SMALL["vocab_size"])
    forward_and_backward = packed(group, policy, shares_prompts=policy.shares_prompts)
    result = forward_and_backward()
    expected = each_alone(group, policy)
    got = errors(result, expected)
    what = f"{lengths.prompt} + {lengths.completions} tokens, {model}"
    _expect_at_most(MAX_LOGPROB_ERROR, got.logprob, f"log-probabilities, {what}")
    _expect_at_most(MAX_GRAD_ERROR, got.gradient, f"gradients, {what}")


def random_policy(
    size: Mapping[str, Any], dtype: torch.dtype, kind: str, attention: AttentionMode = "auto"
) -> Policy:
    return policy_of(lambda: random_model(size), dtype, kind, attention)


def random_weights(config: Any) -> Any:
    """Return a float32 causal language model of this configuration."""
    torch.manual_seed(0)
    auto_model: Any = AutoModelForCausalLM
    return auto_model.from_config(config, dtype=torch.float32)


def policy_of(
    make_model: Callable[[], Any], dtype: torch.dtype, kind: str, attention: AttentionMode
) -> Policy:
    """Return a policy with a model that is made on the device."""
    register_attention()
    device = torch.device(kind)
    with device:
        model = make_model().to(dtype).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return Policy(model, device, attention=attention)


def draw_rollouts(prompt_len: int, lengths: Sequence[int], vocab_size: int) -> list[Rollout]:
    """Draw a group. A completion's advantage is the weight of its tokens in the loss."""
    rng = np.random.default_rng(0)

    def draw_tokens(length: int) -> npt.NDArray[np.int32]:
        return rng.integers(vocab_size, size=length, dtype=np.int32)

    prompt = draw_tokens(prompt_len)
    completions = [draw_tokens(length) for length in lengths]
    advantages = rng.normal(size=len(lengths)).tolist()
    rollouts = []
    for ids, advantage in zip(completions, advantages, strict=True):
        logprobs = np.zeros(len(ids), np.float32)
        is_trained = np.ones(len(ids), np.bool_)
        rollouts.append(Rollout(0, prompt, ids, logprobs, is_trained, advantage))
    return rollouts


def each_alone(group: Sequence[Rollout], policy: Policy) -> Result:
    """Compute the result with transformers' own attention in float64, one sequence at a time."""
    model = copy.deepcopy(policy.model).double()
    model.set_attn_implementation("eager")
    model.zero_grad()
    results = []
    for rollout in group:
        prompt_len = len(rollout.prompt_ids)
        tokens = np.concatenate([rollout.prompt_ids, rollout.completion_ids])
        ids = torch.from_numpy(tokens).to(policy.device, torch.int64)  # [P + R]
        logits = model(input_ids=ids[None], use_cache=False).logits[0]  # [P + R, vocabulary]
        of_completion = logits[prompt_len - 1 : -1]  # a token is predicted by the one before it
        distributions = torch.log_softmax(of_completion, dim=-1)  # [R, vocabulary]
        targets = ids[prompt_len:, None]  # [R, 1]
        logprobs = distributions.gather(1, targets)[:, 0]  # [R]
        weight = logprobs.new_tensor(rollout.advantage)
        results.append(_backward(logprobs, weight, model))
    all_logprobs = torch.cat([result.logprobs for result in results])
    return Result(all_logprobs, results[-1].gradients)  # gradients add up


def packed(
    group: Sequence[Rollout], policy: Policy, *, shares_prompts: bool = True
) -> Callable[[], Result]:
    """Return a function: one forward and backward of the packed group, in the same gradients."""
    batch = pack(group, shares_prompts=shares_prompts)
    targets = torch.from_numpy(batch.targets).to(policy.device)  # [K]
    weights = torch.from_numpy(batch.advantages).to(policy.device)  # [K]

    def forward_and_backward() -> Result:
        policy.model.zero_grad(set_to_none=False)  # so that gradients are no part of a peak
        hidden = policy.hidden_states(policy.inputs_of(batch))
        logprobs, _ = chunked_token_logprobs(policy, hidden, targets, temperature=1.0)
        return _backward(logprobs, weights, policy.model)

    return forward_and_backward


def _backward(logprobs: Tensor, weights: Tensor, model: Any) -> Result:
    """Differentiate the weighted sum of log-probabilities [K]; gradients are added to the
    model's."""
    loss = (logprobs * weights).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Result(logprobs.detach(), gradients)


def errors(result: Result, expected: Result) -> Errors:
    """Return the errors of a result against that in float64."""
    norms = {name: gradient.norm() for name, gradient in expected.gradients.items()}
    all_norms = torch.stack(list(norms.values()))
    total_norm = all_norms.norm()
    gradient_errors = []
    for name, gradient in expected.gradients.items():
        difference = result.gradients[name].double() - gradient
        scale = max(norms[name], 1e-4 * total_norm)
        gradient_errors.append(difference.norm() / scale)
    logprob_errors = (result.logprobs.double() - expected.logprobs).abs()
    # Unlike Python's `max`, torch's is NaN if any value is.
    largest_logprob_error = logprob_errors.max()
    largest_gradient_error = torch.stack(gradient_errors).max()
    return Errors(float(largest_logprob_error), float(largest_gradient_error))


def check_weights(infer: str, train: str) -> None:
    """Send a random model from a trainer to engines that hold zeros; compare every bit."""
    flags = {"devices.infer": infer, "devices.train": train, "rollout.engine": "embedded"}
    spec = resolve(load_config(None, flags))
    with Supervisor() as supervisor:
        call = start_members(supervisor, spec, resolve_placement(spec), SMALL)
        call("update")
        digests = call("digest")
        if len(set(digests)) > 1:
            raise RuntimeError("an engine's weights differ from those sent")


def start_members(
    supervisor: Supervisor,
    spec: RunSpec,
    placement: Placement,
    size: Mapping[str, Any],
    module: str = "easyrl.runtime.self_test_part",  # here `__name__` may be `__main__`
) -> Callable[..., list[Any]]:
    """Start a process for the trainer and one for each engine. Return a function that calls a
    method of `module`'s `Member` in all at the same time; the trainer's result is the first."""
    store = f"/proc/{os.getpid()}/fd/{os.memfd_create('easyrl-store')}"
    num_engines = placement.num_rollout_workers
    world_size = 1 + num_engines
    workers = []

    def start(role: str, number: int, rank: int) -> None:
        settings = worker_settings(spec, placement, role, number, store=store, log_file=None)
        settings = with_environment(settings)
        endpoint = settings.weight_endpoint(rank, world_size)
        member = (module, "Member", settings, endpoint, size)
        with environment_of_children(settings.environment):
            workers.append(supervisor.spawn(settings.name, run_worker, *member))

    start("train", 0, rank=0)
    for number in range(num_engines):
        start("rollout", number, rank=1 + number)

    # Calls and results are plain tuples: where this module is `__main__`, a class of it would not
    # be the same one for a member.
    def call(method: str, *arguments: Any) -> list[Any]:
        for worker in workers:
            worker.control.send((method, arguments))
        results: dict[str, Any] = {}
        while len(results) < len(workers):
            for worker, message in supervisor.wait():
                if isinstance(message, tuple):  # else an event of the worker's start
                    (result,) = message
                    results[worker.name] = result
        return [results[worker.name] for worker in workers]

    return call


@dataclass(eq=False)
class Member:
    """The trainer (rank 0) or an engine, whose weights are zeros. Calls the methods it is sent."""

    settings: WorkerSettings
    endpoint: WeightEndpoint
    size: Mapping[str, Any]  # of the model
    control: Connection

    def __post_init__(self) -> None:
        pin(self.settings.cores)
        self._version = 0
        self.dtype: torch.dtype = getattr(torch, self.settings.spec.model.dtype)  # of the engines
        device = torch.device(self.settings.device)
        with device, torch.no_grad():
            model = random_model(self.size)
            if self.endpoint.rank > 0:
                model.to(self.dtype)
                for weight in model.parameters():
                    weight.zero_()
        self.policy = Policy(model, device)

    def run(self) -> None:
        while True:
            message = self.control.recv()
            if not isinstance(message, tuple):  # Stop
                return
            name, arguments = message
            method = getattr(self, name)
            result = method(*arguments)
            self.control.send((result,))

    @cached_property
    def channel(self) -> WeightChannel:
        return WeightChannel(self.endpoint)

    def update(self) -> None:
        self._version += 1
        if self.endpoint.rank == 0:
            weights = self.policy.weights()
            self.channel.send(self._version, weights, dtype=self.dtype, gather=gathered)
        else:
            self.policy.load_weights(self.channel.receive(self._version))

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, weight in self.policy.named_weights():
            values = weight.detach().to(self.dtype).cpu()
            as_bytes = values.view(-1).view(torch.uint8)
            digest.update(name.encode())
            digest.update(as_bytes.numpy().tobytes())
        return digest.hexdigest()


def check_run(infer: str, train: str, engine: str, words: Sequence[str]) -> None:
    """Train; compare the engines' log-probabilities with the trainer's, also after an update."""
    seen: list[events.Event] = []
    dtype = "float32" if train == "cpu" else "bfloat16"
    flags: dict[str, Any] = {
        "devices.infer": infer,
        "devices.train": train,
        "model.dtype": dtype,
        "reward.functions": ["length_penalty"],
        "rollout.engine": engine,
        "rollout.max_completion_length": 100,
        "train.learning_rate": LEARNING_RATE,
        "train.iterations": 2,
        "train.keep_checkpoints": 0,
        "data.num_held_out": 0,
    }
    with tempfile.TemporaryDirectory(prefix="easyrl-test-") as folder:
        config = load_config(None, {**flags, "output.dir": f"{folder}/run"}, words)
        end = run(config, [seen.append])
    if end.exit_code != 0:
        raise RuntimeError(end.message)
    for event in seen:
        if isinstance(event, events.IterationFinished):
            norm = event.metrics["grad_norm"]
            if not norm > 0.0:  # also NaN
                raise ValueError(f"expected a gradient, got one of norm {norm}")
            gap = event.metrics["sampling/sampling_logp_difference/mean"]
            _expect_at_most(MAX_GAP, gap, "gap between engine and trainer")


def _expect_at_most(bound: float, got: float, what: str) -> None:
    if not got <= bound:  # also NaN
        raise ValueError(f"{what}: expected at most {bound}, got {got:.3g}")


if __name__ == "__main__":
    part, infer, train, *words = sys.argv[1:]
    settings = []
    for word in words:
        if "." in word:  # SECTION.KEY=VALUE
            settings.append(word)
        else:  # an environment variable
            key, _, value = word.partition("=")
            os.environ[key] = value
    if part == "weights":
        check_weights(infer, train)
    elif part == "attention":
        check_attention(settings)
    elif part == "states":
        check_states(settings)
    else:
        check_run(infer, train, part, settings)
