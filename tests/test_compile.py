"""`train.compile`: compiled layers give the gradient of plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_updates
import torch
from test_train_ranks import Ranks, ranks
from test_updates import model, train
from torch._dynamo.utils import counters

from easyrl.config import ConfigError
from runs import SMALL, finish, summary_of
from tiny_models import FAMILIES, SPREAD, UNSHARED, largest_gradient_gap, tiny_model

torch.set_num_threads(1)

__all__ = ["model", "ranks"]  # fixtures
COMPILE = "train.compile=true"
HARDER = ("algorithm.beta=0.3", "train.updates_per_iteration=2", "algorithm.loss_type=dapo")
CHECKPOINTED = (*HARDER, "train.activation_checkpointing=true")
LORA = (*HARDER, "model.lora.rank=3")
BFLOAT16 = ("model.dtype=bfloat16", "algorithm.importance_sampling_correction=none")
NOT_COMPILED = {"mamba"}  # an error of torch 2.13's compiler
NOT_TRAINED = {"roberta"}


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()
    counters.clear()


def assert_same_gradients(*words: str, bound: float = 1e-5) -> None:
    plain, compiled = train(*words), train(*words, COMPILE)
    assert counters["stats"]["unique_graphs"] > 0
    for got, expected in zip(compiled.gradients, plain.gradients, strict=True):
        assert largest_gradient_gap(got, expected) <= bound


def test_compiled_layers_give_the_gradient_of_plain_ones() -> None:
    assert_same_gradients(*CHECKPOINTED)


@pytest.mark.long
@pytest.mark.parametrize("words", [(), HARDER, LORA, ("model.attention=repeated",)])
def test_other_settings(words: tuple[str, ...]) -> None:
    assert_same_gradients(*words)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted({*FAMILIES, *UNSHARED} - NOT_COMPILED - NOT_TRAINED))
def test_other_models(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = UNSHARED[family][0] if family in UNSHARED else {}
    tiny_model(family, spread=SPREAD, **changes).save_pretrained(tmp_path)
    monkeypatch.setattr(test_updates, "MODEL", str(tmp_path))
    # Recurrences, routers and learned masks amplify rounding.
    assert_same_gradients(bound=1e-4 if family in UNSHARED else 1e-5)


@pytest.mark.long
def test_a_model_that_cannot_be_compiled_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("mamba", spread=SPREAD, **UNSHARED["mamba"][0]).save_pretrained(tmp_path)
    monkeypatch.setattr(test_updates, "MODEL", str(tmp_path))
    with pytest.raises(ConfigError, match=r"train\.compile"):
        train(COMPILE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "more", "bound"),
    [(CHECKPOINTED, (), 1e-5), (LORA, (), 1e-5), (HARDER, BFLOAT16, 0.3)],
)
def test_two_ranks(
    ranks: Ranks, words: tuple[str, ...], more: tuple[str, ...], bound: float
) -> None:
    expected = train(*words)
    for outcome in ranks.train(*words, *more, COMPILE):
        for got, gradient in zip(outcome.gradients, expected.gradients, strict=True):
            assert largest_gradient_gap(got, gradient) <= bound


@pytest.mark.long
def test_a_run_with_lent_cores(tmp_path: Path) -> None:
    """The number of threads changes, and layers are compiled for each."""
    folder, rewards = tmp_path / "run", tmp_path / "rewards.py"
    rewards.write_text("def score(completions, **_): return [len(c) % 3 for c in completions]")
    words = ("--output", str(folder), "--iterations", "4", "--reward", f"{rewards}:score")
    code, out, err = finish(*words, *SMALL, COMPILE)
    assert "train.compile" in out
    assert (code, err) == (0, "")  # no warning of semaphores, which tqdm leaves in a worker
    summary = summary_of(folder)
    assert summary["groups_off_policy"] == 0
    assert 0.0 < summary["sampling_logp_difference_max"] < 1e-3
