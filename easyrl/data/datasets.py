"""Open `data.dataset` as a stream of prompts.

    task of a preset               ─► TaskRows ─┐
    preset's rows, on the hub      ─┬► Source  ─┴► DataSet ─► PromptStream ─► prompt(index)
    file, folder, hub id           ─┘

Errors in the data are found when it is opened, before a process is started.
"""

from __future__ import annotations

import pkgutil

from easyrl.config import Config, ConfigError
from easyrl.config.data import DataConfig
from easyrl.data.presets import PRESETS, TRAINED, preset_of
from easyrl.data.sources import FORMS, KEY, Source, open_hub, open_source
from easyrl.data.streams import DataSet, PromptStream, RowForm, TaskRows


def open_prompts(config: Config, *, is_trained: bool = True) -> PromptStream:
    """Open `data.dataset`. Raises ConfigError where it cannot be used.

    A preset for evaluations is opened as its problems, in their own order; so is a preset with
    held-out problems on the hub where nothing `is_trained`, so that the training rows need not be
    fetched.
    """
    data, names = config.data, config.data.datasets
    if data.preset is not None and set(names) <= set(PRESETS):
        raise ConfigError(
            f"data.preset: expected null, because '{data.shown}' is a preset itself, got "
            f"'{data.preset}'; use it with rows of your own as data.dataset (--dataset)"
        )
    is_trained = is_trained or len(names) > 1
    stream = PromptStream(
        {name: _open(name, config, is_trained=is_trained) for name in names},
        data.weights or [1.0] * len(names),
    )
    stream.examples()  # raises ConfigError for a row without a prompt
    return stream


def check_trainable(data: DataConfig) -> None:
    """Raise ConfigError for a preset that is for evaluations only."""
    for name in data.datasets:
        if name in PRESETS and name not in TRAINED:
            raise ConfigError(
                f"{KEY}: '{name}' is for evaluations, not for training; expected {FORMS}"
            )


def _open(name: str, config: Config, *, is_trained: bool) -> DataSet:
    data = config.data
    form = RowForm.of(data, preset_of(name, data))
    seed = config.runtime.seed if data.shuffle else None
    preset = PRESETS.get(name)
    if preset is None:
        return DataSet(open_source(name), form, seed)
    if preset.task:
        task = pkgutil.resolve_name(preset.task)
        rows = TaskRows(task, config.runtime.seed, form.prompt_column)
        held_out = Source(name, rows.held_out(), lambda row: f"held-out problem {row} of '{name}'")
        source = Source(name, rows, lambda row: f"problem {row} of '{name}'")
        return DataSet(source, form, None, DataSet(held_out, form, None))
    assert preset.held_out is not None
    try:
        if preset.rows is None or not is_trained:
            return DataSet(open_hub(preset.held_out), form, None)
        measured = None
        if data.num_held_out != 0:
            measured = DataSet(open_hub(preset.held_out), form, None)
        return DataSet(open_hub(preset.rows), form, seed, measured)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. With such rows in a file: --dataset FILE data.preset={name}"
        ) from error
