"""Open `data.dataset` as a stream of prompts.

    preset (generated)  ─► TaskStream ─┐
    preset (on the hub) ─┐             ├─► MixedStream, of a list ─► prompt(index) ─► Prompt
    file, folder, hub id ┴► RowStream ─┘

Errors in the data are found when it is opened, before a process is started.
"""

from __future__ import annotations

import pkgutil

from easyrl.config import Config, ConfigError
from easyrl.config.data import DataConfig
from easyrl.data.presets import PRESETS, TRAINED, HubRows, nearest_preset, preset_of
from easyrl.data.sources import FORMS, KEY, Source, open_hub, open_source
from easyrl.data.streams import MixedStream, PromptStream, RowForm, RowStream, TaskStream


def open_prompts(config: Config, *, is_trained: bool = True) -> PromptStream:
    """Open `data.dataset`. Raises ConfigError where it cannot be used.

    A preset for evaluations is opened as its problems, in their own order; so is a preset with
    held-out problems on the hub where nothing `is_trained`, so that the training rows need not be
    fetched.
    """
    names = config.data.datasets
    if config.data.preset is not None and set(names) <= set(PRESETS):
        raise ConfigError(
            f"data.preset: expected null, because '{config.data.shown}' is a preset itself, got "
            f"'{config.data.preset}'; use it with rows of your own as data.dataset (--dataset)"
        )
    if len(names) == 1:
        return _open(names[0], config, is_trained=is_trained)
    streams = {name: _open(name, config) for name in names}
    return MixedStream(streams, config.data.weights or [1.0] * len(names))


def check_trainable(data: DataConfig) -> None:
    """Raise ConfigError for a preset that is for evaluations only."""
    for name in data.datasets:
        if name in PRESETS and name not in TRAINED:
            raise ConfigError(
                f"{KEY}: '{name}' is for evaluations, not for training; expected "
                f"{', '.join(TRAINED)}, {FORMS}"
            )


def _open(name: str, config: Config, *, is_trained: bool = True) -> PromptStream:
    data, seed = config.data, config.runtime.seed
    form = RowForm.of(data, preset_of(name, data))
    order_seed = seed if data.shuffle else None
    preset = PRESETS.get(name)
    if preset is None:
        source = open_source(name)
        if source is None:
            others = ", ".join(name for name in PRESETS if name not in TRAINED)
            raise ConfigError(
                f"{KEY}: expected {', '.join(TRAINED)}, {FORMS} (for evaluations also {others}), "
                f"got '{name}'{nearest_preset(name)}"
            )
        return RowStream(source, form, seed=order_seed)
    if isinstance(preset.rows, str):
        return TaskStream(name, pkgutil.resolve_name(preset.rows), form, seed)
    held_out = preset.held_out
    if held_out is not None and (preset.rows is None or not is_trained):
        return RowStream(_open_hub(name, held_out), form, seed=None)
    assert preset.rows is not None
    measured = None
    if held_out is not None and data.num_held_out != 0:
        without = (
            f"\nThese are the held-out problems of '{name}'; data.num_held_out=0 trains without "
            "them"
        )
        measured = RowStream(_open_hub(name, held_out, without), form, seed=None)
    return RowStream(_open_hub(name, preset.rows), form, seed=order_seed, held_out=measured)


def _open_hub(preset: str, rows: HubRows, hint: str = "") -> Source:
    try:
        return open_hub(rows)
    except ConfigError as error:
        raise ConfigError(
            f"{error}{hint}. With such rows in a file: --dataset FILE data.preset={preset}"
        ) from error
