"""Runs of `easyrl grpo` with LoRA."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from easyrl.data.hub import resolve_model
from easyrl.model.export import export_checkpoint
from runs import SMALL, finish, lines_of, summary_of, without_timing

PROMPT = "12+34="
TINY = resolve_model("tiny")


@pytest.mark.long
@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_both_schedules_end_in_the_same_bits_with_lora(tmp_path: Path, devices: str) -> None:
    """A reference, an old policy, two rollout workers, random delays everywhere."""
    ends = {}
    for schedule in ("sync", "periodic"):
        folder = tmp_path / schedule
        code, out, err = finish(
            *("--output", str(folder), "--iterations", "4", "--schedule", schedule),
            *("model.lora.rank=4", "algorithm.beta=0.05", "train.updates_per_iteration=2"),
            *("runtime.deterministic=true", "--infer-devices", "cpu:2", *SMALL[1:]),
            *("--train-devices", devices),
            *("train.prompts_per_iteration=6", "train.max_tokens_per_micro_batch=200"),
            "rollout.max_completion_length=64",
            EASYRL_RANDOM_DELAYS="0.01",
        )
        assert (code, err) == (0, "")
        assert "LoRA of rank 4: 37,888 weights are trained" in out
        summary = summary_of(folder)
        assert summary["policy_version"] == 8 and summary["groups_off_policy"] == 0
        metrics = [without_timing(line) for line in lines_of(folder / "metrics.jsonl")]
        assert metrics[-1]["kl"] > 0 and metrics[-1]["num_updates_not_finite"] == 0
        assert 0 < summary["sampling_logp_difference_max"] <= 1e-4
        ends[schedule] = summary["weights_sha256"], metrics
    assert ends["sync"] == ends["periodic"]
    end = out.partition("\nfinished\n")[2]
    assert "adapter/" in end and "the adapter merged" in end
    assert_model_and_adapter_were_trained(folder)


def test_one_rank_reads_lora_weights_of_two_ranks_in_bfloat16(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, _, err = finish(
        *("--output", str(folder), "--iterations", "3", "--train-devices", "cpu:2", *SMALL),
        *("model.lora.rank=4", "model.dtype=bfloat16", "train.offload=[optimizer]"),
        *("algorithm.beta=0.05", "train.updates_per_iteration=2"),
        "rollout.max_completion_length=64",
    )
    assert (code, err) == (0, "")
    metrics = lines_of(folder / "metrics.jsonl")[-1]
    assert metrics["kl"] > 0 and metrics["num_updates_not_finite"] == 0
    assert_model_and_adapter_were_trained(folder)
    message = export_checkpoint(folder, tmp_path / "exported")
    assert summary_of(folder)["weights_sha256"] in message  # merged from the stored adapters


@pytest.mark.long
@pytest.mark.parametrize("devices", [("cpu:2", "cpu"), ("cpu", "cpu:2")])
def test_lora_run_resumes_with_another_number_of_train_devices(
    tmp_path: Path, devices: tuple[str, str]
) -> None:
    words = (*SMALL, "model.lora.rank=4", "algorithm.beta=0.05", "runtime.deterministic=true")
    words = (*words, "train.lr_scheduler_type=constant", "rollout.max_completion_length=64")
    once, twice = tmp_path / "once", tmp_path / "twice"
    code, _, err = finish("--output", str(once), "--iterations", "6", *words)
    assert (code, err) == (0, "")
    first = ("--output", str(twice), "--iterations", "3", "--train-devices", devices[0])
    assert finish(*first, *words)[::2] == (0, "")
    again = ("--resume", str(twice), "--iterations", "6", "--train-devices", devices[1])
    assert finish(*again)[::2] == (0, "")
    one, two = (load_file(folder / "model/model.safetensors") for folder in (once, twice))
    before = load_file(Path(TINY) / "model.safetensors")
    for name, weight in one.items():
        gap = float((two[name] - weight).norm() / weight.norm())
        moved = float((before[name] - weight).norm() / weight.norm())
        is_frozen = not name.endswith("_proj.weight")
        assert gap <= 1e-5 and (gap < moved / 100 or (is_frozen and moved == gap == 0.0)), name
    assert_model_and_adapter_were_trained(twice)


def assert_model_and_adapter_were_trained(folder: Path) -> None:
    """Check `model/` by its hash, and `adapter/` by its logits on the run's initial model."""
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(tensor.detach().numpy().tobytes())
    assert digest.hexdigest() == summary_of(folder)["weights_sha256"]
    before = load_file(Path(TINY) / "model.safetensors")
    after = load_file(folder / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) != name.endswith("_proj.weight"), name

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    base = AutoModelForCausalLM.from_pretrained(TINY)

    def logits(of: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = of.eval()(input_ids=ids).logits
        return found

    of_base, of_model = logits(base), logits(model)
    assert float((of_model - of_base).abs().max()) > 1e-4
    on_base = PeftModel.from_pretrained(base, folder / "adapter")
    by_name = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    for adapted in (on_base, by_name):
        torch.testing.assert_close(logits(adapted), of_model, rtol=0.0, atol=2e-5)


@pytest.mark.long
def test_second_lora_run_starts_from_the_merged_model_of_the_first(tmp_path: Path) -> None:
    """That model is its reference. Only some layers are adapted."""
    words = (*SMALL, "model.lora.rank=2", "model.lora.target_modules=[q_proj, 3.mlp.up_proj]")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, model in ((first, TINY), (second, str(first / "model"))):
        code, _, err = finish(
            *("--output", str(folder), "--model", model, "--iterations", "2", *words),
            *("algorithm.beta=0.1", "train.learning_rate=1e-2"),
            "rollout.max_completion_length=100",
        )
        assert (code, err) == (0, "")
    before, between, after = (
        load_file(path / "model.safetensors")
        for path in (Path(TINY), first / "model", second / "model")
    )
    for name in after:
        is_adapted = name.endswith(("q_proj.weight", "3.mlp.up_proj.weight"))
        assert torch.equal(before[name], between[name]) != is_adapted, name
        assert torch.equal(between[name], after[name]) != is_adapted, name
    assert abs(lines_of(second / "metrics.jsonl")[0]["kl"]) < 1e-9
