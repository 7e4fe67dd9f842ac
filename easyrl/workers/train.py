"""The train worker: groups out of the ring, one optimizer step per update, weights out.

             ┌─ ExchangeWeights: broadcast policy_version to the rollout workers
controller ──┼─ TrainIteration:  ring ─► micro-batches ─► Learner ─► steps
             └─ SaveModel

consumes: groups (ring)          waits for: the next group, the controller's next command
produces: weights, metrics       unblocks:  rollout workers waiting for weights or ring slots
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from easyrl import events
from easyrl.channels.ring_buffer import RingPort
from easyrl.channels.weights import WeightChannel
from easyrl.config import Config
from easyrl.cores import pin
from easyrl.delays import maybe_sleep
from easyrl.heap import keep_freed_memory
from easyrl.model.policy import Policy
from easyrl.model.pretrained import load_tokenizer
from easyrl.workers.group_stream import GroupStream, micro_batches
from easyrl.workers.learner import Learner
from easyrl.workers.settings import WorkerSettings
from easyrl.workers.timeline import Timeline

_REPEATED = (
    "model.attention: {}, so prompts are not shared: each completion is trained behind a prompt of "
    "its own, and groups are generated one by one through transformers' generate. It is exact, "
    "and slower"
)
_COPIED = (
    "weights cross through the CPU, since the shared device's memory cannot be opened twice: {}"
)


class TrainWorker:
    def __init__(self, settings: WorkerSettings, port: RingPort, control: Connection) -> None:
        self.settings = settings
        self.config: Config = settings.config
        self.port = port
        self.control = control
        self.device = torch.device(settings.device)
        pin(settings.cores)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.timeline = Timeline(control.send)
        control.send(events.Starting("loading the model"))
        policy = Policy.load(
            self.config.model.path,
            self.device,
            trust_remote_code=self.config.model.trust_remote_code,
            attention=self.config.model.attention,
        )
        if policy.obstacle is not None:
            control.send(events.Note(_REPEATED.format(policy.obstacle)))
        if self.config.model.lora.rank is not None:
            model = self.config.model
            policy.add_adapter(model.lora, path=model.path, seed=self.config.runtime.seed)
        self.learner = Learner(policy, self.config)
        self.channel: WeightChannel | None = None

    def run(self) -> None:
        """Obey commands until `Stop`."""
        while True:
            match self.control.recv():
                case events.JoinWeights(membership, rank, size):
                    self.channel = self.settings.join_weights(membership, rank, size)
                    if self.channel.obstacle is not None:
                        self.control.send(events.Note(_COPIED.format(self.channel.obstacle)))
                case events.ExchangeWeights(version):
                    self._send_weights(version)
                case events.TrainIteration(iteration):
                    self.control.send(self._train_iteration(iteration))
                case events.SaveModel(folder):
                    self.control.send(self._save(Path(folder)))
                case events.Stop():
                    return

    def _send_weights(self, version: int) -> None:
        assert self.channel is not None and version == self.learner.policy_version
        with self.timeline.measure("weights"):
            # What is not trained the rollout workers have since the first time.
            weights = self.learner.policy.weights(only_trained=self.channel.has_sent)
            self.channel.send(version, weights)
        self.timeline.report()
        self.control.send(events.WeightsExchanged(version))

    def _train_iteration(self, iteration: int) -> events.IterationTrained:
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
            ready = wait([self.port.readable_fd, self.control])
        if self.control in ready:  # only Stop comes while an iteration is under way
            raise SystemExit(0)

    def _save(self, folder: Path) -> events.ModelSaved:
        tokenizer = load_tokenizer(
            self.config.model.path, trust_remote_code=self.config.model.trust_remote_code
        )
        policy = self.learner.policy
        if policy.adapter is not None:
            _save_whole(folder.with_name("adapter"), policy.adapter.save)
            policy.merge_adapter()
        _save_whole(folder, lambda unfinished: policy.save(unfinished, tokenizer))
        return events.ModelSaved(policy.weights_sha256())


def _save_whole(folder: Path, save: Callable[[Path], None]) -> None:
    """Under its own name there is never half a folder."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    save(unfinished)
    unfinished.rename(folder)
