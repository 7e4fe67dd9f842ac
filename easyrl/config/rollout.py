"""Section `rollout`, and the sampling settings of training and evaluations."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from easyrl.config.eval import EvalConfig
from easyrl.config.section import (
    AS_LIST,
    EACH_ONCE,
    Compared,
    MayChange,
    NamesFiles,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

EngineName = Literal["embedded", "vllm"]
"""The inference engine that a run uses: `auto` is one of these once devices are known."""
EMBEDDED: Final = "embedded"
VLLM: Final = "vllm"
MAX_BRANCHES = 128  # token sequences of an agent's episode: it bounds what a group carries
ToolFormat = Literal[
    "auto",
    "deepseek_v3",
    "gemma4",
    "glm",
    "gpt_oss",
    "hermes",
    "hunyuan",
    "hy3",
    "json_list",
    "kimi_k2",
    "lfm2",
    "llama3",
    "minimax_m2",
    "mistral",
    "muse_glimmer",
    "qwen3_coder",
    "seed_oss",
]
AGENT_FUNCTION = re.compile(r"\S+\.py|.*\.py:\w*|[\w.]+:\w*")


class RolloutConfig(Section):
    """Sampling of completions, and the engine that samples them."""

    num_generations: int = Field(default=8, ge=2)
    """Completions per prompt: the group whose rewards are compared."""
    max_completion_length: PositiveInt = 256
    """Longest completion in tokens; a longer one is cut off."""
    stop: Compared[Annotated[list[str], EACH_ONCE]] = Field(default_factory=list)
    """Strings that end a completion, as in ["\\n\\n", END]. They are trained; rewards see them."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, of generation and of the trained distribution alike."""
    top_k: NonNegativeInt = 0
    """Sample only from this many most probable tokens; 0: all, as the trained distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample only from the most probable tokens with this sum of probabilities; 1: all."""
    max_concurrent_groups: MayChange[PositiveInt | None] = None
    """Groups in flight per engine, at most its prompts of an iteration. Null: a quarter of these
    (half where workers lend each other cores), but at least 16; all with `runtime.schedule=sync`,
    unless the run is deterministic, and with vLLM on the train worker's device."""
    ring_slots: MayChange[PositiveInt | None] = None
    """Finished groups that the ring buffer holds; null: `train.prompts_per_iteration`."""
    engine: Literal["auto", "embedded", "vllm"] = "auto"
    """Inference engine: `vllm`, or EasyRL's own engine over transformers' model code (`embedded`).
    `auto`: vLLM on accelerators where a suitable one is installed; the run prints which."""
    tensor_parallel_size: PositiveInt = 1
    """Devices that one vLLM engine spans: a divisor of the number of inference devices."""
    memory_fraction: MayChange[float | None] = Field(default=None, gt=0.0, le=1.0)
    """Fraction of its accelerator's memory that a rollout worker may take for weights and KV cache.
    Null: 0.9, or 0.5 of an accelerator that it shares with a train worker."""
    environment: NamesFiles[Compared[str | dict[str, str] | None]] = Field(
        default=None, min_length=1
    )
    """Environment that the model acts in over several turns (docs/environments.md): `guess`,
    `file.py:Class`, `package.module:Class`. Several by name, {maze: maze.py:Maze, …}: the column
    `environment` of a row names its own. Null: none."""
    tools: NamesFiles[Compared[Annotated[list[str], AS_LIST, EACH_ONCE]]] = Field(
        default_factory=list
    )
    """Functions that the model may call, `file.py:function` or `package.module:function`."""
    agent: NamesFiles[Compared[NonEmptyStr | None]] = None
    """Program that calls an OpenAI-compatible endpoint over the model (docs/agents.md):
    `file.py:function`, `package.module:function`, or a command, as in "python run.py {column}".
    Null: none."""
    agent_sampling: Compared[Literal["refuse", "ignore"]] = "refuse"
    """How to answer an agent that asks for other sampling settings than the run's. `refuse`: with
    an error; `ignore`: sample with the run's settings, and report it once."""
    agent_history: Compared[Literal["kept", "as_sent"]] = "kept"
    """What the model sees of its earlier answers to an agent. `kept`: the tokens that it sampled,
    with what it thought. `as_sent`: what the chat template writes for them; where that is another
    text, as without earlier thoughts, the request is a branch that is computed anew."""
    tool_format: Compared[ToolFormat] = "auto"
    """Form of a tool call (docs/environments.md). `auto`: the one that reads what the chat template
    writes, or else the tokenizer's `response_template`."""
    takes_pictures: Compared[bool] = False
    """Whether tools and environments may answer with pictures, and requests of agents show some.
    The model then has the part that reads them, also if no row has a picture, and a slot of the
    ring buffer has room for `data.max_image_bytes` of each episode, too."""
    max_turns: Compared[PositiveInt] = 16
    """Most turns of the model in an episode. `rollout.max_completion_length` counts all tokens
    after the prompt, also those of tools."""
    tool_timeout_seconds: MayChange[PositiveFloat] = 60.0
    """Longest time of a turn's tool calls, after which the model gets an error message, or of an
    environment's `reset` or `step`."""
    episode_timeout_seconds: Compared[PositiveFloat | None] = None
    """End an episode after its first turn that ends later than this. Null: never."""
    environment_workers: MayChange[int] = Field(default=2, ge=1, le=512)
    """Processes that environments run in, per rollout worker. All of a group are in one."""
    concurrent_calls: MayChange[int] = Field(default=64, ge=1, le=1024)
    """Calls that run at a time in each of these processes; one in deterministic runs. A tool that
    sets signal handlers (`signal.alarm`) needs 1."""

    @model_validator(mode="after")
    def _has_one_loop(self) -> Self:
        if self.agent is not None and (self.environment is not None or self.tools):
            expected = "expected null with rollout.environment or rollout.tools"
            raise ValueError(f"rollout.agent (--agent): {expected}, got {self.agent!r}")
        if self.takes_pictures and not self.has_environments:
            expected = "expected false without rollout.environment, rollout.tools or rollout.agent"
            raise ValueError(f"rollout.takes_pictures: {expected}, got true")
        return self

    @field_validator("agent")
    @classmethod
    def _has_words(cls, value: str | None) -> str | None:
        shlex.split(value or "")  # raises ValueError, with the reason
        return value

    @property
    def agent_words(self) -> list[str]:
        """The words of an agent that is a command; [] for a function."""
        is_function = self.agent is None or AGENT_FUNCTION.fullmatch(self.agent)
        return [] if is_function else shlex.split(self.agent or "")

    @property
    def has_environments(self) -> bool:
        return self.environment is not None or bool(self.tools) or self.agent is not None

    @property
    def environments(self) -> dict[str, str | None]:
        """The environments by name. A single one has the name "", and is None with tools alone."""
        if isinstance(self.environment, dict):
            return dict(self.environment)
        return {"": self.environment}


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """Sampling settings of training, or of an evaluation."""

    num_samples: int  # at most, per prompt
    max_completion_length: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of_training(cls, rollout: RolloutConfig) -> Self:
        return cls(
            num_samples=rollout.num_generations,
            max_completion_length=rollout.max_completion_length,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
        )

    @classmethod
    def of_evaluation(
        cls, config: EvalConfig, rollout: RolloutConfig, of_preset: Mapping[str, Any]
    ) -> Self:
        """Return the user's settings, else the preset's (`of_preset`, by the keys of `eval`), else
        one greedy sample of the length in training."""
        values: dict[str, Any] = {
            "num_samples": 1,
            "max_completion_length": rollout.max_completion_length,
            "temperature": 0.0,
            "top_k": rollout.top_k,
            "top_p": rollout.top_p,
        }
        for given in (of_preset, dict(config)):
            for name in values:
                if given.get(name) is not None:
                    values[name] = given[name]
        if config.temperature == 0.0:
            values["num_samples"] = 1  # a preset's samples would be the same
        elif values["temperature"] == 0.0 and values["num_samples"] > 1:
            values["temperature"] = rollout.temperature
        return cls(**values)
