"""`runtime.restart=on_failure`: run in a child process, and start the run again when it fails.

    easyrl grpo (this process) ──fork──► controller ──spawn──► workers
        ▲                                    │
        └── exit code 1, or killed ──────────┘   again, from the newest checkpoint

This process has one thread and imports neither torch nor numpy, so that it may fork. It passes
signals on. A terminal or a scheduler may send them to the child as well, which takes two within
MERGE_SECONDS for one. When this process is killed, the kernel kills the child and its workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from easyrl.config import Config
from easyrl.model.checkpoint_files import CHECKPOINTS, checkpoints_in
from easyrl.processes import adopt_orphans, die_with_parent
from easyrl.runtime.run_folder import folder_of
from easyrl.runtime.supervisor import (
    FAILED,
    SIGNALLED,
    STOP_SIGNALS,
    MergedSignals,
    handle_signals,
)

TIME = "%Y-%m-%d %H:%M:%S"
MERGE_SECONDS = 1.0
ORPHANS_SECONDS = 10.0  # for the workers of a killed controller to end: they hold devices
RESTORE_TERMINAL = "\033[?1049l\033[?25h"  # after a live view that was killed


def run_with_restarts(
    config: Config, resume: Path | None, start: Callable[[Config, Path | None], int]
) -> int:
    """Call `start(config, resume)` in a child process, and again with `runtime.resume=auto` after
    each failure. Returns the exit code of the run."""
    runtime, folder = config.runtime, resume or folder_of(config)
    output = config.output.model_copy(update={"dir": str(folder)})
    config = config.model_copy(update={"output": output})
    auto = runtime.model_copy(update={"resume": "auto"})
    failures: list[tuple[float, Path | None, str]] = []  # time, newest checkpoint, description
    adopt_orphans()
    while True:
        code, is_stopped = _run_in_child(partial(start, config, resume))
        is_failure = code == FAILED or (code < 0 and -code not in STOP_SIGNALS)
        if is_stopped or not is_failure or not (folder / "config.yaml").is_file():
            return code if code >= 0 else SIGNALLED - code
        _wait_for_orphans()
        now, newest = time.time(), next(reversed(checkpoints_in(folder / CHECKPOINTS)), None)
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        described = f"{time.strftime(TIME)}  {cause}; newest checkpoint: {newest or 'none'}"
        failures.append((now, newest, described))
        # Those without a newer checkpoint since are repetitions, however long each took.
        begin = now - runtime.restart_window_seconds
        number = sum(when > begin or version == newest for when, version, _ in failures)
        if number > runtime.max_restarts:
            limits = f"runtime.restart_window_seconds={runtime.restart_window_seconds:g}"
            cause = f"the run failed {number} times within {limits} or without a newer checkpoint"
            allowed = f"allowed: runtime.max_restarts={runtime.max_restarts}"
            _report(folder, "\n".join([f"{cause}; {allowed}", *(text for *_, text in failures)]))
            return FAILED
        limit = f"restart {number} of at most {runtime.max_restarts}"
        _report(folder, f"the run failed ({cause}) and starts again ({limit})")
        config, resume = config.model_copy(update={"runtime": auto}), None


def _run_in_child(run: Callable[[], int]) -> tuple[int, bool]:
    """Return the child's exit code (negative: killed by that signal), and whether a signal has
    stopped it."""
    parent, child = os.getpid(), 0
    signals: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        os.kill(child, signum)  # it may have ended, but its number is not free yet

    with handle_signals(forward):
        sys.stdout.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if child := os.fork():
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _wait_for(child)
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), bool(signals)
    die_with_parent(parent)
    MergedSignals.seconds = MERGE_SECONDS
    with handle_signals(_leave):  # until the run has its own handlers
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise SystemExit(run())


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(SIGNALLED + signum)


def _wait_for(child: int) -> None:
    """Wait until `child` has ended, but leave it a zombie; reap adopted processes meanwhile."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        if ended.si_pid == child:
            return
        os.waitpid(ended.si_pid, 0)


def _wait_for_orphans() -> None:
    deadline = time.monotonic() + ORPHANS_SECONDS
    with contextlib.suppress(ChildProcessError):  # there are none
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)


def _report(folder: Path, text: str) -> None:
    """Print, and add to the run's log."""
    restored = RESTORE_TERMINAL if sys.stderr.isatty() else ""
    print(f"{restored}easyrl: " + text.replace("\n", "\n        "), file=sys.stderr)
    with contextlib.suppress(OSError), (folder / "logs" / "easyrl.log").open("a") as log:
        log.write(f"{time.strftime(TIME)}  {text}\n")
