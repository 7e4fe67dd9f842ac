"""`easyrl.train` and `easyrl.evaluate`: the commands `easyrl grpo` and `easyrl eval` as functions.

A call leaves no worker and no thread behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from easyrl import events, user_code
from easyrl.api.callbacks import Callback
from easyrl.api.inputs import Inputs
from easyrl.config import Config, ConfigError, by_name, load_config, options_by_key
from easyrl.devices import NO_AUTOLOAD
from easyrl.evaluation.command import evaluate as run_evaluation
from easyrl.evaluation.view import EvalView
from easyrl.model.checkpoint_files import CHECKPOINTS, best_checkpoint
from easyrl.observe.observers import make_observers
from easyrl.processes import UNGUARDED, allow_long_integers
from easyrl.runtime import run_folder
from easyrl.runtime.callbacks import CallbackFailure, Callbacks
from easyrl.runtime.resume import config_file_of, resumes_by_itself, settings_to_evaluate
from easyrl.runtime.run import run
from easyrl.runtime.supervisor import FINISHED, SIGNALLED, USER_ERROR

StrPath = str | os.PathLike[str]


class Rows(Protocol):
    """A `datasets.Dataset`."""

    column_names: list[str]


Dataset = StrPath | Sequence[StrPath] | Sequence[Mapping[str, Any]] | Rows
Reward = str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | Mapping[str, Any]
Environment = str | type | Mapping[str, str | type]


class Results:
    """The folder of a run or an evaluation, and what is in it. Raises ConfigError for another."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)
        if not (self.folder / "config.yaml").is_file():
            kind = type(self).__name__
            raise ConfigError(f"{kind}: expected a folder with its config.yaml, got '{folder}'")

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Prompts and completions with their rewards: the lines of samples.jsonl."""
        return self._lines("samples.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        """The results: summary.json of a run, eval.json of an evaluation. Empty until the end."""
        file = self.folder / ("summary.json" if isinstance(self, Run) else "eval.json")
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}

    def _lines(self, name: str) -> list[dict[str, Any]]:
        lines = run_folder.read_lines(self.folder / name)
        return list(run_folder.from_1(self.folder, lines))


class Run(Results):
    """A training run, finished or not. As `model` of a call it stands for its weights."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dict for each iteration: the lines of metrics.jsonl."""
        return self._lines("metrics.jsonl")

    @property
    def model_path(self) -> str | None:
        """The trained model, a Hugging Face folder; None until the run has finished."""
        path = self.folder / "model"
        return str(path) if path.is_dir() else None

    @property
    def best_checkpoint(self) -> str | None:
        """The checkpoint with the best evaluation (`train.eval_every`), for `model`, `easyrl
        export` and `easyrl eval`; None without one."""
        path = best_checkpoint(self.folder / CHECKPOINTS)
        return None if path is None else str(path)

    def resume(self, iterations: int | None = None, **settings: Any) -> Run:
        """Continue from the newest checkpoint, to `iterations` in all."""
        return train(resume=self.folder, iterations=iterations, **settings)


class Evaluation(Results):
    @property
    def accuracy(self) -> float | None:
        return self.summary.get("accuracy")


def train(
    model: StrPath | Mapping[str, Any] | None = None,
    dataset: Dataset | None = None,
    reward: Reward | None = None,
    *,
    environment: Environment | None = None,
    agent: str | Callable[..., Any] | None = None,
    config: StrPath | None = None,
    infer_devices: str | None = None,
    train_devices: str | None = None,
    spare_devices: str | None = None,
    ray_address: str | None = None,
    output: StrPath | None = None,
    iterations: int | None = None,
    seed: int | None = None,
    schedule: str | None = None,
    resume: StrPath | None = None,
    callbacks: Sequence[Callback | Any] = (),
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Train a model with GRPO, as `easyrl grpo` does.

    Args:
        model: A Hugging Face folder, a hub id, a built-in model, a run or a checkpoint.
        dataset: A preset, a path or a hub id, a list of them, a list of rows (dicts), or a
            `datasets.Dataset`.
        reward: A reward function, a name of one, or a list of them.
        environment: What the model acts in: a class, `file.py:Class`, or several by name.
        agent: What calls the model: a function, `file.py:function`, or a command.
        config: YAML file with settings; the arguments win over it.
        output: The run folder.
        iterations: Iterations in all, resumed or not.
        resume: A run to resume from its newest checkpoint. It keeps its data and rewards.
        callbacks: Objects that are called during the run, and may end it (`easyrl.Callback`).
        progress: Print progress; in a notebook, show it as one output that is updated.
        settings: Settings by section, as in `train={"learning_rate": 1e-5}`.

    Raises:
        ConfigError: For a mistake in the arguments (a ValueError).
        RuntimeError: When the run has failed; if a callback has raised, with that as its cause.
        KeyboardInterrupt: When it was interrupted. The message has the command that resumes it. A
            run that a callback or `train.stop_when` has ended is returned.
    """
    options = options_by_key(
        model=model,
        dataset=dataset,
        reward=reward,
        environment=environment,
        agent=agent,
        infer_devices=infer_devices,
        train_devices=train_devices,
        spare_devices=spare_devices,
        ray_address=ray_address,
        output=output,
        iterations=iterations,
        seed=seed,
        schedule=schedule,
    )
    with _call():
        given = _by_key(options, settings)
        resumed = None
        if resume is not None:
            functions = given.get("reward.functions")
            config = config_file_of(resume, config, output, dataset, functions, environment, agent)
            given["output.dir"] = resumed = config.parent
        resolved, inputs = _resolve(config, given)
        folder = run_folder.folder_of(resolved.output.dir, resolved.data.datasets)
        is_restarted = resumed is None and resumes_by_itself(resolved, folder)
        if inputs and (not is_restarted or run_folder.is_locked(folder)):
            run_folder.refuse_existing(folder, but_inputs=False)
        has_started = (folder / "config.yaml").is_file() and not run_folder.is_unstarted(folder)
        if is_restarted and has_started:
            inputs.check_unchanged(folder)
        called = Callbacks(_list_of(callbacks), lambda: Run(folder))
        with inputs.stored(resolved, folder) as stored:
            *others, view = make_observers(stored.output.log_to, live=False)

            def observe(event: events.Event) -> events.Note | None:
                if isinstance(event, events.RunEnded):
                    is_raised = bool(event.exit_code) and not event.is_planned
                    if is_raised:  # an exception says why
                        event = replace(event, message="")
                return view(event) if progress else None

            end = run(stored, [*others, observe], resumed, called)
        if called.has_started:
            _call_at_end(called, end)
        if end.is_planned:
            return Run(folder)
        return Run(_finished(end, folder, called.error))


def evaluate(
    model: StrPath | Mapping[str, Any] | None = None,
    dataset: Dataset | None = None,
    reward: Reward | None = None,
    *,
    environment: Environment | None = None,
    agent: str | Callable[..., Any] | None = None,
    config: StrPath | None = None,
    base: StrPath | None = None,
    num_samples: int | None = None,
    engine: str | None = None,
    infer_devices: str | None = None,
    ray_address: str | None = None,
    output: StrPath | None = None,
    seed: int | None = None,
    compare: StrPath | None = None,
    progress: bool = True,
    **settings: Any,
) -> Evaluation:
    """Evaluate a model, as `easyrl eval` does. Arguments and exceptions are those of `train`.

    Args:
        base: The model that an adapter belongs to.
        num_samples: Completions per problem.
        output: Folder of the results; a stopped evaluation continues in it.
        compare: An evaluation to compare with, or its folder.
    """
    options = options_by_key(
        model=model,
        dataset=dataset,
        reward=reward,
        environment=environment,
        agent=agent,
        num_samples=num_samples,
        engine=engine,
        infer_devices=infer_devices,
        ray_address=ray_address,
        output=output,
        seed=seed,
    )
    with _call():
        given = _by_key(options, settings)
        resolved, inputs = _resolve(config, settings_to_evaluate(given, config) | given)
        folder = run_folder.folder_of(resolved.output.dir, resolved.data.datasets, "eval-")
        is_empty = folder.is_dir() and not any(folder.iterdir())
        is_usable = not folder.exists() or is_empty or (folder / "settings.json").is_file()
        if inputs and not is_usable:
            raise ConfigError(f"output.dir (output): '{folder}' exists, and is no evaluation")
        quiet = contextlib.nullcontext() if progress else contextlib.redirect_stdout(io.StringIO())
        other = None if compare is None else Path(compare)
        base = None if base is None else os.fspath(base)
        with inputs.stored(resolved, folder) as stored, quiet:
            end = run_evaluation(stored, EvalView(live=False), base=base, other=other)
        return Evaluation(_finished(end, folder))


def _by_key(options: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, by section, and the options, which win, by the full names of keys."""
    given = by_name(settings)
    for key, value in options.items():
        if key in ("model.path", "reward.functions") and isinstance(value, Mapping):
            section = key.partition(".")[0]  # as in model={"path": "tiny", "dtype": "bfloat16"}
            given |= by_name({section: value})
        else:
            given[key] = value
    return given


def _resolve(file: StrPath | None, given: Mapping[str, Any]) -> tuple[Config, Inputs]:
    """Merge the layers; return the config, in which objects have names, and the objects."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        values[key] = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(values.get("model.path", ""), str):
        raise ConfigError(
            "model.path (model): expected a name or a folder, got an object of type "
            f"{type(values['model.path']).__name__} (save_pretrained writes a folder)"
        )
    inputs = Inputs(values)
    return load_config(None if file is None else Path(file), values), inputs


def _list_of(callbacks: Any) -> Sequence[Any]:
    """Raises ConfigError unless these are several callbacks."""
    if isinstance(callbacks, list | tuple):
        return callbacks
    raise ConfigError(f"callbacks: expected a list, as in callbacks=[Mine()], got {callbacks!r}")


def _call_at_end(called: Callbacks, end: events.RunEnded) -> None:
    """Tell the callbacks how the run has ended. Raises RuntimeError if one of them fails, unless
    the run has failed, too."""
    status = "failed"
    if end.exit_code == FINISHED:
        status = "finished"
    elif end.exit_code > SIGNALLED:
        status = "stopped"
    try:
        called.end(status)
    except CallbackFailure as failure:
        if status != "failed":
            error = ConfigError if failure.is_user_error else RuntimeError
            raise error(f"{failure}\n(the run has {status})") from failure.__cause__


def _finished(end: events.RunEnded, folder: Path, cause: BaseException | None = None) -> Path:
    if end.exit_code == FINISHED:
        return folder
    if end.exit_code > SIGNALLED:
        raise KeyboardInterrupt(end.message)
    raise (ConfigError if end.exit_code == USER_ERROR else RuntimeError)(end.message) from cause


@contextlib.contextmanager
def _call() -> Iterator[None]:
    """Restore what a call changes in this process. Leave out EasyRL's frames of a ConfigError."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)  # a worker imports the program; the supervisor explains it
    user_code.forget()  # a file may have changed since the last call
    environment, paths = dict(os.environ), list(sys.path)
    os.environ.update(NO_AUTOLOAD | environment)
    max_int_digits = sys.get_int_max_str_digits()
    allow_long_integers()  # of rows and samples
    try:
        yield
    except ConfigError as error:
        raise error.with_traceback(None) from None
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = paths
        sys.set_int_max_str_digits(max_int_digits)
