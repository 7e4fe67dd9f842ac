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
from typing import Any

from easyrl import __version__, events
from easyrl.config import (
    Config,
    ConfigError,
    by_name,
    change_config,
    keys_marked,
    to_commented_yaml,
)
from easyrl.config.algorithm import LOSS_KEY
from easyrl.config.rollout import SamplingChoice
from easyrl.config.section import COMPARED, PROMPT_FORM
from easyrl.config.spec import RunSpec
from easyrl.data.datasets import identity_of, open_prompts, problem_ids, problems_of
from easyrl.data.presets import PRESETS, eval_sampling
from easyrl.evaluation.figures import Answers, Lines, compare, summarize
from easyrl.evaluation.folder import MODEL, EvalFolder, differing_settings, read_evaluation
from easyrl.evaluation.view import EvalView, show_comparison, show_results
from easyrl.formatting import counted
from easyrl.model.export import ModelSource, find_model, run_of
from easyrl.model.files import ModelFiles, check_positions, model_size, read_model_files
from easyrl.observe.text import say
from easyrl.runtime import preflight, supervisor
from easyrl.runtime.fleet import Fleet
from easyrl.runtime.launcher import make_launcher
from easyrl.runtime.ledger import ledger_of_evaluation
from easyrl.runtime.memory_estimate import check_memory, estimate_memory
from easyrl.runtime.memory_fit import fits
from easyrl.runtime.metrics import no_program_warning
from easyrl.runtime.placement import Placement, describe, place_evaluation
from easyrl.runtime.resolve import resolve, with_eval_data, with_long_problems
from easyrl.runtime.resume import with_absolute_paths
from easyrl.runtime.run_folder import finite, folder_of, sample_values
from easyrl.types import Prompt

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
    """Check model, problems, rewards, devices, prompts and memory. Raises ConfigError."""
    source = find_model(config.model.path, base)
    config = with_long_problems(with_eval_data(config))
    files = read_model_files(source.base)
    stream = open_prompts(resolve(config).data, is_trained=False)
    problems = problems_of(stream, config.data)
    sampling = SamplingChoice.of_evaluation(config.eval, config.rollout, eval_sampling(config.data))
    # Rewards depend on the number and length of completions.
    changes = {
        "rollout.num_generations": max(2, sampling.num_samples),
        "rollout.max_completion_length": sampling.max_completion_length,
        "train.max_tokens_per_micro_batch": None,
    }
    spec = replace(resolve(change_config(config, changes)), sampling=sampling)
    check_positions(spec.limits, files, section="eval")
    example = next(iter(problems.values()))
    interfaces, warnings = preflight.check_functions(spec, example, is_trained=False)
    with suppress(ConfigError):  # of a run of another version
        run = run_of(config.model.path)
        trained = {*run.data.datasets} & {*config.data.datasets} - {*PRESETS} if run else None
        if trained and not stream.held_out():
            warnings.append("note: the model's run trained on rows of this data set (--dataset)")
    for warning in warnings:
        say(warning)
    with_base = replace(spec, model=replace(spec.model, path=source.base))
    prompts = preflight.short_problems(with_base, problems, interfaces, source.tokenizer)
    placement = place_evaluation(spec, len(prompts), sampling.num_samples)
    placement = _fit_memory(spec, placement, files, sampling.num_samples)
    num_skipped = len(problems) - len(prompts)
    by_id = dict(zip(problem_ids(prompts), prompts, strict=True))
    values, digests = by_name(config.model_dump(mode="json")), preflight.identify_code(spec)
    settings = {
        "model": source.path,
        "model_identity": source.identity(),
        "dataset": config.data.shown,
        "dataset_identity": identity_of(list(by_id)),
        "reward_functions": spec.rewards.functions,
        "reward_weights": spec.rewards.weights,
        "correct_reward": config.eval.correct_reward,
        **asdict(sampling),
        "engine": placement.engine.name,
        **{key: values[key] for key in keys_marked(COMPARED, PROMPT_FORM)},
        **{f"{key}_identity": digests[key] for key in digests if key != LOSS_KEY},
    }
    home = json.dumps(f"{config.output.dir}/")[:-1]  # inputs of Python, in a folder that may move
    settings = json.loads(json.dumps(settings).replace(home, '"'))
    return Plan(config, spec, source, by_id, num_skipped, sampling, placement, settings)


def _fit_memory(
    spec: RunSpec, placement: Placement, files: ModelFiles, num_samples: int
) -> Placement:
    """Halve the number of problems in flight until the estimate fits, unless the user chose it.
    Raises ConfigError if nothing fits. (vLLM's cache has a fixed size on an accelerator.)"""
    model = model_size(files.config, files.num_weights or 0)
    is_vllm = placement.engine.name == "vllm"
    if model is None or (is_vllm and placement.infer.kind != "cpu"):
        return placement
    while True:
        num_problems = placement.max_concurrent_groups
        # A config has groups of two or more: one sample each of two problems is such a group.
        num_groups = -(-num_problems * num_samples // spec.schedule.num_generations)
        counted = replace(placement, max_concurrent_groups=num_groups)
        is_fixed = num_problems == 1 or spec.engine.max_concurrent_groups is not None
        if is_fixed or fits(spec, counted, model):
            check_memory(estimate_memory(spec, counted, model))
            return placement
        placement = replace(placement, max_concurrent_groups=num_problems // 2)


def evaluate(
    config: Config, view: EvalView, *, base: str | None = None, other: Path | None = None
) -> events.RunEnded:
    """Return how the evaluation ended. Raises ConfigError for what the user can fix. `base`: the
    model that an adapter belongs to; `other`: an evaluation to compare with."""
    with supervisor.signals_as_interrupts():
        compared = None if other is None else read_evaluation(other)
        plan = check_evaluation(with_absolute_paths(config), base)
        output, datasets = plan.config.output.dir, plan.config.data.datasets
        path = folder_of(output, datasets, "eval-")
        with closing(EvalFolder(path, to_commented_yaml(plan.config), plan.settings)) as folder:
            answers, num = folder.answers, len(plan.problems)
            for difference in [] if other is None else differing_settings(other, plan.settings):
                say(f"warning: not the same evaluation: {difference}")
            devices = describe(plan.placement)
            try:
                with view.bar:
                    view.start(plan.settings, folder.path, devices, num, len(answers))
                    num_tokens, seconds = _answer_the_rest(plan, folder, view)
                results = _results(plan, answers, num_tokens, seconds)
                folder.write_results(results)
                show_results(folder.path, results)
                if other is not None and compared is not None:
                    _compare(folder, results, compared, other)
                return events.RunEnded(supervisor.FINISHED, "")
            except supervisor.Interrupted as stop:
                exit_code = supervisor.SIGNALLED + stop.signum
                message = f"stopped by {stop}: {len(answers)} of {num} problems are answered"
            except (supervisor.WorkerFailure, OSError) as error:  # OSError: a full disk
                exit_code, message = supervisor.FAILED, str(error)
                if isinstance(error, supervisor.WorkerFailure) and error.is_user_error:
                    exit_code = supervisor.USER_ERROR
            resume = f"To continue: the same command with --output {quote(str(folder.path))}"
            return events.RunEnded(exit_code, f"{message}\n{resume}")


def _answer_the_rest(plan: Plan, folder: EvalFolder, view: EvalView) -> tuple[int, float]:
    """Have the remaining problems answered; return the tokens of the answers, and the seconds."""
    remaining = {p.index: key for key, p in plan.problems.items() if key not in folder.answers}
    num_tokens, seconds = 0, 0.0
    first_samples: list[events.Sample] = []
    num_first = min(NUM_FIRST_SAMPLES, len(remaining) * plan.sampling.num_samples)
    if not remaining:
        return num_tokens, seconds
    if plan.source.kind != "model":
        say("merging the adapter" if plan.source.kind == "adapter" else "exporting the checkpoint")
    prompts = [plan.problems[problem] for problem in remaining.values()]
    with TemporaryDirectory(prefix=MODEL, dir=folder.path) as scratch:
        trust = plan.config.model.trust_remote_code
        model = plan.source.make(Path(scratch) / "model", trust=trust)
        # Closed here, so that no worker outlives an exception.
        with closing(answers_of_workers(plan, model, prompts, folder, view)) as answered:
            for seconds, answer in answered:
                problem = remaining[answer.prompt_index]
                folder.append(problem, _lines(plan, problem, answer))
                num_tokens += sum(sample.length for sample in answer.samples)
                if len(first_samples) < num_first:
                    first_samples.extend(answer.samples)
                    if len(first_samples) >= num_first:
                        limit = plan.sampling.max_completion_length
                        warning = no_program_warning(first_samples, limit, section="eval")
                        view.observe(events.Note(warning))
                view.show_progress(seconds, folder.answers, num_tokens)
    return num_tokens, seconds


def answers_of_workers(
    plan: Plan, model: str, prompts: Sequence[Prompt], folder: EvalFolder, view: EvalView
) -> Generator[tuple[float, events.PromptEvaluated]]:
    """Start rollout workers on the model folder `model`; yield their answers as they arrive, each
    with the seconds since all workers were ready."""
    spec = replace(plan.spec, model=replace(plan.spec.model, path=model))
    placement = plan.placement
    num_samples = plan.sampling.num_samples
    launcher = make_launcher(spec, placement, folder.path, view.observe)
    with launcher, supervisor.Supervisor() as watching:
        fleet = Fleet(
            spec,
            placement,
            watching,
            launcher,
            log_of=lambda worker: folder.path / "logs" / f"{worker}.log",
            notify=view.observe,
        )
        fleet.wait_until_ready()
        began = time.monotonic()
        ledger = ledger_of_evaluation(spec.schedule, placement, 0, prompts, num_samples=num_samples)
        for answer in fleet.answers(ledger):
            yield time.monotonic() - began, answer


def _lines(plan: Plan, problem: str, answer: events.PromptEvaluated) -> Lines:
    """A line of `samples.jsonl` for each sample of a problem."""
    references, lines = plan.problems[problem].references(), []
    for number, sample in enumerate(answer.samples):
        line = {
            "problem": problem,
            "prompt_index": answer.prompt_index,
            "sample": number,
            "prompt": answer.prompt,
            **sample_values(sample),
        }
        lines.append(finite(events.with_columns(line, {**references, **sample.columns})))
    return lines


def _results(plan: Plan, answers: Answers, num_tokens: int, seconds: float) -> dict[str, Any]:
    """The content of `eval.json`. `num_tokens`, `seconds`: of this command's answers."""
    # In the problems' order, so that sums do not depend on the order of arrival.
    ordered = [answers[problem] for problem in plan.problems]
    return {
        **plan.settings,
        "num_engines": plan.placement.num_rollout_workers,
        "easyrl": __version__,
        **summarize(ordered, plan.config.eval.correct_reward),
        "num_too_long": plan.num_skipped,
        "wall_seconds": seconds,
        "tokens_per_second": num_tokens / seconds if seconds else None,
    }


def _compare(folder: EvalFolder, results: Mapping[str, Any], other: Answers, path: Path) -> None:
    figures, problems = compare(folder.answers, other, results["correct_reward"])
    if len(problems) < (least := min(len(folder.answers), len(other))):
        say(f"warning: only {len(problems)} of {counted(least, 'problem')} are in both")
    name = str(path)
    folder.write_results({**results, "comparison": finite({"with": name, **figures})})
    file = folder.path / "comparison.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in problems), encoding="utf-8")
    show_comparison(figures, name, file)
