"""`easyrl report`, `easyrl plot`: show runs to others."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from easyrl.cli.common import Force, check_new, command, echo

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
    force: Force = False,
) -> None:
    """Write one HTML page about runs: curves, timeline, samples, settings. It needs no network."""
    from easyrl.observe.history import read_histories, to_csv

    runs = read_histories(folders)
    file = _new_file(folders, output, "report.html", force=force)
    if csv:
        text = to_csv(runs)
    else:
        from easyrl.observe.report import to_page  # with matplotlib: later than errors

        text = to_page(runs)
    if csv and output is None:
        echo(text, nl=False)
    else:
        write(file, text.encode(errors="replace"))


@command
def plot(
    folders: Runs,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Ends in .svg or .png. Default: curve.svg, of one run in RUN.",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Draw reward and held-out accuracy of runs into one picture."""
    from easyrl.observe.history import read_histories

    runs = read_histories(folders)
    file = _new_file(folders, output, "curve.svg", force=force)
    from easyrl.observe.plots import draw_results  # with matplotlib: later than errors

    write(file, draw_results(runs, file.suffix))


def _new_file(folders: list[Path], output: Path | None, name: str, *, force: bool) -> Path:
    """Return the file to write. Only that in the folder of a run may exist."""
    is_own = output is None and len(folders) == 1
    file = output or (folders[0] if is_own else Path()) / name
    check_new("--output", file, force=force or is_own)
    return file


def write(file: Path, content: bytes) -> None:
    """Write the file and print its name."""
    file.write_bytes(content)
    echo(str(file))
