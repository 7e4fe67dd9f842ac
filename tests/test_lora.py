"""LoRA: adapters in the trainer, merged weights everywhere else."""

import json
from itertools import islice
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from easyrl.config import load_config
from easyrl.config.model import LoraConfig
from easyrl.layout.row import Rollout, pack
from easyrl.model.export import export_checkpoint
from easyrl.model.files import meta_model
from easyrl.model.inputs import ModelInputs
from easyrl.model.lora import PARTS, check_lora
from easyrl.model.policy import Policy
from easyrl.model.sharding import TrainRanks
from easyrl.model.tri_model import TriModel
from mistakes import TINY
from runs import SMALL, lines_of, succeed, summary_of
from tiny_models import (
    OLD_SIZES,
    VOCABULARY,
    draw_sequences,
    largest_gradient_gap,
    lay_out,
    packed_logits,
    pieces_of,
    plain_model,
    separate_logits,
    tiny_model,
    tree_of,
)

LORA = LoraConfig(rank=3)
KINDS = [
    *("qwen2", "qwen3", "gemma2"),  # biases, a tied head, soft-capping
    *("phi3", "qwen3_moe", "deepseek_v3"),  # fused projections, experts, MLA
    *("gpt2", "bloom"),  # Conv1D, repeated prompts
]
SEQUENCES = draw_sequences([3, 13, 1, 8])


def saved(kind, folder):
    changes = OLD_SIZES if kind in ("gpt2", "bloom") else {}
    tiny_model(kind, **changes).save_pretrained(folder / kind)
    return folder / kind


def adapted(path, lora=LORA, dtype="float32"):
    """A policy whose adapters differ from their initial values."""
    policy = Policy.load(str(path), dtype=dtype)
    policy.add_adapter(lora, path=str(path), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in policy.trained_parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return policy


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_saved_model_and_saved_adapter_equal_the_policy(kind, tmp_path):
    from peft import AutoPeftModelForCausalLM, PeftModel

    path = saved(kind, tmp_path)
    policy, base = adapted(path), plain_model(path)
    merged = {name: weight.clone() for name, weight in policy.named_weights()}
    assert merged.keys() == dict(base.named_parameters()).keys()
    with torch.no_grad():
        expected = packed_logits(policy, SEQUENCES)
        assert float((expected - separate_logits(base, SEQUENCES)).abs().max()) > 1e-2
    sha256 = policy.weights_sha256()
    assert policy.adapter is not None
    adapter = tmp_path / "adapter"
    policy.adapter.save(adapter)
    trained = {id(weight): weight.clone() for weight in policy.trained_parameters()}
    policy.save(tmp_path / "model", Mock())
    # Saving leaves the policy as it was.
    assert all(torch.equal(trained[id(weight)], weight) for weight in policy.trained_parameters())
    assert policy.weights_sha256() == sha256
    found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, attn_implementation="eager"
    )
    model, info = found
    assert not info["missing_keys"] and not info["unexpected_keys"]
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in merged.items())
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(path) and config["r"] == 3
    by_name = AutoPeftModelForCausalLM.from_pretrained(adapter, attn_implementation="eager")
    on_base = PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        for loaded in (plain_model(path, merged), model, by_name, on_base):
            got = separate_logits(loaded.eval(), SEQUENCES)
            torch.testing.assert_close(got, expected, rtol=0.0, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "deepseek_v3", "gpt2"])
def test_gradients_equal_those_of_the_formula(kind, tmp_path):
    """Two groups that share their prompts; against W + alpha / rank B A in float64."""
    path = saved(kind, tmp_path)
    policy = adapted(path, LoraConfig(rank=3, alpha=5))
    groups = [(3, [2, 4]), (2, [3, 1])]
    sequences = lay_out(groups)
    tree = tree_of(groups)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, VOCABULARY, (tree.num_tokens,), generator=generator)
    weights = torch.randn(len(tokens), VOCABULARY, generator=generator)
    logits = policy.forward(ModelInputs.of_row(tokens, tree))
    # A prompt's logits count once for each completion.
    shares = torch.zeros(len(tokens))
    for sequence in sequences:
        shares[sequence] += 1
    (logits * weights * shares[:, None]).sum().backward()

    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained)
    leaves = {
        name: parameter.detach().double().requires_grad_() for name, parameter in trained.items()
    }
    plain = plain_model(path, dtype=torch.float64)
    state = dict(plain.named_parameters())
    for name in [name for name in leaves if ".lora_A." in name]:
        delta = leaves[name.replace(".lora_A.", ".lora_B.")] @ leaves[name]
        weight = name.partition(".lora_A.")[0] + ".weight"
        state[weight] = state[weight] + 5 / 3 * (delta.T if kind == "gpt2" else delta)
    for sequence in sequences:
        ids = tokens[sequence][None]
        out = functional_call(plain, state, kwargs={"input_ids": ids, "use_cache": False})
        (out.logits[0] * weights[sequence]).sum().backward(retain_graph=True)
    got, expected = ({name: p.grad for name, p in each.items()} for each in (trained, leaves))
    assert largest_gradient_gap(got, expected) <= 1e-5


def test_reference_is_the_base_model_without_a_copy(tmp_path):
    path = saved("qwen3", tmp_path)
    policy, ids = adapted(path), draw_sequences([12])[0].numpy().astype(np.int32)
    rollout = Rollout(0, ids[:1], ids[1:], np.zeros(11, np.float32), np.ones(11, np.bool_), 1.0)
    batch = pack([rollout], shares_prompts=False)
    updates = "train.updates_per_iteration=2"
    config = load_config(words=[updates, "algorithm.beta=0.1"])
    models = TriModel(policy, config, TrainRanks(), None)
    assert models._reference is policy.adapter
    logprobs, _, _, ref_logprobs, _ = models.logprobs(batch, policy_is_old=True)
    base = Policy.load(str(path))
    expected = TriModel(base, load_config(words=[]), TrainRanks(), None)
    of_base = expected.logprobs(batch, policy_is_old=True)[0].detach()
    assert ref_logprobs is not None and not ref_logprobs.requires_grad
    torch.testing.assert_close(ref_logprobs, of_base, rtol=0.0, atol=1e-6)
    assert float((logprobs.detach() - of_base).abs().max()) > 1e-2
    # Afterwards the policy has its adapters again, and they are trained.
    logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.trained_parameters())
    again = models.logprobs(batch, policy_is_old=True)[0]
    assert torch.equal(again.detach(), logprobs.detach())


def test_initial_adapters_change_nothing_depend_on_the_seed_and_have_the_expected_size():
    policies = [Policy.load("tiny") for _ in range(3)]
    before, found = policies[0].weights_sha256(), []
    for policy, seed in zip(policies, (1, 1, 2), strict=True):
        policy.add_adapter(LORA, path="tiny", seed=seed)
        assert policy.weights_sha256() == before
        found.append(torch.cat([weight.flatten() for weight in policy.trained_parameters()]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert check_lora(LORA, "tiny", meta_model(AutoConfig.from_pretrained(TINY))) == len(found[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "gpt2"])
def test_engine_merges_adapters_to_the_trainers_bits(kind, dtype, tmp_path):
    path = saved(kind, tmp_path)
    policy, engine = adapted(path, dtype=dtype), Policy.load(str(path), dtype=dtype)
    frozen = dict(engine.model.named_parameters())

    def check():
        expected = dict(policy.named_weights())
        assert frozen.keys() == expected.keys()
        for name, weight in frozen.items():
            assert weight.dtype == getattr(torch, dtype) and torch.equal(weight, expected[name])

    with torch.no_grad():
        for weight in policy.model.parameters():
            if not weight.requires_grad:
                weight.mul_(1.5)  # so that the engine needs them
    engine.load_weights(pieces_of(policy.weights(merge=False), size=7))
    check()
    for _ in range(2):  # each starts from the frozen weights, not from the merged ones
        for weight in policy.trained_parameters():
            weight.data.mul_(-0.5)
        engine.load_weights(pieces_of(policy.weights(only_trained=True, merge=False), size=7))
        check()
    sent = policy.weights(only_trained=True, merge=False)
    assert {f".{weight.name.rpartition('.')[2]}" for weight in sent} == {*PARTS}
    # An exchange that broke off is repeated in full.
    every = policy.weights(merge=False)
    engine.load_weights(islice(pieces_of(every, size=7), 500))
    engine.load_weights(pieces_of(every))
    check()


def test_one_rank_reads_lora_weights_of_two_ranks_in_bfloat16(tmp_path):
    """`model/` has the summary's hash, and `adapter/` its logits on the run's initial model."""
    from peft import PeftModel

    folder = tmp_path / "run"
    succeed(
        *("--output", str(folder), "--iterations", "3", "--train-devices", "cpu:2", *SMALL),
        *("rollout.max_completion_length=64", "algorithm.beta=0.05", "model.lora.rank=4"),
        *("train.updates_per_iteration=2", "model.dtype=bfloat16", "train.offload=[optimizer]"),
    )
    metrics, sha256 = lines_of(folder / "metrics.jsonl")[-1], summary_of(folder)["weights_sha256"]
    assert metrics["kl"] > 0 and metrics["num_updates_not_finite"] == 0
    assert Policy.load(str(folder / "model"), dtype="bfloat16").weights_sha256() == sha256
    before, after = (load_file(path / "model.safetensors") for path in (TINY, folder / "model"))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == torch.bfloat16
        is_frozen = torch.equal(tensor, before[name].to(tensor.dtype))
        assert is_frozen != name.endswith("_proj.weight"), name
    base, merged = plain_model(TINY), plain_model(folder / "model")
    prompt = [torch.tensor([21, 22, 15, 23, 24, 33])]  # 12+34=
    with torch.no_grad():
        of_base, of_model = (separate_logits(each, prompt) for each in (base, merged))
        assert float((of_model - of_base).abs().max()) > 1e-4
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
        of_adapter = separate_logits(adapted, prompt)
    torch.testing.assert_close(of_adapter, of_model, rtol=0.0, atol=0.1)  # rounded weights
    # Merged from the stored adapters:
    assert sha256 in export_checkpoint(folder, tmp_path / "exported")
