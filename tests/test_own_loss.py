"""`algorithm.loss_type=my_loss.py:loss`: a loss of the user's own."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from test_losses import config_of as built_in
from test_losses import random_inputs

from easyrl.algorithm import losses
from easyrl.algorithm.losses import load_loss
from easyrl.config import Config, ConfigError, load_config
from runs import SMALL, finish, lines_of

REINFORCE = """
from easyrl.algorithm.losses import LossOutputs
def loss(inputs):
    per_token = -inputs.advantages * inputs.logprobs
    likely = inputs.logprobs.detach().exp() * inputs.loss_mask
    return LossOutputs(per_token.sum(), {"probability": likely.sum()})
"""
WORDS = (*SMALL, "rollout.max_completion_length=80", "train.iterations=2", "data.num_held_out=0")


def copy_of(loss_type: str) -> str:
    """The source of the built-in losses, for one of them."""
    functions = inspect.getsource(losses.policy_loss) + inspect.getsource(losses.loss_denominator)
    functions = functions.replace("config.algorithm.loss_type", repr(loss_type))
    return (
        "from easyrl.algorithm.losses import *\n"
        "from easyrl.algorithm.losses import _surrogate, _sum_over_completion, _zero_masked\n"
        + functions.replace("algorithm.loss_type", repr(loss_type))
    )


def config_of(tmp_path: Path, source: str, name: str = "loss") -> Config:
    file = tmp_path / "my_loss.py"
    file.write_text(source)
    return load_config(None, {"algorithm.loss_type": f"{file}:{name}", "algorithm.beta": 0.3})


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_copy_of_a_built_in_loss_gives_the_same_bits(loss_type: str, tmp_path: Path) -> None:
    own = load_loss(config_of(tmp_path, copy_of(loss_type), "policy_loss"))
    config = built_in(loss_type=loss_type, beta=0.3)
    found = []
    for loss in (own, load_loss(config)):
        inputs = random_inputs([3, 5, 1], seed=0)
        outputs = loss.policy_loss(inputs, config)
        outputs.loss.backward()
        found.append([outputs.loss, inputs.logprobs.grad, *outputs.metrics.values()])
        assert loss.loss_denominator(config, num_completions=3, num_tokens=7) in (3.0, 7.0)
    assert all(map(torch.equal, *found)) and found[0][1].any()


def test_every_train_worker_uses_it_and_a_changed_file_is_not_resumed(tmp_path: Path) -> None:
    file, folder = tmp_path / "my_loss.py", tmp_path / "run"
    file.write_text(REINFORCE)
    words = ("--output", str(folder), *WORDS, "--train-devices", "cpu:2")
    code, _, err = finish(*words, f"algorithm.loss_type={file}:loss")
    assert code == 0, err
    line = lines_of(folder / "metrics.jsonl")[0]
    assert 0.0 < line["loss/probability"] <= 1.0 and "clip_ratio/low_mean" not in line
    assert line["entropy"] > 0 and line["grad_norm"] > 0
    file.write_text(REINFORCE.replace("-inputs", "-2.0 * inputs"))
    code, _, err = finish("--resume", str(folder), "--iterations", "3")
    assert code == 2 and "algorithm.loss_type" in err and "changed" in err


def test_the_divisor_is_the_number_of_completions_or_that_of_the_file(tmp_path: Path) -> None:
    config = config_of(tmp_path, REINFORCE)
    assert load_loss(config).loss_denominator(config, num_completions=8, num_tokens=70) == 8.0
    (tmp_path / "other").mkdir()
    own = "\ndef loss_denominator(config, num_completions, num_tokens): return 2 * num_tokens"
    config = config_of(tmp_path / "other", REINFORCE + own)
    assert load_loss(config).loss_denominator(config, num_completions=8, num_tokens=70) == 140.0


OUTPUTS = "from easyrl.algorithm.losses import LossOutputs\ndef loss(inputs, config): return "


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("def other(inputs): pass", "loss"),
        ("def loss(): return 1", "loss()"),
        ("def loss(inputs): return inputs.logits", "logits"),
        ("def loss(inputs): return inputs.logprobs.sum()", "LossOutputs"),
        (f"{OUTPUTS}LossOutputs(inputs.logprobs, {{}})", "scalar"),
        (f"{OUTPUTS}LossOutputs(inputs.logprobs.sum(), {{'a': inputs.logprobs}})", "scalar"),
        (f"{OUTPUTS}LossOutputs(inputs.advantages.sum(), {{}})", "gradient"),
        (f"{REINFORCE}def loss_denominator(config, **numbers): return 0", "loss_denominator"),
        ("import no_such_module", "no_such_module"),
    ],
)
def test_a_loss_that_cannot_work_is_refused(source: str, shown: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss_type") as caught:
        load_loss(config_of(tmp_path, source))
    assert shown in str(caught.value)
