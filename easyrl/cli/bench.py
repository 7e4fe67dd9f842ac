"""`easyrl bench`: measure."""

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from easyrl.cli.common import Force, InferDevices, TrainDevices, Words, check_new, command
from easyrl.formatting import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = ("loop", "peer")  # the others are in the folder `benchmarks` of a checkout
SUITES = {
    "attention": "groups that store their prompt once against groups that repeat it",
    "engine": "the embedded engine against transformers' generate",
    "loop": "whole runs on random models of real shapes (takes devices and any setting)",
    "peer": "whole iterations against TRL's on the same work (needs TRL; takes devices)",
    "pipeline": "whole iterations under four schedules",
    "ray": "iterations on a Ray cluster against the same without Ray",
    "ring": "the ring buffer against a queue",
    "weights": "a weight update against bare broadcasts (takes devices)",
}


@command
def bench(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="One of the suites above.")],
    *,
    words: Words = None,
    infer_devices: InferDevices = None,
    train_devices: TrainDevices = None,
    model: Annotated[
        str | None,
        Option(
            help="`loop`, `weights`: 0.6B, 1.7B or small; `peer`: a folder or a hub id. "
            "Default: random."
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, Option(help="Data type of `loop`, `weights`.")
    ] = None,
    rows: Annotated[
        str | None, Option(metavar="ROW,ROW", help="Rows of `peer`; default: all.")
    ] = None,
    rounds: Annotated[
        int | None, Option(min=1, help="Turns of both trainers in `peer`; default: 3.")
    ] = None,
    iterations: Annotated[
        int | None,
        Option(min=1, help="Measured iterations of each run of `loop` (default: 3), `peer`."),
    ] = None,
    json: Annotated[
        Path | None, Option(metavar="FILE", help="Also write the results here.")
    ] = None,
    force: Force = False,
) -> int:
    """Measure a part or whole runs (docs/benchmarks.md)."""
    given: dict[str, Any] = {
        "words": words,
        "infer_devices": infer_devices,
        "train_devices": train_devices,
        "model": model,
        "dtype": dtype,
        "rows": rows,
        "rounds": rounds,
        "iterations": iterations,
    }
    options = {name: value for name, value in given.items() if value}
    suites = SUITES if (ROOT / "benchmarks" / "ring.py").exists() else SHIPPED
    if suite not in suites:
        raise ConfigError(f"bench: expected one of {', '.join(suites)}, got '{suite}'")
    check_new("--json", json, force=force)
    from easyrl.bench.harness import run_suite

    if suite not in SHIPPED:
        sys.path.insert(0, str(ROOT))  # before a foreign package of the name `benchmarks`
    package = "easyrl.bench" if suite in SHIPPED else "benchmarks"
    run = import_module(f"{package}.{suite}").run
    not_taken = options.keys() - inspect.signature(run).parameters.keys()
    if not_taken:
        named = {name: f"--{name.replace('_', '-')}" for name in not_taken} | {"words": "settings"}
        shown = ", ".join(named[name] for name in sorted(not_taken))
        raise ConfigError(f"bench {suite}: takes no {shown}")
    return run_suite(suite, run(**options), json)


of_suites = ";\n".join(f"{name}: {text}" for name, text in SUITES.items())
bench.__doc__ = f"{bench.__doc__}\n\n{of_suites}.\n\nAll but loop and peer need a checkout."
