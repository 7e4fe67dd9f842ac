"""The rows of a Hugging Face `datasets.Dataset`, with the values that a JSONL file would have.

    parquet, save_to_disk, hub ─► `datasets` ─► Table ─► rows whose dates and times are text

The library turns a column of dates in JSON files into timestamps, and parquet files have types of
their own. A reward that compares texts would then never find "2024-01-02".
"""

import datetime
from collections.abc import Iterator, Sequence
from typing import Any

from easyrl.types import is_missing

Row = dict[str, Any]


class Table:
    """A loaded data set: rows by their index, as dictionaries of plain values."""

    def __init__(self, dataset: Any) -> None:
        """`dataset`: a `datasets.Dataset`. Raises ValueError for a column whose texts are lost."""
        self._dataset = dataset
        self.column_names: list[str] = dataset.column_names
        columns = {name: dataset.data.column(name) for name in self.column_names}
        if mixed := [name for name, column in columns.items() if _has_reread_texts(column)]:
            raise ValueError(
                f"column '{mixed[0]}' has values of several types, and datasets has read its texts "
                'as JSON once more ("007" became 7, "null" None); give the path of the .jsonl file'
            )
        self._dates = {name for name, column in columns.items() if not _has_times_of_day(column)}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return self._plain(self._dataset[index])

    def every(self, step: int) -> Iterator[Row]:
        """Yield the rows 0, `step`, 2 `step`, …"""
        yield from map(self._plain, self._dataset.select(range(0, len(self), step)))

    def only(self, columns: Sequence[str]) -> list[Row]:
        """Return these columns of all rows."""
        if not columns:
            return [{}] * len(self)
        return [self._plain(row) for row in self._dataset.select_columns([*columns]).to_list()]

    def _plain(self, row: Row) -> Row:
        return {
            name: plain_value(value, is_date=name in self._dates) for name, value in row.items()
        }


def plain_value(value: Any, *, is_date: bool = False) -> Any:
    """Return the value with ISO 8601 texts for dates and times, also within lists and dictionaries.
    `is_date`: of timestamps the date alone, because all of the column are at midnight."""
    if isinstance(value, dict):
        return {key: plain_value(part, is_date=is_date) for key, part in value.items()}
    if isinstance(value, list):
        return [plain_value(part, is_date=is_date) for part in value]
    if isinstance(value, datetime.timedelta):  # pandas' own kind has another text
        return str(datetime.timedelta(value.days, value.seconds, value.microseconds))
    if not isinstance(value, datetime.date | datetime.time) or is_missing(value):
        return value
    if isinstance(value, datetime.datetime) and is_date:
        value = value.date()
    return value.isoformat()


def _has_times_of_day(column: Any) -> bool:
    """Return whether a column has timestamps that are not at midnight, in its own time zone."""
    import pyarrow
    from pyarrow import compute

    for leaf in _leaves(column):
        if pyarrow.types.is_timestamp(leaf.type):
            at_midnight = compute.equal(compute.floor_temporal(leaf, unit="day"), leaf)
            if not compute.all(at_midnight).as_py():
                return True
    return False


def _has_reread_texts(column: Any) -> bool:
    """Return whether a column of the library's type Json has values that are neither objects nor
    lists. The library stores the text "007" and the number 7 alike."""
    from pyarrow import compute

    for leaf in _leaves(column):
        if str(leaf.type) == "extension<arrow.json>":
            chunks = leaf.chunks if hasattr(leaf, "chunks") else [leaf]
            for chunk in chunks:
                are_single = compute.match_substring_regex(chunk.storage, r"^\s*[^\s{\[]")
                if compute.any(are_single).as_py():
                    return True
    return False


def _leaves(column: Any) -> Iterator[Any]:
    """Yield the Arrow arrays of single values that a column consists of."""
    from pyarrow import compute, types

    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        yield from _leaves(compute.list_flatten(column))
    elif types.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _leaves(compute.struct_field(column, [number]))
    else:
        yield column
