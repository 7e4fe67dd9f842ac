"""Workers that hang, for `easyrl.runtime.launch.run_worker`."""

import ctypes
import time

from easyrl import events


class HangsInC:
    def __init__(self, settings, control):
        self.control = control

    def run(self):
        self.control.send(events.Note("hangs from here on"))
        while True:
            ctypes.PyDLL(None).sleep(1000)  # keeps the GIL; a signal ends it


def hangs_before_its_first_event(control):
    time.sleep(1000)
