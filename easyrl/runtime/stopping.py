"""Whether a run is to end early (`train.stop_when`): a function of its metrics so far.

Nothing else is remembered, so a resumed run, whose metrics are cut back to its checkpoint, decides
as the run that was not interrupted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from easyrl.config.spec import RunSpec
from easyrl.config.stopping import COMPARISONS, StopCondition
from easyrl.rewards import judge
from easyrl.rewards.builtin import BUILT_IN

LOGGED = "logged/"
"""Begins the names of metrics that the user's code logs, in a condition."""
ROUNDING = 1e-9
"""A change that is this much smaller than the least one counts: 0.57 - 0.56 is less than 0.01."""
ALWAYS = (
    *("reward", "reward_std", "frac_reward_zero_std"),
    *("groups_skipped", "groups_replaced", "groups_not_replaced", "replacement_rounds"),
    *("reward_errors", "completions/mean_length", "completions/min_length"),
    *("completions/max_length", "completions/clipped_ratio"),
    *("loss", "grad_norm", "learning_rate", "num_updates_not_finite"),
    *("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean"),
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    *("num_completion_tokens", "num_inserted_tokens", "num_trainer_tokens"),
    *("num_tokens", "num_generated_tokens", "policy_version"),
    *("perf/iteration_seconds", "perf/weights_seconds", "perf/controller_seconds"),
    *("perf/infer_seconds", "perf/train_seconds", "perf/max_concurrent_groups"),
    *("perf/tokens_per_second", "perf/tokens_per_second_per_device"),
)
"""Metrics that every iteration has (docs/watching.md)."""
OF_CORRECTION = (
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/capped",
)
OF_TEACHER = ("teacher/kl", "teacher/top_token_agreement")
OF_EVALUATION = ("eval/accuracy", "eval/standard_error", "eval/reward", "eval/problems")
OF_TURNS = ("episodes/turns", "tools/calls", "tools/errors")
OF_AGENT = ("episodes/turns", "episodes/branches", "episodes/without_requests")


class Value(NamedTuple):
    """A metric's value in one iteration."""

    iteration: int  # from 1
    value: float


def metric_names(spec: RunSpec) -> dict[str, str]:
    """Return the names of metrics, each with the setting without which a run lacks it; "" if this
    run has it."""
    acts = spec.rewards.acts
    needs = dict.fromkeys(ALWAYS, "")
    for name in spec.rewards.names:
        needs[f"rewards/{name}/mean"] = ""
        needs[f"rewards/{name}/std"] = ""

    def add(names: Iterable[str], setting: str, *, is_there: bool) -> None:
        for name in names:
            if needs.get(name) != "":
                needs[name] = "" if is_there else setting

    add(["kl"], "algorithm.beta over 0", is_there=spec.loss.beta > 0)
    has_correction = spec.loss.correction != "none"
    add(OF_CORRECTION, "algorithm.importance_sampling_correction", is_there=has_correction)
    add(OF_TEACHER, "algorithm.teacher", is_there=spec.teacher is not None)
    evaluations = "train.eval_every over 0 and held-out problems (a preset's, or eval.dataset)"
    add(OF_EVALUATION, evaluations, is_there=spec.schedule.eval_every > 0)
    has_turns = acts in ("environment", "tools")
    add(OF_TURNS, "rollout.environment or rollout.tools", is_there=has_turns)
    add(OF_AGENT, "rollout.agent", is_there=acts == "agent")
    inserted = ["completions/mean_inserted_length"]
    add(inserted, "rollout.environment, tools or agent", is_there=acts is not None)
    add(judge.COUNTS, "--reward judge", is_there="judge" in spec.rewards.functions)
    return needs


def may_log(spec: RunSpec) -> bool:
    """Return whether the user's code may log metrics of its own: a reward function, an agent or a
    loss."""
    rewards = spec.rewards
    given = [each for each in rewards.functions if each not in (*BUILT_IN, *rewards.models)]
    has_own_function = any(not each.startswith("easyrl.") for each in given)
    return has_own_function or spec.rewards.acts == "agent" or spec.loss.is_own


def values_of(condition: StopCondition, lines: Iterable[Mapping[str, Any]]) -> list[Value]:
    """Return the metric's value in each line that has one. A name that begins with LOGGED is found
    with and without that."""
    names = [condition.metric, condition.metric.removeprefix(LOGGED)]
    found = []
    for line in lines:
        of_line = [line[name] for name in names if line.get(name) is not None]
        if of_line:
            found.append(Value(line["iteration"], of_line[0]))
    return found


def reason_to_stop(
    conditions: Iterable[StopCondition], lines: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return which condition holds after the last of these lines of metrics, and why."""
    for condition in conditions:
        values = values_of(condition, lines)
        if condition.is_patience:
            best = best_of(condition, values)
            number = len(values) - 1 - values.index(best) if best is not None else 0
            if best is not None and number >= condition.count:
                extreme = "highest" if condition.is_rise else "lowest"
                return _reason(condition, f"{extreme}: {best.value:.4g}", best.iteration)
            continue
        newest = values[-condition.count :]
        compare = COMPARISONS[condition.comparison]
        holds = all(compare(each.value, condition.bound) for each in newest)
        if len(newest) == condition.count and holds:
            return _reason(condition, f"{newest[-1].value:.4g}", newest[-1].iteration)
    return None


def best_of(condition: StopCondition, values: Iterable[Value]) -> Value | None:
    """Return the value after the last rise (fall) that a patience has waited for."""
    best: Value | None = None
    for each in values:
        if best is None:
            best = each
            continue
        change = each.value - best.value if condition.is_rise else best.value - each.value
        if change > 0 and change >= condition.least - ROUNDING:
            best = each
    return best


def _reason(condition: StopCondition, about: str, iteration: int) -> str:
    return f"train.stop_when: {condition.text} ({about} in iteration {iteration})"
