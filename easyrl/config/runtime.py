"""Sections `runtime` and `output`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from easyrl.config.section import (
    AS_LIST,
    EACH_ONCE,
    Compared,
    MayChange,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    Section,
)


class RuntimeConfig(Section):
    """Schedule, seed and time limits of the run."""

    seed: Compared[int] = Field(default=0, ge=0, lt=2**63)
    """Seed of the data's order, the sampling, the generated problems and LoRA's first weights."""
    schedule: MayChange[Literal["periodic", "sync"]] = "periodic"
    """`periodic` trains on groups while others are generated; `sync` waits for all of them."""
    deterministic: bool = False
    """The same config gives the same weights to the last bit, under either schedule; slower."""
    resume: MayChange[Literal["never", "auto"]] = "never"
    """`auto`: resume from the newest whole checkpoint in output.dir, or start a new run if there is
    none, so that one command serves for the start and for every restart."""
    timeout_seconds: MayChange[PositiveFloat] = 120.0
    """Longest time, in seconds, of each step of a weight transfer, of a step that train workers
    take together, and of a reward call. After it a rollout worker that does not take part in a
    transfer is replaced, `reward.on_error` decides about a call, and otherwise the run ends."""
    stall_seconds: MayChange[PositiveFloat | None] = 1800.0
    """Time in seconds without progress (a token; with vLLM a finished group; a trained micro-batch,
    a transfer, a step of the start) after which the workers' stacks are written to the logs of the
    run folder, and the worker that the others wait for is killed: a rollout worker is replaced,
    otherwise the run ends. Loading and saving must take less; null: never."""
    max_restarts: MayChange[NonNegativeInt] = 3
    """Rollout workers that are replaced within `restart_window_seconds`; one more ends the run.
    0: the first death ends it."""
    restart_window_seconds: MayChange[PositiveFloat] = 600.0
    """Time in seconds over which `max_restarts` counts."""
    autoscale: MayChange[bool] = False
    """Add rollout workers on `devices.spare` while the trainer waits for groups, and remove them
    while the ring is full."""


NumberOrAll = Annotated[
    NonNegativeInt | None, BeforeValidator(lambda value: None if value == "all" else value)
]


class OutputConfig(Section):
    """Files and trackers that a run writes to."""

    dir: MayChange[NonEmptyStr | None] = None
    """The run folder; null: runs/<time>-<task>."""
    samples: MayChange[NumberOrAll] = 1
    """Groups of each iteration that are written to samples.jsonl; `all` or null: all of them."""
    log_to: MayChange[
        Annotated[list[Literal["tensorboard", "wandb", "trackio"]], AS_LIST, EACH_ONCE]
    ] = Field(default_factory=list)
    """Trackers that also get the metrics: a list of `tensorboard`, `wandb` (Weights & Biases),
    `trackio`; each needs its extra, as in pip install 'easyrl-train[wandb]'."""
