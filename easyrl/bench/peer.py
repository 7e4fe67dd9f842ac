"""Whole iterations of EasyRL against TRL's GRPO trainer on the same work.

Both get the same model, prompts, reward function, precision, cores and number of prompts,
completions and updates (one per iteration, on-policy). Both sample from the whole distribution at
temperature 1. Models are random and prompts are digits. One of the 99 tokens ends a completion, so
lengths are geometric up to the cap. The learning rate is 0: every iteration does the same work.

EasyRL runs with its defaults, TRL in a process of its own with the settings below, in turns. On
NVIDIA GPUs TRL generates with vLLM, on the devices that it trains on.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any

from easyrl.bench import harness
from easyrl.config import ConfigError, load_config
from easyrl.config.devices import parse_device_set
from easyrl.devices import accelerator, visible_environment
from easyrl.formatting import install_command
from easyrl.processes import die_with_parent, num_cores
from easyrl.runtime.placement import resolve_placement
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
MID = TINY | {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@dataclass(frozen=True)
class Work:
    """What both trainers do in an iteration, and how TRL does it."""

    size: Mapping[str, Any]  # of the random model
    num_prompts: int
    num_generations: int
    prompt_length: int
    cap: int  # longest completion
    iterations: int  # measured per run
    micro_batch: int  # of TRL, in completions

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.num_generations


# Micro-batches of 16 and 64 were compared by whole iterations on two cores, in three rounds of each
# row but `mid_1k`.
ROWS = {
    "tiny_short": Work(TINY, 16, 8, 12, 256, iterations=8, micro_batch=64),
    "tiny_long": Work(TINY, 8, 16, 256, 64, iterations=8, micro_batch=64),
    "mid_short": Work(MID, 16, 8, 12, 256, iterations=3, micro_batch=16),
    "mid_long": Work(MID, 8, 16, 256, 64, iterations=3, micro_batch=16),
    "mid_1k": Work(MID, 8, 8, 1024, 128, iterations=2, micro_batch=16),
}
TRL_SETTINGS = {
    "model_init_kwargs": {"dtype": "float32"},  # weights; `bf16` computes in bfloat16
    "learning_rate": 0.0,
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
SHOWN_LINES = 20  # of the peer's output, if it fails


def run(
    rows: str | None = None,
    model: str | None = None,
    infer_devices: str | None = None,
    train_devices: str | None = None,
    *,
    rounds: int = 3,
) -> Iterator[harness.Row]:
    """One row per name in `rows` (separated by commas; default: all), of random models or `model`.
    Rates are medians over rounds. Raises ConfigError for unknown rows and devices that TRL cannot
    use, or without TRL."""
    names = [name.strip() for name in rows.split(",")] if rows is not None else [*ROWS]
    if unknown := [name for name in names if name not in ROWS]:
        got = "', '".join(unknown)
        raise ConfigError(f"--rows: expected some of {', '.join(ROWS)}, got '{got}'")
    flags: dict[str, Any] = {"devices.infer": infer_devices, "devices.train": train_devices}
    config = load_config(None, flags)
    is_ray = any(each and parse_device_set(each).is_ray for each in (infer_devices, train_devices))
    placement = None if is_ray else resolve_placement(config)  # else a cluster would be started
    if placement is None or placement.infer.kind != placement.train.kind:
        infer, train = infer_devices or "the default", train_devices or "the default"
        raise ConfigError(
            "--infer-devices, --train-devices: expected both CPU or both accelerators of this "
            f"machine, got {infer} and {train}"
        )
    on_cpu = placement.train.kind == "cpu"
    used = [] if on_cpu else sorted({*placement.infer.indices, *placement.train.indices})
    if used and 8 % len(used):
        raise ConfigError(
            "--infer-devices, --train-devices: expected 1, 2, 4 or 8 devices, among which TRL "
            f"divides completions, got {len(used)}"
        )
    for package, extra in (("trl", "peer"),) if on_cpu else (("trl", "peer"), ("vllm", "vllm")):
        if util.find_spec(package) is None:
            raise ConfigError(f"bench peer: expected {package}, got none: {install_command(extra)}")
    flags["model.dtype"] = dtype = "float32" if on_cpu else "bfloat16"
    for name in names:
        work = ROWS[name]
        with signals_as_interrupts(), tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
            source: Any = model or random_model(work.size)
            sizes = work.num_prompts, work.prompt_length
            inputs = harness.write_model_and_prompts(Path(folder), source, dtype, *sizes)
            actions = {
                "easyrl": partial(run_easyrl, name, work, {**flags, **inputs}),
                "peer": partial(run_trl, f"{name}, TRL", work, inputs, used),
            }
            runs = harness.take_turns(actions, rounds, num_warm_up=0)
        rates = {side: [rate for rate, _ in of_side] for side, of_side in runs.items()}
        row = {"row": name, "ratio": harness.median_ratio(rates["easyrl"], rates["peer"])}
        for side, of_side in runs.items():
            row[f"{side}_tokens_per_second"] = statistics.median(rates[side])
            row[f"{side}_mean_length"] = statistics.mean(length for _, length in of_side)
        yield row | {"peer": f"TRL {metadata.version('trl')}"}


def run_easyrl(name: str, work: Work, flags: Mapping[str, Any]) -> tuple[float, float]:
    """Return completion tokens per second, and the mean length of a completion."""
    own = {
        "train.prompts_per_iteration": work.num_prompts,
        "rollout.num_generations": work.num_generations,
        "rollout.max_completion_length": work.cap,
    }
    figures = harness.record(f"{name}, EasyRL", {**flags, **own}, iterations=work.iterations)
    num_tokens = figures["completion_tokens"]
    return num_tokens / figures["seconds"], num_tokens / work.num_completions


# -- TRL ------------------------------------------------------------------------------------------


def run_trl(
    name: str, work: Work, inputs: Mapping[str, Any], used: Sequence[int]
) -> tuple[float, float]:
    """Return completion tokens per second, and the mean length of a completion. `used`: indices of
    accelerators; empty: the CPU."""
    num_processes = max(1, len(used))
    micro_batch = math.gcd(work.micro_batch, work.num_completions // num_processes)
    config: dict[str, Any] = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": work.num_completions // (micro_batch * num_processes),
        "num_generations": work.num_generations,
        "max_completion_length": work.cap,
        "use_cpu": not used,
        "bf16": bool(used),
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_cores())}
    program = [sys.executable, "-m"]
    if used:
        environment |= visible_environment(accelerator()[0], used)
        config |= {"use_vllm": True, "vllm_mode": "colocate"}
        program += ["accelerate.commands.launch", f"--num_processes={num_processes}", "-m"]
    with tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
        asked, result, log_file = (Path(folder, each) for each in ("asked", "result", "log"))
        run = {"model": inputs["model.path"], "prompts": inputs["data.dataset"]}
        run |= {"iterations": work.iterations, "result": str(result)}
        asked.write_text(json.dumps({**run, "config": {**config, "output_dir": folder}}))
        program += ["easyrl.bench.peer", str(asked)]
        with log_file.open("w") as log:
            code = subprocess.run(program, env=environment, stdout=log, stderr=log, check=False)
        if code.returncode != 0:
            lines = log_file.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
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
    num_steps = 1 + settings["iterations"]
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=GRPOConfig(**TRL_SETTINGS, **settings["config"], max_steps=num_steps),
        train_dataset=Dataset.from_list(prompts * num_steps),
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        Path(settings["result"]).write_text(json.dumps({"tokens": tokens, "ends": ends}))


if __name__ == "__main__":
    die_with_parent(os.getppid())
    train_with_trl(json.loads(Path(sys.argv[1]).read_text()))
