"""Notice that this process was stopped for a while: by Ctrl-Z, or since a laptop slept.

Time limits of other libraries go on meanwhile, because they look at the clock.
"""

import math
import threading
import time

BEAT_SECONDS = 1.0
PAUSE_SECONDS = 5.0
"""Time without a beat that counts as a pause."""


class Heartbeat:
    """A thread that looks at the clock every BEAT_SECONDS."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._last_beat = time.time()
        self._last_pause = -math.inf  # when the newest pause was over
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            now = time.time()
            if now - self._last_beat > PAUSE_SECONDS:
                self._last_pause = now
            self._last_beat = now

    def has_paused_since(self, then: float) -> bool:
        """Return whether this process was stopped after a time, in Unix seconds. (The first beat
        after a pause may be due still.)"""
        is_due = time.time() - self._last_beat > PAUSE_SECONDS
        return is_due or self._last_pause > then

    def stop(self) -> None:
        self._stopped.set()
