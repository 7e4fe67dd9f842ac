"""The commands with few options: samples, watch, export, config, doctor."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from easyrl.cli.common import ConfigFile, Force, NoLive, command, echo
from easyrl.formatting import ConfigError


@command
def samples(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run or an evaluation.")
    ],
    *,
    min_reward: Annotated[float | None, Option(help="With at least this reward.")] = None,
    max_reward: Annotated[float | None, Option(help="With at most this reward.")] = None,
    iteration: Annotated[
        str | None, Option(metavar="N", help="Only these iterations: 3 or 3-5.")
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="At most this many.")] = None,
    raw: Annotated[
        bool, Option("--raw", help="As the model sees them: chat template, special tokens.")
    ] = False,
) -> None:
    """Print prompts, completions, rewards and advantages."""
    from easyrl.observe.samples import show_samples

    show_samples(folder, min_reward, max_reward, iteration, limit, is_raw=raw)


@command
def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    no_live: NoLive = False,
) -> int:
    """Show the live view of a running or finished run, from its folder."""
    from easyrl.observe.watch import watch

    return watch(folder, live=not no_live)


@command
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run: its newest one.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="The folder to write.")
    ] = None,
    *,
    push: Annotated[
        str | None,
        Option(
            metavar="OWNER/NAME", help="Publish it, with a model card, on the Hugging Face hub."
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, Option(help="By default that of the model's files.")
    ] = None,
    force: Force = False,
) -> None:
    """Write a checkpoint as a model that transformers and vLLM load, or publish it."""
    if push is not None and folder is None:
        from easyrl.observe.model_card import publish

        echo(publish(checkpoint, push, trust=trust_remote_code))
        return
    if push is not None or folder is None:
        raise ConfigError("expected either DIR or --push OWNER/NAME")
    from easyrl.model.export import export_checkpoint

    options: Any = {"trust": trust_remote_code, "force": force, "dtype": dtype or "own"}
    echo(export_checkpoint(checkpoint, folder, **options))


@command
def print_config(
    config: ConfigFile = None,
    diff: Annotated[
        Path | None,
        Option(metavar="RUN", help="Only what differs from the defaults in this run or file."),
    ] = None,
    markdown: Annotated[
        bool, Option("--markdown", help="All settings as Markdown: docs/settings.md.")
    ] = False,
    search: Annotated[
        str | None, Option(metavar="WORD", help="Only settings with this in name or meaning.")
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY|SECTION|KEY=VALUE", help="What to print, or a setting."),
    ] = None,
) -> None:
    """Print every setting with its meaning, or some, as YAML that --config takes."""
    from easyrl.config import find_keys, load_config, settings_markdown, to_commented_yaml

    names = [word for word in words or () if "=" not in word]
    words = [word for word in words or () if "=" in word]
    only = find_keys(names, search)
    if diff is not None and (config is not None or only):
        raise ConfigError("--diff: expected neither --config nor names of settings with it")
    if markdown:
        text = settings_markdown()
    elif diff is None:
        text = to_commented_yaml(load_config(config, {}, words), only=only)
    else:
        resolved = load_config(diff / "config.yaml" if diff.is_dir() else diff, {}, words)
        changes = to_commented_yaml(resolved, only_changes=True)
        heading = "What differs from the defaults" if changes else "Every setting has its default"
        text = f"# {heading}: {diff}\n{changes}"
    echo(text, nl=False)


@command
def doctor(
    json: Annotated[bool, Option("--json", help="Print the lines as JSON.")] = False,
    test: Annotated[
        bool, Option("--test", help="Also test the devices, in about two minutes.")
    ] = False,
) -> int:
    """Check what EasyRL can use on this machine, and how to fix the rest."""
    from easyrl.cli.doctor import run_doctor

    return run_doctor(as_json=json, has_test=test)
