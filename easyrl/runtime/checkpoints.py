"""The controller's side of checkpoints: which are due, requested and written.

    controller ──SaveCheckpoint──► train worker ──copy──► its writer thread ──► CheckpointSaved

At most one is being written. If the next one is due meanwhile, the controller waits before it sends
anything else: a train worker that waited for its writer would keep the rollout workers waiting for
weights.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict

from easyrl import events
from easyrl.config import Config
from easyrl.events import Observer
from easyrl.model.checkpoint_files import unfinished_name
from easyrl.runtime.resume import SavedState
from easyrl.runtime.run_folder import RunFolder

PROGRESS_SECONDS = 1.0


class Checkpoints:
    def __init__(
        self, config: Config, folder: RunFolder, notify: Observer, *, saved_version: int | None
    ) -> None:
        """`saved_version`: policy version of the checkpoint that the run resumed from."""
        self._train = config.train
        self._folder = folder.checkpoints
        self._notify = notify
        self._newest = saved_version
        self._writing: SavedState | None = None
        self._reported, self._num_bytes = 0.0, 0

    @property
    def are_kept(self) -> bool:
        """Whether the run can be resumed."""
        return self._train.keep_checkpoints > 0

    @property
    def is_saving(self) -> bool:
        return self._writing is not None

    def is_due(self, num_iterations: int) -> bool:
        """Whether `train.save_every` asks for a checkpoint after so many iterations."""
        every = self._train.save_every
        is_last = num_iterations == self._train.iterations
        return self.are_kept and (is_last or (every is not None and num_iterations % every == 0))

    def has(self, policy_version: int) -> bool:
        """Whether the newest checkpoint, written or being written, is of this version."""
        return self._newest == policy_version

    def save(self, send: Callable[[events.Command], None], state: SavedState) -> None:
        """Request a checkpoint of this state from the train worker."""
        assert self._writing is None
        self._writing, self._newest, self._num_bytes = state, state.policy_version, 0
        best = state.best["policy_version"] if state.best and self._train.keep_best else None
        path = str(self._folder / str(state.policy_version))
        send(events.SaveCheckpoint(path, state.policy_version, asdict(state), best))

    def report_wait(self) -> None:
        """Report that training waits until the current checkpoint is written."""
        assert self._writing is not None
        note = (
            f"training waits: the checkpoint of iteration {self._writing.num_iterations} is still "
            "being written and the next one is due (a higher train.save_every avoids it)"
        )
        self._notify(events.Note(note))

    def on_saved(self, saved: events.CheckpointSaved) -> None:
        """The train worker has written the checkpoint, or could not."""
        self._writing = None
        if saved.error:
            self._newest = None
            note = (
                f"the checkpoint {self._folder / str(saved.policy_version)} could not be written: "
                f"{saved.error}; training continues, and earlier checkpoints are kept (use an "
                "output.dir with more free space, or a lower train.keep_checkpoints)"
            )
            self._notify(events.Note(note))

    def report_progress(self) -> bool:
        """While a stopping run waits for its checkpoint: report each second how much is written.
        Returns whether it has grown since the last report."""
        now = time.monotonic()
        if now - self._reported < PROGRESS_SECONDS or self._writing is None:
            return False
        folder = unfinished_name(self._folder / str(self._writing.policy_version))
        before, self._num_bytes = self._num_bytes, 0
        with contextlib.suppress(OSError):  # just published
            self._num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        self._reported = now
        what = (
            f"saving the checkpoint of iteration {self._writing.num_iterations}: "
            f"{self._num_bytes / 2**20:,.0f} MiB (Ctrl-C again: stop without it)"
        )
        self._notify(events.Stopping(now, what))
        return self._num_bytes > before
