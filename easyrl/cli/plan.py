"""`easyrl plan`: predict the throughput of every split of devices."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from easyrl.cli.common import Force, check_new, command
from easyrl.cli.reports import write
from easyrl.formatting import ConfigError


@command
def plan(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RATES [RATES ...] [SECTION.KEY=VALUE ...]",
            help="Folders of runs, or files of `bench loop --json`; settings to change.",
        ),
    ],
    *,
    devices: Annotated[int, Option(min=2, max=1024, metavar="N", help="Devices to split.")],
    model: Annotated[
        str | None, Option(help="Model in a file of `bench loop` that has several.")
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Also draw it: .png or .svg.")
    ] = None,
    json: Annotated[
        Path | None, Option(metavar="FILE", help="Also write the predictions here.")
    ] = None,
    force: Force = False,
) -> None:
    """Predict tokens per second of every split of N devices into engines and trainers, from the
    rates of runs (docs/devices.md)."""
    paths = [Path(word) for word in arguments if "=" not in word or Path(word).exists()]
    words = [word for word in arguments if "=" in word and not Path(word).exists()]
    if not paths:
        raise ConfigError("RATES: expected a run's folder or a file of `bench loop --json`")
    if output is not None and output.suffix not in (".png", ".svg"):
        raise ConfigError(f"--output: expected .png or .svg as suffix, got '{output.suffix}'")
    check_new("--output", output, force=force)
    check_new("--json", json, force=force)
    from easyrl.bench.plan import make_plan, to_screen
    from easyrl.observe.text import say_rich

    found = make_plan(paths, devices, words, model)
    say_rich(to_screen(found))
    if json is not None:
        write(json, json_format.dumps(asdict(found), indent=2).encode())
    if output is not None:
        from easyrl.observe.plots import draw_splits

        write(output, draw_splits(found.splits, output.suffix))
