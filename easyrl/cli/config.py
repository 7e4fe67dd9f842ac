"""`easyrl config`: print settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from easyrl.cli.common import ConfigFile, Words, load, user_errors


def print_config(
    config: ConfigFile = None,
    diff: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Only what this run folder or config file sets differently."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="All settings as Markdown: docs/settings.md.")
    ] = False,
    words: Words = None,
) -> None:
    """Print every setting with its meaning, as YAML that --config takes."""
    from easyrl.config import settings_markdown, to_commented_yaml

    with user_errors():
        if markdown:
            typer.echo(settings_markdown(), nl=False)
            return
        if diff is None:
            typer.echo(to_commented_yaml(load(config, {}, words)), nl=False)
            return
        if config is not None:
            raise ValueError("--config, --diff: expected one of them, got both")
        resolved = load(diff / "config.yaml" if diff.is_dir() else diff, {}, words)
        changes = to_commented_yaml(resolved, only_changes=True)
        heading = "What differs from the defaults" if changes else "Every setting has its default"
        typer.echo(f"# {heading}: {diff}\n{changes}", nl=False)
