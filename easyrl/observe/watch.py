"""`easyrl watch RUN`: the live view of a run from another terminal, from the run's files alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from easyrl import records
from easyrl.observe.live_view import LastPicture, LiveView
from easyrl.observe.plain_lines import PlainLines, print_end, say
from easyrl.observe.run_files import RunFiles
from easyrl.observe.screen import is_fit_for_pictures
from easyrl.records import Observer, Record

POLL_SECONDS = 0.25
SILENCE_SECONDS = 600.0
"""After so long without a word a run on another machine is taken for dead."""
KILLED = 1
INTERRUPTED = 128 + signal.SIGINT


def watch(folder: Path, *, live: bool) -> int:
    """Show the run until it ends; returns its exit code (1 where it was killed, 130 where the
    watching was interrupted). Raises ValueError where `folder` is no run folder."""
    try:
        return _watch(RunFiles(folder), live=live)
    except (KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(
            f"'{folder}' is not what this version of easyrl writes, or was removed "
            f"({type(error).__name__}: {error}); accepted: a whole run folder"
        ) from error


def _watch(files: RunFiles, *, live: bool) -> int:
    last: Record | None = None
    view = LiveView(files.now, log_file=Path(os.devnull))
    observe: Observer = PlainLines()
    before = {signum: signal.signal(signum, _stop) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for record in _follow(files):
            if last is None and live and is_fit_for_pictures():
                is_over = files.has_ended or files.is_alive is False
                observe = LastPicture() if is_over else view
            observe(record)
            last = record
    except KeyboardInterrupt:
        view.close()
        print_end(INTERRUPTED, f"the run goes on; to see it again: easyrl watch {files.folder}")
        return INTERRUPTED
    finally:
        view.close()
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert isinstance(last, records.RunEnded)
    return last.exit_code


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)  # through `finally`: the terminal is left as it was


def _follow(files: RunFiles) -> Iterator[Record]:
    """What the files tell, as it comes, until the run has ended."""
    is_alive: bool | None = True
    is_waiting = False
    while True:
        for record in files.read():
            yield record
            if isinstance(record, records.RunEnded):
                return
        if is_alive is False:  # already before that was read
            yield _killed(
                f"the run was killed: its process is gone and told of no end; what there is lies "
                f"in {files.folder}"
            )
            return
        is_alive = files.is_alive
        if is_alive is False:
            continue
        if is_alive is None and files.seconds_of_silence > SILENCE_SECONDS:
            yield _killed(
                f"nothing has been written to {files.folder} for {SILENCE_SECONDS:.0f} s, and its "
                "process cannot be seen from here; if it lives, watch it again once it writes"
            )
            return
        if not (files.is_begun or is_waiting):
            say(f"waiting for the run to begin: {files.folder} tells of nothing yet")
            is_waiting = True
        time.sleep(POLL_SECONDS)


def _killed(message: str) -> Record:
    return records.RunEnded(KILLED, message)
