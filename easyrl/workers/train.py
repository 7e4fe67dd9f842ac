"""The train worker: groups out of the ring, one optimizer step per iteration, weights out.

             ┌─ ExchangeWeights: broadcast policy_version to the rollout workers
controller ──┼─ TrainIteration:  ring ─► micro-batches ─► backward … ─► one step
             └─ SaveModel

consumes: groups (ring)          waits for: the next group, the controller's next command
produces: weights, metrics       unblocks:  rollout workers waiting for weights or ring slots
"""

from __future__ import annotations

import math
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from torch import Tensor

from easyrl import devices, events
from easyrl.algorithm.losses import LossInputs, grpo_loss
from easyrl.algorithm.schedule import learning_rate_factor
from easyrl.channels.ring_buffer import RingPort
from easyrl.channels.weights import WeightChannel
from easyrl.config import Config
from easyrl.data.packing import MicroBatch
from easyrl.delays import maybe_sleep
from easyrl.model.attention import PackedGroups
from easyrl.model.logprobs import token_logprobs
from easyrl.model.policy import Policy
from easyrl.model.pretrained import load_tokenizer
from easyrl.workers.group_stream import GroupStream, micro_batches
from easyrl.workers.settings import WorkerSettings
from easyrl.workers.timeline import Timeline

# What a micro-batch adds to the iteration's sums.
SUMS = ("loss", "tokens", "entropy", "clipped_low", "clipped_high", "logp_difference")


class TrainWorker:
    def __init__(self, settings: WorkerSettings, port: RingPort, control: Connection) -> None:
        self.settings = settings
        self.config: Config = settings.config
        self.port = port
        self.control = control
        self.device = torch.device(settings.device)
        self.timeline = Timeline(control.send)
        control.send(events.Starting("loading the model"))
        self.policy = Policy.load(
            self.config.model.path,
            self.device,
            trust_remote_code=self.config.model.trust_remote_code,
        )
        train = self.config.train
        self.optimizer = torch.optim.AdamW(
            self.policy.model.parameters(),
            lr=self.config.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            weight_decay=train.weight_decay,
            fused=True,
        )
        self.policy_version = 0
        self.channel: WeightChannel | None = None
        self._zero_gradients()

    def run(self) -> None:
        """Obey commands until `Stop`."""
        while True:
            match self.control.recv():
                case events.JoinWeights(membership, rank, size):
                    self.channel = self.settings.join_weights(membership, rank, size)
                case events.ExchangeWeights(version):
                    self._send_weights(version)
                case events.TrainIteration(iteration, first_prompt_index):
                    self.control.send(self._train_iteration(iteration, first_prompt_index))
                case events.SaveModel(folder):
                    self.control.send(self._save(Path(folder)))
                case events.Stop():
                    return

    def _send_weights(self, version: int) -> None:
        assert self.channel is not None and version == self.policy_version
        with self.timeline.measure("weights"):
            self.channel.send(version, self.policy.named_weights())
        self.timeline.report()
        self.control.send(events.WeightsExchanged(version))

    def _train_iteration(self, iteration: int, first_prompt_index: int) -> events.IterationTrained:
        runtime, train = self.config.runtime, self.config.train
        stream = GroupStream(
            self.port,
            iteration=iteration,
            policy_version=self.policy_version,
            first_prompt_index=first_prompt_index,
            num_groups=train.prompts_per_iteration,
            in_order=runtime.deterministic,
            wait_for_all=runtime.schedule == "sync",
            wait_for_group=self._wait_for_group,
        )
        sums: dict[str, Tensor] = {name: torch.zeros((), device=self.device) for name in SUMS}
        largest_difference = torch.zeros((), device=self.device)
        busy_seconds = 0.0
        num_taken = 0
        for micro_batch in micro_batches(
            stream, max_tokens=train.max_tokens_per_micro_batch, fill=runtime.deterministic
        ):
            started = self.timeline.begin("train")
            maybe_sleep()
            difference = self._accumulate(micro_batch, sums)
            largest_difference = torch.maximum(largest_difference, difference)
            busy_seconds += self.timeline.add(
                "train",
                started,
                num_tokens=len(micro_batch.targets),
                num_groups=stream.num_trained - num_taken,
            )
            num_taken = stream.num_trained
        started = time.monotonic()
        step_metrics = self._step(iteration, sums["loss"])
        busy_seconds += self.timeline.add(
            "train", started, num_groups=stream.num_trained - num_taken
        )
        self.timeline.report()
        # Groups of equal rewards carry no gradient and are not computed: of them nothing is known.
        tokens = float(sums["tokens"]) or math.nan
        return events.IterationTrained(
            iteration=iteration,
            policy_version=self.policy_version,
            groups_trained=stream.num_trained,
            groups_off_policy=0,  # GroupStream raises before one is trained
            completion_tokens=stream.completion_tokens,
            busy_seconds=busy_seconds,
            metrics={
                "loss": float(sums["loss"]),
                "entropy": float(sums["entropy"]) / tokens,
                "clip_ratio/low_mean": float(sums["clipped_low"]) / tokens,
                "clip_ratio/high_mean": float(sums["clipped_high"]) / tokens,
                "sampling/sampling_logp_difference/mean": float(sums["logp_difference"]) / tokens,
                "sampling/sampling_logp_difference/max": (
                    float(largest_difference) if tokens > 0 else math.nan
                ),
                **step_metrics,
            },
        )

    def _wait_for_group(self) -> None:
        with self.timeline.measure("wait"):
            ready = wait([self.port.readable_fd, self.control])
        if self.control in ready:  # only Stop comes while an iteration is under way
            raise SystemExit(0)

    def _accumulate(self, batch: MicroBatch, sums: dict[str, Tensor]) -> Tensor:
        """Forward and backward of one micro-batch; returns its largest log-probability gap."""
        algorithm, temperature = self.config.algorithm, self.config.rollout.temperature
        targets, mask, reported, advantages, completion_of_token = (
            torch.from_numpy(array).to(self.device)
            for array in (
                batch.targets,
                batch.loss_mask,
                batch.rollout_logprobs,
                batch.advantages,
                batch.completion_of_token,
            )
        )
        logits = self.policy.forward(
            torch.from_numpy(batch.input_ids).to(self.device),
            torch.from_numpy(batch.position_ids).to(self.device),
            PackedGroups(batch.groups, self.device),
            logits_at=torch.from_numpy(batch.logits_at).to(self.device),
        )
        logprobs, entropy = token_logprobs(logits, targets, temperature)
        # One update per iteration: the old policy is the policy itself.
        old_logprobs = logprobs.detach()
        outputs = grpo_loss(
            LossInputs(
                logprobs, old_logprobs, advantages, mask, completion_of_token, batch.num_completions
            ),
            epsilon=algorithm.epsilon,
            epsilon_high=algorithm.epsilon_high or algorithm.epsilon,
        )
        loss = outputs.loss / self._completions_per_iteration
        loss.backward()  # type: ignore[no-untyped-call]
        difference = torch.where(mask, (old_logprobs - reported).abs(), 0.0)
        for name, value in (
            ("loss", loss.detach()),
            ("tokens", outputs.num_tokens),
            ("entropy", torch.where(mask, entropy, 0.0).sum()),
            ("clipped_low", outputs.num_clipped_low),
            ("clipped_high", outputs.num_clipped_high),
            ("logp_difference", difference.sum()),
        ):
            sums[name] += value
        return difference.max()

    @property
    def _completions_per_iteration(self) -> int:
        return self.config.train.prompts_per_iteration * self.config.rollout.num_generations

    def _step(self, iteration: int, loss: Tensor) -> dict[str, float]:
        """Apply the accumulated gradient. One that is not finite is dropped and counted."""
        train = self.config.train
        parameters = list(self.policy.model.parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, train.max_grad_norm))
        is_finite = math.isfinite(norm) and math.isfinite(float(loss))
        learning_rate = self.config.learning_rate * learning_rate_factor(
            iteration,
            num_iterations=train.iterations,
            warmup_iterations=train.warmup_iterations,
            kind=train.lr_scheduler_type,
        )
        if is_finite:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self._zero_gradients()
        devices.synchronize(self.device)
        self.policy_version += 1
        return {
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "num_updates_not_finite": 0.0 if is_finite else 1.0,
        }

    def _zero_gradients(self) -> None:
        """Zeros, not None: an iteration without a gradient is a step with a gradient of zero."""
        for parameter in self.policy.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def _save(self, folder: Path) -> events.ModelSaved:
        tokenizer = load_tokenizer(
            self.config.model.path, trust_remote_code=self.config.model.trust_remote_code
        )
        unfinished = folder.with_name(folder.name + ".unfinished")
        self.policy.save(unfinished, tokenizer)
        unfinished.rename(folder)
        return events.ModelSaved(self.policy.weights_sha256())
