"""Print docs/sizing.md: `python docs/sizing.py > docs/sizing.md`. Every cell is a plan, as
`easyrl grpo --dry-run --assume` makes it, of a folder that has only a config.json."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.performance_model import MODELS as SHAPES  # noqa: E402
from benchmarks.performance_model import Model  # noqa: E402

QWEN_3B = Model(2048, 11008, 36, 16, 2, 128, family="qwen2")
QWEN_7B = Model(3584, 18944, 28, 28, 4, 128, family="qwen2", tied=False)
MODELS = {
    "Qwen2.5-0.5B": SHAPES["0.5 B"],
    "Qwen3-1.7B": SHAPES["1.7 B"],
    "Qwen2.5-3B": QWEN_3B,
    "Qwen2.5-7B": QWEN_7B,
    "Qwen3-8B": SHAPES["8 B"],
}
DEVICES = ("24GiB", "80GiB", "2x24GiB", "2x80GiB", "8x80GiB")
WORDS = "data.max_prompt_length=512 rollout.max_completion_length=1024 model.dtype=bfloat16"
SHORT = {
    "train.activation_checkpointing": "checkpointing",
    "train.max_tokens_per_micro_batch": "micro-batches",
    "rollout.max_concurrent_groups": "groups in flight",
    "train.offload": "offloading",
    "rollout.memory_fraction": "another memory share",
    "rollout.engine": "vLLM",
    "rollout.tensor_parallel_size": "engines over several devices",
    "devices.infer": "",  # another split, which the next key says
    "devices.train": "more train devices",
}
PAGE = f"""# Sizing

Which model fits on which devices, by EasyRL's own estimate. Nothing of it has been measured on
several GPUs. For your model, devices and lengths ask the command itself; the model may be a folder
with only its `config.json`:

    easyrl grpo --dry-run --assume 2x24GiB --model MODEL model.dtype=bfloat16

One GPU for both: `--assume 80GiB --infer-devices 0 --train-devices 0`.

Below are groups of 8 completions of 1,024 tokens and prompts of 512, in bfloat16. A
single device does both; of several a quarter trains, or more where the model needs them.
**fits**: as it is. Otherwise the settings that the command proposes to change, with values: smaller
micro-batches, fewer groups in flight, activation checkpointing, offloading to the host's memory
(slower), more train devices, a larger or smaller share of the device
for the engine (`rollout.memory_fraction`).
**–**: nothing that it tries is enough. With LoRA a model may not fit although training all weights
does: the embedded engine keeps every adapted layer twice, with and without adapters (8 B: 13 GiB
more). vLLM keeps them once.

| model | trained |{"".join(f" {each} |" for each in DEVICES)}
|---|---|{"---|" * len(DEVICES)}
"""
AFTER = """
Longer completions need more: memory of the trainer grows with `train.max_tokens_per_micro_batch`,
that of the engine with groups in flight times length. What needs how much, and which setting helps:
[Memory](devices.md#memory). How fast it should be: [Expected speed](devices.md#expected-speed).

This page is printed by `python docs/sizing.py > docs/sizing.md`.
"""


def cell(folder: str, devices: str, *, lora: bool) -> str:
    """Return whether it fits, or what has to change."""
    from easyrl.config import load_config
    from easyrl.devices import parse_assumed
    from easyrl.runtime.preflight import make_plan

    words = [*WORDS.split(), f"model.path={folder}", *(["model.lora.rank=16"] if lora else [])]
    if "x" not in devices:
        words += ["devices.infer=0", "devices.train=0"]
    plan = make_plan(load_config(words=words), parse_assumed(devices))
    if plan.changes is None:
        return "–"
    return ", ".join(filter(None, (SHORT[key] for key in plan.changes))) or "fits"


def sizing_markdown() -> str:
    lines = []
    for known, shape in MODELS.items():
        config: dict[str, Any] = {
            "architectures": [
                "Qwen2ForCausalLM" if shape.family == "qwen2" else "Qwen3ForCausalLM"
            ],
            "model_type": shape.family,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_size,
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": shape.tied,
            "torch_dtype": "bfloat16",
        }
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            for lora in (False, True):
                cells = [cell(folder, each, lora=lora) for each in DEVICES]
                kind = "LoRA, rank 16" if lora else "all weights"
                lines.append(f"| {known} | {kind} | {' | '.join(cells)} |\n")
    return PAGE + "".join(lines) + AFTER


if __name__ == "__main__":
    print(sizing_markdown(), end="")
