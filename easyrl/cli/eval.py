"""The commands `easyrl eval` and `easyrl samples`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from easyrl.cli.common import ConfigFile, NoLive, Words, load, user_errors


def evaluate(
    *,
    config: ConfigFile = None,
    model: Annotated[
        str | None,
        typer.Option(help="`tiny`, a folder, a hub id, a run folder, a checkpoint or an adapter."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that an adapter belongs to.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A preset, a file, a folder of save_to_disk, or a hub id.")
    ] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="Reward function, as in `grpo`; repeatable.")
    ] = None,
    num_samples: Annotated[int | None, typer.Option(help="Completions per problem.")] = None,
    engine: Annotated[str | None, typer.Option(help="vllm or embedded.")] = None,
    infer_devices: Annotated[
        str | None, typer.Option(help="One engine on each: 0-7, cpu or cpu:2.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of the results; a stopped one continues."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same sampling.")] = None,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="RUN_OR_FILE", help="Compare with this evaluation."),
    ] = None,
    no_live: NoLive = False,
    words: Words = None,
) -> None:
    """Evaluate a model: accuracy with its standard error, pass@k, avg@k."""
    flags = {
        "model.path": model,
        "data.dataset": dataset,
        "reward.functions": reward or None,
        "eval.num_samples": num_samples,
        "rollout.engine": engine,
        "devices.infer": infer_devices,
        "output.dir": output,
        "runtime.seed": seed,
    }
    with user_errors():
        from easyrl.evaluate.command import evaluate
        from easyrl.evaluate.view import EvalView

        resolved = load(config, flags, words)
        if dataset is not None:  # --dataset wins over eval.dataset of the config file
            chosen = resolved.eval.model_copy(update={"dataset": None})
            resolved = resolved.model_copy(update={"eval": chosen})
        observers = [EvalView(live=not no_live)]
        exit_code = evaluate(resolved, observers, base=base, other=compare)
    raise typer.Exit(exit_code)


def samples(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run or an evaluation.")
    ],
    min_reward: Annotated[float | None, typer.Option(help="With at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="With at most this reward.")] = None,
    iteration: Annotated[
        str | None, typer.Option(metavar="N", help="Only these iterations: 3 or 3-5.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.")] = None,
) -> None:
    """Page through prompts, completions, rewards and advantages."""
    from easyrl.observe.samples import Wanted, parse_iterations, show_samples

    with user_errors():
        iterations = None if iteration is None else parse_iterations(iteration)
        show_samples(folder, Wanted(min_reward, max_reward, iterations, limit))
