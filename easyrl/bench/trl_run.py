"""One run of TRL's GRPO trainer, which `easyrl bench peer` starts in a process of its own.

    python -m easyrl.bench.trl_run SETTINGS.json

Writes the number of completion tokens of each iteration (`tokens`) and the time at which it ended
(`ends`, seconds) to the file that the settings name. The first iteration warms up.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from easyrl.bench.harness import spread
from easyrl.processes import die_with_parent

COMMON = {
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


def main(settings: dict[str, Any]) -> None:
    tokens: list[int] = []
    ends: list[float] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(gather_object([sum(map(len, completion_ids))])))
        return spread(completion_ids)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    prompts = [json.loads(line) for line in Path(settings["prompts"]).read_text().splitlines()]
    num_steps = 1 + settings["iterations"]
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=GRPOConfig(**COMMON, **settings["config"], max_steps=num_steps),
        train_dataset=Dataset.from_list(prompts * num_steps),
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        Path(settings["result"]).write_text(json.dumps({"tokens": tokens, "ends": ends}))


if __name__ == "__main__":
    die_with_parent(os.getppid())
    main(json.loads(Path(sys.argv[1]).read_text()))
