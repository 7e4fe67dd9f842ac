"""`easyrl plan`: predict the throughput of every split of devices."""

import json as json_format
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from easyrl.cli.common import Force, Words, check_new, command, echo
from easyrl.cli.reports import write

SIMULATED = {
    *("train.prompts_per_iteration", "train.updates_per_iteration", "runtime.schedule"),
    *("train.max_tokens_per_micro_batch", "rollout.max_concurrent_groups"),
}
"""Settings that may differ from the measured ones."""


@command
def plan(
    rates: Annotated[Path, Argument(help="A run's folder, or a file of `bench loop --json`.")],
    words: Words = None,
    *,
    devices: Annotated[int, Option(min=2, max=1024, metavar="N", help="Devices to split.")],
    json: Annotated[
        Path | None, Option(metavar="FILE", help="Also write the predictions here.")
    ] = None,
    force: Force = False,
) -> None:
    """Predict tokens per second of every split of N devices into engines and trainers, from the
    rates of a run (docs/devices.md)."""
    check_new("--json", json, force=force)
    from easyrl.config import ConfigError, load_config
    from easyrl.planning.simulation import flags_of, predict_splits, read_rates, to_text

    run = read_rates(rates)
    config = load_config(None, run.config.model_dump(mode="json"), words)
    if other := {word.partition("=")[0] for word in words or ()} - SIMULATED:
        raise ConfigError(
            f"{', '.join(sorted(other))}: a plan can change {', '.join(sorted(SIMULATED))}; for "
            "another setting, measure a run that has it"
        )
    splits = predict_splits(run, config, devices)
    best = max(splits, key=lambda split: split.tokens_per_second)
    flags = flags_of(run, best)
    echo(f"{to_text(run, splits)}\nfastest: {flags}, {best.tokens_per_second:,.0f} tokens/s")
    if json is not None:
        every = [split._asdict() for split in splits]
        found = {"flags": flags, "best": best._asdict(), "splits": every}
        write(json, json_format.dumps(found, indent=2).encode())
