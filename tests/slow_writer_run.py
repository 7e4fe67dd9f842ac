"""`easyrl grpo` on a slow disk: the first checkpoint is written once the run waits for it.

    python slow_writer_run.py RUN ARGUMENTS...

Spawned processes import the main script too, so that this also holds in the train worker.
"""

import sys
import time

from easyrl.workers import saver

write_tensors = saver.write_tensors


def write_slowly(folder, tensors, process_group=None):
    log = folder.parent.parent / "logs" / "easyrl.log"
    while folder.name.startswith("1.") and "training waits" not in log.read_text():
        time.sleep(0.05)
    write_tensors(folder, tensors, process_group)


saver.write_tensors = write_slowly

if __name__ == "__main__":
    from easyrl.cli import main

    sys.argv[1:] = ["grpo", "--output", *sys.argv[1:]]
    main()
