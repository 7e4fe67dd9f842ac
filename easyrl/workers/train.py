"""The train worker: groups out of the ring, one optimizer step per update, weights out.

             ┌─ ExchangeWeights: broadcast policy_version to the rollout workers
controller ──┼─ TrainIteration:  ring ─► micro-batches ─► Learner ─► steps
             ├─ SaveCheckpoint:  a copy of the boundary ─► CheckpointSaver (a thread)
             └─ SaveModel

`Stop` and `Halt` are also heard while an iteration is under way, between two micro-batches.

consumes: groups (ring)          waits for: the next group, the controller's next command
produces: weights, metrics       unblocks:  rollout workers waiting for weights or ring slots
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from torch import Tensor

from easyrl import events
from easyrl.channels.ring_buffer import RingPort
from easyrl.channels.weights import WeightChannel
from easyrl.config import Config
from easyrl.delays import maybe_sleep
from easyrl.model.export import export_model
from easyrl.model.policy import Policy
from easyrl.model.pretrained import load_tokenizer
from easyrl.workers.group_stream import GroupStream, micro_batches
from easyrl.workers.learner import Learner
from easyrl.workers.saver import CheckpointSaver
from easyrl.workers.settings import WorkerSettings
from easyrl.workers.timeline import Timeline

_REPEATED = (
    "model.attention: {}, so prompts are not shared: each completion is trained behind a prompt of "
    "its own, and groups are generated one by one through transformers' generate. It is exact, "
    "and slower"
)


class _Halted(Exception):
    """The iteration under way is dropped."""


class TrainWorker:
    def __init__(self, settings: WorkerSettings, port: RingPort, control: Connection) -> None:
        self.settings = settings
        self.config: Config = settings.config
        self.port = port
        self.control = control
        self.device = torch.device(settings.device)
        self.timeline = Timeline(self._send)
        self._sending = threading.Lock()  # the saver tells of its end from a thread
        self.saver = CheckpointSaver(self._send, keep=self.config.train.keep_checkpoints)
        self._boundary: tuple[int, Mapping[str, Tensor]] | None = None
        """The state at this policy version, where the policy goes on from it meanwhile."""
        control.send(events.Starting("loading the model"))
        policy = Policy.load(
            self.config.model.path,
            self.device,
            trust_remote_code=self.config.model.trust_remote_code,
            attention=self.config.model.attention,
        )
        if policy.obstacle is not None:
            self._send(events.Note(_REPEATED.format(policy.obstacle)))
        self.learner = Learner(policy, self.config)
        if settings.checkpoint is not None:
            self.learner.restore(Path(settings.checkpoint), settings.policy_version)
        self.channel: WeightChannel | None = None

    def run(self) -> None:
        """Obey commands until `Stop`."""
        while True:
            match self.control.recv():
                case events.JoinWeights(membership, rank, size):
                    self.channel = self.settings.join_weights(membership, rank, size)
                case events.ExchangeWeights(version):
                    self._send_weights(version)
                case events.TrainIteration(iteration):
                    self._train_iteration(iteration)
                case events.SaveCheckpoint() as command:
                    self.saver.save(command, self._state_at(command.policy_version))
                case events.Halt():
                    self._send(events.Halted())
                case events.SaveModel(folder):
                    self._send(self._save(Path(folder)))
                case events.Stop():
                    return

    def _send(self, event: events.Event) -> None:
        with self._sending:
            self.control.send(event)

    def _state_at(self, policy_version: int) -> Mapping[str, Tensor]:
        """Of the newest boundary, whether or not its next iteration has begun."""
        if self._boundary is not None and self._boundary[0] == policy_version:
            return self._boundary[1]
        assert self.learner.policy_version == policy_version
        return self.learner.state()

    def _send_weights(self, version: int) -> None:
        assert self.channel is not None and version == self.learner.policy_version
        with self.timeline.measure("weights"):
            self.channel.send(version, self.learner.policy.named_weights())
        self.timeline.report()
        self._send(events.WeightsExchanged(version))

    def _train_iteration(self, iteration: int) -> None:
        version = self.learner.policy_version
        keeps_boundary = (
            self.config.train.updates_per_iteration > 1 and self.config.train.keep_checkpoints > 0
        )
        # What the first update changes could not be saved any more if the others are dropped.
        self._boundary = (version, self._state_at(version)) if keeps_boundary else None
        try:
            self._send(self._trained_iteration(iteration))
        except _Halted:
            self._send(events.Halted())

    def _trained_iteration(self, iteration: int) -> events.IterationTrained:
        runtime, train = self.config.runtime, self.config.train
        stream = GroupStream(
            self.port,
            iteration=iteration,
            policy_version=self.learner.policy_version,  # of the broadcast: whatever is stepped on
            num_groups=train.prompts_per_iteration,
            num_updates=train.updates_per_iteration,
            in_order=runtime.deterministic,
            wait_for_all=runtime.schedule == "sync",
            wait_for_group=self._wait_for_group,
            mask_truncated=self.config.algorithm.mask_truncated_completions,
        )
        self.learner.begin_iteration(iteration)
        busy_seconds = self._train_update(stream)
        for _ in range(1, train.updates_per_iteration):
            stream.begin_next_update()
            busy_seconds += self._train_update(stream)
        self.timeline.report()
        return events.IterationTrained(
            iteration=iteration,
            policy_version=self.learner.policy_version,
            groups_trained=stream.num_trained,
            groups_off_policy=0,  # GroupStream raises before one is trained
            completion_tokens=stream.completion_tokens,
            busy_seconds=busy_seconds,
            metrics=self.learner.metrics(),
        )

    def _train_update(self, stream: GroupStream) -> float:
        """Train the stream's update and step; returns the busy seconds."""
        train = self.config.train
        busy_seconds = 0.0
        num_taken = stream.num_trained
        for micro_batch in micro_batches(
            stream,
            max_tokens=train.max_tokens_per_micro_batch,
            fill=self.config.runtime.deterministic,
            keep_zero_advantages=self.config.algorithm.trains_zero_advantages,
            shares_prompts=self.learner.policy.shares_prompts,
        ):
            self._hear_commands()
            started = self.timeline.begin("train")
            maybe_sleep()
            self.learner.accumulate(micro_batch)
            busy_seconds += self.timeline.add(
                "train",
                started,
                num_tokens=len(micro_batch.targets),
                num_groups=stream.num_trained - num_taken,
            )
            num_taken = stream.num_trained
        self._hear_commands()
        started = time.monotonic()
        num_groups = train.prompts_per_iteration // train.updates_per_iteration
        self.learner.step(
            num_completions=num_groups * self.config.rollout.num_generations,
            num_tokens=stream.num_loss_tokens,
        )
        return busy_seconds + self.timeline.add(
            "train", started, num_groups=stream.num_trained - num_taken
        )

    def _wait_for_group(self) -> None:
        with self.timeline.measure("wait"):
            wait([self.port.readable_fd, self.control])
        self._hear_commands()

    def _hear_commands(self) -> None:
        """Only these two come while an iteration is under way."""
        if self.control.poll():
            match self.control.recv():
                case events.Halt():
                    raise _Halted
                case events.Stop():
                    raise SystemExit(0)

    def _save(self, folder: Path) -> events.ModelSaved:
        tokenizer = load_tokenizer(
            self.config.model.path, trust_remote_code=self.config.model.trust_remote_code
        )
        export_model(self.learner.policy, tokenizer, folder)
        return events.ModelSaved(self.learner.policy.weights_sha256())
