"""The presets: sources of a task's prompts, their form, and the reward that scores them.

A preset gives values for keys of the section `data` that are null, and for `reward.functions`; what
the user sets wins. The `held_out` part is never trained: accuracy is measured on it.

Facts about data sets are from their cards on the hub; prompts and sampling name their sources.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from easyrl.config import ConfigError, DataConfig
from easyrl.config.data import REASONING_GYM
from easyrl.data import tasks
from easyrl.data.picture_sums import PICTURE_SUMS
from easyrl.data.reasoning_gym import ReasoningGym
from easyrl.data.tasks import Task

BOXED = "{%s}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""DeepSeek-R1's model card ("Usage Recommendations") recommends this sentence in the user's message
and no system prompt. Qwen2.5-Math (model card; `qwen25-math-cot` in github.com/QwenLM/Qwen2.5-Math,
evaluation/utils.py) uses it as the system prompt: set `data.prompt_template={question}` (for `math`
`{problem}`) and `data.system_prompt` for that."""
COUNTDOWN = (
    "Numbers: {nums}. Target: {target}.\n"
    "Find an arithmetic expression that equals the target. Use every number exactly once, and no "
    "other; the operations are +, -, * and /, with parentheses where needed. Think first, then "
    "write the expression alone between <answer> and </answer>, for example: "
    "<answer>(8 - 3) * 6</answer>"
)
"""The task of TinyZero (github.com/Jiayi-Pan/TinyZero: examples/data_preprocess/countdown.py, the
rule in verl/utils/reward_score/countdown.py), worded anew and without the beginning of the answer.
Its data, Jiayi-Pan/Countdown-Tasks-3to4 on the hub, has the same columns."""


@dataclass(frozen=True, slots=True)
class Preset:
    reward: str  # an entry of `reward.functions`
    task: Task | None = None  # generates the problems
    rows: str | None = None
    """Training rows on the hub, `owner/name:subset:split`. With neither task nor rows, the preset
    is for evaluations only."""
    held_out: str | None = None  # held-out rows on the hub; a task has its own problems
    prompt_column: str = "prompt"
    prompt_template: str | None = None
    chat: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling of the completions in an evaluation that is comparable with published ones, by keys
    of the section `eval`; top_p; and `data.max_prompt_length`, where the default is too short."""


GREEDY = {"temperature": 0.0, "top_p": 1.0, "num_samples": 1, "max_completion_length": 2048}
"""Qwen2.5-Math-Instruct (arXiv 2409.12122; github.com/QwenLM/Qwen2.5-Math, evaluation/): zero-shot,
greedy, at most 2,048 tokens."""
REASONING = {
    "temperature": 0.6,
    "top_p": 0.95,
    "max_completion_length": 32768,
    "max_prompt_length": 2048,  # some problems of MATH contain drawings as programs
}
"""DeepSeek-R1 (arXiv 2501.12948, evaluation setup; its model card): temperature 0.6, top-p 0.95, at
most 32,768 tokens, pass@1 as the mean of 4 to 64 responses, more where problems are fewer. The
paper gives the number of responses for AIME only (cons@64); the model card, 64 for all."""

MATH = Preset(
    reward="math",
    # 40,315 problems: problem, answer, solution (mostly empty).
    rows="agentica-org/DeepScaleR-Preview-Dataset",
    # The 500 problems of MATH that "Let's Verify Step by Step" (arXiv 2305.20050) held out:
    # problem, solution, answer, subject, level, unique_id.
    held_out="HuggingFaceH4/MATH-500::test",
    prompt_column="problem",
    prompt_template=BOXED % "problem",
    chat=True,
)
MATH_500 = replace(MATH, rows=None, sampling={**REASONING, "num_samples": 4})
PRESETS: Mapping[str, Preset] = {
    "arithmetic": Preset("easyrl.data.tasks:score", task=tasks.ARITHMETIC),
    "countdown": Preset("countdown", task=tasks.COUNTDOWN, prompt_template=COUNTDOWN, chat=True),
    "countdown-small": Preset("countdown", task=tasks.COUNTDOWN_SMALL),
    "picture-sums": Preset("easyrl.data.tasks:score", task=PICTURE_SUMS, chat=True),
    "guess": Preset("environment", task=tasks.GUESS, chat=True),
    "gsm8k": Preset(
        reward="gsm8k",
        # 7,473 problems, its split `test` 1,319: question, answer, whose last line is `#### N`.
        rows="openai/gsm8k:main:train",
        held_out="openai/gsm8k:main:test",
        prompt_column="question",
        prompt_template=BOXED % "question",
        chat=True,
        sampling=GREEDY,
    ),
    "math": MATH,
    "math500": MATH_500,
    # The 30 problems of both of the year's contests, in its only split, `train`: id, problem,
    # solution, answer, url, year.
    "aime24": replace(
        MATH_500, held_out="HuggingFaceH4/aime_2024", sampling={**REASONING, "num_samples": 64}
    ),
}
TRAINED = [name for name, preset in PRESETS.items() if preset.task or preset.rows]
"""Presets that can be trained: the others have held-out problems only."""
DEFAULT_HELD_OUT = 256
"""Number of held-out problems of a task of reasoning-gym."""


def named_preset(name: str, data: DataConfig) -> Preset | None:
    """Return the preset that a data set is; None for rows of the user's own."""
    if not name.startswith(REASONING_GYM):
        return PRESETS.get(name)
    task = name.removeprefix(REASONING_GYM)
    is_mixture = len(data.datasets) > 1
    options = data.options.get(task, {}) if is_mixture else data.options
    num_held_out = data.num_held_out
    if num_held_out is None:
        num_held_out = DEFAULT_HELD_OUT
    generator = ReasoningGym(task, json.dumps(options, sort_keys=True), num_held_out)
    return Preset("reasoning_gym", task=generator)


def preset_of(name: str, data: DataConfig) -> Preset | None:
    """Return the preset of a data set: itself, or for own rows `data.preset`; None without one."""
    if name not in PRESETS and data.preset not in (None, *PRESETS):
        raise ConfigError(f"data.preset: expected {', '.join(PRESETS)}, got '{data.preset}'")
    return named_preset(name, data) or PRESETS.get(data.preset or "")


def default_reward(data: DataConfig) -> str | None:
    """Return the reward that all of the data sets have; None if some have none, or another one."""
    rewards = set[str | None]()
    for name in data.datasets:
        if name.startswith(REASONING_GYM):
            rewards.add("reasoning_gym")
            continue
        preset = PRESETS.get(name) or PRESETS.get(data.preset or "")
        rewards.add(preset.reward if preset else None)
    if len(rewards) != 1:
        return None
    return rewards.pop()


def eval_sampling(data: DataConfig) -> Mapping[str, Any]:
    """Return how an evaluation of the data set samples; empty for mixtures and own rows."""
    if not isinstance(data.dataset, str):
        return {}
    preset = preset_of(data.dataset, data)
    return preset.sampling if preset else {}
