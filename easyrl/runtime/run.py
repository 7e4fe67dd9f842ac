"""`easyrl grpo`, once the config is resolved: check, make the run folder, train, sum up."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from easyrl.config import Config
from easyrl.data.datasets import open_prompts
from easyrl.hub import check_model
from easyrl.rewards.loading import check_rewards
from easyrl.runtime.placement import describe, resolve_placement
from easyrl.runtime.ring import make_ring
from easyrl.runtime.run_folder import RunFolder

FINISHED, FAILED, USER_ERROR = 0, 1, 2
SIGNALLED = 128
"""Plus the signal's number: 130 after Ctrl-C, 143 after SIGTERM."""


def run(config: Config) -> int:
    """Train; returns the exit code. Raises ValueError for what the user can mend."""
    started = time.monotonic()
    check_model(config.model.path)
    prompts = open_prompts(config)
    check_rewards(config, prompts.prompt(0))
    placement = resolve_placement(config)  # last: to look for accelerators takes torch
    ring = make_ring(config, placement)
    folder = RunFolder(config)
    _say(f"run folder {folder.path}\n{describe(placement)}")

    from easyrl.runtime.controller import Controller  # loads torch
    from easyrl.runtime.supervisor import Interrupted, Supervisor, WorkerFailure

    try:
        with Supervisor() as supervisor:
            summary = Controller(
                config,
                placement,
                prompts=prompts,
                folder=folder,
                supervisor=supervisor,
                ring=ring,
                started=started,
                say=_say,
            ).run()
    except Interrupted as interrupted:
        _say(f"stopped by {interrupted}; what there is lies in {folder.path}")
        return SIGNALLED + interrupted.signum
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    except WorkerFailure as failure:
        print(f"easyrl: {failure}", file=sys.stderr)
        return USER_ERROR if failure.is_user_error else FAILED
    except Exception:
        traceback.print_exc()
        return FAILED
    folder.write_summary(summary)
    _say(
        f"finished: reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}, "
        f"{summary['completion_tokens']} tokens in {summary['wall_seconds']:.1f} s; "
        f"model in {folder.model}"
    )
    return FINISHED


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has read enough: the run goes on without an audience
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
