"""Whole iterations of EasyRL against TRL's GRPO trainer on the same work (docs/benchmarks.md).

TRL runs in a process of its own; the two take turns. Models are random and prompts are digits, but
in the rows `smollm2`, which ask a chat model for sums and train it a little.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from easyrl.bench import harness
from easyrl.config import ConfigError, load_config
from easyrl.devices import accelerator, visible_environment
from easyrl.formatting import require
from easyrl.processes import die_with_parent, num_cores
from easyrl.runtime.placement import Placement, resolve_placement
from easyrl.runtime.resolve import resolve
from easyrl.runtime.self_test_part import random_model
from easyrl.runtime.supervisor import WorkerFailure, signals_as_interrupts

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


@dataclass(frozen=True)
class Work:
    """What both trainers do in an iteration, and how TRL does it."""

    size: Mapping[str, Any] | None  # of the random model; None: a chat model that is given
    num_prompts: int
    num_generations: int
    prompt_length: int
    cap: int  # longest completion
    iterations: int  # measured per run
    micro_batch: int  # TRL's, in completions: the faster of 16 and 64 on two cores
    learning_rate: float = 0.0
    lora_rank: int | None = None

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.num_generations


ROWS = {
    "tiny_short": Work(TINY, 16, 8, 12, 256, iterations=8, micro_batch=64),
    "tiny_long": Work(TINY, 8, 16, 256, 64, iterations=8, micro_batch=64),
    "smollm2": Work(None, 8, 8, 4, 64, 2, micro_batch=16, learning_rate=1e-6),
    "smollm2_lora": Work(None, 8, 8, 4, 64, 2, micro_batch=16, learning_rate=1e-6, lora_rank=16),
}
RANDOM = [name for name, work in ROWS.items() if work.size is not None]
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
) -> Iterator[harness.Row]:
    """One row per name in `rows` (separated by commas; default: those of random models, which
    `model` replaces). Rates are medians over rounds. Raises ConfigError for unknown
    rows, for devices of two kinds or of Ray, and without TRL."""
    names = [name.strip() for name in rows.split(",")] if rows is not None else RANDOM
    if unknown := [name for name in names if name not in ROWS]:
        got = "', '".join(unknown)
        raise ConfigError(f"--rows: expected some of {', '.join(ROWS)}, got '{got}'")
    if model is None and (chats := [name for name in names if name not in RANDOM]):
        raise ConfigError(f"--rows {chats[0]}: expected --model FOLDER too, a chat model; got none")
    flags: dict[str, Any] = {"devices.infer": infer_devices, "devices.train": train_devices}
    config = load_config(None, flags)
    is_ray = any(each is not None and each.is_ray for each in config.devices.sets)
    # A cluster would be started.
    placement = None if is_ray else resolve_placement(resolve(config))
    if placement is None or placement.infer.kind != placement.train.kind:
        raise ConfigError(
            "--infer-devices, --train-devices: expected both CPU or both accelerators of this "
            f"machine, got {infer_devices or 'auto'} and {train_devices or 'auto'}"
        )
    on_cpu = placement.train.kind == "cpu"
    for extra in ("peer",) if on_cpu else ("peer", "vllm"):
        require(extra, "bench peer")
    flags["model.dtype"] = dtype = "float32" if on_cpu else "bfloat16"
    for name in names:
        work = ROWS[name]
        with signals_as_interrupts(), tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
            source: Any = model if work.size is None or model else random_model(work.size)
            sizes, how = (work.num_prompts, work.prompt_length), {"is_chat": work.size is None}
            inputs = harness.write_model_and_prompts(Path(folder), source, dtype, *sizes, **how)
            settings = peer_settings(work, placement)
            used = ", ".join(f"{key} {value}" for key, value in settings.items())
            peer = f"TRL {metadata.version('trl')}, {used}"
            actions = {
                "easyrl": partial(run_easyrl, name, work, {**flags, **inputs}),
                "peer": partial(run_trl, f"{name}, {peer}", work, inputs, settings),
            }
            runs = harness.take_turns(actions, rounds, num_warm_up=0)
        rates = {side: [rate for rate, _ in runs[side]] for side in runs}
        ratio = harness.median_ratio(*rates.values())
        row: harness.Row = {"row": name, "ratio": ratio, "peer": peer}
        for side in runs:
            row[f"{side}_tokens_per_second"] = statistics.median(rates[side])
            row[f"{side}_mean_length"] = statistics.mean(length for _, length in runs[side])
        yield row


def run_easyrl(name: str, work: Work, flags: Mapping[str, Any]) -> tuple[float, float]:
    """Return completion tokens per second, and the mean length of a completion."""
    own = {
        "train.prompts_per_iteration": work.num_prompts,
        "rollout.num_generations": work.num_generations,
        "rollout.max_completion_length": work.cap,
        "train.learning_rate": work.learning_rate,
        "train.lr_scheduler_type": "constant",
        "model.lora.rank": work.lora_rank,
    }
    figures = harness.record(f"{name}, EasyRL", {**flags, **own}, iterations=work.iterations)
    num_tokens = figures["completion_tokens"]
    return num_tokens / figures["seconds"], num_tokens / work.num_completions


def peer_settings(work: Work, placement: Placement) -> dict[str, Any]:
    if placement.train.kind == "cpu":
        return {"micro-batch": work.micro_batch}
    used = sorted({*placement.infer.indices, *placement.train.indices})
    size = math.gcd(work.micro_batch, work.num_completions // len(used))
    return {"devices": used, "vllm": "colocate", "micro-batch": size}


def run_trl(
    name: str, work: Work, inputs: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[float, float]:
    """Return completion tokens per second, and the mean length of a completion."""
    used = settings.get("devices")
    num_processes = len(used or [None])
    micro_batch = settings["micro-batch"]
    config = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": work.num_completions // (micro_batch * num_processes),
        "num_generations": work.num_generations,
        "max_completion_length": work.cap,
        "use_cpu": used is None,
        "bf16": used is not None,
        "learning_rate": work.learning_rate,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_cores())}
    program = [sys.executable, "-m"]
    if used is not None:
        environment |= visible_environment(accelerator()[0], used)
        config |= {"use_vllm": True, "vllm_mode": settings["vllm"]}
        program += ["accelerate.commands.launch", f"--num_processes={num_processes}", "-m"]
    with tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
        asked, result, log_file = (Path(folder, each) for each in ("asked", "result", "log"))
        run = {"model": inputs["model.path"], "prompts": inputs["data.dataset"]}
        run |= {"iterations": work.iterations, "result": str(result), "rank": work.lora_rank}
        asked.write_text(json.dumps({**run, "config": {**config, "output_dir": folder}}))
        program += ["easyrl.bench.peer", str(asked)]
        with log_file.open("w") as log:
            code = subprocess.run(program, env=environment, stdout=log, stderr=log, check=False)
        if code.returncode != 0:
            lines = log_file.read_text(errors="replace").splitlines()[-20:]
            raise WorkerFailure("\n".join([f"bench, {name}: exit code {code.returncode}", *lines]))
        measured = json.loads(result.read_text())
    seconds, num_tokens = measured["ends"][-1] - measured["ends"][0], sum(measured["tokens"][1:])
    print(f"{name}: {seconds / work.iterations:.2f} s per iteration", file=sys.stderr)
    return num_tokens / seconds, num_tokens / (work.num_completions * work.iterations)


def train_with_trl(settings: dict[str, Any]) -> None:
    """Run TRL's trainer in this process. Write completion tokens (`tokens`) and end (`ends`, in
    seconds) of each iteration to the file `result`. The first iteration warms up."""
    from accelerate.utils import gather_object
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokens: list[int] = []
    ends: list[float] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(gather_object([sum(map(len, completion_ids))])))
        return harness.spread(completion_ids)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    prompts = [json.loads(line) for line in Path(settings["prompts"]).read_text().splitlines()]
    num_steps, rank = 1 + settings["iterations"], settings["rank"]
    lora = {"r": rank, "lora_alpha": 2 * (rank or 0), "target_modules": "all-linear"}
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=GRPOConfig(**TRL_SETTINGS, **settings["config"], max_steps=num_steps),
        train_dataset=Dataset.from_list(prompts * num_steps),
        callbacks=[Clock()],
        peft_config=LoraConfig(**lora) if rank else None,
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        Path(settings["result"]).write_text(json.dumps({"tokens": tokens, "ends": ends}))


if __name__ == "__main__":
    die_with_parent(os.getppid())
    train_with_trl(json.loads(Path(sys.argv[1]).read_text()))
