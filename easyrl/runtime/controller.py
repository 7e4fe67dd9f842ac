"""The controller: the CLI's own process. It drives the iterations; only small messages pass here.

One iteration (policy_version k; it grows by `train.updates_per_iteration`):

    controller              train worker                    rollout workers
    ──────────────────────────────────────────────────────────────────────────────────
    ExchangeWeights k ────► broadcast weights ════════════► receive; no sequence in flight
    TrainIteration ───────► wait for the first group
    Generate prompts ─────────────────────────────────────► engine, rewards, advantages
                            group ◄══════ ring ◄═══════════ group            (many times)
                            forward, backward
    ◄── GroupScored ──────────────────────────────────────  (small: rewards, lengths)
    Generate fresh prompts ───────────────────────────────► replace rejected groups
                            last group of an update: optimizer step
    ◄── IterationTrained ──
    every train.eval_every: exchange weights, evaluate the held-out problems
    metrics.jsonl, one line of output
    every train.save_every: wait until the previous checkpoint is written, then
    SaveCheckpoint ───────► copy; a thread writes it during the next iterations

Who waits for whom:

    rollout workers wait for      prompts (controller), weights (train worker), free ring slots
    the train worker waits for    commands (controller), groups (rollout workers, through the ring)
    the controller waits for      events of any worker, only in `Supervisor.wait`

A signal stops the run at the end of the last complete iteration. If that has no checkpoint yet,
`Halt` makes the train worker drop the current iteration, and the checkpoint is written. A second
signal ends the run at once.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from easyrl import events
from easyrl.channels.ring_buffer import RingBuffer
from easyrl.config import Config
from easyrl.config.algorithm import REPLACEMENT_ROUNDS
from easyrl.config.devices import count_devices
from easyrl.events import Observer
from easyrl.rewards.loading import reward_names
from easyrl.runtime.checkpoints import Checkpoints
from easyrl.runtime.dispatch import Dispatcher, Rounds
from easyrl.runtime.evaluation import AFTER, BEFORE, HeldOut, answers_to
from easyrl.runtime.metrics import IterationRecord, Totals
from easyrl.runtime.placement import device_names
from easyrl.runtime.preflight import Preflight
from easyrl.runtime.resume import Resume, SavedState
from easyrl.runtime.run_folder import RunFolder
from easyrl.runtime.supervisor import Interrupted, Supervisor
from easyrl.runtime.workers import Workers


class Controller:
    """One run, from spawning the workers to the saved model."""

    def __init__(
        self,
        config: Config,
        checked: Preflight,
        *,
        folder: RunFolder,
        supervisor: Supervisor,
        ring: RingBuffer,
        started: float,
        notify: Observer,
        resumed: Resume | None = None,
    ) -> None:
        """`started`: when the command began, as `time.monotonic` counts."""
        self.config = config
        self.checked = checked
        self.folder = folder
        self.supervisor = supervisor
        self.notify = notify
        self._ring = ring
        self.started = started
        self.resumed = resumed
        before = resumed.state if resumed is not None else SavedState()
        values, identity = config.model_dump(mode="json"), checked.identity
        # At the last boundary; `totals` is set when it is saved.
        self.state = replace(before, config=values, identity=identity)
        num_devices = count_devices(device_names(checked.placement).values())
        self.totals = Totals(num_devices, started, self.state.totals)
        self._accuracy_after: float | None = None
        self._is_best = False  # the newest iteration, by its evaluation
        self._first_exchange_done = False  # the rollout workers
        self._notes: set[str] = set()
        saved_version = before.policy_version or None
        self.checkpoints = Checkpoints(config, folder, notify, saved_version=saved_version)

    def run(self) -> dict[str, Any]:
        """Train; returns the contents of `summary.json`."""
        store_fd = os.memfd_create("easyrl-store")  # no name, so that no file is left behind
        try:
            self._start_workers(f"/proc/{os.getpid()}/fd/{store_fd}")
            return self._run()
        finally:
            os.close(store_fd)

    def _run(self) -> dict[str, Any]:
        held_out = self.checked.held_out
        try:
            if self.state.num_iterations == 0 and held_out:
                accuracy = self._evaluate(BEFORE).accuracy
                self.state = replace(self.state, accuracy_before=accuracy)
            for iteration in range(self.state.num_iterations, self.config.train.iterations):
                self._run_iteration(iteration)
                if self.checkpoints.is_due(self.state.num_iterations) or self._is_best:
                    self._save_boundary()
            if held_out and self._accuracy_after is None:
                self._accuracy_after = self._evaluate(AFTER).accuracy
            sha256 = self._save_model()
            self.workers.wait_for_checkpoint()
        except Interrupted as interrupted:
            self._save_last_boundary(interrupted)
            raise
        return self.totals.summary(self.config.train, self.state, self._accuracy_after, sha256)

    # -- phases of a run --------------------------------------------------------------------------

    def _start_workers(self, store_path: str) -> None:
        placement = self.checked.placement
        self.workers = Workers(
            self.config,
            placement,
            self.supervisor,
            log_of=self.folder.log_of,
            notify=self.notify,
            ring=self._ring,
            store_path=store_path,
            checkpoints=self.checkpoints,
            resumed=self.resumed,
        )
        self.workers.wait_until_ready()
        self.dispatcher = Dispatcher(self.workers.rollout, self.config, placement)
        ranks_per_engine = placement.engine.tensor_parallel_size
        world_size = 1 + ranks_per_engine * len(self.workers.rollout)
        self.workers.rank0.send(events.InitWeightChannel(rank=0, world_size=world_size))
        for number, worker in enumerate(self.workers.rollout):
            rank = 1 + ranks_per_engine * number
            worker.send(events.InitWeightChannel(rank=rank, world_size=world_size))

    def _exchange_weights(self) -> float:
        """Broadcast the trainer's weights to all rollout workers; returns the seconds it took. A
        worker counts as started after its first exchange."""
        started = time.monotonic()
        is_first, self._first_exchange_done = not self._first_exchange_done, True
        starting = events.Starting("exchanging the first weights")
        for worker in self.workers.all if is_first else ():
            self.notify(events.FromWorker(worker.name, started, starting))
        for worker in (self.workers.rank0, *self.workers.rollout):
            worker.send(events.ExchangeWeights(self.state.policy_version))
        for _ in self.workers.all:
            worker, event = self.workers.next_event()
            assert isinstance(event, events.WeightsExchanged)
            if is_first:
                self.notify(events.FromWorker(worker.name, time.monotonic(), events.Ready()))
        return time.monotonic() - started

    def _run_iteration(self, iteration: int) -> None:
        started = time.monotonic()
        self.notify(events.IterationStarted(started, iteration))
        record = IterationRecord(iteration, weights_seconds=self._exchange_weights())
        rounds = Rounds(
            self.checked.prompts,
            self.state.next_prompt_index,
            num_groups=self.config.train.prompts_per_iteration,
            max_replacements=REPLACEMENT_ROUNDS,
        )
        self.workers.rank0.send(events.TrainIteration(iteration))
        while record.trained is None or not rounds.is_complete:
            if rounds.is_over and not rounds.is_complete:
                self._start_round(record, rounds)
            try:
                worker, event = self.workers.next_event()
            except Interrupted as interrupted:
                self._halt(interrupted)
                continue
            match event:
                case events.GroupScored():
                    self._record_first_rollout()
                    record.add_group(worker.name, event, time.monotonic() - started)
                    self.dispatcher.on_group(worker)
                    rounds.add(event)
                case events.IterationTrained():
                    record.trained = event
                case events.Halted():
                    if record.trained is None and self.workers.interrupted is not None:
                        raise self.workers.interrupted
                case _:
                    raise AssertionError(f"{worker.name} sent {event}")
        self.state = replace(self.state, next_prompt_index=rounds.next_index)
        self._finish_iteration(record, record.trained, time.monotonic() - started)
        self.state = replace(self.state, file_sizes=self.folder.file_sizes())
        if self.workers.interrupted is not None:
            raise self.workers.interrupted

    def _start_round(self, record: IterationRecord, rounds: Rounds) -> None:
        prompts = rounds.start()
        record.num_replacement_rounds = rounds.number
        if rounds.number > 0:
            now = time.monotonic()
            self.notify(events.RoundStarted(now, record.iteration, rounds.number, len(prompts)))
        self.dispatcher.start(record.iteration, prompts, is_last_round=rounds.is_last)

    def _finish_iteration(
        self, record: IterationRecord, trained: events.IterationTrained, seconds: float
    ) -> None:
        expected, version = self.config.train.prompts_per_iteration, trained.policy_version
        if trained.groups_trained != expected:
            raise RuntimeError(
                f"iteration {record.iteration}: expected {expected} trained groups, got "
                f"{trained.groups_trained}"
            )
        self.state = replace(
            self.state, policy_version=version, num_iterations=record.iteration + 1
        )
        metrics = record.metrics(reward_names(self.config))
        metrics |= self.totals.add_iteration(record, metrics, seconds)
        metrics |= self._evaluate_iteration()
        line = {"iteration": record.iteration, "policy_version": version, **metrics}
        line |= record.logged(taken=line.keys())
        self.notify(events.IterationFinished(time.monotonic(), line))
        for note in record.notes(self.config):
            if note not in self._notes:
                self._notes.add(note)
                self.notify(events.Note(note))

    def _evaluate(self, round_: int) -> HeldOut:
        """Sample one completion of each held-out problem with the current weights."""
        self._exchange_weights()
        held_out = self.checked.held_out
        self.notify(events.EvaluationStarted(time.monotonic(), round_, len(held_out)))
        answers = []
        for answer in answers_to(held_out, self.dispatcher, self.workers.next_event, round_=round_):
            self._record_first_rollout()
            answers.append(answer)
        result = HeldOut.of(answers, self.config.eval.correct_reward)
        figures = result.accuracy, result.num_problems, result.standard_error
        num_iterations = self.state.num_iterations
        self.notify(events.Evaluated(time.monotonic(), round_, *figures, num_iterations))
        return result

    def _evaluate_iteration(self) -> Mapping[str, float]:
        """The metrics of an evaluation after this iteration, if one is due. A signal skips it, and
        the run ends with this iteration."""
        number, train = self.state.num_iterations, self.config.train
        is_last = number == train.iterations
        self._is_best = False
        is_due = train.eval_every > 0 and (is_last or number % train.eval_every == 0)
        if not is_due or self.workers.interrupted is not None:
            return {}
        try:
            result = self._evaluate(AFTER if is_last else AFTER + number)
        except Interrupted as interrupted:
            self.workers.begin_to_stop(interrupted)
            return {}
        if is_last:
            self._accuracy_after = result.accuracy
        best = self.state.best
        if result.accuracy > (best["accuracy"] if best else -math.inf):
            best = {
                "accuracy": result.accuracy,
                "num_iterations": number,
                "policy_version": self.state.policy_version,
            }
            self.state = replace(self.state, best=best)
            self._is_best = train.keep_best
        return result.metrics()

    def _record_first_rollout(self) -> None:
        if self.totals.first_rollout_seconds is None:
            now = time.monotonic()
            self.totals.first_rollout_seconds = now - self.started
            self.notify(events.FirstRollout(now))

    def _save_model(self) -> str:
        self.notify(events.SavingModel(time.monotonic()))
        self.workers.rank0.send(events.SaveModel(str(self.folder.model)))
        _, saved = self.workers.next_event()
        assert isinstance(saved, events.ModelSaved)
        return saved.weights_sha256

    # -- checkpoints, and stopping ----------------------------------------------------------------

    def _save_boundary(self) -> None:
        """Request a checkpoint of the last iteration boundary."""
        if self.checkpoints.is_saving:
            self.checkpoints.report_wait()
            self.workers.wait_for_checkpoint()
        state = replace(self.state, totals=self.totals.state())
        self.checkpoints.save(self.workers.rank0.send, state)

    def _halt(self, interrupted: Interrupted) -> None:
        """A signal during an iteration: drop the current iteration. Raises `interrupted` if
        nothing remains to be saved, or at the second signal."""
        is_saved = self.checkpoints.has(self.state.policy_version)
        if is_saved or not self._is_resumable or self.workers.interrupted is not None:
            raise interrupted
        self.workers.begin_to_stop(interrupted)
        self.workers.rank0.send(events.Halt())
        what = f"{interrupted}: finishing this micro-batch (Ctrl-C again: no checkpoint)"
        self.notify(events.Stopping(time.monotonic(), what))

    def _save_last_boundary(self, interrupted: Interrupted) -> None:
        """The run stops: save its last boundary, unless a second signal says not to wait."""
        is_second = self.workers.interrupted not in (None, interrupted)
        if is_second or self.workers.is_late or not self._is_resumable:
            return
        self.workers.begin_to_stop(interrupted)
        if not self.checkpoints.has(self.state.policy_version):
            self._save_boundary()
        self.workers.wait_for_checkpoint()

    @property
    def _is_resumable(self) -> bool:
        return self.checkpoints.are_kept and self.state.num_iterations > 0
