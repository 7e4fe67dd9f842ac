"""`run_with_restarts` with runs that last no time.

    python restarting_run.py FOLDER END... [SECTION.KEY=VALUE...]

Run n ends in the way of the n-th END, or else of the last: an exit code, a signal's name, or
"hang". FOLDER/starts gets a line for each, FOLDER/signals one for each signal that it handles. With
"+" before the END it first makes a checkpoint, with "-" it removes FOLDER/config.yaml.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from easyrl.config import Config, load_config
from easyrl.runtime.restart import run_with_restarts
from easyrl.runtime.supervisor import handle_signals


def start(config: Config, resume: Path | None) -> int:
    folder = Path(str(config.output.dir))
    folder.mkdir(exist_ok=True)
    file = folder / "starts"
    with file.open("a") as starts:
        starts.write(f"{os.getpid()} {config.runtime.resume} {resume}\n")
    number = len(file.read_text().splitlines())
    end = ends[min(number, len(ends)) - 1]
    (folder / "config.yaml").touch()
    if end[0] == "+":
        (folder / "checkpoints" / str(number)).mkdir(parents=True)
    if end[0] == "-":
        (folder / "config.yaml").unlink()
    end = end.lstrip("+-")
    if end == "hang":
        subprocess.Popen(["sleep", "1"])  # not waited for
        hang(folder)
    if end.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[end])
    return int(end)


def hang(folder: Path) -> None:
    def on_signal(signum: int, frame: FrameType | None) -> None:
        with (folder / "signals").open("a") as signals:
            signals.write(f"{signum}\n")

    with handle_signals(on_signal):
        print("hangs", flush=True)
        while not (folder / "signals").exists():
            time.sleep(0.05)
        time.sleep(0.5)
    raise SystemExit(143)


words = [word for word in sys.argv[2:] if "=" in word]
ends = [word for word in sys.argv[2:] if "=" not in word]
config = load_config(None, {"output.dir": sys.argv[1]}, words)
sys.exit(run_with_restarts(config, None, start))
