"""Section `reward`."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from easyrl.config.section import (
    AS_LIST,
    EACH_ONCE,
    Compared,
    MayChange,
    NamesFiles,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    Section,
)


def _check_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"expected a regular expression ({error})") from None
    return text


RegularExpression = Annotated[str, AfterValidator(_check_pattern)]


class JudgeConfig(Section):
    """The reward `judge`: a language model behind an OpenAI-compatible server (docs/judges.md)."""

    url: MayChange[str | None] = Field(default=None, pattern=r"^https?://[^\s@?#]+$")
    """The server's address, as http://127.0.0.1:8000/v1, without user, password or query."""
    model: Compared[NonEmptyStr] = "default"
    """The model's name on the server."""
    key_variable: MayChange[str | None] = None
    """Name of the environment variable that holds the server's key; null: none is sent."""
    template: NamesFiles[Compared[str | None]] = None
    """A text file with the question, in which `{prompt}`, `{completion}` and any column, as
    `{answer}`, are replaced; null: it asks for a score from 0 to 10."""
    mode: Compared[Literal["single", "listwise"]] = "single"
    """A question for each completion, or one for a whole group (`{completions}`)."""
    pattern: Compared[RegularExpression] = (
        r"(?i)score(?: \d+)?(?: ?\([^)\n]*\))?[^\w:=]{0,3}[:=]"
        r"[^\w.+\-\u2212\u2013]{0,5}([-+]?(?:\d*\.)?\d+)"
    )
    """Python's regular expression whose one group is the score, at its last match."""
    field: Compared[str | None] = None
    """Field of a JSON object in the answer that has the score, instead of `pattern`."""
    range: Compared[tuple[float, float]] = (0.0, 10.0)
    """Lowest and highest score, which become 0 and 1. Others count as unreadable."""
    samples: Compared[int] = Field(default=1, ge=1, le=64)
    """Answers to each question, whose scores are averaged."""
    options: Compared[dict[str, Any]] = Field(default={"temperature": 0})
    """Other fields of each request: sampling, `max_tokens`, and whatever the server accepts."""
    concurrency: MayChange[int] = Field(default=8, ge=1, le=512)
    """Questions at a time, of all processes on this machine that ask this `url`."""
    timeout_seconds: MayChange[float] = Field(default=60.0, gt=0.0, le=3600.0)
    """Longest time of one answer, in seconds; then it is asked for again."""

    @model_validator(mode="after")
    def _score_can_be_read(self) -> Self:
        if re.compile(self.pattern).groups != 1:
            raise ValueError(f"reward.judge.pattern: expected one group (...), got {self.pattern}")
        if self.range[0] >= self.range[1]:
            raise ValueError(f"reward.judge.range: expected a lower number first, got {self.range}")
        return self


class RewardConfig(Section):
    """Reward functions (docs/rewards.md)."""

    functions: NamesFiles[Annotated[list[str] | None, AS_LIST, EACH_ONCE]] = None
    """`none` (`algorithm.teacher` alone trains; held-out problems keep the preset's reward), or a
    list of `exact_match`, `math`, `gsm8k`, `code`, `judge`, `regex`, `format`, `countdown`,
    `length_penalty`, `file.py:function`, `package.module:function`, and folders or hub ids of
    reward models; null: the preset's."""
    weights: list[float] | None = None
    """One weight per function, in their order; null: 1 each."""
    pattern: Compared[RegularExpression | None] = None
    """Python's regular expression that the function `regex` searches a completion for."""
    code_timeout_seconds: Compared[float] = Field(default=10.0, gt=0.0, le=3600.0)
    """Longest time of one program with all of its tests, in seconds."""
    code_sandbox: MayChange[Literal["bwrap", "limits"]] = "bwrap"
    """Isolation of programs: bubblewrap (`bwrap`), or resource limits alone (`limits`), for
    containers that allow no namespaces and are the sandbox themselves."""
    num_workers: MayChange[int] = Field(default=2, ge=1, le=512)
    """Processes that score in parallel, per rollout worker."""
    timeout_seconds: MayChange[PositiveFloat | None] = None
    """Longest time of one reward call, in seconds; null: `runtime.timeout_seconds`, and none for
    the judge, whose retries end."""
    memory_limit_gib: MayChange[float | None] = Field(default=4.0, ge=0.25)
    """Memory that each reward process may allocate, in GiB; null: no limit."""
    on_error: MayChange[Literal["stop", "skip_group", "zero"]] = "stop"
    """After a reward call that raises, returns an invalid value, takes too long, needs too much
    memory or ends its process: end the run with a checkpoint (`stop`), replace the group
    (`skip_group`), or let its completions score 0 in that function (`zero`). reward_errors.jsonl
    has the calls."""
    model_device: MayChange[Literal["cpu"] | NonNegativeInt] = "cpu"
    """Device of the reward models: `cpu`, or the number of an accelerator, such as one that also
    trains. Each rollout worker has one process for all of its reward models."""
    model_label: Compared[NonNegativeInt | None] = None
    """The label, counted from 0, whose logit is the score by a reward model with several."""
    check: MayChange[bool] = True
    """Call each function of the user, and the judge, on dummy completions before a run starts."""
    judge: JudgeConfig = JudgeConfig()

    @property
    def is_none(self) -> bool:
        return self.functions == ["none"]

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        functions = self.functions or ["the preset's"]
        if self.weights is not None and len(self.weights) != len(functions):
            expected = f"expected one for each of {', '.join(functions)}"
            raise ValueError(f"reward.weights: {expected}, got {self.weights}")
        if "none" in functions and len(functions) > 1:
            raise ValueError(f"reward.functions: expected none alone, got {', '.join(functions)}")
        has_pattern = self.pattern is not None
        needs_pattern = "regex" in functions
        if has_pattern != needs_pattern:
            expected = "expected a regular expression with the function regex, else null"
            raise ValueError(f"reward.pattern: {expected}, got {self.pattern!r}")
        has_url = self.judge.url is not None
        needs_url = "judge" in functions
        if has_url != needs_url:
            expected = "expected a server's address with the function judge, else null"
            raise ValueError(f"reward.judge.url: {expected}, got {self.judge.url!r}")
        return self
