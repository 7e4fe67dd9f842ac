"""`easyrl grpo`, once the config is resolved: check, make the run folder, train, sum up."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from types import FrameType

from easyrl import records
from easyrl.channels.ring_buffer import RingBuffer
from easyrl.config import Config
from easyrl.data.datasets import PromptStream, open_prompts
from easyrl.hub import check_model
from easyrl.records import Observer, tell_all
from easyrl.rewards.loading import check_rewards
from easyrl.runtime.placement import Placement, describe, device_names, resolve_placement
from easyrl.runtime.ring import make_ring
from easyrl.runtime.run_folder import RunFolder

FINISHED, FAILED, USER_ERROR = 0, 1, 2
SIGNALLED = 128
"""Plus the signal's number: 130 after Ctrl-C, 143 after SIGTERM."""


def run(config: Config, observers: Sequence[Observer] = ()) -> int:
    """Train; returns the exit code. Raises ValueError for what the user can mend.

    Observers are told of no run before all that is checked here has passed.
    """
    started = time.monotonic()
    tell_all(observers)(records.CheckStarted("checking the model, the data and the devices"))
    check_model(config.model.path)
    prompts = open_prompts(config)
    check_rewards(config, prompts.prompt(0))
    placement = resolve_placement(config)  # last: to look for accelerators takes torch
    ring = make_ring(config, placement)
    folder = RunFolder(config)
    tell = tell_all([folder.observe, *observers])
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        tell(
            records.RunStarted(
                started,
                folder.path,
                config,
                devices=device_names(placement),
                num_slots=config.ring_slots,
                description=describe(placement),
            )
        )
        exit_code, message = _train(
            config,
            placement,
            prompts=prompts,
            ring=ring,
            folder=folder,
            started=started,
            tell=tell,
        )
    except KeyboardInterrupt as interrupt:  # before the supervisor hears of signals, or after
        signum = signal.Signals(interrupt.args[0] if interrupt.args else signal.SIGINT)
        exit_code = SIGNALLED + signum
        message = f"stopped by {signum.name}; what there is lies in {folder.path}"
    tell(records.RunEnded(exit_code, message))
    signal.signal(signal.SIGTERM, before)
    return exit_code


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signum)


def _train(
    config: Config,
    placement: Placement,
    *,
    prompts: PromptStream,
    ring: RingBuffer,
    folder: RunFolder,
    started: float,
    tell: Observer,
) -> tuple[int, str]:
    """From spawned workers to none left: the exit code, and why it is not 0."""
    from easyrl.runtime.controller import Controller  # loads torch
    from easyrl.runtime.supervisor import Interrupted, Supervisor, WorkerFailure

    try:
        with Supervisor() as supervisor:
            controller = Controller(
                config,
                placement,
                prompts=prompts,
                folder=folder,
                supervisor=supervisor,
                ring=ring,
                started=started,
                tell=tell,
            )
            summary = controller.run()
        tell(records.RunFinished(time.monotonic(), summary))
    except Interrupted as interrupted:
        message = f"stopped by {interrupted}; what there is lies in {folder.path}"
        return SIGNALLED + interrupted.signum, message
    except WorkerFailure as failure:
        return (USER_ERROR if failure.is_user_error else FAILED), str(failure)
    except Exception:
        return FAILED, traceback.format_exc().rstrip()
    return FINISHED, ""
