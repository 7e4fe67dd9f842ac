"""`easyrl report`, `easyrl plot`: show runs to others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from easyrl.cli.common import command

Runs = Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="The run folders.")]


@command
def report(
    folders: Runs,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="Default: report.html, of one run in RUN."),
    ] = None,
    csv: Annotated[
        bool, Option("--csv", help="The metrics of all iterations as CSV, to FILE or the screen.")
    ] = False,
) -> None:
    """Write one HTML page about runs: curves, timeline, samples, settings. It needs no network."""
    from easyrl.observe.history import read_histories, to_csv
    from easyrl.observe.page import to_page

    runs = read_histories(folders)
    text = to_csv(runs) if csv else to_page(runs)
    if csv and output is None:
        typer.echo(text, nl=False)
        return
    file = output or (folders[0] if len(runs) == 1 else Path()) / "report.html"
    with _writing(file):
        file.write_text(text, encoding="utf-8", errors="replace")
    typer.echo(f"{file} ({file.stat().st_size / 2**20:.1f} MiB)")


@command
def plot(
    folders: Runs,
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="Ends in .svg or .png.")
    ] = Path("curve.svg"),
) -> None:
    """Draw reward and held-out accuracy of runs into one picture."""
    from easyrl.observe.history import read_histories
    from easyrl.observe.plots import write_plot

    runs = read_histories(folders)
    with _writing(output):
        write_plot(runs, output)
    typer.echo(output)


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Raise ValueError if the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--output: expected a file that can be written, got '{file}': {error.strerror}"
        ) from None
