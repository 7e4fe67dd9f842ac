"""Checks of `train.stop_when`: that its metrics exist, and appear in this run."""

import re
from collections.abc import Iterable, Sequence

from easyrl.config import ConfigError
from easyrl.config.hints import similar_names
from easyrl.config.spec import RunSpec, ScheduleSpec
from easyrl.config.stopping import StopCondition
from easyrl.runtime.stopping import LOGGED, may_log, metric_names

KEY = "train.stop_when"


def check_stop_when(spec: RunSpec) -> Sequence[str]:
    """Raise ConfigError for a metric that no run has, or that this one never has; warn of a
    condition that cannot hold before the last iteration."""
    schedule = spec.schedule
    if schedule.stop_when and schedule.keep_checkpoints == 0:
        raise ConfigError(
            f"train.keep_checkpoints: expected at least 1 with {KEY}, because a stopped run has no "
            "model but that of its checkpoint, got 0"
        )
    warnings = []
    for condition in schedule.stop_when:
        _check_metric(spec, condition)
        num_values = schedule.iterations
        if condition.is_of_evaluation:
            num_values = schedule.iterations // schedule.eval_every
        num_needed = condition.count + 1 if condition.is_patience else condition.count
        if num_needed >= num_values:
            warnings.append(
                f"warning: {KEY} '{condition.text}' cannot end the run before its last iteration: "
                f"it needs {num_needed} values of {condition.metric}, and the run has {num_values} "
                "(train.iterations, train.eval_every)"
            )
    return warnings


def _similar(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that may be meant, by the first of these rules that finds any: the mean of
    what `name` says (`completions/mean_length` for `completion_length`); similar as a whole; in the
    last part, of those that begin alike (`rewards/score/mean` for
    `rewards/math/mean`); made of words of `name` (`reward` for `mean_reward`); in the last part."""
    words = _words_of(name)
    means = [each for each in names if _words_of(each) == words | {"mean"}]
    if means:
        return means[:1]
    whole = similar_names(name, [*names])
    if whole:
        return whole
    group = name.partition("/")[0]
    alike = [each for each in names if each.startswith(f"{group}/")]
    made_of_them = [each for each in names if _words_of(each) <= words]
    longest = sorted(made_of_them, key=len, reverse=True)[:1]
    return _similar_in_last_part(name, alike) or longest or _similar_in_last_part(name, names)


def _words_of(name: str) -> set[str]:
    """Return the words of a metric's name, without the ending of plurals."""
    return {word.removesuffix("s") for word in re.split("[/_]", name)}


def _similar_in_last_part(name: str, names: Iterable[str]) -> list[str]:
    by_last_part = {each.rpartition("/")[2]: each for each in names}
    last_part = name.rpartition("/")[2]
    return [by_last_part[part] for part in similar_names(last_part, [*by_last_part])]


def _check_metric(spec: RunSpec, condition: StopCondition) -> None:
    needs = metric_names(spec)
    name = condition.metric
    can_log = may_log(spec)
    if name.startswith(LOGGED) and can_log:
        return
    if name.startswith("loss/") and spec.loss.is_own:
        return
    if name not in needs:
        similar = _similar(name, needs)
        hint = f"did you mean {' or '.join(similar)}? " if similar else ""
        if can_log:
            hint += f"One that your code logs (log_metric) is called {LOGGED}NAME here. "
        elif name.startswith(LOGGED):
            hint = "it needs a reward function of your own that logs it (log_metric); "
        raise ConfigError(
            f"{KEY}: expected a metric of the run, got '{name}'; {hint}docs/watching.md lists them"
        )
    if needs[name]:
        raise ConfigError(
            f"{KEY}: expected a metric that this run has, got '{name}', which needs {needs[name]}"
        )


def describe_stop_when(schedule: ScheduleSpec) -> list[str]:
    """Name the conditions that end the run early; empty if there are none."""
    conditions = [condition.text for condition in schedule.stop_when]
    if not conditions:
        return []
    return [f"ends early: {', or '.join(conditions)} ({KEY})"]
