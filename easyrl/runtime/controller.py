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

Who knows what:

    Controller    the phases of the run, its checkpoints and metrics     this file
    Ledger        where each group of the iteration is                   `runtime/ledger.py`
    Fleet         the state of each worker; it replaces those that die   `runtime/fleet.py`
    Supervisor    processes, pipes and signals                           `runtime/supervisor.py`

At most one checkpoint is being written: if the next one is due meanwhile, the controller waits
before it sends anything else, as a train worker that waited for its writer would keep the rollout
workers waiting for weights.

A signal, or a reward call that fails (`reward.on_error=stop`), stops the run at the end of the last
complete iteration. If that has no checkpoint yet, `Halt` makes the train worker drop the current
iteration, and the checkpoint is written. A second signal ends the run at once.
"""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from easyrl import events
from easyrl.config import ConfigError
from easyrl.config.devices import DeviceSet, count_devices
from easyrl.model.checkpoint_files import BEST, best_checkpoint
from easyrl.runtime import metrics
from easyrl.runtime.balance import Balance
from easyrl.runtime.callbacks import CallbackFailure, Callbacks
from easyrl.runtime.control import serving
from easyrl.runtime.fleet import Fleet
from easyrl.runtime.launcher import Launcher
from easyrl.runtime.ledger import Ledger, ledger_of_evaluation, ledger_of_iteration
from easyrl.runtime.placement import check_scale, first_engines, numbered
from easyrl.runtime.preflight import Preflight
from easyrl.runtime.resume import Resume, SavedState
from easyrl.runtime.run_folder import RunFolder, finite
from easyrl.runtime.stopping import reason_to_stop
from easyrl.runtime.supervisor import Interrupted, RewardFailure, Supervisor
from easyrl.runtime.verdict import nothing_learned

# Numbers of the evaluations: the one before the first iteration, the one after the last, and
# AFTER + n after iteration n (from 1) in between.
BEFORE = 0
AFTER = 1
EarlyEnd = Interrupted | RewardFailure | CallbackFailure
EARLY_ENDS = (Interrupted, RewardFailure, CallbackFailure)
"""What ends a run before its last iteration, with a checkpoint of the newest complete one."""


@dataclass(eq=False)
class Controller:
    """One run, from spawning the workers to the saved model."""

    checked: Preflight
    folder: RunFolder
    launcher: Launcher
    started: float  # when the command began, as `time.monotonic` counts
    notify: events.Observer
    resumed: Resume | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings as the user gave them, where the start has replaced them."""
    callbacks: Callbacks = field(default_factory=Callbacks)

    def __post_init__(self) -> None:
        self.spec = self.checked.run.spec
        before = self.resumed.state if self.resumed is not None else SavedState()
        values = self.checked.run.config.model_dump(mode="json")
        self.state = replace(
            before,
            config=values,
            identity=self.checked.identity,
            given={**before.given, **self.given},
        )
        """State after the newest complete iteration; `wall_seconds` is set when it is saved."""
        self._lines = self.folder.read_metrics()
        """Metrics of the iterations, as in `metrics.jsonl`."""
        self._warned_of = set[str]()  # kinds of warnings that are given once
        self._num_devices = count_devices(self.launcher.devices.values())
        self._after: dict[str, float] = {}  # metrics of the evaluation after the last iteration
        self._judged: Counter[str] = Counter()
        """What judging took in the evaluations since the last line of metrics."""
        self._newest_checkpoint = before.policy_version
        """Version of the newest checkpoint that is written or being written."""
        self._is_writing = False  # a checkpoint
        self._stopping: EarlyEnd | None = None  # what is ending the run
        self._unreported: list[Path] = []
        """Checkpoints that were written since the callbacks were called last."""
        self.balance = Balance(max_engines=self.spec.schedule.prompts_per_iteration)
        self._balanced = 0  # the balanced number of rollout workers an iteration ago

    def run(self) -> dict[str, Any]:
        """Train; returns the contents of `summary.json`."""
        checkpoint = None
        if self.resumed is not None and self.resumed.checkpoint is not None:
            checkpoint = str(self.resumed.checkpoint)
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
                checkpoint=checkpoint,
                policy_version=self.state.policy_version,
            )
            self.fleet.wait_until_ready()
            return self._run()

    def _run(self) -> dict[str, Any]:
        try:
            sha256 = self._train()
        except EARLY_ENDS as cause:
            self.fleet.ledger = None
            if self._stopping is not cause:
                self._begin_to_stop(cause)
            if self._newest_checkpoint != self.state.policy_version:
                self._save_boundary()
            self._wait_for_checkpoint()
            if not isinstance(cause, CallbackFailure):
                self._report_checkpoints()
            raise
        self._report_checkpoints()
        return self._summary(sha256)

    def _train(self) -> str:
        """Run the iterations that are left, the evaluations before and after, and save the model.
        Return the checksum of its weights."""
        held_out = self.checked.held_out
        if self.state.num_iterations == 0 and held_out:
            before = self._evaluate(BEFORE)
            self.state = replace(
                self.state,
                accuracy_before=before["eval/accuracy"],
                error_before=before["eval/standard_error"],
                held_out_reward_before=before["eval/reward"],
            )
            self._stop_if(self.callbacks.evaluation({"iteration": 0, **before}))
        for iteration in range(self.state.num_iterations, self.spec.schedule.iterations):
            self._run_iteration(iteration)
            if self._is_checkpoint_due():
                self._save_boundary()
        if held_out and not self._after:
            self._after = self._evaluate(AFTER)
            self.callbacks.evaluation({"iteration": self.state.num_iterations, **self._after})
        sha256 = self._save_model()
        self._wait_for_checkpoint()
        return sha256

    def _summary(self, weights_sha256: str) -> dict[str, Any]:
        summary = metrics.summarize(
            self._lines,
            self.spec.schedule,
            self.spec.rewards.names,
            self.state,
            self._num_devices,
        )
        for name, value in self._judged.items():
            summary[name] = summary.get(name, 0) + value
        verdict = nothing_learned(self._lines, self.spec)
        return {
            **summary,
            "nothing_learned": None if verdict is None else verdict._asdict(),
            "accuracy_after": self._after.get("eval/accuracy"),
            "error_after": self._after.get("eval/standard_error"),
            "held_out_problems": self._after.get("eval/problems"),
            "held_out_reward_after": self._after.get("eval/reward"),
            "checkpoint_best": self._best_path(),
            "wall_seconds": self._wall_seconds,
            "weights_sha256": weights_sha256,
            "worker_restarts": self.fleet.num_restarts.total(),
        }

    def _best_path(self) -> str | None:
        """Return the best checkpoint's path within the run folder."""
        best = best_checkpoint(self.folder.checkpoints)
        return None if best is None else str(best.relative_to(self.folder.path))

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
        balanced = self.balance.num_engines()
        if not self.spec.faults.autoscale or self.fleet.num_refused > 0 or balanced is None:
            return
        placement = self.checked.placement
        at_least = max(balanced, placement.num_rollout_workers)
        number = min(at_least, placement.max_rollout_workers)
        is_agreed = number == self._balanced
        self._balanced = number
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
        started = time.monotonic()
        cpu_started = time.process_time()
        self.notify(events.IterationStarted(started, iteration + 1))
        ledger = ledger_of_iteration(
            self.spec.schedule,
            self.checked.placement,
            iteration,
            self.checked.prompts,
            self.state.next_prompt_index,
        )
        weights_seconds = self._exchange_weights()
        self.fleet.ledger = ledger
        self.fleet.rank0.send(events.TrainIteration(iteration))
        self._wait_until_trained(ledger)
        self.fleet.ledger = None
        seconds = {
            "perf/iteration_seconds": time.monotonic() - started,
            "perf/weights_seconds": weights_seconds,
            "perf/controller_seconds": time.process_time() - cpu_started,  # of this process
        }
        self._finish_iteration(ledger, seconds)
        self._autoscale()
        if self._stopping is None:
            self._call_back()
        if self._stopping is not None:
            raise self._stopping

    def _wait_until_trained(self, ledger: Ledger) -> None:
        """Handle events until all groups of the iteration are reported and trained. Raises what
        ends the run without it."""
        while ledger.trained is None or not ledger.is_complete:
            try:
                event = self.fleet.next_event()
            except EARLY_ENDS as cause:
                if self._newest_checkpoint == self.state.policy_version:
                    raise
                self._begin_to_stop(cause)
                self.fleet.rank0.send(events.Halt())
                continue
            if isinstance(event, events.Halted) and self._stopping and ledger.trained is None:
                raise self._stopping

    def _finish_iteration(self, ledger: Ledger, seconds: Mapping[str, float]) -> None:
        trained = ledger.trained
        assert trained is not None
        expected = self.spec.schedule.prompts_per_iteration
        if trained.groups_trained != expected:
            raise RuntimeError(f"expected {expected} trained groups, got {trained.groups_trained}")
        num_engines = len([worker for worker in self.fleet.rollout if worker.is_placed])
        self.balance.add(ledger, seconds, max(1, num_engines))
        self.state = replace(
            self.state,
            policy_version=trained.policy_version,
            num_iterations=trained.iteration + 1,
            next_prompt_index=ledger.next_index,
        )
        line = finite(self._metrics_of(ledger, seconds))
        self._lines.append(line)
        self.notify(events.IterationFinished(time.monotonic(), line))
        self.state = replace(self.state, file_sizes=self.folder.file_sizes())
        self._warn(ledger)

    def _metrics_of(self, ledger: Ledger, seconds: Mapping[str, float]) -> dict[str, Any]:
        """Return the iteration's line of metrics, with those of an evaluation if one is due."""
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
        return line

    def _warn(self, ledger: Ledger) -> None:
        """Warn of an iteration that shows a mistake in the settings, once for each kind."""
        if len(self._lines) == 1:
            samples = metrics.samples_of(ledger.reports)
            limit = self.spec.limits.max_completion_length
            warning = metrics.no_program_warning(samples, limit)
            if warning:
                self.notify(events.Note(warning))
        warning = metrics.no_learning_warning(
            self._lines, self.spec.batches, self.spec.limits, self.folder.path
        )
        self._warn_once("learning", warning)
        logged = [report.logged for report in ledger.reports]
        self._warn_once("requests", metrics.no_requests_warning(logged))

    def _warn_once(self, kind: str, warning: str) -> None:
        """Show a warning, if there is one, until the end; only the first one of its kind."""
        if warning and kind not in self._warned_of:
            self._warned_of.add(kind)
            self.notify(events.Note(warning, is_lasting=True))

    def _evaluate(self, round_: int) -> dict[str, float]:
        """Sample one completion of each held-out problem with the current weights."""
        self._exchange_weights()
        held_out = self.checked.held_out
        self.notify(events.EvaluationStarted(time.monotonic(), len(held_out)))
        ledger = ledger_of_evaluation(self.spec.schedule, self.checked.placement, round_, held_out)
        answers = [*self.fleet.answers(ledger)]
        self._judged.update(metrics.judge_counts(answers))
        logged = [answer.logged for answer in answers]
        self._warn_once("requests", metrics.no_requests_warning(logged))
        correct_reward = self.spec.schedule.correct_reward
        measured, num_problems = metrics.evaluation_metrics(answers, correct_reward)
        evaluated = events.Evaluated(
            time.monotonic(),
            accuracy=measured["eval/accuracy"],
            num_prompts=num_problems,
            standard_error=measured["eval/standard_error"],
            num_iterations=self.state.num_iterations,
            reward=measured["eval/reward"],
        )
        self.notify(evaluated)
        measured["eval/problems"] = num_problems
        return measured

    def _evaluate_iteration(self) -> dict[str, float]:
        """The metrics of an evaluation, if one is due. What ends the run meanwhile skips it."""
        number = self.state.num_iterations
        eval_every = self.spec.schedule.eval_every
        is_last = number == self.spec.schedule.iterations
        is_due = eval_every > 0 and (is_last or number % eval_every == 0)
        if not is_due or self._stopping is not None:
            return {}
        try:
            measured = self._evaluate(AFTER if is_last else AFTER + number)
        except EARLY_ENDS as cause:
            self._begin_to_stop(cause)
            return {}
        if is_last:
            self._after = measured
        return measured

    def _save_model(self) -> str:
        self.notify(events.SavingModel(time.monotonic()))
        self.fleet.rank0.send(events.SaveModel(str(self.folder.model)))
        while True:
            event = self.fleet.next_event()
            if isinstance(event, events.ModelSaved):
                return event.weights_sha256

    # -- checkpoints, and stopping ----------------------------------------------------------------

    def _call_back(self) -> None:
        """Call the callbacks after an iteration, and end the run if one of them, or
        `train.stop_when`, says so. After the last iteration it finishes in any case."""
        line = self._lines[-1]
        is_last = self.state.num_iterations == self.spec.schedule.iterations
        stopped_by = [self._report_checkpoints()]
        if line.get("eval/accuracy") is not None:
            evaluated = {name: value for name, value in line.items() if name.startswith("eval/")}
            evaluated["iteration"] = line["iteration"]
            stopped_by.append(self.callbacks.evaluation(evaluated))
        stopped_by.append(self.callbacks.iteration(line))
        stopped_by.append(reason_to_stop(self.spec.schedule.stop_when, self._lines) or "")
        if not is_last:
            for reason in stopped_by:
                self._stop_if(reason)

    def _report_checkpoints(self) -> str:
        """Call the callbacks for the checkpoints that were written; return which one stops the run,
        or an empty string."""
        stopped_by = ""
        while self._unreported:
            path = self._unreported.pop(0)
            stopped_by = self.callbacks.checkpoint(path) or stopped_by
        return stopped_by

    def _stop_if(self, reason: str) -> None:
        """End the run as `easyrl stop` does, if there is a reason."""
        if reason and self._stopping is None:
            raise Interrupted(signal.SIGTERM, reason, is_planned=True)

    def about_best(self) -> str:
        """Name the best checkpoint, for the end of a stopped run; empty without one."""
        path = best_checkpoint(self.folder.checkpoints)
        metric = self.spec.schedule.best_metric
        best = metrics.best_of(self._lines, metric)
        if path is None or str(best.get("policy_version")) != path.name:
            return ""
        value = f"{metric.name} {best[metric.name]:.4g} in iteration {best['iteration']}"
        return f"\nbest checkpoint: {self.folder.checkpoints / BEST} ({value})"

    def _on_event(self, event: events.Event) -> None:
        """Pass an event of the fleet on; record that a checkpoint has been written."""
        self.notify(event)
        match event:
            case events.FromWorker(event=events.CheckpointSaved(version, error=error)):
                self._is_writing = False
                if not error:
                    self._unreported.append(self.folder.checkpoints / str(version))
                else:
                    self._newest_checkpoint = 0
                    path = self.folder.checkpoints / str(version)
                    kept = "training continues, and earlier checkpoints are kept"
                    note = f"the checkpoint {path} could not be written: {error}; {kept}"
                    self.notify(events.Note(note))

    def _is_checkpoint_due(self) -> bool:
        schedule = self.spec.schedule
        number = self.state.num_iterations
        is_last = number == schedule.iterations
        is_due = schedule.save_every is not None and number % schedule.save_every == 0
        is_best = metrics.best_of(self._lines, schedule.best_metric) is self._lines[-1]
        return schedule.keep_checkpoints > 0 and (is_last or is_due or is_best)

    def _save_boundary(self) -> None:
        """Begin to write a checkpoint of the state after the newest complete iteration."""
        if self._is_writing:
            note = "training waits until the previous checkpoint is written (train.save_every)"
            self.notify(events.Note(note))
            self._wait_for_checkpoint()
        state = replace(self.state, wall_seconds=self._wall_seconds)
        version = state.policy_version
        self._newest_checkpoint = version
        self._is_writing = True
        path = str(self.folder.checkpoints / str(version))
        best = metrics.best_of(self._lines, self.spec.schedule.best_metric)
        best_version = best.get("policy_version")
        self.fleet.rank0.send(events.SaveCheckpoint(path, version, asdict(state), best_version))

    def _wait_for_checkpoint(self) -> None:
        while self._is_writing:
            self.fleet.next_event()

    def _begin_to_stop(self, cause: EarlyEnd) -> None:
        """Announce that the run ends with its last checkpoint. Raises `cause` if there is nothing
        to save, or the run is being stopped already."""
        is_resumable = self.spec.schedule.keep_checkpoints > 0 and self.state.num_iterations > 0
        if self._stopping is not None or not is_resumable:
            raise cause
        self._stopping = cause
        self.fleet.begin_to_stop()  # `easyrl stop` does not hurry it from now on
        what = "a reward call failed"  # the end of the run says which
        if isinstance(cause, CallbackFailure):
            what = "a callback failed"
        again = ""
        if isinstance(cause, Interrupted):
            what = str(cause)
            if cause.signum == signal.SIGINT:
                again = " (Ctrl-C again: stop without it)"
        self.notify(events.Note(f"{what}: saving the last checkpoint{again}"))
