"""Values of a row's columns: which are missing, what texts an answer has, and dates as text.

Rows come from JSON and CSV files, pandas, and Hugging Face `datasets`. Each marks a missing value
in its own way, and has its own types for numbers and dates. Rewards see one form.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

PANDAS_MISSING = ("NAType", "NaTType")
"""Types of pandas' missing values. They are compared by name: pandas need not be installed."""
PYTHON_FLOAT = re.compile(r"-?\d+(?:\.0|(?:\.\d+)?e[-+]\d+)")
"""`18.0` and `1e-05`: numbers as Python, and pandas in a CSV file, write them."""


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
    found = {}
    for name, value in row.items():
        is_none = is_missing(value) and not isinstance(value, str)
        found[name] = None if is_none else value
    return found


def answers_of(value: Any) -> list[str]:
    """Return the texts that a row's answer accepts.

    A list accepts each of its values. A number that is written as `18.0` or `1e-05` is also
    accepted as `18` or `0.00001`. Without an answer the result is empty.
    """
    is_list = isinstance(value, list | tuple | np.ndarray)
    values = [each for each in (value if is_list else [value]) if not is_missing(each)]
    texts = []
    for each in values:
        is_bytes = isinstance(each, bytes)
        texts.append(each.decode(errors="backslashreplace") if is_bytes else str(each))
    for text in list(texts):
        if PYTHON_FLOAT.fullmatch(text):
            texts.append(np.format_float_positional(float(text), trim="-"))
    for each in values:
        if isinstance(each, Decimal):
            texts.append(f"{each.normalize():f}")
    return texts


def plain_value(value: Any, *, is_date: bool = False) -> Any:
    """Return the value with ISO 8601 text for dates and times, also within lists and dictionaries.

    `is_date`: write timestamps as dates without a time, because all of the column are at midnight.
    """
    if isinstance(value, dict):
        return {key: plain_value(part, is_date=is_date) for key, part in value.items()}
    if isinstance(value, list):
        return [plain_value(part, is_date=is_date) for part in value]
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
        with_times.update(name for name, value in row.items() if _has_time_of_day(value))
    plain = []
    for row in rows:
        values = {}
        for name, value in row.items():
            values[name] = plain_value(value, is_date=name not in with_times)
        plain.append(values)
    return plain


def _has_time_of_day(value: Any) -> bool:
    """Return whether the value has a timestamp that is not at midnight, in its own time zone."""
    if isinstance(value, dict):
        return any(map(_has_time_of_day, value.values()))
    if isinstance(value, list):
        return any(map(_has_time_of_day, value))
    if not isinstance(value, datetime.datetime) or is_missing(value):
        return False
    return value.replace(tzinfo=None).isoformat() != f"{value.date().isoformat()}T00:00:00"
