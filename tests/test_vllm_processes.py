"""vLLM's processes are removed with their rollout worker."""

import sys
from pathlib import Path

from easyrl.engines.vllm.processes import processes_of
from runs import start_process, wait_until

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
    holder = start_process([sys.executable, "-c", HOLDER], {})
    assert holder.stdout is not None
    folder = holder.stdout.readline().strip()

    def found():
        return processes_of(folder), Path(folder, "socket").exists()

    wait_until(lambda: all(found()))
    holder.kill()
    holder.communicate()
    wait_until(lambda: not any(found()))
    assert not Path(folder).exists()
