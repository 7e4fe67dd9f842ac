"""`easyrl grpo`, after the config is resolved: check, open the run folder, train, summarize."""

import os
import shutil
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from easyrl import events
from easyrl.config import INPUTS, Config, to_commented_yaml
from easyrl.formatting import counted
from easyrl.model.adapter_files import KEY as ADAPTER_KEY
from easyrl.model.checkpoint_files import discard_unfinished, set_aside
from easyrl.model.export import ModelSource
from easyrl.model.files import fingerprint
from easyrl.runtime import run_folder, self_test, supervisor
from easyrl.runtime.callbacks import CallbackFailure, Callbacks
from easyrl.runtime.checks.engine import describe_weights
from easyrl.runtime.checks.prompts import describe_sources
from easyrl.runtime.checks.stopping import describe_stop_when
from easyrl.runtime.controller import Controller
from easyrl.runtime.launcher import make_launcher
from easyrl.runtime.placement import describe
from easyrl.runtime.preflight import Preflight, check_run
from easyrl.runtime.resolve import resolve
from easyrl.runtime.resume import (
    Resume,
    as_started,
    find_resume,
    replaced_at_start,
    saved_state,
    start_from,
    with_absolute_paths,
)
from easyrl.runtime.stopping import reason_to_stop


@supervisor.signals_as_interrupts()
def run(
    config: Config,
    observers: Sequence[events.Observer] = (),
    resume: Path | None = None,
    callbacks: Callbacks | None = None,
) -> events.RunEnded:
    """Train; return how the run ended. `resume`: run folder to resume. Observers get only notes
    before all checks have passed. Raises ConfigError, and Interrupted for a signal before the run
    has started."""
    started = time.monotonic()
    notify = events.combine_observers(observers)
    config = with_absolute_paths(config, is_resumed=resume is not None)
    given = config
    state = saved_state(_folder_of(config))
    if state is not None:
        config = as_started(config, state)
    source = None
    resumed = find_resume(config, resume)
    if resumed is None:
        config, source = start_from(config)
    elif resumed.is_finished:
        os.close(resumed.lock)
        done = f"{resumed.folder} has finished its {counted(config.train.iterations, 'iteration')}"
        end = events.RunEnded(supervisor.FINISHED, f"{done} (to train more: --iterations)")
        notify(end)
        return end
    elif reason := _reason_not_to_resume(config, resumed):
        os.close(resumed.lock)
        message = f"nothing is left to do in {resumed.folder}: {reason}\n"
        message += "to train on: the same command with train.stop_when=null, or another condition"
        end = events.RunEnded(supervisor.SIGNALLED + signal.SIGTERM, message, is_planned=True)
        notify(end)
        return end
    elif resumed.checkpoint is None:
        config, source = start_from(config)
    supervisor.start_resource_tracker()  # before the reward functions' processes start another one
    checked = check_run(config, resumed, source)
    changes, notes = self_test.before_run(checked.placement, notify)
    checked = replace(checked.changed(changes), warnings=[*checked.warnings, *notes])
    if source is not None and source.kind != "model":
        checked = _make_model(checked, source)
    if checked.placement.is_ray:  # nodes have other working directories
        absolute = _folder_of(checked.run.config).absolute()
        checked = checked.changed({"output.dir": str(absolute)})
    path = _folder_of(checked.run.config)
    with make_launcher(checked.run.spec, checked.placement, path, notify) as launcher:
        folder = _open_folder(path, checked.run.config, resumed)
        controller = Controller(
            checked,
            folder=folder,
            launcher=launcher,
            started=started,
            notify=events.combine_observers([folder.observe, *observers]),
            resumed=resumed,
            given=replaced_at_start(given, checked.run.config),
            callbacks=callbacks or Callbacks(),
        )
        try:
            end = _train(controller)
            controller.notify(end)
        finally:
            folder.close()
        return end


def _reason_not_to_resume(config: Config, resumed: Resume) -> str | None:
    """Return the condition of `train.stop_when` that held after the checkpoint's iteration."""
    state = resumed.state
    if state.num_iterations >= config.train.iterations:
        return None
    lines = run_folder.read_lines(resumed.folder / "metrics.jsonl")
    done = []
    for line in run_folder.from_1(resumed.folder, lines):
        if line["iteration"] <= state.num_iterations:
            done.append(line)
    return reason_to_stop(resolve(config).schedule.stop_when, done)


def _folder_of(config: Config) -> Path:
    return run_folder.folder_of(config.output.dir, config.data.datasets)


def _open_folder(path: Path, config: Config, resumed: Resume | None) -> run_folder.RunFolder:
    text = to_commented_yaml(config)
    if resumed is None:
        return run_folder.RunFolder(path, text)
    folder = run_folder.RunFolder(path, text, resumed.lock, resumed.state.file_sizes)
    for checkpoint in resumed.damaged:
        set_aside(checkpoint)
    for each in (folder.path, folder.checkpoints):
        discard_unfinished(each)
    return folder


def _make_model(checked: Preflight, source: ModelSource) -> Preflight:
    """Write the model of a checkpoint or an adapter, or an adapter that is trained further, into
    the new run's folder."""
    config = checked.run.config
    folder = _folder_of(config).absolute()
    is_new = not folder.exists()
    # The name shows in reports and model cards where the model comes from.
    parts = Path(source.path).absolute().parts
    name = parts[-1]
    if source.kind == "checkpoint":  # RUN-checkpoints-10
        name = "-".join(parts[-3:])
    try:
        folder.mkdir(mode=run_folder.PRIVATE, parents=True, exist_ok=True)
        (folder / INPUTS).mkdir(exist_ok=True)
        made = folder / INPUTS / name
        if made != Path(source.path).absolute():
            shutil.rmtree(made, ignore_errors=True)  # of a start that was killed
        path = source.make(made, trust=config.model.trust_remote_code)
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    about_source = source.describe(config.model.lora)
    warnings = [about_source, *checked.warnings] if about_source else checked.warnings
    identity = checked.identity
    key = ADAPTER_KEY if source.kind == "continued" else "model.path"
    if key == "model.path":
        identity = {**identity, key: fingerprint(path)}
    checked = checked.changed({key: path, "output.dir": str(folder)})
    return replace(checked, identity=identity, warnings=warnings)


def _train(controller: Controller) -> events.RunEnded:
    """Run, and return how the run ended. No worker is left then."""
    folder = controller.folder
    code = supervisor.FAILED
    is_planned = False
    try:
        _announce(controller)
        stopped_by = controller.callbacks.start()
        if stopped_by:
            raise supervisor.Interrupted(signal.SIGTERM, stopped_by, is_planned=True)
        summary = controller.run()
        summary["prompts_skipped"] = controller.checked.num_prompts_skipped
        controller.notify(events.RunFinished(time.monotonic(), summary))
        return events.RunEnded(supervisor.FINISHED, "")
    except supervisor.Interrupted as interrupted:
        discard_unfinished(folder.checkpoints)  # a second signal ends its writing
        code = supervisor.SIGNALLED + interrupted.signum
        message = f"stopped by {interrupted}; the run folder is {folder.path}"
        message += controller.about_best()
        is_planned = interrupted.is_planned
    except (supervisor.WorkerFailure, CallbackFailure) as failure:
        if failure.is_user_error:
            code = supervisor.USER_ERROR
        message = str(failure)
        if isinstance(failure, supervisor.RewardFailure):
            file = folder.path / run_folder.REWARD_ERRORS
            message += f"\n{supervisor.ABOUT_ON_ERROR}: {file}"
    except run_folder.RunFolderLost as lost:
        message = str(lost)
    except Exception as error:
        run_folder.write_log(folder.path, traceback.format_exc())
        cause = traceback.format_exception_only(error)[-1].strip()
        message = f"{cause}\n(the full traceback is in {folder.log_of('easyrl')})"
    return events.RunEnded(code, message + run_folder.resume_hint(folder.path), is_planned)


def _announce(controller: Controller) -> None:
    """Notify observers that the run starts or resumes, with its metrics so far."""
    checked = controller.checked
    found = controller.launcher.devices
    lines = controller.folder.read_metrics()  # of a resumed run
    accuracies = [(0, controller.state.accuracy_before)]
    accuracies += [(line["iteration"], line.get("eval/accuracy")) for line in lines]
    notes = _notes(checked, controller.resumed)
    controller.notify(
        events.RunStarted(
            controller.started,
            controller.folder.path,
            checked.run.spec,
            checked.run.config.model_dump(mode="json"),
            devices=found,
            description="\n".join([*notes, describe(checked.placement, found)]),
            num_iterations=controller.state.num_iterations,
            earlier=lines,
            accuracies=[(number, value) for number, value in accuracies if value is not None],
        )
    )


def _notes(checked: Preflight, resumed: Resume | None) -> list[str]:
    """Describe model, data, rewards and prompts of the run, and what the checks warn of."""
    spec = checked.run.spec
    notes = [] if resumed is None else [resumed.describe(checked.run.config)]
    notes.append(describe_weights(checked.model, spec.model))
    notes.append(describe_sources(spec))
    if checked.num_prompts_skipped:
        skipped = checked.num_prompts_skipped
        left = checked.prompts.epoch_length
        notes.append(f"prompts skipped: {skipped} (data.max_prompt_length), left: {left}")
    notes += describe_stop_when(spec.schedule)
    return [*notes, *checked.about_prompts, *checked.warnings]
