"""The controller's side of checkpoints: which are due, requested and written.

    controller ──SaveCheckpoint──► train worker ──copy──► its writer thread ──► CheckpointSaved

At most one is being written. If the next one is due meanwhile, the controller waits before it sends
anything else: a train worker that waited for its writer would keep the rollout workers waiting for
weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from easyrl import events
from easyrl.config import Config
from easyrl.events import Observer
from easyrl.model.checkpoint_files import unfinished_name
from easyrl.runtime.resume import RunState
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
        self._writing: RunState | None = None
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

    def save(self, send: Callable[[events.Command], None], state: RunState) -> None:
        """Request a checkpoint of this state from the train worker."""
        assert self._writing is None
        self._writing, self._newest, self._num_bytes = state, state.policy_version, 0
        best = state.best if self._train.keep_best else None
        send(
            events.SaveCheckpoint(
                str(self._folder / str(state.policy_version)),
                state.policy_version,
                asdict(state),
                None if best is None else best["policy_version"],
            )
        )

    def report_wait(self) -> None:
        """Say that training waits until the current checkpoint is written."""
        assert self._writing is not None
        self._notify(
            events.Note(
                f"training waits: the checkpoint of iteration {self._writing.num_iterations} is "
                "still being written and the next one is due (a higher train.save_every avoids it)"
            )
        )

    def on_saved(self, saved: events.CheckpointSaved) -> None:
        """The train worker has written the checkpoint, or could not."""
        self._writing = None
        if saved.error:
            self._newest = None
            self._notify(
                events.Note(
                    f"the checkpoint {self._folder / str(saved.policy_version)} could not be "
                    f"written: {saved.error}; training continues, and earlier checkpoints are kept "
                    "(use an output.dir with more free space, or a lower train.keep_checkpoints)"
                )
            )

    def report_progress(self) -> bool:
        """While a stopping run waits for its checkpoint: say each second how much is written.
        Returns whether it has grown since the last report."""
        now = time.monotonic()
        if now - self._reported < PROGRESS_SECONDS or self._writing is None:
            return False
        before, self._num_bytes = self._num_bytes, self._bytes_written(self._writing)
        self._reported = now
        what = f"saving the checkpoint of iteration {self._writing.num_iterations}"
        written = f"{self._num_bytes / 2**20:,.0f} MiB written"
        hint = "(again: stop without it)"
        self._notify(events.Stopping(now, f"{what}, {written} {hint}"))
        return self._num_bytes > before

    def _bytes_written(self, state: RunState) -> int:
        folder = unfinished_name(self._folder / str(state.policy_version))
        try:
            return sum(file.stat().st_size for file in folder.iterdir())
        except OSError:  # just published
            return 0
