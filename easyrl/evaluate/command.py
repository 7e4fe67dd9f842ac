"""`easyrl eval` with a resolved config: plan, answer what is not answered yet, summarize, compare.

    plan ─► folder ─► model ─► rollout workers ══ answers ══► samples.jsonl ─► eval.json
               └──────── problems answered before ──────────────────────────────┘

A problem's answers are on the disk before the next ones are awaited. An evaluation that was stopped
or killed therefore continues with the same command.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from easyrl import __version__, events
from easyrl.config import Config
from easyrl.config.eval import SamplingChoice
from easyrl.data.datasets import open_prompts
from easyrl.data.presets import eval_sampling, with_long_problems
from easyrl.data.problems import identity_of, problem_ids, problems_of, with_eval_data
from easyrl.evaluate.figures import Evaluation, Lines, accuracy_of, compare, summarize
from easyrl.evaluate.folder import MODEL, EvalFolder, converted_model, read_evaluation
from easyrl.evaluate.view import EvalView, show_comparison
from easyrl.model.export import ModelSource, find_model
from easyrl.model.files import ModelFiles, read_model_files
from easyrl.rewards.loading import check_rewards, reward_names, reward_specs, reward_weights
from easyrl.runtime.dispatch import Dispatcher
from easyrl.runtime.evaluation import answers_to
from easyrl.runtime.memory import (
    bytes_by_device,
    check_memory,
    estimate_memory,
    memory_of_devices,
    model_size,
)
from easyrl.runtime.placement import Placement, describe, place_evaluation
from easyrl.runtime.preflight import check_positions, too_long_prompts
from easyrl.runtime.resume import with_absolute_paths
from easyrl.runtime.run_folder import finite
from easyrl.runtime.supervisor import (
    SIGNALLED,
    Interrupted,
    Supervisor,
    WorkerFailure,
    signals_as_interrupts,
)
from easyrl.runtime.workers import Workers
from easyrl.types import Prompt

FINISHED, FAILED, USER_ERROR = 0, 1, 2
COMPARISON = "comparison.jsonl"


# -- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    config: Config  # its section `data` says where the problems are
    worker_config: Config  # the same as if training sampled this way
    source: ModelSource
    model: Mapping[str, Any]  # what is evaluated: `path`, and `files`, its identity
    problems: Mapping[str, Prompt]  # by id
    sampling: SamplingChoice
    placement: Placement
    num_skipped: int  # problems whose prompts are too long (`data.long_prompts=skip`)

    @property
    def dataset_identity(self) -> str:
        return identity_of(list(self.problems))

    def settings(self) -> Mapping[str, Any]:
        """Settings that must not change when the evaluation continues, by their keys."""
        config = self.config
        return {
            MODEL: self.model,
            "model.dtype": config.model.dtype,
            "data.dataset (--dataset), its rows": self.dataset_identity,
            "data.max_prompt_length": config.data.max_prompt_length,
            "reward.functions (--reward)": reward_specs(config),
            "reward.weights": reward_weights(config),
            "reward.answer_column": config.reward.answer_column,
            **{
                f"eval.{key}" + " (--num-samples)" * (key == "num_samples"): value
                for key, value in asdict(self.sampling).items()
            },
            "eval.correct_reward": config.eval.correct_reward,
            "rollout.engine (--engine)": self.placement.engine.name,
            "runtime.seed (--seed)": config.runtime.seed,
        }

    def about(self) -> dict[str, Any]:
        """Model, data and sampling of the evaluation: the first keys of `eval.json`."""
        config = self.config
        return {
            "model": self.model["path"],
            "model_identity": self.model["files"],
            "dataset": config.data.shown,
            "dataset_identity": self.dataset_identity,
            "reward_functions": reward_specs(config),
            "correct_reward": config.eval.correct_reward,
            **asdict(self.sampling),
            "seed": config.runtime.seed,
            "dtype": config.model.dtype,
            "engine": self.placement.engine.name,
            "num_engines": self.placement.num_rollout_workers,
            "easyrl": __version__,
        }


def make_plan(config: Config, base: str | None = None) -> Plan:
    """Check what an evaluation needs: model, problems, rewards, devices, prompts, memory.

    `base`: the model that an adapter belongs to. Raises ValueError, with the key to change, for
    what would not work.
    """
    converted = None if base else converted_model(config)
    if converted is None:
        source = find_model(config.model.path, base)
        model: Mapping[str, Any] = {"path": source.path, "files": source.identity()}
    else:
        path, model = str(converted[0]), converted[1]
        source = ModelSource("model", path, path)
    config = with_eval_data(config)
    config = config.model_copy(update={"data": with_long_problems(config.data)})
    files = read_model_files(source.base)
    problems = problems_of(open_prompts(config, is_trained=False), config)
    sampling = SamplingChoice.of_evaluation(config.eval, config.rollout, eval_sampling(config.data))
    # Rewards depend on the number and length of completions.
    update = {
        "num_generations": sampling.num_samples,
        "max_completion_length": sampling.max_completion_length,
    }
    sampled = config.model_copy(update={"rollout": config.rollout.model_copy(update=update)})
    check_positions(sampled, files, section="eval")
    check_rewards(sampled, problems.prompts[0])
    skipped = too_long_prompts(
        _with_model(config, source.base), problems, sampling.max_completion_length
    )
    prompts = problems.without(skipped).prompts
    placement = place_evaluation(config, len(prompts), sampling.num_samples)
    placement = _fit_memory(sampled, placement, files)
    by_id = dict(zip(problem_ids(prompts), prompts, strict=True))
    return Plan(config, sampled, source, model, by_id, sampling, placement, len(skipped))


def _with_model(config: Config, path: str) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def _fit_memory(config: Config, placement: Placement, files: ModelFiles) -> Placement:
    """Halve the number of problems in flight until the estimate fits, unless the user chose it.
    Raises ConfigError if the model and the KV cache cannot fit. (vLLM's cache has a fixed size on
    an accelerator.)"""
    model = model_size(files.config, files.num_weights or 0)
    is_vllm = placement.engine.name == "vllm"
    if model is None or (is_vllm and placement.infer.kind != "cpu"):
        return placement
    sizes = memory_of_devices(placement)
    while True:
        processes = estimate_memory(config, placement, model, ring_bytes=0)
        needed = bytes_by_device(processes)
        fits = all(num_bytes <= sizes[device] for device, num_bytes in needed.items())
        num_problems = placement.max_concurrent_groups
        if fits or num_problems == 1 or config.rollout.max_concurrent_groups is not None:
            check_memory(processes, sizes)
            return placement
        placement = replace(placement, max_concurrent_groups=num_problems // 2)


# -- the evaluation -------------------------------------------------------------------------------


def evaluate(
    config: Config, view: EvalView, *, base: str | None = None, other: Path | None = None
) -> int:
    """Return the exit code. Raises ValueError for what the user can fix before anything starts.

    `base`: the model that an adapter belongs to; `other`: an evaluation to compare with.
    """
    with signals_as_interrupts():
        compared = None if other is None else read_evaluation(other)
        plan = make_plan(with_absolute_paths(config), base)
        with closing(EvalFolder(plan.config, plan.settings())) as folder:
            answers = folder.read(plan.sampling.num_samples)
            description, num_problems = describe(plan.placement), len(plan.problems)
            view.start(plan.about(), folder.path, description, num_problems, len(answers))
            exit_code, message = _run(plan, folder, answers, compared, view)
            view.end(exit_code, message)
    return exit_code


def _run(
    plan: Plan,
    folder: EvalFolder,
    answers: dict[str, Lines],
    compared: Evaluation | None,
    view: EvalView,
) -> tuple[int, str]:
    """Complete `answers` and the folder; return the exit code and a message."""
    resume = f"To continue: the same command with --output {folder.path}"
    try:
        if len(answers) < len(plan.problems):
            _answer_the_rest(plan, folder, answers, view)
        results = _results(plan, folder, answers)
        folder.write_results(results)
        view.show_results(folder.path, results)
        if compared is not None:
            own = read_evaluation(folder.path)
            whole, problems = compare(own, compared, plan.config.eval.correct_reward)
            folder.write_results({**results, "comparison": finite(whole)})
            file = folder.path / COMPARISON
            file.write_text("".join(json.dumps(line) + "\n" for line in problems), encoding="utf-8")
            show_comparison(plan.model["path"], whole, problems, file)
        return FINISHED, ""
    except Interrupted as stop:
        done = f"{len(answers)} of {len(plan.problems)} problems are answered"
        return SIGNALLED + stop.signum, f"stopped by {stop}: {done}. {resume}"
    except WorkerFailure as failure:
        return USER_ERROR if failure.is_user_error else FAILED, f"{failure}\n{resume}"
    except ValueError as error:  # a checkpoint that cannot be exported, no problem in common
        return USER_ERROR, str(error)
    except OSError as error:  # a full disk
        return FAILED, f"{error}\n{resume}"
    except Exception:
        return FAILED, traceback.format_exc()


def _answer_the_rest(
    plan: Plan, folder: EvalFolder, answers: dict[str, Lines], view: EvalView
) -> None:
    """Have the remaining problems answered, and add each answer to the folder and `answers`."""
    remaining = {
        prompt.index: (problem, prompt)
        for problem, prompt in plan.problems.items()
        if problem not in answers
    }
    if plan.source.kind != "model" and not folder.model.exists():
        is_adapter = plan.source.kind == "adapter"
        view.say("merging the adapter" if is_adapter else "exporting the checkpoint")
    model = plan.source.make(folder.model)
    num_tokens, next_report = 0, 0.0
    prompts = [prompt for _, prompt in remaining.values()]
    # Closed here, so that no worker outlives an exception.
    with closing(answers_of_workers(plan, model, prompts, folder, view)) as answered:
        for answer in answered:
            problem, prompt = remaining[answer.prompt_index]
            lines = _lines(plan, problem, prompt, answer)
            folder.append(lines)
            answers[problem] = [{**line, "prompt": "", "completion": ""} for line in lines]
            now = time.monotonic()
            num_tokens += sum(answer.completion_lengths)
            if now >= next_report or len(answers) == len(plan.problems):
                accuracy = accuracy_of(answers.values(), plan.config.eval.correct_reward)
                view.show_progress(now, len(answers), accuracy, num_tokens)
                next_report = now + view.report_seconds


def answers_of_workers(
    plan: Plan, model: str, prompts: Sequence[Prompt], folder: EvalFolder, view: EvalView
) -> Generator[events.PromptEvaluated]:
    """Start rollout workers on the model folder `model`; yield their answers as they arrive."""
    config, placement = _with_model(plan.worker_config, model), plan.placement
    num_samples = plan.sampling.num_samples
    with Supervisor() as supervisor:
        workers = Workers(
            config,
            placement,
            supervisor,
            log_of=lambda worker: folder.path / "logs" / f"{worker}.log",
            notify=view.observe,
            sampling=plan.sampling,
        )
        workers.wait_until_ready()
        folder.start_clock()
        view.start_progress(time.monotonic())
        yield from answers_to(
            prompts,
            Dispatcher(workers.rollout, config, placement, num_generations=num_samples),
            workers.next_event,
            round_=0,
            num_samples=num_samples,
            with_texts=True,
        )


def _lines(plan: Plan, problem: str, prompt: Prompt, answer: events.PromptEvaluated) -> Lines:
    """A line of `samples.jsonl` for each sample of a problem."""
    names = reward_names(plan.config)
    expected = prompt.columns.get(plan.config.reward.answer_column)
    columns = {"answer": expected} if isinstance(expected, (str, int, float)) else {}
    # No function has rewards if a reward call failed.
    by_function = answer.rewards_by_function or [[None] * len(answer.rewards)] * len(names)
    lines = []
    for number, completion in enumerate(answer.completions):
        scores = [rewards[number] for rewards in by_function]
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
            **columns,
        }
        lines.append(finite(line))
    return lines


def _results(plan: Plan, folder: EvalFolder, answers: Mapping[str, Lines]) -> dict[str, Any]:
    """The content of `eval.json`."""
    # In the problems' order, so that sums do not depend on the order of arrival.
    ordered = [answers[problem] for problem in plan.problems]
    figures = finite(summarize(ordered, plan.config.eval.correct_reward))
    seconds = folder.seconds
    return {
        **plan.about(),
        **figures,
        "num_too_long": plan.num_skipped,
        "wall_seconds": seconds,
        "tokens_per_second": figures["completion_tokens"] / seconds if seconds else None,
    }
