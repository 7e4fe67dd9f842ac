"""Write checkpoints in a thread while training continues, one at a time.

boundary ──► copies on the CPU ──► thread: unfinished folder ──► rename ──► older ones removed
                                                                    └──► CheckpointSaved
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from easyrl.events import CheckpointSaved, SaveCheckpoint
from easyrl.model import checkpoint_files
from easyrl.model.checkpoint import write_tensors
from easyrl.model.sharding import TrainRanks


class CheckpointSaver:
    def __init__(
        self, send: Callable[[CheckpointSaved], None], *, keep: int, ranks: TrainRanks
    ) -> None:
        """`send` is called from the thread. All ranks save; rank 0 publishes, and keeps `keep`."""
        self._send = send
        self._keep = keep
        self._ranks = ranks
        self._thread: threading.Thread | None = None

    def save(self, command: SaveCheckpoint, tensors: Mapping[str, Tensor]) -> None:
        """Start writing `tensors`, which must not change any more."""
        if self._thread is not None:
            self._thread.join()  # rank 0 reports at the end of its thread, after the others wrote
        self._thread = threading.Thread(target=self._write, args=(command, tensors), daemon=True)
        self._thread.start()

    def _write(self, command: SaveCheckpoint, tensors: Mapping[str, Tensor]) -> None:
        path = Path(command.path)
        began = time.monotonic()
        error = ""
        try:
            folder = checkpoint_files.unfinished_name(path)
            digests = write_tensors(folder, tensors, self._ranks.group_for_files)
            if self._ranks.rank == 0:
                checkpoint_files.publish(path, command.state, digests)
                if command.best_version is not None:
                    checkpoint_files.name_best(path.parent, command.best_version)
                checkpoint_files.keep_newest(path.parent, self._keep)
        except BaseException as cause:  # torch's own CheckpointException is no Exception
            lines = (str(cause).strip() or type(cause).__name__).splitlines()
            # torch writes the errors of all ranks below each other.
            is_of_all_ranks = hasattr(cause, "failures")
            error = lines[-1] if is_of_all_ranks else lines[0]
            if self._ranks.rank == 0:
                checkpoint_files.discard_unfinished(path.parent)  # free the disk for the next one
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        seconds = time.monotonic() - began
        self._send(CheckpointSaved(command.policy_version, seconds, size, error))
