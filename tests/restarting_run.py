"""`run_with_restarts` with runs that last no time.

    python restarting_run.py FOLDER END... [SECTION.KEY=VALUE...]

Run n ends in the way of the n-th END, or else of the last: an exit code, a signal's name, or
"hang" (until a signal). FOLDER/starts gets a line for each. With "+" before the END it first makes
a checkpoint, with "-" it removes FOLDER/config.yaml. PAUSE_SECONDS is the time between two runs.
"""

import os
import signal
import sys
from pathlib import Path

from easyrl.config import load_config
from easyrl.runtime import restart
from easyrl.runtime.supervisor import Interrupted, Supervisor


def start(config, resume):
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
        return hang()
    if end.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[end])
    return int(end)


def hang():
    with Supervisor() as supervisor:
        print("hangs", flush=True)
        try:
            supervisor.wait()
        except Interrupted as stop:
            supervisor.wait(0.5)  # raises if the signal counts twice
            return 128 + stop.signum
    return 1


words = [word for word in sys.argv[2:] if "=" in word]
ends = [word for word in sys.argv[2:] if "=" not in word]
config = load_config(None, {"output.dir": sys.argv[1]}, words)
restart.PAUSE_SECONDS = float(os.environ.get("PAUSE_SECONDS", "0"))
sys.exit(restart.run_with_restarts(config, Path(sys.argv[1]), start))
