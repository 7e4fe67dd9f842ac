"""The train worker: groups from the ring, one optimizer step per update, weights to the engines.

             ┌─ ExchangeWeights: broadcast policy_version to the rollout workers
controller ──┼─ TrainIteration:  ring ─► micro-batches ─► Learner ─► optimizer steps
             ├─ SaveCheckpoint:  copy of the boundary ─► CheckpointSaver (a thread)
             ├─ SendWeights:     the iteration's policy to one new rollout worker
             └─ SaveModel

`Stop`, `Halt` and `SendWeights` are also obeyed during an iteration, between two micro-batches.

There is one train worker per train device. Rank 0 takes the commands (except `Stop`), reads the
ring, broadcasts weights and publishes files. It sends the other ranks each command and their share
of the rollouts over pipes: a wait for the next group may be long, and `Stop` must get through. If a
rank dies, the others' pipes raise EOFError or ConnectionError, and they end.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from easyrl import devices, events, user_code
from easyrl.channels.ring_buffer import RingPort
from easyrl.channels.weights import WeightChannel
from easyrl.config.model import DType
from easyrl.config.spec import TrainSpec
from easyrl.model.adapter_files import read_adapter
from easyrl.model.export import ADAPTER, MERGED, replace_folder
from easyrl.model.files import tokenizer_of
from easyrl.model.kept_parts import KeptParts
from easyrl.model.loading import PictureInput, load_policy, picture_input
from easyrl.model.lora import combine
from easyrl.model.policy import Policy
from easyrl.model.saving import save_policy
from easyrl.model.sharding import TrainRanks, gathered
from easyrl.model.towers import find_kept_parts
from easyrl.processes import keep_freed_memory, maybe_sleep, pin
from easyrl.types import MicroBatch
from easyrl.workers.batches import GroupReader, Origin, UpdateEnd, micro_steps
from easyrl.workers.core_sharing import WorkerCores
from easyrl.workers.learner import Learner
from easyrl.workers.saver import CheckpointSaver
from easyrl.workers.settings import WorkerSettings
from easyrl.workers.timeline import Timeline


class Dropped(Exception):
    """The controller has dropped the current iteration."""


class _State(NamedTuple):
    """The training state at a boundary between two iterations."""

    policy_version: int
    tensors: dict[str, Tensor]


class _Joined(NamedTuple):
    """What became of joining a weight channel."""

    channel: WeightChannel | None  # None on other ranks than 0, and where it failed
    error: str = ""


class TrainWorker:
    def __init__(
        self, settings: WorkerSettings, port: RingPort | None, control: Connection
    ) -> None:
        """Rank 0 alone uses `port`."""
        self.settings = settings
        assert isinstance(settings.spec, TrainSpec)
        self.spec = settings.spec
        self.port = port
        self.control = control
        self.device = torch.device(settings.device)
        pin(settings.cores)
        self.cores = WorkerCores(settings.num_threads, settings.cores, settings.core_sharing)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.timeline = Timeline(self._send, settings.clock_offset_seconds)
        self._sending = threading.Lock()  # the saver reports from a thread
        self.is_first_rank = settings.rank == 0
        user_code.sources.update(settings.sources or {})
        self.ranks = self._join_ranks()
        keep = self.spec.keep_checkpoints
        self.saver = CheckpointSaver(self._report, keep=keep, ranks=self.ranks)
        self._state_before_updates: _State | None = None
        """Kept while updates move the policy away from it."""
        self._kept_parts: KeptParts | None = None  # of the model's folder
        with self.ranks.naming_failures():
            self.learner = self._load()
        self.channel: WeightChannel | None = None
        self.has_exchanged = False  # over this channel
        self._temporary_channel: WeightChannel | None = None
        self._channel_error = ""  # why there is no channel
        self._iteration_version = self.learner.policy_version  # at the iteration's start
        self._deferred: deque[events.Command] = deque()  # received during an exchange

    def _join_ranks(self) -> TrainRanks:
        settings = self.settings
        if settings.num_train_ranks > 1:
            self.control.send(events.Starting("waiting for the other train workers"))
        else:
            # A single rank is sharded only to gather weights layer by layer.
            is_on_host = "optimizer" in self.spec.optimizer.offload
            is_offloaded = is_on_host and self.device.type != "cpu"
            if self.spec.model.dtype == "float32" and not is_offloaded:
                return TrainRanks()
        return TrainRanks.join(
            settings.store,
            rank=settings.rank,
            size=settings.num_train_ranks,
            device=self.device,
            # While rank 0 waits for a rollout worker, the others wait for rank 0.
            timeout_seconds=2.0 * settings.timeout_seconds,
        )

    def _load(self) -> Learner:
        settings = self.settings
        model = self.spec.model
        self.control.send(events.Starting("loading the model"))
        is_sharded = self.ranks.mesh is not None
        policy = self._load_policy(
            model.path, None if is_sharded else "float32", picture_input(model)
        )
        if self.is_first_rank:
            self._kept_parts = find_kept_parts(model.path, policy.model)
        if policy.no_packing_reason is not None:
            repeated = "so the prompt is repeated for each completion, which is slower"
            note = f"model.attention: {policy.no_packing_reason}, {repeated}"
            self._report(events.Note(note))
        teacher = None
        if self.spec.teacher is not None and self.spec.teacher.path is not None:
            self.control.send(events.Starting("loading the teacher"))
            teacher = self._load_policy(
                self.spec.teacher.path, model.dtype, picture_input(model, self.spec.teacher.path)
            )
            policy.shares_prompts = policy.shares_prompts and teacher.shares_prompts
        if model.lora.rank is not None:
            policy.add_adapter(model.lora, path=model.path, seed=self.spec.seed)
        if settings.core_sharing is not None:
            # A micro-batch may take seconds: the engine's cores are used as soon as it is idle.
            policy.before_each_block(self.cores.use_available)
        learner = Learner(policy, self.spec, self.ranks, teacher)
        if self.spec.optimizer.compile:
            self._report(events.Note("train.compile: the first iterations take longer"))
        if settings.checkpoint is not None:
            learner.restore(Path(settings.checkpoint), settings.policy_version)
        return learner

    def _load_policy(self, path: str, dtype: DType | None, pictures: PictureInput | None) -> Policy:
        policy = load_policy(
            path,
            self.device if self.ranks.mesh is None else "cpu",  # it is sharded onto the devices
            trust_remote_code=self.spec.model.trust_remote_code,
            attention=self.spec.model.attention,
            dtype=dtype,
            pictures=pictures,
        )
        policy.kernels.report = lambda text: self._report(events.Note(text))
        return policy

    def run(self) -> None:
        while True:
            command = self._next_command()
            if isinstance(command, events.Stop):
                return
            with self.ranks.naming_failures():
                self._obey(command)

    def _next_command(self) -> Any:
        """Wait for a command. Rank 0 sends it to the other ranks."""
        if not self.is_first_rank:
            return self._receive()
        with self.cores.idle():
            command = self._take_command()
        if not isinstance(command, events.CancelExchange | events.SendWeights | events.Stop):
            self._dispatch(command)
        return command

    def _dispatch(self, message: Any) -> None:
        for pipe in self.settings.pipes:
            pipe.send(message)

    def _receive(self) -> Any:
        """Wait for the next message of rank 0, or the controller's `Stop`."""
        sources = [*self.settings.pipes, self.control]
        ready = wait(sources, timeout=0.0)
        if not ready:
            with self._waiting():
                ready = wait(sources)
        source = self.control if self.control in ready else self.settings.pipes[0]
        return source.recv()

    def _take_command(self) -> Any:
        return self._deferred.popleft() if self._deferred else self.control.recv()

    def _obey(self, command: events.Command) -> None:
        match command:
            case events.InitWeightChannel(_, world_size, generation):
                if self.channel is not None:
                    self.channel.close()
                self.has_exchanged = False
                joined = self._join_channel(world_size, generation)
                self.channel = joined.channel
                self._channel_error = joined.error
            case events.ExchangeWeights(version):
                self._exchange_weights(version)
            case events.SendWeights():
                self._send_weights(command)
            case events.TrainIteration(iteration):
                self._train_iteration(iteration)
            case events.SaveCheckpoint() as command:
                self.saver.save(command, self._state_at(command.policy_version))
            case events.Halt():
                self._report(events.Halted())
            case events.SaveModel(folder):
                self._report(self._save(Path(folder)))

    def _report(self, event: events.WorkerEvent) -> None:
        if self.is_first_rank:
            self._send(event)

    def _send(self, event: events.WorkerEvent) -> None:
        with self._sending:
            self.control.send(event)

    def _state_at(self, policy_version: int) -> Mapping[str, Tensor]:
        """Return the state at the newest boundary, even if the next iteration has begun."""
        kept = self._state_before_updates
        if kept is not None and kept.policy_version == policy_version:
            self._state_before_updates = None  # it is no longer overwritten
            return kept.tensors
        assert self.learner.policy_version == policy_version
        return self.learner.state()

    def _join_channel(self, world_size: int, generation: int) -> _Joined:
        """Join a weight channel, which only rank 0 does."""
        if not self.is_first_rank:
            return _Joined(None)
        endpoint = self.settings.weight_endpoint(0, world_size, generation)
        try:
            channel = WeightChannel(endpoint, self._is_cancelled)
        except (ConnectionError, TimeoutError) as error:
            return _Joined(None, str(error))
        reason = channel.not_shared_reason
        if reason is not None:
            why = f"two processes cannot share the device's: {reason}"
            self._send(events.Note(f"weights are copied through the CPU: {why}"))
        return _Joined(channel)

    def _is_cancelled(self) -> bool:
        while self.control.poll():
            self._deferred.append(self.control.recv())
        ending = events.CancelExchange | events.Stop
        return any(isinstance(command, ending) for command in self._deferred)

    def _exchange_weights(self, version: int) -> None:
        assert version == self.learner.policy_version
        self._close_temporary_channel()
        # Receivers keep the other weights. vLLM fuses weights, and needs all parts of one.
        only_trained = self.has_exchanged and not self.settings.has_vllm
        with self.timeline.measure("weights"):
            error = self._broadcast(self.channel, version, only_trained=only_trained)
        if error:
            self.channel = None
            self._channel_error = error
        self.has_exchanged = True
        self.timeline.report()
        self._send(events.WeightsExchanged(version, self._channel_error))

    def _broadcast(
        self, channel: WeightChannel | None, version: int, *, only_trained: bool = False
    ) -> str:
        """Send the weights, or gather them too on other ranks; return a failed channel's error."""
        policy = self.learner.policy
        is_vllm = self.settings.has_vllm
        weights = policy.weights(only_trained=only_trained, merge=is_vllm)
        # The engines' dtype, which LoRA's frozen weights have. Adapters stay float32.
        dtype = None if policy.adapter else getattr(torch, self.spec.model.dtype)

        def gather(weight: Tensor, dtype: torch.dtype) -> Tensor:
            self.cores.use_available()  # engines load by now
            return gathered(weight, dtype)

        if channel is not None:
            try:
                channel.send(version, weights, dtype=dtype, gather=gather)
            except (ConnectionError, TimeoutError) as error:
                return str(error)
            return ""
        for weight in weights:
            gathered(weight.materialize(), dtype or weight.reference.dtype)
            # Else a device queues all gathers, and the last times out while rank 0 waits.
            devices.synchronize(self.device)
        return ""

    def _send_weights(self, command: events.SendWeights) -> None:
        """Send the iteration's policy, which is the old one after the first of several updates."""
        version = command.policy_version
        old = None  # the policy of the iteration, if that is no longer the newest
        if version != self.learner.policy_version:
            old = self.learner.tri_model.old
            if version != self._iteration_version or old is None:
                self._report(events.WeightsExchanged(version, "the iteration is over"))
                return
        self._close_temporary_channel()
        self.ranks.drop_gathered()
        with self.timeline.measure("weights"):
            joined = self._join_channel(command.world_size, command.generation)
            error = joined.error
            if not error:
                if self.is_first_rank:  # now, since the others' waits for it have a bound
                    self._dispatch(command)
                with nullcontext() if old is None else old.in_place():
                    error = self._broadcast(joined.channel, version)
        self._temporary_channel = joined.channel
        self._report(events.WeightsExchanged(version, error))

    def _close_temporary_channel(self) -> None:
        """Close the channel to the last newcomer, which has everything by now."""
        if self._temporary_channel is not None:
            self._temporary_channel.close()
            self._temporary_channel = None

    def _train_iteration(self, iteration: int) -> None:
        version = self.learner.policy_version
        self._iteration_version = version
        # `Halt` may drop later updates; the checkpoint then needs the state before the first one.
        if self.spec.batches.updates_per_iteration > 1 and self.spec.keep_checkpoints > 0:
            kept = self._state_before_updates
            earlier = {} if kept is None else kept.tensors  # its memory is used again
            self._state_before_updates = _State(version, self.learner.state(earlier))
        try:
            self._report(self._train(iteration))
        except Dropped:
            self.ranks.drop_gathered()
            if self.is_first_rank:
                self._dispatch(events.Halt())
                self._send(events.Halted())

    def _train(self, iteration: int) -> events.IterationTrained:
        reader = None
        if self.is_first_rank:
            assert self.port is not None
            expected = Origin(iteration, self.learner.policy_version)
            reader = GroupReader(self.spec.batches, self.port, expected, self._wait_for_group)
        batches = self.spec.batches
        num_completions = batches.groups_per_update * batches.num_generations
        busy_seconds = 0.0
        self.learner.begin_iteration(iteration)
        for batch in self._received() if reader is None else self._dispatched(reader):
            if isinstance(batch, UpdateEnd):
                self.cores.use_available()
                started = time.monotonic()
                num_tokens = 0
                self.learner.step(num_completions=num_completions, num_tokens=batch.num_loss_tokens)
            else:
                started = self.timeline.begin("train")
                maybe_sleep()
                self.cores.use_available()
                self.learner.accumulate(batch)
                # Otherwise queued device work counts as waiting, and groups are taken too early.
                devices.synchronize(self.device)
                num_tokens = len(batch.input_ids)
            busy_seconds += self.timeline.add("train", started, num_tokens)
        self.timeline.report()
        if reader is not None and reader.num_duplicates:
            dropped = f"{reader.num_duplicates} groups that had been delivered before were dropped"
            self._report(events.Note(f"iteration {iteration + 1}: {dropped}"))
        return events.IterationTrained(
            iteration=iteration,
            policy_version=self.learner.policy_version,
            groups_trained=0 if reader is None else reader.num_read,
            completion_tokens=0 if reader is None else reader.completion_tokens,
            inserted_tokens=0 if reader is None else reader.inserted_tokens,
            busy_seconds=busy_seconds,
            metrics=self.learner.metrics(),
        )

    def _dispatched(self, reader: GroupReader) -> Iterator[MicroBatch | UpdateEnd]:
        """Rank 0: send each other rank its micro-batches; yield the own ones and ends of updates.
        Commands are obeyed while no rank has begun the next micro-step or the optimizer's step."""
        num_ranks = self.settings.num_train_ranks
        shares_prompts = self.learner.policy.shares_prompts
        batches = self.spec.batches
        steps = micro_steps(batches, reader, num_ranks=num_ranks, shares_prompts=shares_prompts)
        for own, *others in steps:
            self._check_commands()
            for pipe, message in zip(self.settings.pipes, others, strict=True):
                pipe.send(message)
            yield own

    def _received(self) -> Iterator[MicroBatch | UpdateEnd]:
        """Other ranks: receive micro-batches and ends of updates."""
        num_left = self.spec.batches.updates_per_iteration
        while num_left:
            message = self._receive()
            if not isinstance(message, MicroBatch | UpdateEnd):
                self._obey_early(message)
                continue
            if isinstance(message, UpdateEnd):
                num_left -= 1
            yield message

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self.cores.idle(), self.timeline.measure("wait"):
            yield

    def _wait_for_group(self) -> None:
        if not self._deferred:
            with self._waiting():
                assert self.port is not None
                wait([self.port.readable_fd, self.control])
        self._check_commands()

    def _check_commands(self) -> None:
        while self._deferred or self.control.poll():
            self._obey_early(self._take_command())

    def _obey_early(self, command: events.Command) -> None:
        match command:
            case events.Halt():
                raise Dropped
            case events.Stop():
                raise SystemExit(0)
            case events.SendWeights():
                self._send_weights(command)

    def _fit_to_base(self, adapter: Path) -> None:
        """Make a saved adapter fit the base of the one that this run has merged first, if any."""
        merged = Path(self.spec.model.path) / MERGED
        if not merged.is_dir():
            return
        earlier = read_adapter(merged)
        is_plain = not earlier.other_kind and not read_adapter(adapter).other_kind
        if is_plain and earlier.base:
            combine(adapter, earlier)

    def _save(self, folder: Path) -> events.ModelSaved:
        policy = self.learner.policy
        is_writer = self.is_first_rank
        tokenizer = tokenizer_of(self.spec.model)
        if policy.adapter is not None:
            with replace_folder(folder.with_name(ADAPTER), is_writer=is_writer) as new:
                policy.adapter.save(new, is_writer=is_writer)
                if is_writer:
                    self._fit_to_base(new)
                    tokenizer.save_pretrained(new)
        weights_sha256 = policy.weights_sha256()  # first: no rank then waits while rank 0 writes
        with replace_folder(folder, is_writer=is_writer) as new:
            save_policy(policy, new, tokenizer, kept=self._kept_parts, is_writer=is_writer)
        return events.ModelSaved(weights_sha256)
