"""LoRA: adapters in the trainer, merged weights for everybody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from easyrl.config import ConfigError, load_config
from easyrl.config.model import LoraConfig
from easyrl.data.hub import resolve_model
from easyrl.model.attention import PackedGroups
from easyrl.model.lora import Adapter, check_lora
from easyrl.model.policy import Policy
from easyrl.model.tri_model import OtherWeights, PackedInput, TriModel
from easyrl.workers.learner import Learner
from tiny_models import (
    FAMILIES,
    OLD_SIZES,
    SIZES,
    VOCABULARY,
    draw_sequences,
    packed_logits,
    separate_logits,
    tiny_model,
)

torch.set_num_threads(1)

LORA = LoraConfig(rank=3)
KINDS = [
    "qwen2",
    "qwen3",
    "gemma2",
    "gpt_neox",
    "phi3",
    "qwen3_moe",
    "deepseek_v3",
    "gpt2",
    "bloom",
]
"""Biases, tied heads, soft-capping, fused projections, experts, MLA, Conv1D, repeated prompts."""


def changes_of(kind: str) -> dict[str, Any]:
    return OLD_SIZES if kind in ("gpt2", "bloom") else {}


def saved(kind: str, folder: Path) -> Path:
    tiny_model(kind, **changes_of(kind)).save_pretrained(folder / kind)
    return folder / kind


def adapted(path: Path, lora: LoraConfig = LORA, seed: int = 0) -> Policy:
    """A policy whose adapters have learnt something."""
    policy = Policy.load(str(path))
    policy.add_adapter(lora, path=str(path), seed=seed)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in policy.trained_parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return policy


def plain_model(path: Path, weights: dict[str, Tensor] | None = None) -> Any:
    """transformers' own, with other weights."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    if weights is not None:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied: it has one name
    return model.eval()


SEQUENCES = draw_sequences([3, 13, 1, 8])


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_the_model_with_its_adapters(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path)
    policy = adapted(path)
    merged = {name: weight.clone() for name, weight in policy.named_weights()}
    base = plain_model(path)
    assert merged.keys() == dict(base.named_parameters()).keys()
    with torch.no_grad():
        got = packed_logits(policy, SEQUENCES)
        torch.testing.assert_close(
            got, separate_logits(plain_model(path, merged), SEQUENCES), rtol=0.0, atol=2e-5
        )
        assert float((got - separate_logits(base, SEQUENCES)).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_model_and_the_saved_adapter_are_the_policy(kind: str, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel

    path = saved(kind, tmp_path)
    policy = adapted(path)
    with torch.no_grad():
        expected = packed_logits(policy, SEQUENCES)
    sha256 = policy.weights_sha256()
    assert policy.adapter is not None
    policy.adapter.save(tmp_path / "adapter")
    trained = {id(weight): weight.clone() for weight in policy.trained_parameters()}
    policy.save(tmp_path / "model", Saver())
    # It can be trained, and its boundary saved, as before.
    assert all(torch.equal(trained.pop(id(weight)), weight) for weight in adapters_of(policy))
    assert not trained and policy.weights_sha256() == sha256
    found: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, attn_implementation="eager"
    )
    model, info = found
    assert not info["missing_keys"] and not info["unexpected_keys"]
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in policy.named_weights())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(path) and config["r"] == 3
    of_name = AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapter", attn_implementation="eager"
    )
    on_base = PeftModel.from_pretrained(plain_model(path), tmp_path / "adapter")
    with torch.no_grad():
        for loaded in (model, of_name, on_base):
            got = separate_logits(loaded.eval(), SEQUENCES)
            torch.testing.assert_close(got, expected, rtol=0.0, atol=2e-5)


def adapters_of(policy: Policy) -> list[Tensor]:
    return [weight for name, weight in policy.model.named_parameters() if ".lora_" in name]


class Saver:
    def save_pretrained(self, folder: Path) -> None:
        """A tokenizer that leaves nothing."""


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "deepseek_v3", "gpt2"])
def test_gradients_are_those_that_the_formula_has(kind: str, tmp_path: Path) -> None:
    """Two groups that share their prompts; against W + alpha / rank B A in float64."""
    path = saved(kind, tmp_path)
    policy = adapted(path, LoraConfig(rank=3, alpha=5))
    groups = [(3, [2, 4]), (2, [3, 1])]
    rows, positions, sequences, start = [], [], [], 0
    generator = torch.Generator().manual_seed(4)
    for num_prompt, completions in groups:
        prompt = torch.randint(3, VOCABULARY, (num_prompt,), generator=generator)
        rows.append(prompt)
        positions.append(torch.arange(num_prompt))
        places = torch.arange(start, start + num_prompt)
        start += num_prompt
        for length in completions:
            own = torch.randint(3, VOCABULARY, (length,), generator=generator)
            rows.append(own)
            positions.append(num_prompt + torch.arange(length))
            sequences.append(torch.cat([places, torch.arange(start, start + length)]))
            start += length
    tokens = torch.cat(rows)
    weights = torch.randn(len(tokens), VOCABULARY, generator=generator)
    every = torch.arange(len(tokens))
    logits = policy.forward(tokens, torch.cat(positions), PackedGroups(groups), logits_at=every)
    # Each completion sees its prompt's logits, too: of these every sequence has a share.
    shares = torch.zeros(len(tokens))
    for sequence in sequences:
        shares[sequence] += 1
    (logits * weights * shares[:, None]).sum().backward()

    leaves: dict[str, Tensor] = {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in policy.model.named_parameters()
        if ".lora_" in name
    }
    plain = plain_model(path).double()
    state = dict(plain.named_parameters())
    for name in [name for name in leaves if ".lora_A." in name]:
        delta = leaves[name.replace(".lora_A.", ".lora_B.")] @ leaves[name]
        weight = name.partition(".lora_A.")[0] + ".weight"
        state[weight] = state[weight] + 5 / 3 * (delta.T if kind == "gpt2" else delta)
    for sequence in sequences:
        ids = tokens[sequence][None]
        out = functional_call(plain, state, kwargs={"input_ids": ids, "use_cache": False})
        (out.logits[0] * weights[sequence]).sum().backward(retain_graph=True)
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained.keys() == leaves.keys()
    norm = torch.stack([leaf.grad.norm() for leaf in leaves.values()]).norm()  # type: ignore[union-attr]
    for name, leaf in leaves.items():
        expected, got = leaf.grad, trained[name].grad
        assert expected is not None and got is not None
        assert float((got - expected).norm() / max(expected.norm(), 1e-4 * norm)) <= 1e-5, name


# -- the trainer ----------------------------------------------------------------------------------


def packed_input() -> PackedInput:
    (sequence,) = draw_sequences([12])
    places = torch.arange(11)
    layout = PackedGroups.of_sequences([12])
    return PackedInput(sequence, torch.arange(12), layout, places, sequence[1:])


def tri_model(policy: Policy) -> TriModel:
    return TriModel(policy, temperature=1.0, has_old=True, has_reference=True)


def test_the_reference_is_the_base_and_keeps_nothing(tmp_path: Path) -> None:
    path = saved("qwen3", tmp_path)
    policy = adapted(path)
    models, packed = tri_model(policy), packed_input()
    assert models._reference is policy.adapter
    got = models.logprobs(packed, policy_is_old=True)
    base = Policy.load(str(path))
    expected = TriModel(base, temperature=1.0, has_old=False, has_reference=False)
    of_base = expected.logprobs(packed, policy_is_old=True).logprobs
    assert got.ref_logprobs is not None and not got.ref_logprobs.requires_grad
    torch.testing.assert_close(got.ref_logprobs, of_base.detach(), rtol=0.0, atol=1e-6)
    assert float((got.logprobs - of_base).detach().abs().max()) > 1e-2
    # The policy has its adapters back, and they are trained.
    got.logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.trained_parameters())
    again = models.logprobs(packed, policy_is_old=True)
    assert torch.equal(again.logprobs.detach(), got.logprobs.detach())


def test_adapters_are_back_after_an_error_in_the_reference(tmp_path: Path) -> None:
    policy = adapted(saved("qwen3", tmp_path))
    assert policy.adapter is not None
    before = packed_logits(policy, SEQUENCES)
    with pytest.raises(KeyError), policy.adapter.in_place():
        raise KeyError
    assert torch.equal(packed_logits(policy, SEQUENCES), before)
    assert len(policy.trained_parameters()) == 2 * 7 * SIZES["num_hidden_layers"]


def test_of_the_old_policy_only_the_adapters_are_kept(tmp_path: Path) -> None:
    policy = adapted(saved("qwen3", tmp_path))
    old = tri_model(policy)._old
    assert isinstance(old, OtherWeights)
    num_trained = sum(weight.numel() for weight in policy.trained_parameters())
    assert sum(value.numel() for value in old._values) == num_trained
    before = policy.weights_sha256()
    with torch.no_grad():
        for weight in policy.trained_parameters():
            weight.mul_(1.5)
    assert policy.weights_sha256() != before
    with old.in_place():
        assert policy.weights_sha256() == before


def test_a_step_changes_adapters_alone() -> None:
    config = load_config(words=["model.lora.rank=2", "algorithm.beta=0.1"])
    policy = Policy.load("tiny")
    policy.add_adapter(config.model.lora, path="tiny", seed=0)
    learner = Learner(policy, config)
    (group,) = learner.optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in policy.trained_parameters()}
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    for parameter in policy.trained_parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(1.0)
    learner.begin_iteration(5)
    learner.step(num_completions=1, num_tokens=1)
    num_trained = sum(parameter.numel() for parameter in policy.trained_parameters())
    assert learner.metrics()["grad_norm"] == pytest.approx(num_trained**0.5, rel=1e-4)
    for name, weight in policy.model.named_parameters():
        assert torch.equal(weight, before[name]) == (".lora_" not in name), name
        assert (weight.grad is None) == (".lora_" not in name), name


def test_adapters_begin_as_nothing_and_as_the_seed_says() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    policies = [Policy.load("tiny") for _ in range(3)]
    before = policies[0].weights_sha256()
    for policy, seed in zip(policies, (1, 1, 2), strict=True):
        policy.add_adapter(LORA, path="tiny", seed=seed)
        assert policy.weights_sha256() == before
    assert torch.equal(torch.rand(3), expected)  # what others draw stays what it is
    first, same, other = (
        torch.cat([weight.flatten() for weight in policy.trained_parameters()])
        for policy in policies
    )
    assert torch.equal(first, same) and not torch.equal(first, other)


# -- what is sent ---------------------------------------------------------------------------------


def test_only_what_is_trained_need_be_sent_again(tmp_path: Path) -> None:
    path = saved("qwen2", tmp_path)
    policy = adapted(path, LoraConfig(rank=3, target_modules=["q_proj", "layers.1.mlp.up_proj"]))
    sent = [weight.name for weight in policy.weights(only_trained=True)]
    of_layers = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]
    assert sent == sorted([*of_layers, "model.layers.1.mlp.up_proj.weight"])
    base = Policy.load(str(path))
    assert [w.name for w in base.weights(only_trained=True)] == [w.name for w in base.weights()]
    before = dict(base.named_weights())
    for name, weight in policy.named_weights():
        assert torch.equal(weight, before[name]) == (name not in sent), name


def test_a_weight_is_merged_when_its_turn_comes(tmp_path: Path) -> None:
    policy = adapted(saved("qwen2", tmp_path))
    weights = policy.weights(only_trained=True)
    for weight in weights:  # nothing is made yet: what is listed is the base's
        assert weight.reference.data_ptr() in {p.data_ptr() for p in policy.model.parameters()}
    first = weights[0].materialize()
    with torch.no_grad():
        for parameter in policy.trained_parameters():
            parameter.zero_()
    assert not torch.equal(first, weights[0].materialize())
    assert torch.equal(weights[0].materialize(), weights[0].reference)


# -- which layers ---------------------------------------------------------------------------------


def error_of(kind: str, *targets: str, **changes: Any) -> str:
    lora = LoraConfig(rank=2, target_modules=list(targets) or None)
    config = AutoConfig.for_model(kind, **(SIZES | FAMILIES.get(kind, {}) | changes))
    with pytest.raises(ConfigError) as caught:
        check_lora(lora, "m", config)
    return str(caught.value)


QWEN = "use down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


def test_layers_that_cannot_be_adapted_are_named_with_those_that_can() -> None:
    start = "model.lora.target_modules: "
    message = error_of("qwen2", "q_proj", "query")
    assert message == f"{start}m has no module 'query'; {QWEN}"
    message = error_of("qwen2", "embed_tokens")
    told = "'embed_tokens': model.embed_tokens of m is not a linear layer (Embedding)"
    assert message == f"{start}{told}; {QWEN}"
    message = error_of("qwen2", "input_layernorm")
    assert "model.layers.0.input_layernorm of m is not a linear layer (Qwen2RMSNorm)" in message
    assert "shares its weight with the embedding" in error_of("qwen3", "lm_head")


def test_experts_in_one_tensor_are_left_out_and_said_to_be() -> None:
    accepted = "use k_proj, o_proj, q_proj, v_proj"
    assert error_of("qwen3_moe", "experts").endswith(accepted)
    assert "is not a linear layer (Qwen3MoeTopKRouter)" in error_of("qwen3_moe", "gate")
    message = error_of("deepseek_v3", "up_proj")  # of layers without experts
    assert "layers.0.mlp.up_proj of m is treated by peft as part of fused experts" in message


def test_what_peft_refuses_is_told() -> None:
    sizes = {"state_size": 4, "conv_kernel": 4, "time_step_rank": 4}
    assert "peft refuses m: " in error_of("mamba", **sizes)


def test_a_head_of_its_own_can_be_adapted(tmp_path: Path) -> None:
    path = saved("qwen2", tmp_path)
    policy = adapted(path, LoraConfig(rank=2, target_modules=["lm_head", "o_proj"]))
    merged = {name: weight.clone() for name, weight in policy.named_weights()}
    expected = separate_logits(plain_model(path, merged), SEQUENCES)
    assert not torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
    torch.testing.assert_close(
        packed_logits(policy, SEQUENCES), expected, rtol=0.0, atol=2e-5, check_stride=False
    )
    (sequence, *_) = SEQUENCES
    places = torch.arange(len(sequence))
    layout = PackedGroups.of_sequences([len(sequence)])
    hidden = policy.hidden_states(sequence, places, layout, at=places)
    assert float((policy.head(hidden) - expected[: len(sequence)]).detach().abs().max()) <= 2e-5


def test_preflight_counts_what_the_trainer_will_train() -> None:
    config = AutoConfig.from_pretrained(resolve_model("tiny"))
    policy = Policy.load("tiny")
    policy.add_adapter(LORA, path="tiny", seed=0)
    expected = sum(parameter.numel() for parameter in policy.trained_parameters())
    assert check_lora(LORA, "tiny", config) == expected
    names = {name.rpartition(".")[2] for name in _layers(policy.adapter)}
    assert names == set(QWEN.removeprefix("use ").split(", "))


def _layers(adapter: Adapter | None) -> list[str]:
    assert adapter is not None
    return list(adapter._layers)
