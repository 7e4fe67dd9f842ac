"""`easyrl bench`: measure parts and whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from easyrl.cli.common import InferDevices, TrainDevices, Words, command

bench = typer.Typer(help="Measure the parts and the whole.", no_args_is_help=True)
JsonFile = Annotated[
    Path | None, Option("--json", metavar="FILE", help="Also write the results here.")
]


@bench.command("ring")
def bench_ring(json: JsonFile = None) -> None:
    """The ring buffer: bandwidth, and how soon a blocked consumer wakes."""
    _bench("ring", json)


@bench.command("engine")
def bench_engine(json: JsonFile = None) -> None:
    """The embedded engine against transformers' generate."""
    _bench("engine", json)


@bench.command("attention")
def bench_attention(json: JsonFile = None) -> None:
    """Groups that store their prompt once against groups that repeat it."""
    _bench("attention", json)


@bench.command("pipeline")
def bench_pipeline(
    prompts: Annotated[
        list[int] | None, Option(min=2, help="Prompts per iteration; repeatable.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Whole iterations under four schedules: sync, colocated, apart, periodic."""
    _bench("pipeline", json, **({"sizes": prompts} if prompts else {}))


@bench.command("weights")
def bench_weights(
    *,
    infer_devices: InferDevices = None,
    train_devices: TrainDevices = None,
    dtype: Annotated[str, Option(help="Engines: float32 or bfloat16.")] = "float32",
    json: JsonFile = None,
) -> None:
    """A weight update against bare broadcasts of as many bytes."""
    options = {"infer_devices": infer_devices, "train_devices": train_devices, "dtype": dtype}
    _bench("weights", json, **options)


@bench.command("loop")
def bench_loop(
    *,
    infer_devices: InferDevices = None,
    train_devices: TrainDevices = None,
    model: Annotated[str | None, Option(help="0.6B, 1.7B (default: both) or small.")] = None,
    dtype: Annotated[str | None, Option(help="bfloat16 or float32 (default on the CPU).")] = None,
    json: JsonFile = None,
    words: Words = None,
) -> None:
    """Whole runs on random models of real shapes: rates, overlap, MFU, memory."""
    options = {"infer_devices": infer_devices, "train_devices": train_devices, "dtype": dtype}
    _bench("loop", json, **options, model=model, words=words or ())


@command
def _bench(suite: str, file: Path | None, **options: Any) -> int:
    from easyrl.bench.report import run_suite

    return run_suite(suite, file, **options)
