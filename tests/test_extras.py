"""How a missing optional dependency is named. Runs without any are in `test_wheel.py`."""

from pathlib import Path

import pytest

from easyrl.formatting import EXTRAS
from runs import easyrl


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("report", ["report", "RUN"]),
        ("datasets", ["grpo", "--dataset", "owner/name", "--reward", "exact_match"]),
        ("datasets", ["grpo", "--dataset", "gsm8k"]),
        ("datasets", ["grpo", "--dataset", "rows.parquet", "--reward", "exact_match"]),
        ("datasets", ["eval", "--model", "tiny", "--dataset", "math500"]),
        ("math", ["grpo", "--reward", "math"]),
        ("judge", ["grpo", "--reward", "judge", "reward.judge.url=http://127.0.0.1:9"]),
        ("lora", ["grpo", "model.lora.rank=4"]),
        ("ray", ["grpo", "--infer-devices", "ray:cpu:1"]),
        ("wandb", ["grpo", "output.log_to=[wandb]"]),
        ("peer", ["bench", "peer"]),
    ],
)
def test_a_missing_library_is_named_with_its_command_before_anything_starts(
    extra, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("rows.parquet").touch()
    monkeypatch.setitem(EXTRAS, extra, "no_such_module")
    result = easyrl(*words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(f": pip install 'easyrl-train[{extra}]'\n")
    assert [file.name for file in tmp_path.iterdir()] == ["rows.parquet"]
