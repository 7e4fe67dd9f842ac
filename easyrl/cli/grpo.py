"""`easyrl grpo`: train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easyrl.cli.common import (
    ConfigFile,
    InferDevices,
    NoLive,
    TrainDevices,
    Words,
    load,
    user_errors,
)

if TYPE_CHECKING:
    from easyrl.config import Config


def grpo(
    *,
    config: ConfigFile = None,
    model: Annotated[
        str | None,
        typer.Option(help="A built-in model (`tiny`), a Hugging Face folder, or a hub id."),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="A preset, a .jsonl, .csv or .parquet file, a folder of save_to_disk, or a hub "
            "id; several are mixed."
        ),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="exact_match, file.py:function or package.module:function; repeatable."),
    ] = None,
    infer_devices: InferDevices = None,
    train_devices: TrainDevices = None,
    output: Annotated[str | None, typer.Option(metavar="DIR", help="The run folder.")] = None,
    iterations: Annotated[
        int | None, typer.Option(help="Iterations of the run, in all, resumed or not.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same data and sampling.")] = None,
    schedule: Annotated[str | None, typer.Option(help="periodic or sync.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Resume this run from its newest checkpoint."),
    ] = None,
    no_live: NoLive = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the resolved config, placement and memory, and stop."
        ),
    ] = False,
    words: Words = None,
) -> None:
    """Train a model with GRPO."""
    flags = {
        "model.path": model,
        "data.dataset": dataset[0] if dataset and len(dataset) == 1 else dataset or None,
        "reward.functions": reward or None,
        "devices.infer": infer_devices,
        "devices.train": train_devices,
        "output.dir": output,
        "train.iterations": iterations,
        "runtime.seed": seed,
        "runtime.schedule": schedule,
    }
    with user_errors():
        if resume is not None:
            config, flags["output.dir"] = _resumed(resume, config, output), str(resume)
        resolved = load(config, flags, words)
        if dry_run:
            from easyrl.runtime.places import with_whole_paths

            _print_plan(with_whole_paths(resolved, is_resumed=resume is not None))
            return
        from easyrl.observe.observers import make_observers
        from easyrl.runtime.run import run

        exit_code = run(resolved, make_observers(resolved, live=not no_live), resume)
    raise typer.Exit(exit_code)


def _resumed(run: Path, config: Path | None, output: str | None) -> Path:
    """The config file of a run to resume, which keeps its folder and its settings."""
    from easyrl.runtime.resume import no_run_folder

    for flag, value in (("--config", config), ("--output", output)):
        if value is not None:
            raise ValueError(
                f"--resume: expected no {flag}, because a resumed run keeps its folder and the "
                "settings in its config.yaml; give flags and words only for what may change"
            )
    if not (run / "config.yaml").is_file():
        raise ValueError(no_run_folder(run))
    return run / "config.yaml"


def _print_plan(config: Config) -> None:
    from easyrl.config import to_commented_yaml
    from easyrl.data.hub import describe_model
    from easyrl.runtime.placement import describe, resolve_placement
    from easyrl.runtime.preflight import describe_memory, sampling_warnings

    placement = resolve_placement(config)
    lines = [describe_model(config.model.path), describe(placement), ""]
    lines.append(describe_memory(config, placement))
    lines += sampling_warnings(config)
    typer.echo(to_commented_yaml(config))
    for line in "\n".join(lines).splitlines():  # comments: the whole output is a config file
        typer.echo(f"# {line}".rstrip())
