"""Workers that hang, for `easyrl.runtime.launch.run_worker`."""

from __future__ import annotations

import ctypes
import time
from multiprocessing.connection import Connection
from typing import Any

from easyrl import events


class HangsInC:
    def __init__(self, settings: Any, control: Connection) -> None:
        self.control = control

    def run(self) -> None:
        self.control.send(events.Note("hangs from here on"))
        while True:
            ctypes.PyDLL(None).sleep(1000)  # keeps the GIL; a signal ends it


def hangs_before_its_first_event(control: Connection) -> None:
    time.sleep(1000)
