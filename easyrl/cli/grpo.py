"""`easyrl grpo`: train."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from easyrl.cli import common
from easyrl.formatting import ConfigError

if TYPE_CHECKING:
    from easyrl.config import Config
    from easyrl.runtime.preflight import Plan


@common.command
def grpo(
    *,
    config: common.ConfigFile = None,
    model: common.Model = None,
    dataset: Annotated[
        list[str] | None, Option(help="A preset, file, folder or hub id; several are mixed.")
    ] = None,
    reward: common.Reward = None,
    environment: common.Environment = None,
    agent: common.Agent = None,
    infer_devices: common.InferDevices = None,
    train_devices: common.TrainDevices = None,
    spare_devices: Annotated[
        str | None, Option(help="More devices that may generate (runtime.autoscale).")
    ] = None,
    ray_address: common.RayAddress = None,
    output: Annotated[str | None, Option(metavar="DIR", help="The run folder.")] = None,
    iterations: Annotated[int | None, Option(help="Iterations in all, resumed or not.")] = None,
    seed: common.Seed = None,
    schedule: Annotated[str | None, Option(help="periodic or sync.")] = None,
    resume: Annotated[
        Path | None, Option(metavar="RUN", help="Resume this run from its newest checkpoint.")
    ] = None,
    no_live: common.NoLive = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print settings, placement and memory, and stop.")
    ] = False,
    assume: Annotated[
        str | None,
        Option(metavar="8x80GiB", help="With --dry-run: plan for these accelerators; or h100x8."),
    ] = None,
    full: Annotated[
        bool, Option("--full", help="With --dry-run: print every setting, not only changed ones.")
    ] = False,
    words: common.Words = None,
) -> int:
    """Train a model with GRPO."""
    from easyrl.config import load_config, options_by_key

    is_single = dataset is not None and len(dataset) == 1
    settings = options_by_key(
        model=model,
        dataset=dataset[0] if dataset is not None and is_single else dataset,
        reward=reward,
        environment=environment,
        agent=agent,
        infer_devices=infer_devices,
        train_devices=train_devices,
        spare_devices=spare_devices,
        ray_address=ray_address,
        output=output,
        iterations=iterations,
        seed=seed,
        schedule=schedule,
    )
    if (assume or full) and not dry_run:
        raise ConfigError(f"{'--assume' if assume else '--full'}: expected --dry-run too")
    if resume is not None:
        from easyrl.runtime.resume import config_file_of

        config = config_file_of(resume, config, output)
        resume = config.parent
        settings["output.dir"] = str(resume)
    resolved = load_config(config, settings, words)
    if dry_run:
        from easyrl.devices import parse_assumed
        from easyrl.runtime.preflight import make_plan

        assumed = None if assume is None else parse_assumed(assume)
        with redirect_stdout(sys.stderr):  # what the user's loss prints
            plan = make_plan(resolved, assumed, is_resumed=resume is not None)
        _print_plan(plan, resolved, config, is_resumed=resume is not None, full=full)
        if plan.would_start:
            return 0
        # The first lines of a plan have left the screen, or are in a file.
        common.echo(f"easyrl: {plan.verdict}", err=True)
        return common.USER_ERROR

    from easyrl.observe.observers import make_observers
    from easyrl.runtime.run import run

    return run(resolved, make_observers(resolved.output.log_to, live=not no_live), resume).exit_code


def _print_plan(
    plan: Plan, given: Config, file: Path | None, *, is_resumed: bool, full: bool
) -> None:
    """Print the verdict, then a config file with the plan in comments. `given`: the config that is
    from `file`."""
    from easyrl.config import change_config, load_config, to_arguments, to_commented_yaml
    from easyrl.runtime.resume import with_absolute_paths

    resolved = with_absolute_paths(given, is_resumed=is_resumed)
    settings = to_commented_yaml(resolved, only_changes=not full)
    heading = "Settings that differ" if settings else "No setting differs"
    first = plan.verdict.splitlines()
    changes = plan.changes
    if changes is None:
        changes = plan.lora_changes
        first.append(f"nothing that was tried fits: {plan.advice[0]}")
    elif changes and not is_resumed:
        first.append("a command that fits, by the same estimate:")
    if changes and not is_resumed:
        start = ["--config", str(file)] if file else []
        words = to_arguments(change_config(given, changes), load_config(file))
        first.append(shlex.join(["easyrl", "grpo", *start, *words]))
    first += plan.advice[1:]
    _echo_comments([*first, ""])
    common.echo(settings if full else f"# {heading} from the defaults (--full: all)\n{settings}")
    _echo_comments(plan.text.splitlines())


def _echo_comments(lines: Iterable[str]) -> None:
    """Print lines of a plan as comments, since the whole output is a config file."""
    for line in lines:
        common.echo(f"# {line}".rstrip())
