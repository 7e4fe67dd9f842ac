"""The commands with few options, from `easyrl samples` to `easyrl agent serve`."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from easyrl.cli import common
from easyrl.cli.common import ConfigFile, Force, NoLive, check_new, command, echo
from easyrl.formatting import require


@command
def samples(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run or an evaluation.")
    ],
    *,
    min_reward: Annotated[float | None, Option(help="With at least this reward.")] = None,
    max_reward: Annotated[float | None, Option(help="With at most this reward.")] = None,
    iteration: Annotated[str | None, Option(metavar="N", help="Only of these: 3 or 3-5.")] = None,
    limit: Annotated[int | None, Option(min=1, help="At most this many, the newest.")] = None,
    raw: Annotated[bool, Option("--raw", help="With chat template and special tokens.")] = False,
) -> None:
    """Print prompts, completions, rewards and advantages."""
    from easyrl.observe.samples import show_samples

    show_samples(folder, min_reward, max_reward, iteration, limit, is_raw=raw)


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")]


@command
def watch(
    folder: RunFolder,
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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    *,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, Option(help="By default that of the model's files.")
    ] = None,
    force: Force = False,
) -> None:
    """Write a checkpoint as a model that transformers and vLLM load, with a model card."""
    from easyrl.model.export import export_checkpoint
    from easyrl.observe.model_card import card_of

    card = partial(card_of, name=folder.resolve().name)
    options: Any = {"trust": trust_remote_code, "force": force, "dtype": dtype or "own"}
    echo(export_checkpoint(checkpoint, folder, card=card, **options))


@command
def print_config(
    config: ConfigFile = None,
    search: Annotated[
        str | None, Option(metavar="WORD", help="Only settings with this in name or meaning.")
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY|SECTION|KEY=VALUE", help="What to print, or a setting."),
    ] = None,
) -> None:
    """Print every setting with its meaning, or some, as YAML that --config takes."""
    from easyrl.config import find_keys, load_config, to_commented_yaml

    names = [word for word in words or () if "=" not in word]
    words = [word for word in words or () if "=" in word]
    resolved = load_config(config, {}, words)
    shown = find_keys(names, search)
    echo(to_commented_yaml(resolved, only=shown), nl=False)


@command
def doctor(
    test: Annotated[bool, Option("--test", help="Also test devices: two minutes.")] = False,
) -> int:
    """Check what EasyRL can use on this machine, and how to fix the rest."""
    from easyrl.cli.doctor import run_doctor

    return run_doctor(has_test=test)


@command
def status(
    folder: RunFolder,
    as_json: Annotated[bool, Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the workers of a live run, and which side waits for the other."""
    from easyrl.observe.lines import status_table
    from easyrl.observe.text import say_rich
    from easyrl.runtime.control import request

    reply = request(folder, {"command": "status"})
    if as_json:
        echo(json.dumps(reply, indent=2))
    else:
        say_rich(status_table(reply))


@command
def scale(
    folder: RunFolder,
    infer_devices: Annotated[
        str, Option(help="Devices that shall generate from now on: 0-5, 0,2,5, cpu:2 or ray:8.")
    ],
) -> None:
    """Add and remove rollout workers of a live run."""
    from easyrl.runtime.control import request

    echo(request(folder, {"command": "scale", "infer_devices": infer_devices})["message"])


@command
def stop(folder: RunFolder) -> None:
    """Stop a live run after its last complete iteration, with a checkpoint to resume from."""
    from easyrl.runtime.control import request
    from easyrl.runtime.run_folder import is_locked, resume_hint

    echo(request(folder, {"command": "stop"})["message"])
    while is_locked(folder):
        time.sleep(0.1)
    if (folder / "summary.json").is_file():  # it was in its last iteration
        echo(f"{folder} has finished")
    else:
        echo(f"{folder} has stopped{resume_hint(folder)}")


@command
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN [RUN ...]", help="The run folders.")
    ],
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Default: in RUN, of one run.")
    ] = None,
    force: Force = False,
) -> None:
    """Write one HTML page about runs: curves, timeline, samples, settings. It needs no network."""
    from easyrl.observe.history import read_histories

    require("report", "easyrl report")
    runs = read_histories(folders)
    is_own = output is None and len(folders) == 1  # only that file may exist
    file = output or (folders[0] if is_own else Path()) / "report.html"
    check_new("--output", file, force=force or is_own)
    from easyrl.observe.report import to_page  # with matplotlib: later than errors

    file.write_bytes(to_page(runs).encode(errors="replace"))
    echo(str(file))


@command
def plan(
    folder: RunFolder,
    *,
    devices: Annotated[int, Option(min=2, max=1024, metavar="N", help="Devices to split.")],
) -> None:
    """Predict the speed of every split of N devices, from the busy times of a run."""
    from easyrl.bench.plan import measure, predict_splits, to_text, verdict

    run = measure(folder)
    splits = predict_splits(run, devices)
    echo(f"{verdict(run, splits)}\n\n{to_text(run, splits)}")


@command
def serve(
    *,
    config: ConfigFile = None,
    model: common.Model = None,
    infer_devices: common.InferDevices = None,
    port: Annotated[int, Option(help="On this machine alone; 0: a free one.")] = 8000,
    words: common.Words = None,
) -> None:
    """Serve the OpenAI-compatible endpoint that agents get in a run (docs/agents.md)."""
    from easyrl.config import options_by_key

    require("agents", "easyrl agent serve")
    from easyrl.evaluation.serve import serve
    from easyrl.runtime.resume import load_to_evaluate

    given = options_by_key(model=model, infer_devices=infer_devices)
    serve(load_to_evaluate(config, given, words), port)
