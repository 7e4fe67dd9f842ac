"""`easyrl grpo` whose rollout workers die or hang at given points, or that runs other kernels.

    LOSE=rollout-0@weights:0,rollout-1@iteration:3 python altered_run.py --output RUN ...
    PLAIN_KERNELS=1 GRAPHS=1 python altered_run.py --output RUN ...
    HANG=trainer python altered_run.py --output RUN ...

LOSE: a worker kills itself once in the middle of receiving weights version 0 (`weights:0`), or of
its work for iteration 3 (`iteration:3`) or evaluation round 0 (`evaluation:0`); `rollout-0` is the
worker of this name that is there then. HANG: in update 2 of the weight channel (from 0) the
`trainer` hangs, or the engine while it is `loading`, or once all is `loaded`.

Spawned processes import the main script too, so that this holds in all of them, vLLM's too.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from easyrl.runtime import worker_process
from easyrl.workers.settings import WorkerSettings

set_up_environment = worker_process.set_up_process
KINDS = "iteration", "evaluation"  # of requests, as numbered in their keys
STEPS = 5
"""A worker dies in this step of its work: nothing is finished, or some groups are."""


def alter(settings: WorkerSettings) -> None:
    """Change the classes of this process, once torch may be imported."""
    set_up_environment(settings)
    output = Path(settings.log_file or "").parent.parent
    for name, _, point in (each.partition("@") for each in os.environ.get("LOSE", "").split(",")):
        if name == settings.name:
            _lose(point, settings.name, output)
    if os.environ.get("PLAIN_KERNELS"):
        _leave_out_fused_kernels()
    if os.environ.get("GRAPHS"):
        _record_steps()


def _leave_out_fused_kernels() -> None:
    import torch

    from easyrl.engines import embedded
    from easyrl.model.mixers import sdpa

    def attend(*inputs: Any, **settings: Any) -> torch.Tensor:
        return torch._scaled_dot_product_attention_math(*inputs, **settings)[0]

    sdpa.is_fused = lambda block, settings: False
    sdpa.scaled_dot_product_attention = attend
    embedded.fused_decoder = lambda policy, max_length: None
    embedded.fuse_steps = lambda policy: None


def _record_steps() -> None:
    import recorded_graphs

    def capture(*arguments: Any) -> Any:
        captured = recorded_graphs.capture(*arguments)
        print("captured a decode step", flush=True)
        return captured

    recorded_graphs.install(SimpleNamespace(setattr=setattr), capture)


def _lose(point: str, worker: str, output: Path) -> None:
    from easyrl.channels.weights import WeightChannel
    from easyrl.engines.base import GroupRequest
    from easyrl.engines.embedded import EmbeddedEngine

    kind, number_of_loss = point.split(":")
    submit, step, receive = EmbeddedEngine.submit, EmbeddedEngine.step, WeightChannel.receive
    work = [("", 0), 0]  # kind and number of the newest request, steps since

    def is_due(now: str, number: int) -> bool:
        return now == kind and number == int(number_of_loss)

    def die(number: int) -> None:
        """Once for each point: the process that replaces this one lives."""
        try:
            (output / "logs" / f"{worker}-{kind}-{number}.lost").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def submit_and_count(self: EmbeddedEngine, request: GroupRequest) -> None:
        submit(self, request)
        newest = KINDS[request.key[0]], request.key[1]
        if newest != work[0]:
            work[:] = newest, 0

    def step_or_die(self: EmbeddedEngine) -> Any:
        finished = step(self)
        work[1] += 1
        if work[1] == STEPS and is_due(*work[0]):
            die(work[0][1])
        return finished

    def receive_or_die(self: WeightChannel, version: int, *more: Any) -> Iterator[Any]:
        for number, piece in enumerate(receive(self, version, *more)):
            if number == 1 and is_due("weights", version):
                die(version)
            yield piece

    EmbeddedEngine.submit = submit_and_count  # type: ignore[method-assign]
    EmbeddedEngine.step = step_or_die  # type: ignore[method-assign]
    WeightChannel.receive = receive_or_die  # type: ignore[method-assign]


def _hang(who: str) -> None:
    from easyrl.channels.weights import WeightChannel

    send, receive = WeightChannel.send, WeightChannel.receive
    endpoint, bucket_bytes = WorkerSettings.weight_endpoint, 2**18  # the model is a dozen of them

    def hang() -> Any:
        while True:
            time.sleep(1.0)

    def is_due(now: str, version: int, num_bytes: int = 10**9) -> bool:
        return (now, version) == (who, 2) and num_bytes > 3 * bucket_bytes

    def send_or_hang(self: WeightChannel, version: int, weights: Any, **more: Any) -> int:
        weights, num_bytes = list(weights), 0
        for index, weight in enumerate(weights):
            num_bytes += weight.reference.nbytes
            if is_due("trainer", version, num_bytes):
                weights[index] = replace(weight, materialize=hang)
        return send(self, version, weights, **more)

    def receive_or_hang(self: WeightChannel, version: int, *more: Any) -> Iterator[Any]:
        num_bytes = 0
        for piece in receive(self, version, *more):
            yield piece
            num_bytes += piece.values.nbytes
            if is_due("loading", version, num_bytes):
                hang()
        if is_due("loaded", version):
            hang()

    def with_small_buckets(self: WorkerSettings, *rank: int) -> Any:
        return replace(endpoint(self, *rank), bucket_bytes=bucket_bytes)

    WeightChannel.send, WeightChannel.receive = send_or_hang, receive_or_hang  # type: ignore
    WorkerSettings.weight_endpoint = with_small_buckets  # type: ignore[method-assign]


worker_process.set_up_process = alter
if os.environ.get("HANG"):
    _hang(os.environ["HANG"])

if __name__ == "__main__":
    from easyrl.cli import main
    from easyrl.runtime import self_test

    self_test.before_run = lambda *_: ({}, [])  # type: ignore[assignment]
    sys.argv[1:] = ["grpo", *sys.argv[1:]]
    main()
