"""Sections `runtime` and `output` of the config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from easyrl.config.text import Section, each_once


class RuntimeConfig(Section):
    """How the run is driven."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the data's order, the sampling, the generated problems and LoRA's first weights."""
    schedule: Literal["periodic", "sync"] = "periodic"
    """`periodic` trains on groups while others are generated; `sync` waits for all of them."""
    deterministic: bool = False
    """The same configuration gives the same weights to the last bit, under either schedule; slower.
    """
    resume: Literal["never", "auto"] = "never"
    """`auto`: resume from the newest whole checkpoint in output.dir if there is one, else start a
    new run. The same command then serves for the start and for every restart."""
    timeout_seconds: float = Field(default=120.0, gt=0.0)
    """Longest wait of workers for each other (to exchange weights; of train workers in each step),
    longest time of one reward call, and longest time without progress while the last checkpoint of
    a stopped run is written, in seconds. After it the run stops and says why (for a reward call see
    `reward.on_error`)."""


class OutputConfig(Section):
    """What a run writes."""

    dir: str | None = Field(default=None, min_length=1)
    """The run folder; null: runs/<time>-<task>."""
    log_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(default_factory=list)
    """Trackers that also get the metrics: a list of `tensorboard`, `wandb` (Weights & Biases),
    `trackio`, `mlflow`; each needs its extra, as in pip install 'easyrl[wandb]'."""

    @field_validator("log_to")
    @classmethod
    def _names_each_once(cls, value: list[str]) -> list[str]:
        return each_once("output.log_to", value)
