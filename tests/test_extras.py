"""Optional dependencies: what works without them, and how a missing one is named."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from easyrl import cli
from easyrl.data.hub import resolve_model
from easyrl.formatting import EXTRAS
from runs import SMALL, succeed, summary_of

ROOT = Path(__file__).parent.parent
BLOCKED = {*EXTRAS.values(), "scipy", "pandas", "pyarrow", "psutil"} - {"httpx2"}
"""As if they were not installed. httpx2 comes with huggingface_hub 2."""


def test_a_run_and_a_resumed_one_need_no_optional_library(tmp_path):
    program = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED}))"
    (tmp_path / "sitecustomize.py").write_text(program)
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "--model", resolve_model("tiny"), "--dataset", str(data), "--reward", "exact_match"
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
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith(f": pip install 'easyrl-train[{extra}]'\n")
    assert [file.name for file in tmp_path.iterdir()] == ["rows.parquet"]
