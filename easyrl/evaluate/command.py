"""`easyrl eval` with a resolved config: plan, answer what is not answered yet, summarize, compare.

    plan ─► folder ─► model ─► rollout workers ══ answers ══► samples.jsonl ─► eval.json
               └──────── problems answered before ──────────────────────────────┘

A problem's answers are on the disk before the next ones are awaited. An evaluation that was stopped
or killed therefore continues with the same command.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from easyrl import __version__, events
from easyrl.config import Config
from easyrl.evaluate.compare import Evaluation, compare, read_evaluation
from easyrl.evaluate.folder import EvalFolder
from easyrl.evaluate.plan import Plan, make_plan
from easyrl.evaluate.results import Answers, accuracy_of, summarize
from easyrl.events import Observer, combine_observers
from easyrl.rewards.loading import reward_names, reward_specs
from easyrl.runtime.placement import describe, device_names
from easyrl.runtime.resume import with_absolute_paths
from easyrl.runtime.run_folder import finite
from easyrl.runtime.supervisor import (
    SIGNALLED,
    Interrupted,
    WorkerFailure,
    signal_of,
    signals_as_interrupts,
)

if TYPE_CHECKING:
    from easyrl.types import Prompt

FINISHED, FAILED, USER_ERROR = 0, 1, 2
COMPARISON = "comparison.jsonl"
REPORT_SECONDS = 1.0
"""Minimum time between two progress reports."""


def evaluate(
    config: Config,
    observers: Sequence[Observer] = (),
    *,
    base: str | None = None,
    other: Path | None = None,
) -> int:
    """Return the exit code. Raises ValueError for what the user can fix before anything starts.

    `base`: the model that an adapter belongs to; `other`: an evaluation to compare with.
    """
    started = time.monotonic()
    with signals_as_interrupts():
        notify = combine_observers(observers)
        notify(events.CheckStarted("checking the model, the data and the devices"))
        compared = None if other is None else read_evaluation(other)
        plan = make_plan(with_absolute_paths(config), base)
        with closing(EvalFolder(plan.config, plan.settings())) as folder:
            known = set(plan.ids)
            answers = [a for a in folder.read(plan.sampling.num_samples) if a.problem in known]
            notify(
                events.EvalStarted(
                    started,
                    folder.path,
                    _about(plan),
                    devices=device_names(plan.placement),
                    description=describe(plan.placement),
                    num_problems=len(plan.problems),
                    num_done=len(answers),
                )
            )
            ended = _run(plan, folder, answers, compared, notify)
            notify(ended)
    return ended.exit_code


def _run(
    plan: Plan,
    folder: EvalFolder,
    answers: list[Answers],
    compared: Evaluation | None,
    notify: Observer,
) -> events.RunEnded:
    """Take `answers` from what is there to complete, and report how it ended."""
    resume = f"To continue: the same command with --output {folder.path}"
    try:
        _answer_the_rest(plan, folder, answers, notify)
        results = _results(plan, folder, answers)
        folder.write_results(results)
        notify(events.EvalFinished(time.monotonic(), folder.path, results))
        if compared is not None:
            _compare(plan, folder, compared, results, notify)
        return events.RunEnded(FINISHED, "")
    except (KeyboardInterrupt, Interrupted) as stop:
        signum = stop.signum if isinstance(stop, Interrupted) else signal_of(stop)
        done = f"{len(answers)} of {len(plan.problems)} problems are answered"
        message = f"stopped by {signal.Signals(signum).name}: {done}. {resume}"
        return events.RunEnded(SIGNALLED + signum, message)
    except WorkerFailure as failure:
        code = USER_ERROR if failure.is_user_error else FAILED
        return events.RunEnded(code, f"{failure}\n{resume}")
    except ValueError as error:  # a checkpoint that cannot be exported, no problem in common
        return events.RunEnded(USER_ERROR, str(error))
    except OSError as error:  # a full disk
        return events.RunEnded(FAILED, f"{error}\n{resume}")
    except Exception:
        return events.RunEnded(FAILED, traceback.format_exc())


def _answer_the_rest(
    plan: Plan, folder: EvalFolder, answers: list[Answers], notify: Observer
) -> None:
    """Have the remaining problems answered, and append each answer to the folder and `answers`."""
    done = {answer.problem for answer in answers}
    remaining = {
        prompt.index: (name, prompt)
        for name, prompt in zip(plan.ids, plan.problems, strict=True)
        if name not in done
    }
    if not remaining:
        return
    if plan.source.kind != "model" and not folder.model.exists():
        what = {"checkpoint": "exporting the checkpoint", "adapter": "merging the adapter"}
        notify(events.Note(what[plan.source.kind]))
    model = plan.source.make(folder.model)
    num_tokens, next_report = 0, 0.0
    # Closed here, so that no worker outlives an exception.
    problems = [prompt for _, prompt in remaining.values()]
    with closing(answers_of_workers(plan, model, problems, folder, notify)) as answered:
        for answer in answered:
            name, prompt = remaining[answer.prompt_index]
            lines = _lines(plan, name, prompt.columns, answer)
            folder.append(lines)
            answers.append(Answers.of_lines(lines))
            now = time.monotonic()
            num_tokens += sum(answer.completion_lengths)
            if now >= next_report or len(answers) == len(plan.problems):
                accuracy = accuracy_of(answers, plan.config.eval.correct_reward)
                notify(events.ProblemsAnswered(now, len(answers), *accuracy, num_tokens))
                num_tokens, next_report = 0, now + REPORT_SECONDS


def answers_of_workers(
    plan: Plan, model: str, problems: Sequence[Prompt], folder: EvalFolder, notify: Observer
) -> Generator[events.PromptEvaluated]:
    """Start rollout workers on the model folder `model`; yield their answers as they arrive."""
    from easyrl.runtime.dispatch import Dispatcher
    from easyrl.runtime.evaluation import answers_to
    from easyrl.runtime.supervisor import Supervisor
    from easyrl.runtime.workers import Workers

    sampled = plan.worker_config
    config = sampled.model_copy(update={"model": sampled.model.model_copy(update={"path": model})})
    num_samples = plan.sampling.num_samples
    with Supervisor() as supervisor:
        workers = Workers(
            config,
            plan.placement,
            supervisor,
            log_of=folder.log_of,
            notify=notify,
            sampling=plan.sampling,
        )
        workers.wait_until_ready()
        folder.start_clock()
        notify(events.EvaluationStarted(time.monotonic(), 0, len(problems)))
        yield from answers_to(
            problems,
            Dispatcher(workers.rollout, config, plan.placement, num_generations=num_samples),
            workers.next_event,
            round_=0,
            num_samples=num_samples,
            with_texts=True,
        )


def _lines(
    plan: Plan, problem: str, columns: Mapping[str, Any], answer: events.PromptEvaluated
) -> list[dict[str, Any]]:
    """A line of `samples.jsonl` for each sample of a problem."""
    names = reward_names(plan.config)
    expected = columns.get(plan.config.reward.answer_column)
    by_sample = list(zip(*answer.rewards_by_function, strict=True))
    lines = []
    for number, completion in enumerate(answer.completions):
        scores = by_sample[number] if by_sample else [None] * len(names)
        line = {
            "problem": problem,
            "prompt_index": answer.prompt_index,
            "sample": number,
            "prompt": answer.prompt,
            "completion": completion,
            "reward": answer.rewards[number],
            "rewards": finite(dict(zip(names, scores, strict=True))),
            "length": answer.completion_lengths[number],
            "truncated": answer.truncated[number],
        }
        if isinstance(expected, (str, int, float)):
            line["answer"] = expected
        lines.append(finite(line))
    return lines


def _about(plan: Plan) -> dict[str, Any]:
    """What is evaluated, and how: the first keys of `eval.json`."""
    config, sampling = plan.config, plan.sampling
    return {
        "model": plan.model["path"],
        "model_identity": plan.model["files"],
        "dataset": config.data.shown,
        "dataset_identity": plan.dataset_identity,
        "reward_functions": reward_specs(config),
        "correct_reward": config.eval.correct_reward,
        "num_samples": sampling.num_samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_completion_length": sampling.max_completion_length,
        "seed": config.runtime.seed,
        "dtype": config.model.dtype,
        "engine": plan.placement.engine.name,
        "num_engines": plan.placement.num_rollout_workers,
        "easyrl": __version__,
    }


def _results(plan: Plan, folder: EvalFolder, answers: Sequence[Answers]) -> dict[str, Any]:
    """The content of `eval.json`."""
    order = {name: number for number, name in enumerate(plan.ids)}
    # Sorted, so that sums do not depend on the order of arrival.
    ordered = sorted(answers, key=lambda answer: order[answer.problem])
    figures = finite(summarize(ordered, plan.config.eval.correct_reward))
    seconds = folder.seconds
    return {
        **_about(plan),
        **figures,
        "num_too_long": plan.num_skipped,
        "wall_seconds": seconds,
        "tokens_per_second": figures["completion_tokens"] / seconds if seconds else None,
    }


def _compare(
    plan: Plan, folder: EvalFolder, other: Evaluation, results: dict[str, Any], notify: Observer
) -> None:
    own = read_evaluation(folder.path)
    whole, problems = compare(own, other, plan.config.eval.correct_reward)
    whole = finite(whole)
    folder.write_results({**results, "comparison": whole})
    file = folder.path / COMPARISON
    file.write_text("".join(json.dumps(line) + "\n" for line in problems), encoding="utf-8")
    notify(events.EvalCompared(results, whole, problems, file))
