"""`easyrl eval` with a resolved config: plan, answer what is not answered yet, summarize, compare.

    plan ─► folder ─► model ─► rollout workers ══ answers ══► samples.jsonl ─► eval.json
               └──────── problems answered before ──────────────────────────────┘

A problem's answers are on the disk before the next ones are awaited.
"""

import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from easyrl import __version__, devices, events
from easyrl.config import (
    Config,
    ConfigError,
    by_name,
    change_config,
    keys_marked,
    to_commented_yaml,
)
from easyrl.config.algorithm import LOSS_KEY
from easyrl.config.model import LoraConfig
from easyrl.config.rollout import SamplingChoice
from easyrl.config.section import COMPARED, PROMPT_FORM
from easyrl.config.spec import RunSpec
from easyrl.data.datasets import identity_of, open_prompts, problem_ids, problems_of
from easyrl.data.presets import eval_sampling
from easyrl.evaluation.figures import Answers, Lines, compare, summarize
from easyrl.evaluation.folder import KIND, MODEL, EvalFolder, differing_settings, read_evaluation
from easyrl.evaluation.view import EvalView, show_comparison, show_results
from easyrl.formatting import counted
from easyrl.model.export import ModelSource, find_model, run_of
from easyrl.model.files import ModelSize
from easyrl.observe.text import say
from easyrl.runtime import supervisor
from easyrl.runtime.checks import Checks, Stage
from easyrl.runtime.checks.devices import find_disk, written_by_evaluation
from easyrl.runtime.checks.engine import measure_model
from easyrl.runtime.checks.functions import find_interfaces, identify_code
from easyrl.runtime.checks.prompts import short_problems
from easyrl.runtime.fleet import Fleet
from easyrl.runtime.launcher import make_launcher
from easyrl.runtime.ledger import ledger_of_evaluation
from easyrl.runtime.memory_estimate import Part, estimate_memory
from easyrl.runtime.memory_fit import fits
from easyrl.runtime.metrics import no_program_warning, no_requests_warning
from easyrl.runtime.placement import Placement, describe, place_evaluation
from easyrl.runtime.resolve import resolve, with_eval_data, with_long_problems
from easyrl.runtime.resume import with_absolute_paths
from easyrl.runtime.run_folder import (
    REWARD_ERRORS,
    finite,
    folder_of,
    keep_pictures,
    picture_names,
    sample_values,
)
from easyrl.types import Prompt

NO_LORA = LoraConfig()  # an adapter is merged into the evaluated model
NUM_FIRST_SAMPLES = 32  # completions after which `no_program_warning` is asked for


@dataclass(frozen=True, slots=True)
class Plan:
    config: Config  # section `data` names the problems
    spec: RunSpec  # of the workers, with the evaluation's number of samples and length
    source: ModelSource
    problems: Mapping[str, Prompt]  # by id
    num_skipped: int  # problems whose prompts are too long (`data.long_prompts=skip`)
    sampling: SamplingChoice
    placement: Placement
    settings: Mapping[str, Any]  # first keys of `eval.json`; the same when it is continued


def check_evaluation(config: Config, base: str | None = None) -> Plan:
    """Make the checks of an evaluation (`runtime.checks`), and choose its problems and devices.
    Raises ConfigError."""
    source = find_model(config.model.path, base)
    config = with_long_problems(with_eval_data(config))
    sampling = SamplingChoice.of_evaluation(config.eval, config.rollout, eval_sampling(config.data))
    # Rewards depend on the number and length of completions.
    changes = {
        "rollout.num_generations": max(2, sampling.num_samples),
        "rollout.max_completion_length": sampling.max_completion_length,
        "train.max_tokens_per_micro_batch": None,
    }
    spec = replace(resolve(change_config(config, changes)), sampling=sampling)
    with_base = replace(spec, model=replace(spec.model, path=source.base, lora=NO_LORA))
    model = measure_model(with_base.model)
    stream = open_prompts(spec.data, is_trained=False)
    spec = spec.with_pictures(stream.has_pictures)
    with_base = with_base.with_pictures(stream.has_pictures)
    if with_base.model.has_pictures:
        model = measure_model(with_base.model)  # with its tower
    problems = problems_of(stream, config.data)
    checks = Checks(Stage.EVALUATION)
    checks.add(
        spec=spec,
        lengths_section="eval",
        model=model,
        disk=find_disk(_folder_of(config)),
        written=written_by_evaluation(model, source),
    )
    example = next(iter(problems.values()))
    interfaces, warnings = find_interfaces(spec.episodes, example)
    checks.warnings += warnings
    trained_datasets = _trained_datasets(config)
    checks.add(example=example, prompts=stream, trained_datasets=trained_datasets)
    prompts = short_problems(with_base, problems, interfaces, source.tokenizer)
    placement = place_evaluation(with_base, len(prompts), sampling.num_samples)
    checks.add(placement=placement, has_compiler=devices.has_c_compiler())
    fitted = _fit_memory(spec, placement, model.size, sampling.num_samples)
    checks.add(parts=fitted.parts)
    checks.finish()
    for warning in checks.warnings:
        say(warning)
    by_id = dict(zip(problem_ids(prompts), prompts, strict=True))
    return Plan(
        config,
        spec,
        source,
        by_id,
        num_skipped=len(problems) - len(prompts),
        sampling=sampling,
        placement=fitted.placement,
        settings=_settings(config, spec, source, list(by_id), placement.engine.name),
    )


def _folder_of(config: Config) -> Path:
    return folder_of(config.output.dir, config.data.datasets, KIND)


def _trained_datasets(config: Config) -> Sequence[str]:
    """Return the data sets of the run whose model is evaluated; empty if that is unknown."""
    with suppress(ConfigError):  # of a run of another version
        run = run_of(config.model.path)
        if run is not None:
            return run.data.datasets
    return ()


class FittedMemory(NamedTuple):
    placement: Placement  # with as many problems in flight as fit
    parts: Sequence[Part]  # of the estimate; empty if it is unknown, or does not depend on these


def _fit_memory(
    spec: RunSpec, placement: Placement, model: ModelSize | None, num_samples: int
) -> FittedMemory:
    """Halve the number of problems in flight until the estimate fits, unless the user chose it.
    (vLLM's cache has a fixed size on an accelerator.)"""
    if model is None or (placement.engine.is_vllm and placement.infer.kind != "cpu"):
        return FittedMemory(placement, ())
    is_chosen = spec.engine.max_concurrent_groups is not None
    while True:
        num_problems = placement.max_concurrent_groups
        # A config has groups of two or more: one sample each of two problems is such a group.
        num_groups = -(-num_problems * num_samples // spec.schedule.num_generations)
        in_groups = replace(placement, max_concurrent_groups=num_groups)
        if is_chosen or num_problems == 1 or fits(spec, in_groups, model):
            return FittedMemory(placement, estimate_memory(spec, in_groups, model))
        placement = replace(placement, max_concurrent_groups=num_problems // 2)


def _settings(
    config: Config,
    spec: RunSpec,
    source: ModelSource,
    problem_names: Sequence[str],
    engine: str,
) -> dict[str, Any]:
    """Return the settings that decide the answers: the first keys of `eval.json`."""
    values = by_name(config.model_dump(mode="json"))
    digests = identify_code(spec)
    settings = {
        "model": source.path,
        "model_identity": source.identity(),
        "dataset": config.data.shown,
        "dataset_identity": identity_of(problem_names),
        "reward_functions": spec.rewards.functions,
        "reward_weights": spec.rewards.weights,
        "correct_reward": config.eval.correct_reward,
        **asdict(spec.sampling),
        "engine": engine,
        **{key: values[key] for key in keys_marked(COMPARED, PROMPT_FORM)},
        **{f"{key}_identity": digests[key] for key in digests if key != LOSS_KEY},
    }
    # Python's functions and rows are files in the output folder, which may move.
    output = json.dumps(f"{config.output.dir}/")[:-1]
    relative: dict[str, Any] = json.loads(json.dumps(settings).replace(output, '"'))
    return relative


def evaluate(
    config: Config, view: EvalView, *, base: str | None = None, other: Path | None = None
) -> events.RunEnded:
    """Return how the evaluation ended. Raises ConfigError for what the user can fix. `base`: the
    model that an adapter belongs to; `other`: an evaluation to compare with."""
    with supervisor.signals_as_interrupts():
        compared = None if other is None else _Compared(other, read_evaluation(other))
        plan = check_evaluation(with_absolute_paths(config), base)
        path = _folder_of(plan.config)
        config_yaml = to_commented_yaml(plan.config)
        with closing(EvalFolder(path, config_yaml, plan.settings)) as folder:
            if compared is not None:
                for difference in differing_settings(compared.path, plan.settings):
                    say(f"warning: not the same evaluation: {difference}")
            try:
                _run(plan, folder, view, compared)
                return events.RunEnded(supervisor.FINISHED, "")
            except supervisor.Interrupted as stop:
                exit_code = supervisor.SIGNALLED + stop.signum
                done = f"{len(folder.answers)} of {len(plan.problems)} problems are answered"
                message = f"stopped by {stop}: {done}"
            except supervisor.WorkerFailure as failure:
                is_users = failure.is_user_error
                exit_code = supervisor.USER_ERROR if is_users else supervisor.FAILED
                message = str(failure)
                if isinstance(failure, supervisor.RewardFailure):
                    message += f"\n{supervisor.ABOUT_ON_ERROR}: {path / REWARD_ERRORS}"
            except OSError as error:  # a full disk
                exit_code = supervisor.FAILED
                message = str(error)
            resume = f"To continue: the same command with --output {quote(str(folder.path))}"
            return events.RunEnded(exit_code, f"{message}\n{resume}")


class _Compared(NamedTuple):
    """Another evaluation."""

    path: Path
    answers: Answers


def _run(plan: Plan, folder: EvalFolder, view: EvalView, compared: _Compared | None) -> None:
    """Answer what is not answered yet, and write and show the results."""
    with view.bar:
        num_problems = len(plan.problems)
        about_devices = describe(plan.placement)
        view.start(plan.settings, folder.path, about_devices, num_problems, len(folder.answers))
        work = _answer_the_rest(plan, folder, view)
    results = _results(plan, folder.answers, work)
    folder.write_results(results)
    show_results(folder.path, results)
    if compared is not None:
        _compare(folder, results, compared)


class _Work(NamedTuple):
    """What this command did."""

    num_tokens: int  # of the answers
    seconds: float  # since all workers were ready; 0: nothing was left to answer


def _answer_the_rest(plan: Plan, folder: EvalFolder, view: EvalView) -> _Work:
    """Have the remaining problems answered."""
    remaining = {}  # id by prompt index
    for problem, prompt in plan.problems.items():
        if problem not in folder.answers:
            remaining[prompt.index] = problem
    if not remaining:
        return _Work(0, 0.0)
    if plan.source.kind == "adapter":
        say("merging the adapter")
    elif plan.source.kind == "checkpoint":
        say("exporting the checkpoint")
    prompts = [plan.problems[problem] for problem in remaining.values()]
    logged: list[Mapping[str, float]] = []
    first_samples: list[events.Sample] = []
    num_first = min(NUM_FIRST_SAMPLES, len(prompts) * plan.sampling.num_samples)
    num_tokens = 0
    seconds = 0.0
    with TemporaryDirectory(prefix=MODEL, dir=folder.path) as scratch:
        trust = plan.config.model.trust_remote_code
        model = plan.source.make(Path(scratch) / "model", trust=trust)
        # Closed here, so that no worker outlives an exception.
        with closing(answers_of_workers(plan, model, prompts, folder, view)) as answered:
            for seconds, answer in answered:
                problem = remaining[answer.prompt_index]
                logged.append(answer.logged)
                keep_pictures(folder.path, answer.pictures)
                folder.append(problem, _lines(plan, problem, answer))
                num_tokens += sum(sample.length for sample in answer.samples)
                if len(first_samples) < num_first:
                    first_samples.extend(answer.samples)
                    if len(first_samples) >= num_first:
                        limit = plan.sampling.max_completion_length
                        warning = no_program_warning(first_samples, limit, section="eval")
                        view.observe(events.Note(warning))
                view.show_progress(seconds, folder.answers, num_tokens)
    view.observe(events.Note(no_requests_warning(logged)))
    return _Work(num_tokens, seconds)


class TimedAnswer(NamedTuple):
    seconds: float  # since all workers were ready
    answer: events.PromptEvaluated


def answers_of_workers(
    plan: Plan, model: str, prompts: Sequence[Prompt], folder: EvalFolder, view: EvalView
) -> Generator[TimedAnswer]:
    """Start rollout workers on the model folder `model`; yield their answers as they arrive."""
    spec = replace(plan.spec, model=replace(plan.spec.model, path=model))
    placement = plan.placement
    launcher = make_launcher(spec, placement, folder.path, view.observe)
    with launcher, supervisor.Supervisor() as watching:
        fleet = Fleet(
            spec,
            placement,
            watching,
            launcher,
            log_of=lambda worker: folder.path / "logs" / f"{worker}.log",
            notify=events.combine_observers([folder.observe, view.observe]),
        )
        fleet.wait_until_ready()
        began = time.monotonic()
        num_samples = plan.sampling.num_samples
        ledger = ledger_of_evaluation(spec.schedule, placement, 0, prompts, num_samples=num_samples)
        for answer in fleet.answers(ledger):
            yield TimedAnswer(time.monotonic() - began, answer)


def _lines(plan: Plan, problem: str, answer: events.PromptEvaluated) -> Lines:
    """Return a line of `samples.jsonl` for each sample of a problem."""
    references = plan.problems[problem].references()
    lines = []
    for number, sample in enumerate(answer.samples):
        line = {
            "problem": problem,
            "prompt_index": answer.prompt_index,
            "sample": number,
            "prompt": answer.prompt,
            **sample_values(sample),
        }
        if answer.pictures:
            line["pictures"] = picture_names(answer.pictures)
        columns = {**references, **sample.columns}
        lines.append(finite(events.with_columns(line, columns)))
    return lines


def _results(plan: Plan, answers: Answers, work: _Work) -> dict[str, Any]:
    """Return the content of `eval.json`."""
    # In the problems' order, so that sums do not depend on the order of arrival.
    ordered = [answers[problem] for problem in plan.problems]
    return {
        **plan.settings,
        "num_engines": plan.placement.num_rollout_workers,
        "easyrl": __version__,
        **summarize(ordered, plan.config.eval.correct_reward),
        "num_too_long": plan.num_skipped,
        "wall_seconds": work.seconds,
        "tokens_per_second": work.num_tokens / work.seconds if work.seconds else None,
    }


def _compare(folder: EvalFolder, results: Mapping[str, Any], compared: _Compared) -> None:
    """Compare with another evaluation: write and show the figures, and list the problems."""
    comparison = compare(folder.answers, compared.answers, results["correct_reward"])
    problems = comparison.problems
    least = min(len(folder.answers), len(compared.answers))
    if len(problems) < least:
        say(f"warning: only {len(problems)} of {counted(least, 'problem')} are in both")
    name = str(compared.path)
    figures = finite({"with": name, **comparison.figures})
    folder.write_results({**results, "comparison": figures})
    lines = []
    for problem in problems:
        lines.append(json.dumps(problem) + "\n")
    file = folder.path / "comparison.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    show_comparison(comparison.figures, name, file)
