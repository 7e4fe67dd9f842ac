"""vLLM's processes are removed with their rollout worker."""

import subprocess
import sys
import time
from pathlib import Path

from easyrl.engines.vllm.processes import processes_of

SECONDS = 5.0
HOLDER = """
import subprocess, time
from easyrl.engines.vllm.processes import Cleanup
cleanup = Cleanup()
open(cleanup.folder + "/socket", "w")
subprocess.Popen(["sleep", "1000"])
print(cleanup.folder, flush=True)
time.sleep(1000)
"""


def test_killed_worker_leaves_no_names_and_no_processes():
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    folder = holder.stdout.readline().strip()
    for is_alive in (True, False):
        if not is_alive:
            holder.kill()
            holder.communicate()
        deadline = time.monotonic() + SECONDS
        while {bool(processes_of(folder)), Path(folder, "socket").exists()} != {is_alive}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert not Path(folder).exists()
