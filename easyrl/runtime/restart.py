"""`runtime.restart=on_failure`: run in a child process, and start the run again when it fails.

    easyrl grpo (this process) ──fork──► controller ──spawn──► workers
        ▲                                    │
        └── exit code 1, or killed ──────────┘   again, from the newest checkpoint

This process has one thread and imports no torch, so that it may fork. It passes signals on. When it
is killed, the kernel kills the child and its workers.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from easyrl.config import Config, change_config
from easyrl.model.checkpoint_files import CHECKPOINTS, checkpoints_in
from easyrl.processes import die_with_parent
from easyrl.runtime import supervisor
from easyrl.runtime.run_folder import folder_of, resume_hint, write_log

AWAITED = {*supervisor.STOP_SIGNALS, signal.SIGCHLD}
PAUSE_SECONDS = 2.0  # before a restart: the workers of a killed controller release their devices


@supervisor.blocked(AWAITED)  # between two starts, too
def run_with_restarts(
    config: Config, resume: Path | None, start: Callable[[Config, Path | None], int]
) -> int:
    """Call `start(config, resume)` in a child process, and again after each failure."""
    runtime, folder = config.runtime, folder_of(config)
    config = change_config(config, {"output.dir": str(folder)})
    is_ray = any(each is not None and each.is_ray for each in config.devices.sets)
    failures: list[tuple[float, Path | None]] = []  # time, newest checkpoint
    while True:
        code, is_stopped = _run_in_child(partial(start, config, resume))
        # On a cluster that has lost a node there may be no room yet.
        lacks_room = code == supervisor.USER_ERROR and is_ray and bool(failures)
        is_failure = code == supervisor.FAILED or code < 0 or lacks_room
        if is_stopped or not is_failure or not (folder / "config.yaml").is_file():
            return code if code >= 0 else supervisor.SIGNALLED - code
        now, newest = time.monotonic(), next(reversed(checkpoints_in(folder / CHECKPOINTS)), None)
        failures.append((now, newest))
        # Those without a newer checkpoint since are repetitions, however long each took.
        begin = now - runtime.restart_window_seconds
        number = sum(when > begin or version == newest for when, version in failures)
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if number > runtime.max_restarts:
            limits = f"runtime.restart_window_seconds={runtime.restart_window_seconds:g}"
            times = f"{number} times within {limits} or without a newer checkpoint"
            allowed = f"allowed: runtime.max_restarts={runtime.max_restarts}"
            end = f"the run failed {times} (now: {cause}); {allowed}"
            _report(folder, end + (resume_hint(folder) if code < 0 else ""))
            return supervisor.FAILED
        limit = f"restart {number} of at most {runtime.max_restarts}"
        _report(folder, f"the run failed ({cause}) and starts again ({limit})")
        config, resume = change_config(config, {"runtime.resume": "auto"}), None
        time.sleep(PAUSE_SECONDS)


def _run_in_child(run: Callable[[], int]) -> tuple[int, bool]:
    """Return the child's exit code (negative: killed), and whether a signal was passed on to it."""

    def stop(signum: int, frame: object) -> None:
        os._exit(supervisor.SIGNALLED + signum)

    signals = supervisor.STOP_SIGNALS
    handled = {each for each in signals if signal.getsignal(each) is not signal.SIG_IGN}
    parent, is_stopped = os.getpid(), False
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        die_with_parent(parent)
        with supervisor.handle_signals(stop):  # until the run has its own handlers
            signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
            raise SystemExit(run())
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if (signum := signal.sigwait({*handled, signal.SIGCHLD})) in handled:
            is_stopped = True
            os.kill(child, signum)
    return os.waitstatus_to_exitcode(ended[1]), is_stopped


def _report(folder: Path, text: str) -> None:
    print(f"easyrl: {text}", file=sys.stderr)
    write_log(folder, text)
