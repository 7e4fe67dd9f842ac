"""Runs over several train ranks that are cut off, and go on over as many or over another number."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_resume import SMALL_AND_SAME, kill, resume

from easyrl.model.checkpoint_files import checkpoints_in
from runs import finish, start, summary_of, wait_for_line

TINY = Path(__file__).parent.parent / "easyrl/tasks/tiny/model.safetensors"


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("cpu:2", "cpu"), ("cpu", "cpu:2")])
def test_another_number_of_ranks_goes_on_to_the_same_weights(
    tmp_path: Path, before: str, after: str
) -> None:
    words = (*SMALL_AND_SAME, "algorithm.beta=0.05", "--iterations", "6", "--train-devices")
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert finish("--output", str(once), *words, before)[0] == 0
    process = start("--output", str(twice), *words, before)
    wait_for_line(process, "checkpoint of iteration 3:")
    kill(process)
    newest = checkpoints_in(twice / "checkpoints")[-1]
    assert len(list(newest.glob("*.safetensors"))) == (2 if before == "cpu:2" else 1)
    out = resume(twice, "--train-devices", after)
    assert ("train-1: cpu" in out) == (after == "cpu:2")
    assert f"{newest.name} of 6 iterations are done" in out
    got, expected = (load_file(folder / "model/model.safetensors") for folder in (twice, once))
    start_weights = load_file(TINY)
    for name, weight in expected.items():
        gap = float((got[name] - weight).norm() / weight.norm())
        moved = float((start_weights[name] - weight).norm() / weight.norm())
        assert gap <= 1e-5 and gap < moved / 100, name
    assert summary_of(twice)["groups_trained"] == summary_of(once)["groups_trained"] == 24
    assert summary_of(twice)["groups_off_policy"] == 0
