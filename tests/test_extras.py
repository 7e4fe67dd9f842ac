"""Optional dependencies: what works without them, and how a missing one is named."""

from pathlib import Path

import pytest

from easyrl.data.hub import resolve_model
from easyrl.formatting import EXTRAS
from runs import SMALL, easyrl, succeed, summary_of, without_optional_libraries, write_rows


@pytest.mark.long
def test_a_resumed_run_with_data_of_ones_own_needs_no_optional_library(tmp_path):
    """That one with the built-in task needs none is shown by the fixture `finished_run`."""
    path, run = without_optional_libraries(tmp_path), tmp_path / "run"
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    words = "--model", resolve_model("tiny"), "--dataset", data, "--reward", "exact_match"
    succeed(*words, "--output", str(run), "--iterations", "1", *SMALL, **path)
    succeed("--resume", str(run), "--iterations", "2", **path)
    assert summary_of(run)["policy_version"] == 2


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
