"""`easyrl watch RUN`: show a run from its files, with the views of the run itself."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from easyrl import events
from easyrl.events import Event, Observer
from easyrl.observe.lines import PlainLines, print_end
from easyrl.observe.run_files import RunFiles
from easyrl.observe.text import is_live_terminal
from easyrl.observe.view import LiveView
from easyrl.runtime.run_folder import is_locked
from easyrl.runtime.supervisor import FAILED

POLL_SECONDS = 0.25
INTERRUPTED = 128 + signal.SIGINT


def watch(folder: Path, *, live: bool) -> int:
    """Show the run until it ends. Returns its exit code; 1 if it was killed, 130 if watching was
    interrupted. Raises ConfigError if `folder` is no run folder."""
    files = RunFiles(folder)
    view = LiveView(files.now, log_file=Path(os.devnull))
    observe: Observer = view if live and is_live_terminal() else PlainLines()
    for signum in (signal.SIGTERM, signal.SIGHUP):  # exit through `finally`
        signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))
    exit_code = FAILED
    try:
        for event in follow(files):
            observe(event)
            if isinstance(event, events.RunEnded):
                exit_code = event.exit_code
    except KeyboardInterrupt:
        view.close()
        hint = f"to see it again: easyrl watch {quote(str(folder))}"
        print_end(INTERRUPTED, f"the run continues; {hint}")
        return INTERRUPTED
    finally:
        view.close()
    return exit_code


def follow(files: RunFiles) -> Iterator[Event]:
    """Yield the events of a run until no command continues it; only the last one's end."""
    end: events.RunEnded | None = None
    is_alive = True
    while is_alive:
        is_alive = is_locked(files.folder)  # before the last read, so that nothing is missed
        for event in files.read():
            end = event if isinstance(event, events.RunEnded) else None
            if end is None:
                yield event
        time.sleep(POLL_SECONDS)
    message = f"the run was killed: its process is gone; see {files.folder / 'logs'}"
    yield end or events.RunEnded(FAILED, message)
