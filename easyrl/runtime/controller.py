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

`Fleet` replaces rollout workers that die. At most one checkpoint is being written: if the next one
is due meanwhile, the controller waits before it sends anything else, as a train worker that waited
for its writer would keep the rollout workers waiting for weights.

A signal stops the run at the end of the last complete iteration. If that has no checkpoint yet,
`Halt` makes the train worker drop the current iteration, and the checkpoint is written. A second
signal ends the run at once.
"""

import contextlib
import math
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from easyrl import events
from easyrl.config import ConfigError
from easyrl.config.devices import DeviceSet, count_devices
from easyrl.runtime import metrics
from easyrl.runtime.control import serving
from easyrl.runtime.fleet import Fleet
from easyrl.runtime.launcher import Launcher
from easyrl.runtime.ledger import Ledger, ledger_of_evaluation, ledger_of_iteration
from easyrl.runtime.placement import check_scale, first_engines, numbered
from easyrl.runtime.preflight import Preflight
from easyrl.runtime.resume import Resume, SavedState
from easyrl.runtime.run_folder import RunFolder, finite
from easyrl.runtime.supervisor import Interrupted, Supervisor

BEFORE, AFTER = 0, 1
"""Evaluation rounds. The round after iteration n (from 1), unless it is the last, is AFTER + n."""


@dataclass(eq=False)
class Controller:
    """One run, from spawning the workers to the saved model."""

    checked: Preflight
    folder: RunFolder
    launcher: Launcher
    started: float  # when the command began, as `time.monotonic` counts
    notify: events.Observer
    resumed: Resume | None = None

    def __post_init__(self) -> None:
        self.spec = self.checked.spec
        before = self.resumed.state if self.resumed is not None else SavedState()
        # The state after the newest complete iteration; `wall_seconds` is set when it is saved.
        values = self.checked.config.model_dump(mode="json")
        self.state = replace(before, config=values, identity=self.checked.identity)
        self._lines = self.folder.read_metrics()  # metrics of the iterations
        self._is_warned = False  # that the run may learn nothing
        self._num_devices = count_devices(self.launcher.devices.values())
        self._after: dict[str, float] = {}  # the last evaluation
        self._judged: Counter[str] = Counter()  # in evaluations after the last line of metrics
        self._newest_checkpoint = before.policy_version  # written, or being written
        self._is_writing = False  # a checkpoint
        self._stopping: Interrupted | None = None  # the signal that is stopping the run
        self.balance = metrics.Balance(max_engines=self.spec.schedule.prompts_per_iteration)
        self._balanced = 0  # the balanced number of rollout workers an iteration ago

    def run(self) -> dict[str, Any]:
        """Train; returns the contents of `summary.json`."""
        path = None if self.resumed is None else self.resumed.checkpoint
        with (
            Supervisor() as supervisor,
            serving(self.folder.path, supervisor, self.notify, self._status, self._scale_by_hand),
        ):
            self.fleet = Fleet(
                self.spec,
                self.checked.placement,
                supervisor,
                self.launcher,
                log_of=self.folder.log_of,
                notify=self._on_event,
                checkpoint=None if path is None else str(path),
                policy_version=self.state.policy_version,
            )
            self.fleet.wait_until_ready()
            return self._run()

    def _run(self) -> dict[str, Any]:
        held_out = self.checked.held_out
        try:
            if self.state.num_iterations == 0 and held_out:
                before = self._evaluate(BEFORE)
                self.state = replace(
                    self.state,
                    accuracy_before=before["eval/accuracy"],
                    held_out_reward_before=before["eval/reward"],
                )
            for iteration in range(self.state.num_iterations, self.spec.schedule.iterations):
                self._run_iteration(iteration)
                if self._is_checkpoint_due():
                    self._save_boundary()
            if held_out and not self._after:
                self._after = self._evaluate(AFTER)
            sha256 = self._save_model()
            self._wait_for_checkpoint()
        except Interrupted as interrupted:
            self.fleet.ledger = None
            if self._stopping is not interrupted:
                self._begin_to_stop(interrupted)
            if self._newest_checkpoint != self.state.policy_version:
                self._save_boundary()
            self._wait_for_checkpoint()
            raise
        summary = metrics.summarize(
            self._lines,
            self.spec.schedule,
            self.spec.rewards.names,
            self.state,
            self._num_devices,
        )
        return {
            **summary,
            **{name: summary.get(name, 0) + value for name, value in self._judged.items()},
            "accuracy_after": self._after.get("eval/accuracy"),
            "held_out_reward_after": self._after.get("eval/reward"),
            "wall_seconds": self._wall_seconds,
            "weights_sha256": sha256,
            "worker_restarts": self.fleet.num_restarts.total(),
        }

    @property
    def _wall_seconds(self) -> float:
        return self.state.wall_seconds + time.monotonic() - self.started

    # -- easyrl status, easyrl scale --------------------------------------------------------------

    def _status(self) -> dict[str, Any]:
        return {
            "iteration": self.state.num_iterations,
            "num_iterations": self.spec.schedule.iterations,
            "waiting": self.balance.waiting(),
            "balanced_rollout_workers": self.balance.num_engines(),
            "workers": self.fleet.rows(),
        }

    def _scale_by_hand(self, wanted: DeviceSet) -> dict[str, Any]:
        if self.spec.faults.autoscale:
            raise ConfigError("runtime.autoscale: expected false in a run that is scaled, got true")
        return self._scale(numbered(wanted, self.checked.placement))

    def _scale(self, wanted: DeviceSet) -> dict[str, Any]:
        before = self.fleet.infer_devices
        check_scale(self.spec, self.checked.placement, before, wanted, self.fleet.changing)
        self.fleet.scale(wanted)
        self.balance.clear()
        message = f"rollout workers on {wanted}, before on {before}"
        self.notify(events.Note(message))
        return {"message": message}

    def _autoscale(self) -> None:
        """Change to the balanced number of rollout workers, once two iterations agree on it."""
        placement, balanced = self.checked.placement, self.balance.num_engines()
        if not self.spec.faults.autoscale or self.fleet.num_refused > 0 or balanced is None:
            return
        number = min(max(balanced, placement.num_rollout_workers), placement.max_rollout_workers)
        is_agreed, self._balanced = number == self._balanced, number
        wanted = first_engines(number, placement)
        if is_agreed and wanted != self.fleet.infer_devices:
            with contextlib.suppress(ConfigError):  # some are starting or leaving
                self._scale(wanted)

    # -- phases of a run --------------------------------------------------------------------------

    def _exchange_weights(self) -> float:
        """Broadcast the trainer's weights to the rollout workers; returns the seconds it took."""
        started = time.monotonic()
        self.fleet.exchange(self.state.policy_version)
        return time.monotonic() - started

    def _run_iteration(self, iteration: int) -> None:
        started, cpu_started = time.monotonic(), time.process_time()
        self.notify(events.IterationStarted(started, iteration + 1))
        placement, prompts = self.checked.placement, self.checked.prompts
        first_index = self.state.next_prompt_index
        ledger = ledger_of_iteration(self.spec.schedule, placement, iteration, prompts, first_index)
        weights_seconds = self._exchange_weights()
        self.fleet.ledger = ledger
        self.fleet.rank0.send(events.TrainIteration(iteration))
        while ledger.trained is None or not ledger.is_complete:
            try:
                event = self.fleet.next_event()
            except Interrupted as interrupted:
                if self._newest_checkpoint == self.state.policy_version:
                    raise
                self._begin_to_stop(interrupted)
                self.fleet.rank0.send(events.Halt())
                continue
            if isinstance(event, events.Halted) and self._stopping and ledger.trained is None:
                raise self._stopping
        self.fleet.ledger = None
        seconds = {
            "perf/iteration_seconds": time.monotonic() - started,
            "perf/weights_seconds": weights_seconds,
            "perf/controller_seconds": time.process_time() - cpu_started,  # of this process
        }
        self._finish_iteration(ledger, seconds)
        self._autoscale()
        if self._stopping is not None:
            raise self._stopping

    def _finish_iteration(self, ledger: Ledger, seconds: Mapping[str, float]) -> None:
        expected, trained = self.spec.schedule.prompts_per_iteration, ledger.trained
        assert trained is not None
        if trained.groups_trained != expected:
            raise RuntimeError(f"expected {expected} trained groups, got {trained.groups_trained}")
        num_engines = sum(worker.is_placed for worker in self.fleet.rollout)
        self.balance.add(ledger, seconds, max(1, num_engines))
        self.state = replace(
            self.state,
            policy_version=trained.policy_version,
            num_iterations=trained.iteration + 1,
            next_prompt_index=ledger.next_index,
        )
        before = self._lines[-1] if self._lines else {}
        line = metrics.iteration_metrics(
            ledger, self.spec.rewards, before, seconds, self._num_devices
        )
        line["perf/max_concurrent_groups"] = self.checked.placement.max_concurrent_groups
        line |= self._evaluate_iteration()
        line |= metrics.logged_metrics(ledger.reports, taken=line.keys())
        self._judged.update(metrics.judge_counts(ledger.reports))
        line |= self._judged  # sums, not the means of a function's own metrics
        self._judged = Counter()
        self._lines.append(finite(line))
        self.notify(events.IterationFinished(time.monotonic(), self._lines[-1]))
        self.state = replace(self.state, file_sizes=self.folder.file_sizes())
        if len(self._lines) == 1:
            samples = metrics.samples_of(ledger.reports)
            limit = self.spec.limits.max_completion_length
            if warning := metrics.no_program_warning(samples, limit):
                self.notify(events.Note(warning))
        warning = metrics.no_learning_warning(
            self._lines, self.spec.batches, self.spec.limits, self.folder.path
        )
        if warning and not self._is_warned:
            self._is_warned = True
            self.notify(events.Note(warning, is_lasting=True))

    def _evaluate(self, round_: int) -> dict[str, float]:
        """Sample one completion of each held-out problem with the current weights."""
        self._exchange_weights()
        held_out = self.checked.held_out
        self.notify(events.EvaluationStarted(time.monotonic(), len(held_out)))
        ledger = ledger_of_evaluation(self.spec.schedule, self.checked.placement, round_, held_out)
        answers = [*self.fleet.answers(ledger)]
        self._judged.update(metrics.judge_counts(answers))
        correct_reward = self.spec.schedule.correct_reward
        measured, num_problems = metrics.evaluation_metrics(answers, correct_reward)
        accuracy, error = measured["eval/accuracy"], measured["eval/standard_error"]
        now, num_done, reward = time.monotonic(), self.state.num_iterations, measured["eval/reward"]
        self.notify(events.Evaluated(now, accuracy, num_problems, error, num_done, reward))
        return measured

    def _evaluate_iteration(self) -> dict[str, float]:
        """The metrics of an evaluation, if one is due. A signal skips it, and ends the run."""
        number, schedule = self.state.num_iterations, self.spec.schedule
        every, is_last = schedule.eval_every, number == schedule.iterations
        is_due = every > 0 and (is_last or number % every == 0)
        if not is_due or self._stopping is not None:
            return {}
        try:
            measured = self._evaluate(AFTER if is_last else AFTER + number)
        except Interrupted as interrupted:
            self._begin_to_stop(interrupted)
            return {}
        if is_last:
            self._after = measured
        return measured

    def _save_model(self) -> str:
        self.notify(events.SavingModel(time.monotonic()))
        self.fleet.rank0.send(events.SaveModel(str(self.folder.model)))
        while not isinstance(event := self.fleet.next_event(), events.ModelSaved):
            pass
        return event.weights_sha256

    # -- checkpoints, and stopping ----------------------------------------------------------------

    def _on_event(self, event: events.Event) -> None:
        """Pass an event of the fleet on; record that a checkpoint has been written."""
        self.notify(event)
        match event:
            case events.FromWorker(event=events.CheckpointSaved(version, error=error)):
                self._is_writing = False
                if error:
                    self._newest_checkpoint = 0
                    path = self.folder.checkpoints / str(version)
                    kept = "training continues, and earlier checkpoints are kept"
                    note = f"the checkpoint {path} could not be written: {error}; {kept}"
                    self.notify(events.Note(note))

    def _is_checkpoint_due(self) -> bool:
        number, schedule = self.state.num_iterations, self.spec.schedule
        every = schedule.save_every or math.inf
        is_due = number == schedule.iterations or number % every == 0
        is_best = metrics.best_of(self._lines) is self._lines[-1]
        return schedule.keep_checkpoints > 0 and (is_due or is_best)

    def _save_boundary(self) -> None:
        if self._is_writing:
            note = "training waits until the previous checkpoint is written (train.save_every)"
            self.notify(events.Note(note))
            self._wait_for_checkpoint()
        state = replace(self.state, wall_seconds=self._wall_seconds)
        version = state.policy_version
        self._newest_checkpoint, self._is_writing = version, True
        path = str(self.folder.checkpoints / str(version))
        best_version = metrics.best_of(self._lines).get("policy_version")
        self.fleet.rank0.send(events.SaveCheckpoint(path, version, asdict(state), best_version))

    def _wait_for_checkpoint(self) -> None:
        while self._is_writing:
            self.fleet.next_event()

    def _begin_to_stop(self, interrupted: Interrupted) -> None:
        is_resumable = self.spec.schedule.keep_checkpoints > 0 and self.state.num_iterations > 0
        if self._stopping is not None or not is_resumable:
            raise interrupted
        self._stopping = interrupted
        self.fleet.begin_to_stop()
        again = " (Ctrl-C again: stop without it)" if interrupted.signum == signal.SIGINT else ""
        self.notify(events.Note(f"{interrupted}: saving the last checkpoint{again}"))
