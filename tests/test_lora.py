"""LoRA: adapters in the trainer, merged weights everywhere else."""

import json
import shutil
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from easyrl.config import ConfigError, load_config
from easyrl.config.model import LoraConfig
from easyrl.layout.row import Rollout, pack
from easyrl.model.adapter_files import read_adapter
from easyrl.model.export import export_checkpoint, find_model
from easyrl.model.inputs import ModelInputs
from easyrl.model.loading import load_policy
from easyrl.model.lora import PARTS, Adapter, check_lora, combine, describe_lora
from easyrl.model.saving import save_policy
from easyrl.model.sharding import TrainRanks
from easyrl.model.towers import meta_model
from easyrl.model.tri_model import TriModel
from easyrl.runtime.resolve import resolve
from easyrl.runtime.resume import start_from
from mistakes import TINY, change_json
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
    policy = load_policy(str(path), dtype=dtype)
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
    save_policy(policy, tmp_path / "model", Mock())
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
    spec = resolve(load_config(words=[updates, "algorithm.beta=0.1"])).for_training
    models = TriModel(policy, spec, TrainRanks(), None)
    assert models._reference is policy.adapter
    logprobs, _, _, ref_logprobs, _ = models.logprobs(batch, policy_is_old=True)
    base = load_policy(str(path))
    expected = TriModel(base, resolve(load_config()).for_training, TrainRanks(), None)
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
    policies = [load_policy("tiny") for _ in range(3)]
    before, found = policies[0].weights_sha256(), []
    for policy, seed in zip(policies, (1, 1, 2), strict=True):
        policy.add_adapter(LORA, path="tiny", seed=seed)
        assert policy.weights_sha256() == before
        found.append(torch.cat([weight.flatten() for weight in policy.trained_parameters()]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert check_lora(LORA, "tiny", meta_model(AutoConfig.from_pretrained(TINY))) == len(found[0])


SMALL_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STATES = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "topk_group": 1,
}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
KINDS_OF_LAYERS = [
    # the model, its sizes, the kinds of layers that are adapted and of linear ones that are not
    ("falcon_h1", STATES | {"mamba_n_heads": 4}, ATTENTION | MLP | {"in_proj"}, {"out_proj"}),
    (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "n_groups": 1,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "chunk_size": 8,
        },
        ATTENTION | {"in_proj"},
        {"out_proj"},
    ),
    (
        "mamba2",
        {"num_heads": 8, "state_size": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
        {"in_proj"},
        {"out_proj"},
    ),
    (
        "bamba",
        STATES | {"attn_layer_indices": [1]},
        ATTENTION | MLP | {"in_proj", "out_proj"},
        set(),
    ),
    (
        "deepseek_v3",
        {
            **ROUTED,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "qk_nope_head_dim": 8,
            "num_key_value_heads": 4,
        },
        MLP | {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
        set(),
    ),
    ("glm4_moe", ROUTED, ATTENTION | MLP, set()),
    (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 16,
            "moe_layer_start_index": 1,
        },
        ATTENTION | MLP,
        set(),
    ),
    (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0],
        },
        ATTENTION | MLP,
        set(),
    ),
]


@pytest.mark.parametrize(("kind", "sizes", "adapted_kinds", "refused"), KINDS_OF_LAYERS)
def test_plain_layers_are_adapted_as_peft_loads_them_and_the_start_decides_so(
    kind, sizes, adapted_kinds, refused, tmp_path
):
    """peft refuses some layers of Mamba's kind, and takes names of dense layers and shared experts
    for those of fused experts."""
    from peft import PeftModel

    config = AutoConfig.for_model(kind, **SMALL_SIZES | sizes)

    def base():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()

    def kinds_of(names):
        return {name.rpartition(".")[2] for name in names}

    model = base()
    linear = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    linear -= {name for name, m in model.named_modules() if m is model.get_output_embeddings()}
    announced = check_lora(LORA, kind, meta_model(config))
    line = describe_lora(LORA, kind, meta_model(config))
    adapter = Adapter(model, LORA, path=kind, seed=0)
    assert kinds_of(adapter._layers) == adapted_kinds
    # No other layer is left out than those of the kinds that peft refuses.
    assert kinds_of(linear - adapter._layers.keys()) == refused
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert sum(weight.numel() for weight in trained) == announced
    adapted_part, _, frozen_part = line.partition("; frozen: ")
    assert all(f" x {name}" in adapted_part for name in adapted_kinds)
    assert all(f" x {name} (peft refuses it)" in frozen_part for name in refused)
    with torch.no_grad():
        for weight in trained:
            weight.normal_(std=0.3)
    ids = torch.arange(3, 20)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    adapter.save(tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path)
    got = loaded(input_ids=ids, use_cache=False).logits
    assert float((expected - base()(input_ids=ids, use_cache=False).logits).abs().max()) > 1e-2
    torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-5)


def test_a_target_that_peft_refuses_is_named_and_shared_experts_can_be_asked_for():
    _, sizes, *_ = KINDS_OF_LAYERS[0]
    model = meta_model(AutoConfig.for_model("falcon_h1", **SMALL_SIZES | sizes))
    refused = LoraConfig(rank=2, target_modules=["out_proj"])
    with pytest.raises(
        ConfigError, match=r"^model\.lora\.target_modules: .*'out_proj', which peft"
    ):
        check_lora(refused, "falcon_h1", model)
    model = meta_model(AutoConfig.for_model("glm4_moe", **SMALL_SIZES | ROUTED))
    shared = LoraConfig(rank=2, target_modules=["shared_experts.up_proj"])
    assert check_lora(shared, "glm4_moe", model) == 2 * (32 + 16)


HYBRID = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "hybrid_layer_ids": [1, 3],
    "num_mem_blocks": 1,
    "num_key_value_heads": 4,
    "mamba_d_state": 8,
    "n_mamba_heads": 8,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "chunk_size": 8,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "adapter_rank": 4,
}
LEFT_OUT = [
    # the model, its sizes, a layer that is left out, what the start line calls it, and why it
    # cannot be a target
    ("llama4_text", {**ROUTED, "intermediate_size_mlp": 48}, "router", "router (router)", ""),
    ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, "router", "router (router)", ""),
    (
        "mamba",
        {"state_size": 4, "conv_kernel": 4, "time_step_rank": 4},
        "dt_proj",
        "dt_proj (its weight is read without a call)",
        "reads without calling",
    ),
    ("zamba2", HYBRID, "o_proj", "o_proj (several layers share it)", "several layers share"),
    ("recurrent_gemma", {"lru_width": 32}, "conv_1d", "conv_1d", ""),
]


@pytest.mark.parametrize(("kind", "sizes", "layer", "shown", "why"), LEFT_OUT)
def test_layers_whose_adapter_could_not_be_merged_are_left_out_and_named(
    kind, sizes, layer, shown, why
):
    """A router returns several tensors, Mamba reads the weight of `dt_proj`, and of a weight that
    two layers share only one adapter would reach the engine. Convolutions have no adapter."""
    config = AutoConfig.for_model(kind, **SMALL_SIZES | sizes)

    def base():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()

    line = describe_lora(LORA, kind, meta_model(config))
    assert f" x {shown}" in line.partition("; frozen: ")[2]
    with pytest.raises(ConfigError, match=rf"^model\.lora\.target_modules: .*'{layer}'.*{why}"):
        check_lora(LoraConfig(rank=2, target_modules=[layer]), kind, meta_model(config))
    model = base()
    adapter = Adapter(model, LORA, path=kind, seed=0)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert sum(weight.numel() for weight in trained) == check_lora(LORA, kind, meta_model(config))
    with torch.no_grad():
        for weight in trained:
            weight.normal_(std=0.2)
    ids = torch.arange(3, 20)[None]
    adapted_logits = model(input_ids=ids, use_cache=False).logits
    merged = base()
    weights = adapter.weights(model.named_parameters())
    state = {weight.name: weight.materialize() for weight in weights}
    _, unexpected = merged.load_state_dict(state, strict=False)
    assert not unexpected
    got = merged(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, adapted_logits, rtol=0.0, atol=1e-4)


def test_a_layer_that_two_targets_name_is_counted_once():
    model = meta_model(AutoConfig.from_pretrained(TINY))
    once, twice = (
        check_lora(LoraConfig(rank=2, target_modules=names), "tiny", model)
        for names in (["q_proj"], ["q_proj", "self_attn.q_proj"])
    )
    assert once == twice


def of_peft(folder, base=TINY, **changes):
    """Save an adapter as peft does, with random values."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]} | changes
    config = PeftConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    config.base_model_name_or_path = str(base)
    torch.manual_seed(len(folder.name))
    get_peft_model(plain_model(base), config).save_pretrained(folder)
    return folder


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def merged_weights(adapter, base, folder):
    """The weights of the base with the adapter, as `easyrl eval` merges it."""
    return weights_of(Path(find_model(str(adapter), base).make(folder)))


THREE = "model.lora.target_modules=[q_proj, down_proj, v_proj]"
FROM_ADAPTER = (*SMALL, "--iterations", "1", "data.num_held_out=0")


def test_a_run_goes_on_with_an_adapter_of_its_rank(tmp_path):
    """With learning rate 0 it stays as it is, and so does the policy: kl is that of the reference,
    which is the policy at the start."""
    mine, run = of_peft(tmp_path / "mine"), tmp_path / "run"
    words = ("--model", str(mine), *FROM_ADAPTER, "model.lora.rank=4", "train.learning_rate=0")
    said = [succeed(*words, "--dry-run"), succeed(*words, "--output", str(run), "algorithm.beta=1")]
    for out in said:
        assert f"the adapter {mine} of {TINY} is trained further" in out
    before, after = (
        load_file(each / "adapter_model.safetensors") for each in (mine, run / "adapter")
    )
    assert before.keys() == after.keys() and all((before[n] == after[n]).all() for n in before)
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    about = (config["r"], config["lora_alpha"], config["base_model_name_or_path"])
    assert about == (4, 6, str(TINY))
    expected = merged_weights(mine, None, tmp_path / "made")
    for name, weight in weights_of(run / "model").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
    (line,) = lines_of(run / "metrics.jsonl")
    assert line["kl"] == 0.0 and line["grad_norm"] > 0.0
    card = (run / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card and "LoRA adapter of rank 4 for tiny" in card
    assert "with EasyRL" in card and "data: arithmetic" in card

    shutil.rmtree(mine)  # the run has a copy
    succeed("--resume", str(run), "--iterations", "2", "train.learning_rate=0.01")
    trained = load_file(run / "adapter" / "adapter_model.safetensors")
    assert any((trained[name] != before[name]).any() for name in before)
    start, _ = start_from(load_config(words=[f"model.path={run}/adapter", "model.lora.rank=4"]))
    assert start.learning_rate == 0.01 and start.model.path == str(TINY)
    assert (start.model.lora.adapter, start.model.lora.alpha) == (str(run / "adapter"), 6)


def test_a_new_adapter_on_a_merged_one_is_saved_with_it_for_its_base(tmp_path):
    mine, run = of_peft(tmp_path / "mine"), tmp_path / "run"
    words = ("--model", str(mine), *FROM_ADAPTER, "model.lora.rank=2", "train.learning_rate=0.01")
    words += ("model.lora.target_modules=[q_proj, k_proj]",)
    for out in (succeed(*words, "--dry-run"), succeed(*words, "--output", str(run))):
        (line,) = (line for line in out.splitlines() if "is merged into its base" in line)
        assert (
            f"the adapter {mine} is merged into its base, {TINY}, and a new one of rank 2" in line
        )
        assert "its rank is 4, and model.lora.rank is 2" in line and "with rank 6" in line
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (6, str(TINY))
    expected = weights_of(run / "model")
    made = merged_weights(run / "adapter", None, tmp_path / "made")
    for name, weight in made.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)
    plain = weights_of(TINY)
    assert any((plain[name] - weight).abs().max() > 1e-3 for name, weight in made.items())
    assert f"LoRA adapter of rank 6 for {TINY.name}" in (run / "adapter" / "README.md").read_text()


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 8}, "rank_pattern": {"q_proj": 3}}],
)  # fmt: skip
def test_two_adapters_combined_are_both(tmp_path, changes):
    first = of_peft(tmp_path / "first", **changes)
    expected_base = Path(find_model(str(first)).make(tmp_path / "merged"))
    second = of_peft(tmp_path / "second", expected_base, r=2, target_modules=["q_proj", "o_proj"])
    expected = merged_weights(second, None, tmp_path / "expected")
    combine(second, read_adapter(first))
    assert json.loads((second / "adapter_config.json").read_text())["r"] == 6
    got = merged_weights(second, None, tmp_path / "got")
    for name, weight in got.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words", "why"),
    [
        ({}, ["model.lora.rank=4"], ""),
        ({}, ["model.lora.rank=4", "model.lora.alpha=6"], ""),
        ({}, ["model.lora.rank=4", "model.lora.target_modules=[q_proj, down_proj]"], ""),
        ({}, ["model.lora.rank=4", "model.lora.alpha=8"], "its alpha is 6"),
        ({}, ["model.lora.rank=4", "model.lora.target_modules=[q_proj]"], "target_modules are not"),
        ({}, ["model.lora.rank=4", THREE], "v_proj"),
        ({"use_rslora": True}, ["model.lora.rank=4"], "use_rslora"),
        ({"use_dora": True}, ["model.lora.rank=4"], "use_dora"),
        ({"modules_to_save": ["lm_head"]}, ["model.lora.rank=4"], "modules_to_save"),
        ({}, [], None),
    ],
)  # fmt: skip
def test_what_becomes_of_an_adapter_follows_from_the_settings(tmp_path, changes, words, why):
    folder = of_peft(tmp_path / "mine", **changes)
    _, source = start_from(load_config(words=[f"model.path={folder}", *words]))
    assert source.kind == ("continued" if why == "" else "adapter")
    assert (why or "") in source.reason_for_new
    text = source.describe(load_config(words=words).model.lora)
    assert (why is None) == ("to train it further: model.lora.rank=4" in text)


def test_adapters_of_other_models_are_refused_before_the_run(tmp_path):
    folder = of_peft(tmp_path / "mine")
    words = [f"model.lora.adapter={folder}", "model.lora.rank=4"]
    with pytest.raises(ConfigError, match=r"expected an adapter of model\.path .* tiny-countdown"):
        start_from(load_config(words=["model.path=tiny-countdown", *words]))
    with pytest.raises(ConfigError, match=r"its rank is 4, and model\.lora\.rank is 8"):
        start_from(load_config(words=[words[0], "model.lora.rank=8"]))
    with pytest.raises(ConfigError, match="expected the folder of an adapter"):
        start_from(load_config(words=[f"model.lora.adapter={tmp_path}", "model.lora.rank=4"]))
    with pytest.raises(ConfigError, match=r"expected model\.lora\.rank too"):
        load_config(words=[words[0]])
    change_json("adapter_config.json", base_model_name_or_path="/gone/from/here")(folder)
    with pytest.raises(ConfigError, match=r"grpo --model MODEL model\.lora\.adapter="):
        start_from(load_config(words=[f"model.path={folder}", "model.lora.rank=4"]))
    pointer = shutil.copytree(folder, tmp_path / "pointer")
    (pointer / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigError, match=r"model\.lora\.adapter: expected a complete adapter_m"):
        start_from(load_config(words=[f"model.lora.adapter={pointer}", "model.lora.rank=4"]))
    lora = LoraConfig(rank=4, adapter=str(folder))
    check_lora(lora, "tiny", meta_model(AutoConfig.from_pretrained(TINY)))
    for kind, named in (("qwen3", "weights, and there"), ("gpt2", "it does not have")):
        path = saved(kind, tmp_path)
        with pytest.raises(ConfigError, match=rf"model\.lora\.adapter: .*{named}"):
            check_lora(lora, str(path), meta_model(AutoConfig.from_pretrained(path)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "gpt2"])
def test_engine_merges_adapters_to_the_trainers_bits(kind, dtype, tmp_path):
    path = saved(kind, tmp_path)
    policy, engine = adapted(path, dtype=dtype), load_policy(str(path), dtype=dtype)
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
    assert load_policy(str(folder / "model"), dtype="bfloat16").weights_sha256() == sha256
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
