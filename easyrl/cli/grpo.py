"""`easyrl grpo`: train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from easyrl.cli.common import (
    ConfigFile,
    InferDevices,
    NoLive,
    RayAddress,
    Reward,
    Seed,
    TrainDevices,
    Words,
    command,
)

if TYPE_CHECKING:
    from easyrl.config import Config


@command
def grpo(
    *,
    config: ConfigFile = None,
    model: Annotated[str | None, Option(help="`tiny`, a Hugging Face folder, or a hub id.")] = None,
    dataset: Annotated[
        list[str] | None, Option(help="A preset, file, folder or hub id; several are mixed.")
    ] = None,
    reward: Reward = None,
    infer_devices: InferDevices = None,
    train_devices: TrainDevices = None,
    spare_devices: Annotated[
        str | None, Option(help="More devices that may generate (runtime.autoscale).")
    ] = None,
    ray_address: RayAddress = None,
    output: Annotated[str | None, Option(metavar="DIR", help="The run folder.")] = None,
    iterations: Annotated[int | None, Option(help="Iterations in all, resumed or not.")] = None,
    seed: Seed = None,
    schedule: Annotated[str | None, Option(help="periodic or sync.")] = None,
    resume: Annotated[
        Path | None, Option(metavar="RUN", help="Resume this run from its newest checkpoint.")
    ] = None,
    no_live: NoLive = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the resolved config, placement and memory, and stop.")
    ] = False,
    words: Words = None,
) -> int:
    """Train a model with GRPO."""
    flags = {
        "model.path": model,
        "data.dataset": dataset[0] if dataset and len(dataset) == 1 else dataset or None,
        "reward.functions": reward or None,
        "devices.infer": infer_devices,
        "devices.train": train_devices,
        "devices.spare": spare_devices,
        "devices.ray_address": ray_address,
        "output.dir": output,
        "train.iterations": iterations,
        "runtime.seed": seed,
        "runtime.schedule": schedule,
    }
    from easyrl.config import load_config

    if resume is not None:
        config = _resumed(resume, config, output)
        flags["output.dir"] = str(resume)
    resolved = load_config(config, flags, words)
    if dry_run:
        from easyrl.runtime.resume import with_absolute_paths

        return _print_plan(with_absolute_paths(resolved, is_resumed=resume is not None))

    def start(config: Config, resume: Path | None) -> int:
        from easyrl.observe.observers import make_observers
        from easyrl.runtime.run import run

        return run(config, make_observers(config, live=not no_live), resume)

    if resolved.runtime.restart == "on_failure":
        from easyrl.runtime.restart import run_with_restarts

        return run_with_restarts(resolved, resume, start)
    return start(resolved, resume)


def _resumed(run: Path, config: Path | None, output: str | None) -> Path:
    """Return the config file of the run to resume, which keeps its folder and its settings."""
    if config is not None or output is not None:
        raise ValueError(
            "--resume: expected neither --config nor --output: a resumed run keeps its folder and "
            "the settings in its config.yaml"
        )
    file = run / "config.yaml"
    if not file.is_file():
        raise ValueError(f"--resume: expected a run folder, but there is no {file}")
    return file


def _print_plan(config: Config) -> int:
    from easyrl.config import to_commented_yaml
    from easyrl.data.hub import describe_model
    from easyrl.runtime.placement import describe, resolve_placement
    from easyrl.runtime.preflight import describe_memory, sampling_warnings

    placement = resolve_placement(config)
    lines = [describe_model(config.model.path), describe(placement), ""]
    lines += [describe_memory(config, placement), *sampling_warnings(config)]
    typer.echo(to_commented_yaml(config))
    for line in "\n".join(lines).splitlines():  # comments: the whole output is a config file
        typer.echo(f"# {line}".rstrip())
    return 0
