"""`easyrl config`: print settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from easyrl.cli.common import ConfigFile, Words, command, load


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
    from easyrl.config import settings_markdown, to_commented_yaml

    if diff is not None and config is not None:
        raise ValueError("--config, --diff: expected one of them, got both")
    if markdown:
        text = settings_markdown()
    elif diff is None:
        text = to_commented_yaml(load(config, {}, words))
    else:
        resolved = load(diff / "config.yaml" if diff.is_dir() else diff, {}, words)
        changes = to_commented_yaml(resolved, only_changes=True)
        heading = "What differs from the defaults" if changes else "Every setting has its default"
        text = f"# {heading}: {diff}\n{changes}"
    typer.echo(text, nl=False)
