"""Inside a tracker's process: the library, its run, and what the controller sends.

Three libraries behind four methods. `__init__` imports the library and finds out whether a run can
be started (is it installed, is the user logged in); `open` starts it; what raises before `open`
has returned keeps the run from beginning, what raises later ends the tracking alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import yaml

from easyrl.lifeline import die_with_parent

# -- what the controller sends ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """The run begins. Answered by None, or by why it cannot be tracked."""

    folder: Path
    config: Mapping[str, Any]
    first_step: int
    """Over 0 where the run goes on: what the tracker has of this step and later ones is void."""


@dataclass(frozen=True, slots=True)
class Log:
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class End:
    exit_code: int


# -- the libraries ------------------------------------------------------------------------------


class Library(Protocol):
    def __init__(self, project: str) -> None: ...

    def open(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        """The run's name is its folder's. With a `first_step` over 0 it is there already."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class TensorBoard:
    """Event files in the run folder itself: `tensorboard --logdir runs` then shows runs by their
    folders' names.

    Written by tensorboard's own writer: it needs no torch, and it raises what went wrong in its
    thread at the next call, where tensorboardX goes on without a word.
    """

    def __init__(self, project: str) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._make_writer = EventFileWriter
        self._make_event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._summaries, self._tensors, self._types = summary_pb2, tensor_pb2, types_pb2
        self._next_step = 0

    def open(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        self._writer = self._make_writer(str(folder))
        self._next_step = first_step
        if first_step:  # TensorBoard drops what other files of the folder have from here on
            start = self._session(status=self._session.START)
            self._writer.add_event(
                self._make_event(wall_time=time.time(), step=first_step, session_log=start)
            )
        text = yaml.safe_dump(dict(config), sort_keys=False)
        self._add(0, [self._text("config", f"```yaml\n{text}```")])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._next_step = step + 1
        value = self._summaries.Summary.Value
        self._add(step, [value(tag=name, simple_value=v) for name, v in values.items()])

    def finish(self, exit_code: int) -> None:
        self._add(self._next_step, [self._text("status", _status(exit_code))])
        self._writer.close()

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._make_event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def _text(self, tag: str, text: str) -> Any:
        metadata = self._summaries.SummaryMetadata
        string = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        return self._summaries.Summary.Value(
            tag=tag,
            metadata=metadata(plugin_data=metadata.PluginData(plugin_name="text")),
            tensor=string,
        )


class WeightsAndBiases:
    """Its files lie in RUN/wandb; WANDB_MODE=offline keeps them there for `wandb sync`."""

    def __init__(self, project: str) -> None:
        import wandb

        self._wandb: Any = wandb
        self._project = project
        wandb.login(verify=True)  # raises where there is no key, or the server refuses it

    def open(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        id_file = folder / "logs" / "wandb.id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        self._run = self._wandb.init(
            project=self._project,
            name=folder.name,
            id=id_file.read_text(),
            resume="allow",  # steps that W&B has already stay as they are
            dir=str(folder),
            config=dict(config),
            settings={"console": "off"},  # this process prints nothing of the run's
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class Trackio:
    """In trackio's own folder (TRACKIO_DIR), or where TRACKIO_SPACE_ID says."""

    def __init__(self, project: str) -> None:
        import trackio

        self._trackio: Any = trackio
        self._project = project

    def open(self, folder: Path, config: Mapping[str, Any], first_step: int) -> None:
        self._run = self._trackio.init(
            project=self._project,
            name=folder.name,
            config=dict(config),
            embed=False,
            resume="allow" if first_step else "never",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, exit_code: int) -> None:
        self._run.log({"run/status": _status(exit_code)})
        self._run.finish()


LIBRARIES: Mapping[str, type[Library]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
REMEDIES = {
    "tensorboard": "the run folder must be on a disk that can be written",
    "wandb": "`wandb login` or WANDB_API_KEY logs in, WANDB_MODE=offline needs no login",
    "trackio": "TRACKIO_DIR and TRACKIO_SPACE_ID say where it writes",
}


# -- the process --------------------------------------------------------------------------------


def tracker_main(kind: str, project: str, control: Connection) -> None:
    """Answer None once the library is there, once the run is open, and once it has ended well;
    say why not, instead, as soon as something fails."""
    die_with_parent()
    os.setsid()  # with processes of the library's own a group: no Ctrl-C, and killed as one
    for signum in (signal.SIGINT, signal.SIGTERM):  # the controller hears them and ends the run
        signal.signal(signum, signal.SIG_IGN)
    _print_to(Path(os.devnull))
    try:
        library = LIBRARIES[kind](project)
        control.send(None)
        _serve(kind, library, control)
    except EOFError:
        pass  # the controller is gone
    except ImportError as error:
        _give_up(control, f"{error}; {install(kind)}")
    except BaseException as error:  # a library may well call sys.exit
        _give_up(control, f"{_in_short(error)}; {REMEDIES[kind]}")


def _serve(kind: str, library: Library, control: Connection) -> None:
    while True:
        match control.recv():
            case Open(folder, config, first_step):
                _print_to(folder / "logs" / f"{kind}.log")
                library.open(folder, config, first_step)
                control.send(None)
            case Log(step, values):
                library.log(step, values)
            case End(exit_code):
                library.finish(exit_code)
                control.send(None)
                return


def _print_to(file: Path) -> None:
    """What the library prints must not stand in the run's own output."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def install(kind: str) -> str:
    return f"pip install 'easyrl[{kind}]' brings what it needs"


def _give_up(control: Connection, why: str) -> None:
    traceback.print_exc()
    with contextlib.suppress(OSError):
        control.send(why)


def _status(exit_code: int) -> str:
    return "finished" if exit_code == 0 else f"failed (exit code {exit_code})"


def _in_short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
