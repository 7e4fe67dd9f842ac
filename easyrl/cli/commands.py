"""The commands: parse, build the config, call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

if TYPE_CHECKING:
    from easyrl.config import Config

USER_ERROR = 2
"""Exit code of errors that the user can fix, Typer's usage errors included."""

ConfigFile = Annotated[
    Path | None, Option("--config", metavar="FILE.yaml", help="Config file; see `config`.")
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Any setting; these win over all else."),
]
Reward = Annotated[
    list[str] | None,
    Option(help="exact_match, file.py:function or package.module:function; repeatable."),
]
InferDevices = Annotated[
    str | None, Option(help="Devices that generate: 0-3, 0,2,5, cpu or cpu:2.")
]
TrainDevices = Annotated[str | None, Option(help="Devices that train.")]
Seed = Annotated[int | None, Option(help="Same seed, same data and sampling.")]
NoLive = Annotated[bool, Option("--no-live", help="Plain lines instead of the live view.")]


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Exit with what the function returns. Print a ValueError, which the user can fix, without a
    traceback."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            code = function(*arguments, **options)
        except ValueError as error:
            typer.echo("easyrl: " + str(error).replace("\n", "\n        "), err=True)
            code = USER_ERROR
        raise typer.Exit(code or 0)

    return run


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
        "output.dir": output,
        "train.iterations": iterations,
        "runtime.seed": seed,
        "runtime.schedule": schedule,
    }
    from easyrl.config import load_config

    if resume is not None:
        config, flags["output.dir"] = _resumed(resume, config, output), str(resume)
    resolved = load_config(config, flags, words)
    if dry_run:
        from easyrl.runtime.resume import with_absolute_paths

        return _print_plan(with_absolute_paths(resolved, is_resumed=resume is not None))
    from easyrl.observe.observers import make_observers
    from easyrl.runtime.run import run

    return run(resolved, make_observers(resolved, live=not no_live), resume)


def _resumed(run: Path, config: Path | None, output: str | None) -> Path:
    """The config file of a run to resume, which keeps its folder and its settings."""
    if config is not None or output is not None:
        raise ValueError(
            "--resume: expected neither --config nor --output: a resumed run keeps its folder and "
            "the settings in its config.yaml"
        )
    if not (file := run / "config.yaml").is_file():
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


@command
def evaluate(
    *,
    config: ConfigFile = None,
    model: Annotated[
        str | None, Option(help="`tiny`, a folder, a hub id, a run, a checkpoint or an adapter.")
    ] = None,
    base: Annotated[
        str | None, Option(metavar="MODEL", help="The model that an adapter belongs to.")
    ] = None,
    dataset: Annotated[str | None, Option(help="A preset, file, folder or hub id.")] = None,
    reward: Reward = None,
    num_samples: Annotated[int | None, Option(help="Completions per problem.")] = None,
    engine: Annotated[str | None, Option(help="vllm or embedded.")] = None,
    infer_devices: InferDevices = None,
    output: Annotated[
        str | None, Option(metavar="DIR", help="Folder of the results; a stopped one continues.")
    ] = None,
    seed: Seed = None,
    compare: Annotated[
        Path | None, Option(metavar="RUN_OR_FILE", help="Compare with this evaluation.")
    ] = None,
    no_live: NoLive = False,
    words: Words = None,
) -> int:
    """Evaluate a model: accuracy with its standard error, pass@k."""
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
    from easyrl.config import load_config
    from easyrl.evaluate.command import evaluate
    from easyrl.evaluate.view import EvalView

    if dataset is not None:  # --dataset wins over eval.dataset of the config file
        words = ["eval.dataset=null", *(words or ())]
    resolved = load_config(config, flags, words)
    return evaluate(resolved, EvalView(live=not no_live), base=base, other=compare)


@command
def samples(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run or an evaluation.")
    ],
    min_reward: Annotated[float | None, Option(help="With at least this reward.")] = None,
    max_reward: Annotated[float | None, Option(help="With at most this reward.")] = None,
    iteration: Annotated[
        str | None, Option(metavar="N", help="Only these iterations: 3 or 3-5.")
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="At most this many.")] = None,
) -> None:
    """Print prompts, completions, rewards and advantages."""
    from easyrl.observe.samples import show_samples

    show_samples(folder, min_reward, max_reward, iteration, limit)


@command
def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    no_live: NoLive = False,
) -> int:
    """Watch a run, or see one that has ended, from its folder alone."""
    from easyrl.observe.trace import watch

    return watch(folder, live=not no_live)


@command
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run: its newest one.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
) -> None:
    """Write a checkpoint as a model that transformers and vLLM load."""
    from easyrl.model.export import export_checkpoint

    typer.echo(export_checkpoint(checkpoint, folder))


@command
def print_config(
    config: ConfigFile = None,
    diff: Annotated[
        Path | None,
        Option(metavar="RUN", help="Only what this run folder or config file sets differently."),
    ] = None,
    markdown: Annotated[
        bool, Option("--markdown", help="All settings as Markdown: docs/settings.md.")
    ] = False,
    words: Words = None,
) -> None:
    """Print every setting with its meaning, as YAML that --config takes."""
    from easyrl.config import load_config, settings_markdown, to_commented_yaml

    if diff is not None and config is not None:
        raise ValueError("--config, --diff: expected one of them, got both")
    if markdown:
        text = settings_markdown()
    elif diff is None:
        text = to_commented_yaml(load_config(config, {}, words))
    else:
        resolved = load_config(diff / "config.yaml" if diff.is_dir() else diff, {}, words)
        changes = to_commented_yaml(resolved, only_changes=True)
        heading = "What differs from the defaults" if changes else "Every setting has its default"
        text = f"# {heading}: {diff}\n{changes}"
    typer.echo(text, nl=False)


@command
def doctor(
    json: Annotated[bool, Option("--json", help="Print the facts and lines as JSON.")] = False,
) -> int:
    """Check what EasyRL can use on this machine, and how to fix the rest."""
    from easyrl.doctor import run_doctor

    return run_doctor(as_json=json)


Suite = Literal["attention", "engine", "loop", "pipeline", "ring", "weights"]


@command
def bench(
    suite: Annotated[Suite, typer.Argument(metavar="SUITE", help="One of these.")],
    *,
    words: Words = None,
    infer_devices: InferDevices = None,
    train_devices: TrainDevices = None,
    model: Annotated[
        Literal["0.6B", "1.7B", "small"] | None, Option(help="Of loop; default: as devices allow.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, Option(help="Of loop and weights.")
    ] = None,
    prompts: Annotated[
        int | None, Option(min=2, help="Prompts per iteration of pipeline; default: 64.")
    ] = None,
    json: Annotated[
        typer.FileTextWrite | None,
        Option(metavar="FILE", lazy=False, help="Also write the results here."),
    ] = None,
) -> int:
    """Measure a part or whole runs (docs/benchmarks.md).

    attention: groups that store their prompt once against groups that repeat it;
    engine: the embedded engine against transformers' generate;
    loop: whole runs on random models of real shapes (takes devices and any setting);
    pipeline: whole iterations under four schedules;
    ring: the ring buffer against a queue;
    weights: a weight update against bare broadcasts (takes devices).
    """
    from easyrl.bench.harness import run_suite

    given = {
        "infer_devices": infer_devices,
        "train_devices": train_devices,
        "model": model,
        "dtype": dtype,
        "prompts": prompts,
        "words": words,
    }
    options = {name: value for name, value in given.items() if value}
    run = import_module(f"easyrl.bench.{suite}").run
    if others := options.keys() - inspect.signature(run).parameters.keys():
        raise ValueError(f"bench {suite}: takes no {', '.join(sorted(others))}")
    return run_suite(suite, run(**options), json)
