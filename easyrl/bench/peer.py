"""Whole iterations of EasyRL against TRL's GRPO trainer on the same work (docs/benchmarks.md).

TRL runs in a process of its own; the two take turns. Models are random and prompts are digits, but
in the rows `smollm2`, which ask a chat model for sums and train it a little, and in the rows
`vision` and `pictures`, which ask for the sum of the numbers in a picture: the built-in model with
a tower, and a random one that sees as many patches as LLaVA 1.5.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    SiglipVisionConfig,
)

from easyrl.bench import harness
from easyrl.config import ConfigError, load_config
from easyrl.devices import accelerator, visible_environment
from easyrl.engines.vllm.platforms import vllm_version
from easyrl.formatting import require
from easyrl.processes import die_with_parent, num_cores
from easyrl.runtime.placement import Placement, resolve_placement
from easyrl.runtime.resolve import resolve
from easyrl.runtime.self_test_part import random_model
from easyrl.runtime.supervisor import WorkerFailure, signals_as_interrupts
from easyrl.types import Messages

TINY = {
    "vocab_size": 99,  # of the built-in tokenizer
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
HYBRID = {
    "vocab_size": 99,
    "hidden_size": 256,
    "intermediate_size": 960,
    "num_hidden_layers": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
"""A Qwen3.5 of 8 million weights, without a tower."""
LLAVA = {
    "text": {
        "vocab_size": 100,  # of the tokenizer of `tiny-vision`
        "hidden_size": 256,
        "intermediate_size": 960,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "vision": {
        "image_size": 336,
        "patch_size": 14,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "vision_use_head": False,
    },
    "image_token_id": 99,
}
"""A LLaVA of 7 million weights and a tower of 5 million. A picture is 576 tokens."""


def random_hybrid(size: Mapping[str, Any]) -> Any:
    """Return a float32 Qwen3.5 without a vision tower. `size`: arguments of its config."""
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**size, max_position_embeddings=4096))


def random_llava(size: Mapping[str, Any]) -> Any:
    """Return a float32 LLaVA. `size`: arguments of the configs of both parts."""
    torch.manual_seed(0)
    text = Qwen3Config(**size["text"], max_position_embeddings=1024)
    config = LlavaConfig(
        text_config=text,
        vision_config=SiglipVisionConfig(**size["vision"]),
        image_token_index=size["image_token_id"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


@dataclass(frozen=True)
class Work:
    """What both trainers do in an iteration, and how TRL does it."""

    size: Mapping[str, Any] | None  # of the random model; None: a chat model that is given,
    # or with pictures the built-in one
    num_prompts: int
    num_generations: int
    prompt_length: int  # digits; 0 with pictures, which have a question of their own
    max_completion_length: int
    iterations: int  # measured per run
    micro_batch: int  # TRL's, in completions: the faster of 16 and 64 on two cores
    make_model: Callable[[Mapping[str, Any]], Any] = random_model  # of `size`
    learning_rate: float = 0.0
    lora_rank: int | None = None
    schema_length: int = 0  # characters of a schema of tools before every prompt
    has_pictures: bool = False  # each prompt has one, of `picture-sums`
    chat_about: Callable[[str], Messages] | None = None  # what a chat model is asked, by the digits

    @property
    def asks_given_model(self) -> bool:
        """Whether the user has to name a chat model."""
        return self.size is None and not self.has_pictures

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.num_generations


SMOLLM2 = Work(
    size=None,
    chat_about=harness.sum_of,
    num_prompts=8,
    num_generations=8,
    prompt_length=4,
    max_completion_length=64,
    iterations=2,
    micro_batch=16,
    learning_rate=1e-6,
)
ROWS = {
    "tiny_short": Work(
        size=TINY,
        num_prompts=16,
        num_generations=8,
        prompt_length=12,
        max_completion_length=256,
        iterations=8,
        micro_batch=64,
    ),
    "tiny_long": Work(
        size=TINY,
        num_prompts=8,
        num_generations=16,
        prompt_length=256,
        max_completion_length=64,
        iterations=8,
        micro_batch=64,
    ),
    "hybrid": Work(
        size=HYBRID,
        make_model=random_hybrid,
        num_prompts=8,
        num_generations=8,
        prompt_length=1024,
        max_completion_length=64,
        iterations=2,
        micro_batch=16,
    ),
    "tools": Work(
        size=TINY,
        num_prompts=8,
        num_generations=8,
        prompt_length=12,
        schema_length=1500,
        max_completion_length=64,
        iterations=4,
        micro_batch=16,
    ),
    "vision": Work(
        size=None,
        num_prompts=8,
        num_generations=8,
        prompt_length=0,
        max_completion_length=64,
        iterations=4,
        micro_batch=64,
        has_pictures=True,
    ),
    "pictures": Work(
        size=LLAVA,
        make_model=random_llava,
        num_prompts=8,
        num_generations=8,
        prompt_length=0,
        max_completion_length=64,
        iterations=2,
        micro_batch=16,
        has_pictures=True,
    ),
    "smollm2": SMOLLM2,
    "smollm2_lora": replace(SMOLLM2, lora_rank=16),
    "smollm2_long": replace(
        SMOLLM2,
        chat_about=harness.story_about,
        num_prompts=4,
        num_generations=4,
        max_completion_length=512,
        iterations=1,
        micro_batch=4,
    ),
}
BY_DEFAULT = [name for name, work in ROWS.items() if not work.asks_given_model]


class Measured(NamedTuple):
    """Measurements of one run of one of the two trainers."""

    tokens_per_second: float  # of completions
    mean_length: float  # of a completion, in tokens


TRL_SETTINGS = {
    "model_init_kwargs": {"dtype": "float32"},  # weights; `bf16` computes in bfloat16
    "lr_scheduler_type": "constant",
    "beta": 0.0,
    "loss_type": "grpo",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def run(
    rows: str | None = None,
    model: str | None = None,
    infer_devices: str | None = None,
    train_devices: str | None = None,
    *,
    rounds: int = 3,
    iterations: int | None = None,
) -> Iterator[harness.Row]:
    """Yield a row per name in `rows`, which commas separate; by default, those that need no model
    of the user's. Rates are medians over rounds. Raises ConfigError for unknown rows, for devices
    of two kinds or of Ray, and without TRL.

    `model`: the chat model of the rows `smollm2`; in other rows it replaces the random one.
    `iterations`: measured in each round instead of the row's own number.
    """
    names = BY_DEFAULT if rows is None else [name.strip() for name in rows.split(",")]
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        got = "', '".join(unknown)
        raise ConfigError(f"--rows: expected some of {', '.join(ROWS)}, got '{got}'")
    chats = [name for name in names if name not in BY_DEFAULT]
    if chats and model is None:
        raise ConfigError(f"--rows {chats[0]}: expected --model FOLDER too, a chat model; got none")
    flags: dict[str, Any] = {"devices.infer": infer_devices, "devices.train": train_devices}
    placement = _placement(flags)
    on_cpu = placement.train.kind == "cpu"
    require("peer", "bench peer")
    dtype = "float32" if on_cpu else "bfloat16"
    flags["model.dtype"] = dtype
    for name in names:
        work = ROWS[name]
        if iterations is not None:
            work = replace(work, iterations=iterations)
        settings = peer_settings(work, placement)
        used = ", ".join(f"{key} {value}" for key, value in settings.items())
        peer = f"TRL {metadata.version('trl')}, {used}"
        with signals_as_interrupts(), tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
            inputs = _write_inputs(Path(folder), work, model, dtype)
            actions = {
                "easyrl": partial(run_easyrl, name, work, {**flags, **inputs}),
                "peer": partial(run_trl, f"{name}, {peer}", work, inputs, settings),
            }
            runs = harness.take_turns(actions, rounds, num_warm_up=0)
        rates: dict[str, list[float]] = {"easyrl": [], "peer": []}
        lengths: dict[str, list[float]] = {"easyrl": [], "peer": []}
        for side, measured in runs.items():
            for each in measured:
                rates[side].append(each.tokens_per_second)
                lengths[side].append(each.mean_length)
        ratio = harness.median_ratio(rates["easyrl"], rates["peer"])
        row: harness.Row = {"row": name, "ratio": ratio, "peer": peer}
        for side in runs:
            row[f"{side}_tokens_per_second"] = statistics.median(rates[side])
            row[f"{side}_mean_length"] = statistics.mean(lengths[side])
        yield row


def _write_inputs(folder: Path, work: Work, model: str | None, dtype: str) -> dict[str, Any]:
    """Write the prompts of a row, and its model unless `model` names one. Return the settings that
    name them."""
    if work.has_pictures:
        if model is None and work.size is not None:
            model = harness.write_picture_model(folder / "model", work.make_model(work.size), dtype)
        return harness.write_pictures(folder, model or "tiny-vision", work.num_prompts)
    return harness.write_model_and_prompts(
        folder,
        model if work.size is None or model else work.make_model(work.size),
        dtype,
        work.num_prompts,
        work.prompt_length,
        chat_about=work.chat_about,
        schema_length=work.schema_length,
    )


def _placement(flags: Mapping[str, Any]) -> Placement:
    """Return the placement of both trainers. Raises ConfigError for devices of two kinds or of
    Ray."""
    config = load_config(None, flags)
    uses_ray = any(each is not None and each.is_ray for each in config.devices.sets)
    if not uses_ray:  # else a cluster would be started
        placement = resolve_placement(resolve(config))
        if placement.infer.kind == placement.train.kind:
            return placement
    raise ConfigError(
        "--infer-devices, --train-devices: expected both CPU or both accelerators of this "
        f"machine, got {flags['devices.infer'] or 'auto'} and {flags['devices.train'] or 'auto'}"
    )


def run_easyrl(name: str, work: Work, flags: Mapping[str, Any]) -> Measured:
    own = {
        "train.prompts_per_iteration": work.num_prompts,
        "rollout.num_generations": work.num_generations,
        "rollout.max_completion_length": work.max_completion_length,
        "train.learning_rate": work.learning_rate,
        "train.lr_scheduler_type": "constant",
        "model.lora.rank": work.lora_rank,
    }
    figures = harness.record(f"{name}, EasyRL", {**flags, **own}, iterations=work.iterations)
    num_tokens = figures["completion_tokens"]
    return Measured(num_tokens / figures["seconds"], num_tokens / work.num_completions)


def peer_settings(work: Work, placement: Placement) -> dict[str, Any]:
    """Return how TRL does the work: on which devices, with which engine, and its micro-batch. A row
    shows them."""
    if placement.train.kind == "cpu":
        return {"micro-batch": work.micro_batch}
    used = sorted({*placement.infer.indices, *placement.train.indices})
    completions_per_device = work.num_completions // len(used)
    # vLLM generates for EasyRL, too, where it is installed.
    generation = {"vllm": "colocate"} if vllm_version() else {"generation": "transformers"}
    return {
        "devices": used,
        **generation,
        "micro-batch": math.gcd(work.micro_batch, completions_per_device),
    }


def run_trl(
    name: str, work: Work, inputs: Mapping[str, Any], settings: Mapping[str, Any]
) -> Measured:
    """Train with TRL in a process of its own, or one per device. Raises WorkerFailure with `name`
    if it fails."""
    used = settings.get("devices")
    num_processes = 1 if used is None else len(used)
    micro_batch = settings["micro-batch"]
    config = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": work.num_completions // (micro_batch * num_processes),
        "num_generations": work.num_generations,
        "max_completion_length": work.max_completion_length,
        "use_cpu": used is None,
        "bf16": used is not None,
        "learning_rate": work.learning_rate,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_cores())}
    program = [sys.executable, "-m"]
    if used is not None:
        environment |= visible_environment(accelerator()[0], used)
        if "vllm" in settings:
            config["use_vllm"] = True
            config["vllm_mode"] = settings["vllm"]
        program += ["accelerate.commands.launch", f"--num_processes={num_processes}", "-m"]
    with tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
        asked = Path(folder, "asked")
        result = Path(folder, "result")
        log_file = Path(folder, "log")
        config["output_dir"] = folder
        run = {
            "model": inputs["model.path"],
            "prompts": inputs["data.dataset"],
            "iterations": work.iterations,
            "result": str(result),
            "rank": work.lora_rank,
            "config": config,
        }
        asked.write_text(json.dumps(run))
        program += ["easyrl.bench.peer", str(asked)]
        with log_file.open("w") as log:
            done = subprocess.run(program, env=environment, stdout=log, stderr=log, check=False)
        if done.returncode != 0:
            lines = log_file.read_text(errors="replace").splitlines()[-20:]
            raise WorkerFailure("\n".join([f"bench, {name}: exit code {done.returncode}", *lines]))
        measured = json.loads(result.read_text())
    # The first iteration has warmed up.
    seconds = measured["ends"][-1] - measured["ends"][0]
    num_tokens = sum(measured["tokens"][1:])
    print(f"{name}: {seconds / work.iterations:.2f} s per iteration", file=sys.stderr)
    num_completions = work.num_completions * work.iterations
    return Measured(num_tokens / seconds, num_tokens / num_completions)


def as_trl_has_it(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the prompts' file with its picture, if it has one, in a column of its own."""
    if "image" not in row:
        return dict(row)
    from PIL import Image

    with Image.open(row["image"]) as image:
        image.load()
    return {"prompt": [{"role": "user", "content": row["prompt"]}], "image": image}


def train_with_trl(settings: dict[str, Any]) -> None:
    """Run TRL's trainer in this process. The first iteration warms up.

    `settings`: as `run_trl` writes them. Of each iteration, the number of completion tokens
    (`tokens`) and the time of its end in seconds (`ends`) are written to the file `result`.
    """
    from accelerate.utils import gather_object
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokens: list[int] = []
    ends: list[float] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        num_tokens = sum(map(len, completion_ids))
        tokens.append(sum(gather_object([num_tokens])))  # of all processes
        return harness.spread(completion_ids)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    lines = Path(settings["prompts"]).read_text().splitlines()
    prompts = [as_trl_has_it(json.loads(line)) for line in lines]
    num_steps = 1 + settings["iterations"]
    lora = None
    if settings["rank"]:
        rank = settings["rank"]
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=GRPOConfig(**TRL_SETTINGS, **settings["config"], max_steps=num_steps),
        train_dataset=Dataset.from_list(prompts * num_steps),
        callbacks=[Clock()],
        peft_config=lora,
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        Path(settings["result"]).write_text(json.dumps({"tokens": tokens, "ends": ends}))


if __name__ == "__main__":
    die_with_parent(os.getppid())
    train_with_trl(json.loads(Path(sys.argv[1]).read_text()))
