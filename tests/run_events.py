"""The events of a run, for tests of what observers make of them."""

import math
from dataclasses import replace

from easyrl import events
from easyrl.config import load_config
from easyrl.events import Activity, FromWorker, GroupScored, Sample, Span, UnderWay
from easyrl.observe.state import RunState
from easyrl.observe.trace import TraceWriter
from easyrl.runtime.resolve import resolve

HOSTILE = "[red]no markup[/red] \x1b[2J\x07 \u202ereversed 日本"
METRICS = {
    "iteration": 1,
    "policy_version": 1,
    "reward": 0.25,
    "frac_reward_zero_std": 0.5,
    "completions/mean_length": 9.0,
    "loss": 0.0,
    "grad_norm": 1.0,
    "num_updates_not_finite": 0.0,
    "perf/iteration_seconds": 10.0,
    "perf/tokens_per_second": 1200.0,
    "perf/infer_seconds": 8.0,
    "perf/train_seconds": 5.0,
    "perf/weights_seconds": 1.0,
}
SUMMARY = {
    "iterations": 60,
    "iteration_seconds": 50.0,
    "infer_seconds": 40.0,
    "train_seconds": 35.0,
    "accuracy_before": 0.5,
    "accuracy_after": 0.5,
    "reward_first": 0.5,
    "reward_last": 0.75,
    "completion_tokens": 1234567,
    "wall_seconds": 61.5,
    "tokens_per_second_per_device": 1000.0,
    "overlap": 0.75,
    "groups_trained": 960,
    "groups_off_policy": 0,
    "updates_per_iteration": 2,
    "sampling_logp_difference_max": 1.5e-5,
    "updates_not_finite": 2,
    "reward_errors": 0,
    "weights_sha256": "0123456789abcdef0123",
}


def group(time_, prompt_index, iteration=1, **more):
    scored = GroupScored(iteration, 0, prompt_index, [1.0, 0.0], [], [100, 200], 0, 0.0)
    return FromWorker("rollout-0", time_, replace(scored, **more))


def shown(time_, prompt_index, completion, **more):
    sample = Sample(completion, 1.0, 0.0, {})
    return group(time_, prompt_index, prompt="2+3=", samples=[sample], shown=sample, **more)


def active(worker, *spans, **more):
    now = spans[-1].ended if spans else more["under_way"].started
    return FromWorker(worker, now, replace(Activity(spans), **more))


def run_started(folder, num_rollout=1):
    config = load_config(None, {"train.iterations": 4, "train.prompts_per_iteration": 8})
    names = [*(f"rollout-{n}" for n in range(num_rollout)), "train-0"]
    return events.RunStarted(
        100.0,
        folder,
        resolve(config),
        config.model_dump(mode="json"),
        dict.fromkeys(names, "cpu"),
        "two workers",
    )


def with_config(started, config):
    return replace(started, spec=resolve(config), settings=config.model_dump(mode="json"))


def run_events(folder, config=None):
    started = run_started(folder)
    failed = f"reward 'score' failed, for the prompt '2+3=' {HOSTILE}"
    second = {**METRICS, "iteration": 2, "policy_version": 2, "reward": math.nan, "kl": 0.01}
    second |= {
        "loss": math.nan,
        "entropy": 0.25,
        "completions/clipped_ratio": 0.125,
        "completions/mean_inserted_length": 30.5,
        "eval/accuracy": 0.7,
    }
    second |= {"groups_skipped": 2, "reward_errors": 3, "num_updates_not_finite": 1.0}
    second |= {"rewards/right/mean": 0.75, "rewards/right/std": 0.1}
    second |= {f"rewards/other-{n}/mean": 0.5 for n in range(5)}
    return [
        with_config(started, config) if config else started,
        FromWorker("rollout-0", 101.0, events.Starting("importing torch")),
        FromWorker("train-0", 101.0, events.Starting("importing torch")),
        FromWorker("train-0", 103.0, events.Ready()),
        FromWorker("rollout-0", 104.0, events.Ready()),
        events.EvaluationStarted(104.0, 10),
        FromWorker("rollout-0", 105.5, events.PromptEvaluated(0, 1, ())),
        events.Evaluated(106.0, 0.125, 10, 0.1, num_iterations=0, reward=0.125),
        events.IterationStarted(108.0, 1),
        events.IterationFinished(118.0, METRICS),
        events.IterationStarted(118.0, 2),
        active("rollout-0", Span("weights", 118.0, 118.1), Span("prefill", 118.1, 118.2),
               Span("generate", 118.2, 121.0), Span("score", 119.0, 121.0)),
        active("train-0", Span("wait", 118.0, 120.0), Span("train", 120.0, 121.0)),
        shown(121.0, 0, "\n".join(f"step {n}" for n in range(99)), iteration=2),
        shown(121.1, 1, f"completion 1 {HOSTILE}", iteration=2),
        group(121.2, 2, 2, errors=[events.FailedCall(failed)]),
        group(121.3, 3, 2, is_rejected=True),
        active("rollout-0", under_way=UnderWay("score", 121.4)),
        active("train-0", under_way=UnderWay("train", 121.6)),
        events.Note(f"careful {HOSTILE}"),
        events.Note("warning: " + "nothing " * 30 + "\nto see: easyrl samples RUN", True),
        events.Note("no events for 60 s: train-0 train"),
        events.WorkerSpawned(183.0, "rollout-1", "cpu"),
        FromWorker("rollout-1", 184.0, events.Starting("loading the model")),
        active("train-0", Span("train", 121.6, 185.0)),
        events.EvaluationStarted(185.0, 10),
        events.Evaluated(186.0, 0.7, 10, 0.2, num_iterations=2, reward=0.75),
        events.Evaluated(186.5, math.nan, 10, math.nan, num_iterations=3),
        events.IterationFinished(187.0, second),
        events.WorkerLeft(188.0, "rollout-1"),
        FromWorker("train-0", 188.0, events.CheckpointSaved(2, 0.1, 2**20)),
        events.SavingModel(188.0),
        events.RunFinished(189.0, SUMMARY),
        events.RunEnded(0, ""),
    ]  # fmt: skip


def write_trace(run):
    notify = TraceWriter()
    for event in run:
        notify(event)


def state_of(run):
    state = RunState()
    for event in run:
        state.apply(event)
    return state
