"""The named presets: where a task's prompts come from and which reward scores them."""

TASKS = {"arithmetic": "easyrl.tasks.arithmetic"}
"""By name: a module with `train_prompts(seed)`, `held_out_prompts()` and `score`."""
