"""The reward `code`: run a completion's program against the unit tests of its row.

    completion ──► its last ```python block ──► sandbox ──► outputs ──► compared here ──► score

`code_tests` describes the forms of tests, `sandbox` what the program is isolated from.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.config.reward import RewardConfig
from easyrl.rewards import sandbox
from easyrl.rewards.code_tests import Suite, read_tests
from easyrl.rewards.functions import Completions, text_of
from easyrl.rewards.signatures import ARGUMENTS, TRAINER_ARGUMENTS

BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)\b[^\n]*\n(.*?)(?:^[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


def code(
    settings: RewardConfig, /, completions: Completions, **columns: Sequence[Any]
) -> list[float | None]:
    """1.0 where all tests pass, else 0.0.

    Raises ValueError for a row whose tests cannot be used, SandboxError where nothing can be run.
    """
    given = {*ARGUMENTS, *TRAINER_ARGUMENTS}  # all others are columns
    scores: list[float | None] = []
    for index, completion in enumerate(completions):
        row = {name: columns[name][index] for name in columns if name not in given}
        suite = _suite_of(row, settings)
        scores.append(float(passes(suite, program_of(text_of(completion)), settings)))
    return scores


def program_of(text: str) -> str:
    """The last ```python block, closed or not; without one the whole text."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def passes(suite: Suite, program: str, settings: RewardConfig) -> bool:
    """Whether the program passes all tests."""
    if not program.strip():
        return False
    token = secrets.token_hex(16)
    job = {**suite.job(), "program": program, "token": token}
    outputs = sandbox.run(job, settings.code_sandbox, settings.code_timeout_seconds)
    return len(outputs) == len(suite.tests) and all(
        output is not None and suite.accepts(index, output, token)
        for index, output in enumerate(outputs)
    )


def check_code(config: Config, columns: Mapping[str, Any]) -> None:
    """Check settings, first row and sandbox before a run. Raises ConfigError."""
    reward = config.reward
    _suite_of(columns, reward)
    own, limit = reward.timeout_seconds, config.runtime.timeout_seconds
    key, limit = ("runtime", limit) if own is None else ("reward", own)
    if reward.code_timeout_seconds >= limit:
        raise ConfigError(
            f"reward.code_timeout_seconds: expected less than {limit:g}, the limit of a call "
            f"({key}.timeout_seconds), got {reward.code_timeout_seconds:g}"
        )
    try:
        sandbox.check(reward.code_sandbox)
    except sandbox.SandboxError as error:
        raise ConfigError(f"reward.code_sandbox={reward.code_sandbox}: {error}") from None


def _suite_of(row: Mapping[str, Any], settings: RewardConfig) -> Suite:
    key = "tests"
    if row.get(key) is None:
        others = ", ".join(name for name in row if name != key) or "no other column"
        raise ConfigError(
            f"data.columns: expected tests in the column '{key}', got none; the row has: {others}"
        )
    try:
        return read_tests(row[key], row)
    except ValueError as error:
        raise ConfigError(f"column '{key}': {error}") from None
