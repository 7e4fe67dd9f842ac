"""Programs on terminals of their own."""

import os
import pty
import select
import struct
import termios
import time
from fcntl import ioctl

from own_processes import WAIT_SECONDS, popen

LEAVE_SCREEN = "\x1b[?1049l"


class Terminal:
    def __init__(self, *words, columns=80, lines=24, **environment):
        self.output = ""
        self._primary, secondary = pty.openpty()
        ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        inherited = dict(os.environ)
        # pytest-xdist sets these for its workers. They would count more than the terminal's size.
        for name in ("LINES", "COLUMNS"):
            inherited.pop(name, None)
        self.process = popen(
            words,
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            env={**inherited, "TERM": "xterm-256color", **environment},
        )
        os.close(secondary)

    def read_until(self, text, timeout=WAIT_SECONDS):
        """Return the output up to `text`, or (None) until the program ends."""
        deadline = time.monotonic() + timeout
        output = select.poll()  # unlike `select.select` for any number of open files
        output.register(self._primary, select.POLLIN)
        while text is None or text not in self.output:
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"no '{text}' in: {self.output[-2000:]}")
            if not output.poll(1000):  # milliseconds
                continue
            try:
                self.output += os.read(self._primary, 65536).decode(errors="replace")
            except OSError:  # no process has the terminal open
                break
        assert text is None or text in self.output, self.output[-2000:]
        return self.output

    def end(self):
        self.read_until(None)
        os.close(self._primary)
        return self.process.wait(WAIT_SECONDS)


def after_the_view(output):
    """Return the output after the alternate screen; the terminal must be restored."""
    assert output.count("\x1b[?1049h") == output.count(LEAVE_SCREEN) == 1
    after = output.rpartition(LEAVE_SCREEN)[2]
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    return after
