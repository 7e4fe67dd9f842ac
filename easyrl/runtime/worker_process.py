"""What runs inside a worker's process: from its start to its exit code.

    parent process             worker's process
    ──────────────────────────────────────────────────────────────────────
    with_environment
    spawn ───────────────────► import the user's program
                               worker_main
    ◄── Starting ─────────────   set up torch, load the model: `workers/rollout.py`, `train.py`
    ◄── Ready ────────────────   Worker.run, until `Stop` or the end of the pipe
    ◄── Failed ───────────────   after an exception

This module imports no torch: the environment must be set before torch is loaded.
"""

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from easyrl import devices
from easyrl.channels.ring_buffer import RingBuffer
from easyrl.config import ConfigError
from easyrl.engines.vllm import platforms as vllm_platforms
from easyrl.events import Failed, Ready, Starting
from easyrl.model.export import DiskError
from easyrl.model.files import quieten_transformers
from easyrl.processes import (
    allow_long_integers,
    die_with_parent,
    set_name,
    spin_environment,
)
from easyrl.types import BrokenInvariant
from easyrl.workers.settings import WorkerSettings


class WorkerClass(NamedTuple):
    """Where a worker's class is. It is imported once the environment is set."""

    module: str
    name: str


WORKERS = {
    "rollout": WorkerClass("easyrl.workers.rollout", "RolloutWorker"),
    "train": WorkerClass("easyrl.workers.train", "TrainWorker"),
}


def worker_main(settings: WorkerSettings, ring: RingBuffer | None, control: Connection) -> None:
    role = settings.name.partition("-")[0]
    port = None if ring is None else ring.attach(settings.owner_id)
    worker_class = WORKERS[role]
    run_worker(worker_class.module, worker_class.name, settings, port, control)


def run_worker(module: str, name: str, settings: WorkerSettings, *arguments: Any) -> None:
    """Create `module.name(settings, *arguments)`, call its `run`, and end the process. The last
    argument is this process's end of the pipe to the controller."""
    control: Connection = arguments[-1]
    die_with_parent()
    set_name(settings.name)
    allow_long_integers()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the controller handles them
        signal.signal(signum, signal.SIG_IGN)
    exit_code = 0
    try:
        if settings.log_file is not None:
            _redirect_output(settings.log_file)
        # A segmentation fault or an abort in native code leaves the Python stacks in the log.
        faulthandler.enable(file=2, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # see Watchdog
        control.send(Starting("importing torch and transformers"))
        set_up_process(settings)
        worker_class = getattr(importlib.import_module(module), name)
        worker = worker_class(settings, *arguments)
        control.send(Ready())
        worker.run()
    except (EOFError, BrokenPipeError, ConnectionResetError, SystemExit):
        pass  # the controller or another train rank has ended, or the controller sent Stop
    except BaseException as error:
        exit_code = 1
        with contextlib.suppress(OSError):
            control.send(describe_failure(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # without waiting for a process group that is stuck in a collective


def _redirect_output(log_file: str) -> None:
    """Append the output of this process, and of processes that it starts, to its log."""
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def describe_failure(error: BaseException) -> Failed:
    """Return the event that reports an exception, inside its handler."""
    if isinstance(error, ConfigError):  # also of a full disk
        is_user_error = not isinstance(error, DiskError)
        return Failed(str(error), traceback="", is_user_error=is_user_error)
    return Failed(
        f"{type(error).__name__}: {error}",
        traceback.format_exc(),
        is_user_error=False,
        is_replaceable=type(error) is not BrokenInvariant,
        is_consequence=type(error) in (ConnectionError, TimeoutError),
    )


def with_environment(settings: WorkerSettings) -> WorkerSettings:
    """Add the variables that the worker's process must have from its start: it imports the user's
    program first, and torch and its libraries read them once."""
    kind = settings.device.partition(":")[0]
    variables = devices.network_environment(settings.address) | devices.NO_DUMPS
    variables["OMP_NUM_THREADS"] = str(settings.num_threads)
    variables["TOKENIZERS_PARALLELISM"] = "false"
    if settings.device_indices:
        variables |= devices.visible_environment(kind, settings.device_indices)
    if settings.memory_fraction is not None:
        variables |= devices.SHARED_DEVICE_ENVIRONMENT
    elif settings.name.startswith("train"):
        variables |= devices.allocator_environment(kind)
    if _is_vllm(settings):
        variables |= vllm_platforms.environment(kind)
    elif kind == "cpu":
        variables |= spin_environment()
    if settings.is_deterministic:
        variables |= devices.DETERMINISTIC_ENVIRONMENT
    return replace(settings, environment=variables)


def _is_vllm(settings: WorkerSettings) -> bool:
    return settings.has_vllm and settings.name.startswith("rollout")


def set_up_process(settings: WorkerSettings) -> None:
    """Import torch and set what holds for the whole process. Raises ConfigError if the process does
    not see the devices that it was given."""
    os.environ.update(settings.environment)  # the user's program may have changed it

    import torch

    quieten_transformers()
    torch.set_num_threads(settings.num_threads)
    kind = settings.device.partition(":")[0]
    devices.load_backend(kind)
    expected = len(settings.device_indices)
    if expected > 0:
        got = devices.num_usable(kind)
        if got != expected:
            raise ConfigError(
                f"devices: expected {expected} for {settings.name}, got {got}: the user's program "
                'uses devices when it is imported; put that under `if __name__ == "__main__":`'
            )
    if settings.listener is not None:
        devices.serve_store(settings.listener)
    if settings.memory_fraction is not None and not _is_vllm(settings):  # vLLM has its own limit
        devices.limit_memory(torch.device(settings.device), settings.memory_fraction)
    if settings.is_deterministic:
        torch.use_deterministic_algorithms(True)
