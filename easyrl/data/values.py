"""Values of a row's columns: which are missing, what texts an answer has, and dates as text.

Rows come from JSON and CSV files, pandas, and Hugging Face `datasets`. Each marks a missing value
in its own way, and has its own types for numbers and dates. Rewards see one form.
"""

import datetime
import re
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

PANDAS_MISSING = ("NAType", "NaTType")
"""Types of pandas' missing values. They are compared by name: pandas need not be installed."""
PYTHON_FLOAT = re.compile(r"-?\d+(?:\.0|(?:\.\d+)?e[-+]\d+)")
"""`18.0` and `1e-05`: numbers as Python, and pandas in a CSV file, write them."""

PATH = re.compile(r"\.([^.\[\]]+)|\[(-?\d+)\]")
"""A step into a column's value: a key, as in `.text`, or an index, as in `[0]`."""


def column_of(name: str, columns: Collection[str]) -> str:
    """Return the column that a name is of: itself, or of a path such as `answers.text[0]` the
    column in which it begins, `answers`."""
    if name in columns:
        return name
    return re.split(r"[.\[]", name, maxsplit=1)[0]


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or the part of it that a path such as `answers.text[0]` names.

    None where the row has no value on the way. Raises LookupError, which says what is there, where
    a value has no such part.
    """
    column = column_of(name, row)
    if column not in row:
        raise LookupError(f"expected a column, which are {', '.join(row)}, got '{column}'")
    steps = name.removeprefix(column)
    if not re.fullmatch(f"({PATH.pattern})*", steps):
        raise LookupError(f"expected a path as in {column}.KEY or {column}[0], got '{name}'")
    value = row[column]
    shown = column
    for step in PATH.finditer(steps):
        if is_missing(value):
            return None
        value = _part(value, step, shown)
        shown += step[0]
    return value


def _part(value: Any, step: re.Match[str], shown: str) -> Any:
    """Return the part of a value that one step of a path names. `shown`: the path before it."""
    key, index = step.groups()
    if key is not None:
        if not isinstance(value, Mapping):
            raise LookupError(f"expected a mapping in {shown}, got {value!r:.80}")
        if key not in value:
            raise LookupError(f"expected one of {', '.join(value)} in {shown}, got '{key}'")
        return value[key]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise LookupError(f"expected a list in {shown}, got {value!r:.80}")
    try:
        return value[int(index)]
    except IndexError:
        raise LookupError(f"{shown} has {len(value)} entries, got index {index}") from None


def is_missing(value: Any) -> bool:
    """Return whether a row has no value: None, an empty string, NaN, or pandas' NA or NaT."""
    if value is None:
        return True
    if isinstance(value, str):
        return not value
    if isinstance(value, float | np.floating):
        return bool(np.isnan(value))
    return type(value).__name__ in PANDAS_MISSING


def with_none(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with None for missing values, except empty strings, which may be intended."""
    found = dict(row)
    for name, value in row.items():
        if is_missing(value) and not isinstance(value, str):
            found[name] = None
    return found


def answers_of(value: Any) -> list[str]:
    """Return the texts that a row's answer accepts.

    A list accepts each of its values. A number that is written as `18.0` or `1e-05` is also
    accepted as `18` or `0.00001`. Without an answer the result is empty.
    """
    is_list = isinstance(value, list | tuple | np.ndarray)
    values = value if is_list else [value]
    texts = []
    other_forms = []
    for each in values:
        if is_missing(each):
            continue
        text = each.decode(errors="backslashreplace") if isinstance(each, bytes) else str(each)
        texts.append(text)
        if PYTHON_FLOAT.fullmatch(text):
            other_forms.append(np.format_float_positional(float(text), trim="-"))
        if isinstance(each, Decimal):
            other_forms.append(f"{each.normalize():f}")
    return texts + other_forms


def plain_value(value: Any, *, is_date: bool = False) -> Any:
    """Return the value with ISO 8601 text for dates and times, also within lists and dictionaries.

    `is_date`: write timestamps as dates without a time, because all of the column are at midnight.
    """
    plain = partial(plain_value, is_date=is_date)
    value = _without_numpy_times(value)
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    if isinstance(value, datetime.timedelta):
        # pandas' own type has another text than Python's.
        return str(datetime.timedelta(value.days, value.seconds, value.microseconds))
    if not isinstance(value, datetime.date | datetime.time) or is_missing(value):
        return value
    if isinstance(value, datetime.datetime) and is_date:
        value = value.date()
    return value.isoformat()


def plain_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with `plain_value` of all values. A column has dates without times where all
    of its timestamps are at midnight."""
    with_times: set[str] = set()
    for row in rows:
        for name, value in row.items():
            if _has_time_of_day(value):
                with_times.add(name)
    plain = []
    for row in rows:
        values = {}
        for name, value in row.items():
            values[name] = plain_value(value, is_date=name not in with_times)
        plain.append(values)
    return plain


def _without_numpy_times(value: Any) -> Any:
    """Return Python's objects for NumPy's times, or an array of these."""
    if not isinstance(value, np.datetime64 | np.timedelta64 | np.ndarray):
        return value
    if value.dtype.kind == "M":
        return value.astype("datetime64[us]").tolist()
    if value.dtype.kind == "m":
        return value.astype("timedelta64[us]").tolist()
    return value


def _has_time_of_day(value: Any) -> bool:
    """Return whether the value has a timestamp that is not at midnight, in its own time zone."""
    value = _without_numpy_times(value)
    if isinstance(value, dict):
        return any(map(_has_time_of_day, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_time_of_day, value))
    if not isinstance(value, datetime.datetime) or is_missing(value):
        return False
    time = value.replace(tzinfo=None).isoformat()  # pandas' own type has nanoseconds
    midnight = f"{value.date().isoformat()}T00:00:00"
    return time != midnight
