"""Conditions that end a run early (`train.stop_when`), as text and as parts.

reward >= 0.9                        one value
reward >= 0.9 for 3                  three values in a row
eval/accuracy without a rise for 5   five values after the highest one
kl without a fall of 0.01 for 20     the same for the lowest, where smaller changes do not count
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
METRIC = r"(?P<metric>[^\s<>=](?:[^<>=]*?[^\s<>=])?)"
COUNT = r"for\s+(?P<count>[1-9]\d*)(?:\s+(?P<unit>iteration|evaluation)s?)?"
BOUND = re.compile(rf"{METRIC}\s*(?P<comparison>>=|<=|>|<)\s*(?P<bound>{NUMBER})(?:\s+{COUNT})?")
PATIENCE = re.compile(
    rf"{METRIC}\s+without\s+a\s+(?P<change>rise|fall)(?:\s+of\s+(?P<least>{NUMBER}))?\s+{COUNT}"
)
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
EXPECTED = (
    "expected a condition as in 'reward >= 0.9' (or >, <, <=), 'reward >= 0.9 for 3' (in a row) or "
    "'eval/accuracy without a rise for 5' (or a fall)"
)
OF_EVALUATION = "eval/"  # begins the names of metrics that only evaluations have


@dataclass(frozen=True, slots=True)
class StopCondition:
    """A condition on the values of one metric, of which an iteration has one or none."""

    text: str  # as the user wrote it
    metric: str
    count: int  # values that it takes
    comparison: str = ""  # a key of COMPARISONS; empty: it waits for a rise or a fall
    bound: float = 0.0  # that values are compared with
    is_rise: bool = False  # that it waits for, else a fall
    least: float = 0.0  # smaller changes are no rise and no fall

    @property
    def is_patience(self) -> bool:
        return not self.comparison

    @property
    def is_of_evaluation(self) -> bool:
        return self.metric.startswith(OF_EVALUATION)


def parse_condition(text: str) -> StopCondition:
    """Read a condition. Raises ValueError for a text of another form."""
    plain = text.strip()
    found = PATIENCE.fullmatch(plain) or BOUND.fullmatch(plain)
    if found is None:
        raise ValueError(EXPECTED)
    parts = found.groupdict()
    condition = StopCondition(
        plain,
        metric=parts["metric"],
        count=int(parts["count"] or 1),
        comparison=parts.get("comparison") or "",
        bound=float(parts.get("bound") or 0.0),
        is_rise=parts.get("change") == "rise",
        least=abs(float(parts.get("least") or 0.0)),
    )
    unit = "evaluation" if condition.is_of_evaluation else "iteration"
    if parts["unit"] not in (None, unit):
        raise ValueError(f"expected {unit}s, which {condition.metric} has a value of")
    return condition
