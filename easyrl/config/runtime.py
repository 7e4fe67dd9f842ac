"""Sections `runtime` and `output`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from easyrl.config.section import AS_LIST, COMPARED, EACH_ONCE, MAY_CHANGE, Section


class RuntimeConfig(Section):
    """Schedule, seed and time limits of the run."""

    seed: Annotated[int, COMPARED] = Field(default=0, ge=0, lt=2**63)
    """Seed of the data's order, the sampling, the generated problems and LoRA's first weights."""
    schedule: Annotated[Literal["periodic", "sync"], MAY_CHANGE] = "periodic"
    """`periodic` trains on groups while others are generated; `sync` waits for all of them."""
    deterministic: bool = False
    """The same config gives the same weights to the last bit, under either schedule; slower."""
    resume: Annotated[Literal["never", "auto"], MAY_CHANGE] = "never"
    """`auto`: resume from the newest whole checkpoint in output.dir, or start a new run if there is
    none, so that one command serves for the start and for every restart."""
    timeout_seconds: Annotated[float, MAY_CHANGE] = Field(default=120.0, gt=0.0)
    """Longest time, in seconds, of each step of a weight transfer, of a step that train workers
    take together, and of a reward call. After it a rollout worker that does not take part in a
    transfer is replaced, `reward.on_error` decides about a call, and otherwise the run ends."""
    stall_seconds: Annotated[float | None, MAY_CHANGE] = Field(default=1800.0, gt=0.0)
    """Time in seconds without progress (a token; with vLLM a finished group; a trained micro-batch,
    a transfer, a step of the start) after which the workers' stacks are written to the logs of the
    run folder, and the worker that the others wait for is killed: a rollout worker is replaced,
    otherwise the run ends. Loading and saving must take less; null: never."""
    max_restarts: Annotated[int, MAY_CHANGE] = Field(default=3, ge=0)
    """Rollout workers that are replaced within `restart_window_seconds`; one more ends the run.
    0: the first death ends it."""
    restart_window_seconds: Annotated[float, MAY_CHANGE] = Field(default=600.0, gt=0.0)
    """Time in seconds over which `max_restarts` counts."""
    autoscale: Annotated[bool, MAY_CHANGE] = False
    """Add rollout workers on `devices.spare` while the trainer waits for groups, and remove them
    while the ring is full."""


ALL_AS_NULL = BeforeValidator(lambda value: None if value == "all" else value)


class OutputConfig(Section):
    """Files and trackers that a run writes to."""

    dir: Annotated[str | None, MAY_CHANGE] = Field(default=None, min_length=1)
    """The run folder; null: runs/<time>-<task>."""
    samples: Annotated[int | None, ALL_AS_NULL, MAY_CHANGE] = Field(default=1, ge=0)
    """Groups of each iteration that are written to samples.jsonl; `all` or null: all of them."""
    log_to: Annotated[
        list[Literal["tensorboard", "wandb", "trackio"]], AS_LIST, EACH_ONCE, MAY_CHANGE
    ] = Field(default_factory=list)
    """Trackers that also get the metrics: a list of `tensorboard`, `wandb` (Weights & Biases),
    `trackio`; each needs its extra, as in pip install 'easyrl-train[wandb]'."""
