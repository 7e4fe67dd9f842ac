"""Layers with a state in packed rows, against each sequence alone."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from easyrl.config import ConfigError
from easyrl.layout.tree import NONE, TokenTree
from easyrl.model.exactness import choose_attention
from easyrl.model.inputs import ModelInputs
from easyrl.model.loading import load_policy
from easyrl.model.mixers.attention import register_attention
from easyrl.model.mixers.kinds import checked_tree
from easyrl.model.mixers.recurrent import MixerState, TreeScan, find_layers
from exact_trees import assert_tree_is_exact, sequences_of
from tiny_models import GROUPED, SPREAD, WITH_STATES, tiny_model

TREE = TokenTree.joined(
    [
        TokenTree.of_group(70, [66, 1, 30]),  # across chunks of 64 tokens
        TokenTree.of_group(1, [5, 2]),
        TokenTree(np.array([3, 1, 2, 1, 1, 4, 1]), np.array([NONE, 0, 1, 1, 0, 4, 4])),
    ]
)


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_tree_gives_the_log_probabilities_and_gradients_of_its_sequences(family):
    model = tiny_model(family, "eager", SPREAD, **WITH_STATES[family]).double()
    if "experts" in str(WITH_STATES[family]):
        model.set_experts_implementation("eager")  # the fused one has no float64
    assert find_layers(model)
    assert_tree_is_exact(model, TREE)


@pytest.mark.parametrize("family", WITH_STATES)
def test_the_check_finds_that_rows_of_such_models_can_be_packed(family):
    model = tiny_model(family, None, SPREAD, **WITH_STATES[family])
    assert choose_attention(model) is None


JAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}
JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
JAMBA |= {"expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1}


def test_the_check_finds_a_model_that_ignores_its_state(tmp_path):
    """Mamba-1 does where several tokens continue one state (transformers 5.24). With weights so
    small its logits hardly show it."""
    register_attention()
    model = tiny_model("jamba", None, SPREAD, **(GROUPED | JAMBA))
    assert "ignores the state" in choose_attention(model)
    tiny_model("jamba", None, SPREAD, **(GROUPED | JAMBA)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^model\.attention: .*ignores the state.*shared_prompt"):
        load_policy(str(tmp_path), attention="shared_prompt")


OTHER_KERNELS = {
    # Name of the library, its module, its function.
    "fails": (
        "causal-conv1d",
        "causal_conv1d",
        "def causal_conv1d_fn(x, *_, **__): raise RuntimeError('no kernel image')",
    ),
    "ignores_states": (
        "flash-linear-attention",
        "fla",
        "def chunk_gated_delta_rule(query, key, value, *_, **__):\n"
        "    return value.cumsum(1), (key[..., None] * value[..., None, :]).sum(1)\n",
    ),
}


@pytest.mark.parametrize("kind", OTHER_KERNELS)
def test_kernels_of_another_version_are_named(kind, tmp_path):
    """transformers 5.24 calls the kernels of any version that it finds, and drops arguments that
    they do not take."""
    library, module, function = OTHER_KERNELS[kind]
    package = tmp_path / module
    package.mkdir()
    package.joinpath("__init__.py").write_text(function)
    description = tmp_path / f"{library.replace('-', '_')}-0.1.dist-info"
    description.mkdir()
    description.joinpath("METADATA").write_text(f"Name: {library}\nVersion: 0.1\n")
    program = (
        "from easyrl.model.loading import load_policy\n"
        "from tiny_models import SPREAD, WITH_STATES, tiny_model\n"
        "sizes = WITH_STATES['qwen3_5_text']\n"
        f"tiny_model('qwen3_5_text', None, SPREAD, **sizes).save_pretrained({str(tmp_path)!r})\n"
        "try:\n"
        f"    print(load_policy({str(tmp_path)!r}).no_packing_reason)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    folders = os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])
    variables = {**os.environ, "PYTHONPATH": folders, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert f"{library} 0.1" in found.stdout, found.stdout + found.stderr
    if kind == "fails":
        assert found.stdout.startswith("ConfigError model.path ")


def test_the_check_crosses_the_chunks_of_a_models_kernels():
    short = tiny_model("qwen3_5_text", None, **WITH_STATES["qwen3_5_text"])
    long = tiny_model("bamba", None, **(WITH_STATES["bamba"] | {"mamba_chunk_size": 128}))
    for model, chunk in ((short, 64), (long, 128)):
        lengths = checked_tree(model).lengths
        assert lengths.max() > chunk
        parents = checked_tree(model).parents
        behind_one_token = [lengths[parent] for parent in parents if parent != NONE]
        assert min(behind_one_token) == 1


def test_a_layer_that_is_recomputed_in_the_backward_pass_finds_its_tree(tmp_path):
    model = tiny_model("qwen3_5_text", None, SPREAD, **WITH_STATES["qwen3_5_text"])
    model.save_pretrained(tmp_path)
    gradients = []
    for is_recomputed in (False, True):
        policy = load_policy(str(tmp_path))
        if is_recomputed:
            policy.checkpoint_activations()
        ids = torch.randint(3, 61, (TREE.num_tokens,), generator=torch.Generator().manual_seed(0))
        inputs = ModelInputs.of_row(ids, TREE)
        policy.forward(inputs).square().sum().backward()
        gradients.append([weight.grad for weight in policy.trained_parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def copied(hidden, state):
    """A layer whose output is the sum of all inputs so far, which it keeps as its state."""
    before = state.get_recurrent_state(0)
    total = hidden.cumsum(1) if before is None else before[:, None] + hidden.cumsum(1)
    state.update_recurrent_state(total[:, -1], 0)
    return total


def test_each_token_is_computed_once_and_no_continuation_has_one_token():
    rows = []

    def run(hidden, state):
        rows.append((hidden.shape[:2], state.has_previous_state()))
        return copied(hidden, state)

    hidden = torch.arange(1.0, TREE.num_tokens + 1)[:, None]
    output = TreeScan(TREE, torch.device("cpu")).scan(run, hidden)
    for sequence in sequences_of(TREE):
        assert torch.equal(output[sequence], hidden[sequence].cumsum(0))
    for (_, length), has_state in rows:
        assert length > 1 or not has_state
    num_cells = sum(number * length for (number, length), _ in rows)
    assert num_cells < 1.5 * TREE.num_tokens


def test_leaves_of_very_different_length_do_not_run_together():
    tree = TokenTree.of_group(10, [100, 90, 3, 2, 60, 4])
    shapes = []

    def run(hidden, state):
        shapes.append(tuple(hidden.shape[:2]))
        return copied(hidden, state)

    TreeScan(tree, torch.device("cpu")).scan(run, torch.ones(tree.num_tokens, 1))
    assert shapes == [(1, 10), (3, 100), (3, 4)]


def test_a_state_is_copied_without_memory_and_appends_to_its_convolution():
    state = MixerState()
    first = state.update_conv_state(torch.tensor([[[1.0, 2.0]]]), 0, conv_kernel_size=3)
    assert first.tolist() == [[[0.0, 0.0, 0.0, 1.0, 2.0]]]
    copies = state.copies(2)
    seen = copies.update_conv_state(torch.tensor([[[3.0]], [[4.0]]]), 0, conv_kernel_size=3)
    assert seen.tolist() == [[[0.0, 1.0, 2.0, 3.0]], [[0.0, 1.0, 2.0, 4.0]]]
    assert state.get_conv_state(0).tolist() == [[[0.0, 1.0, 2.0]]]  # its own is as it was


def test_on_a_cpu_short_chunks_give_the_same_results(tmp_path):
    """Mamba-2's own chunks are meant for a GPU."""
    model = tiny_model("bamba", None, SPREAD, **(WITH_STATES["bamba"] | {"mamba_chunk_size": 256}))
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 61, (300,), generator=torch.Generator().manual_seed(0))
    tree = TokenTree.of_sequences([300])
    own = load_policy(str(tmp_path), "meta")
    assert {layer.chunk_size for layer in find_layers(own.model)} == {256}
    short = load_policy(str(tmp_path))
    assert {layer.chunk_size for layer in find_layers(short.model)} == {64}
    with torch.no_grad():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
        got = short.forward(ModelInputs.of_row(ids, tree))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
