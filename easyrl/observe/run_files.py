"""Read the files of a run, also while it writes them."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from easyrl import events
from easyrl.config import ConfigError, load_config
from easyrl.events import Event
from easyrl.observe.trace import FILE_NAME, FIRST, decode
from easyrl.runtime.resolve import resolve


class GrowingFile:
    """A file of JSON lines that another process appends to, or replaces by a shorter one."""

    def __init__(self, path: Path, parse: Callable[[bytes], Any] = json.loads) -> None:
        self.path = path
        self._parse = parse
        self.offset = 0  # the end of the newest line, in bytes
        self._inode = 0
        self._newest = b"\0"  # the newest line, without its end; before there is one, no text

    def read(self) -> Iterator[Any]:
        """Yield the new lines, except for those that are damaged."""
        with self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if self.offset and inode != self._inode:
                # The file was replaced: continue behind the newest line that was read.
                before, newest, _ = file.read().rpartition(self._newest)
                self.offset = len(before) + len(newest)
            self._inode = inode
            file.seek(self.offset)
            while (text := file.readline()).endswith(b"\n"):
                self.offset += len(text)
                stripped = text.strip(b",\n ")
                try:
                    line = self._parse(stripped)
                except (ValueError, TypeError):  # the bracket; of another version; cut off
                    continue
                self._newest = stripped
                yield line


class RunFiles:
    """The events of a run, from its folder. Raises ConfigError if that is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = folder / "config.yaml"
        trace = folder / FILE_NAME
        self._trace = GrowingFile(trace, partial(json.loads, object_hook=self._decode))
        self._first = 1  # number of the run's first iteration: 0 in files of older versions
        self._clock = 0.0  # Unix seconds at the zero of the events' clock
        is_there = config.is_file() and trace.is_file()
        has_start = is_there and any(isinstance(each, events.RunStarted) for each in self.read())
        if not has_start:
            raise ConfigError(
                f"'{folder}': expected the folder of a run (runs/<time>-<task>) with config.yaml "
                f"and {FILE_NAME} (not damaged), written by EasyRL 0.2 or newer"
            )
        self._trace.offset = 0  # read it again

    def _decode(self, fields: dict[str, Any]) -> Any:
        """Decode a message, with iterations that count from 1."""
        if fields.get("type") == "RunStarted":
            self._first = fields.get(FIRST, 0)  # of this command, which may have resumed the run
        if isinstance(fields.get("iteration"), int):
            fields["iteration"] += 1 - self._first
        return decode(fields)

    def now(self) -> float:
        """Return the time on the events' clock."""
        return time.time() - self._clock

    def read(self) -> Iterator[Event]:
        """Yield the new events."""
        for line in self._trace.read():
            is_line = isinstance(line, dict) and "ts" in line
            event = line.get("args") if is_line else None
            if isinstance(event, events.RunStarted):
                config = load_config(self.folder / "config.yaml")  # of the newest command
                event = replace(
                    event,
                    folder=self.folder,
                    spec=resolve(config),
                    settings=config.model_dump(mode="json"),
                )
                self._clock = line["ts"] / 1e6 - event.started
            if isinstance(event, Event):
                yield event
