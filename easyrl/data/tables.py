"""The rows of a Hugging Face `datasets.Dataset`, with the values that a JSONL file would have.

    parquet, save_to_disk, hub ─► `datasets` ─► Table ─► rows whose dates and times are text

The library turns a column of dates in JSON files into timestamps, and parquet files have types of
their own. A reward that compares texts would then never find "2024-01-02", or the 0.1 of a column
of 32 bits, which is 0.10000000149011612 in Python.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from easyrl.data.values import plain_value

Row = dict[str, Any]
NARROW_TYPES = {"float": np.float32, "halffloat": np.float16}
"""Arrow's name -> type in NumPy."""


NOT_READ = b""
"""Stands for a picture where only the number of pictures matters."""


class Table:
    """A loaded data set: rows by their index, as dictionaries of plain values."""

    def __init__(self, dataset: Any) -> None:
        """`dataset`: a `datasets.Dataset`. Raises ValueError for a column whose texts are lost."""
        # A saved data set keeps `set_format`, with which rows are tensors or data frames.
        self._dataset = dataset.with_format(None)
        self.column_names: list[str] = self._dataset.column_names
        self._files: Any = None  # the columns of `keep_files`, as Arrow stores them
        self.guessed_columns = set()
        """Columns whose texts the library has turned into timestamps with times of day: the texts
        may have been written in another form."""
        self._date_columns = set()  # all of their timestamps are at midnight
        self._narrow_types = {}  # of columns of floating-point numbers with fewer than 64 bits
        columns = dataset.with_format("arrow")[:]  # of the rows that `select` has kept
        for name in self.column_names:
            column = columns.column(name)
            if _has_reread_texts(column):
                raise ValueError(
                    f"column '{name}' has values of several types, and datasets has read its "
                    'texts as JSON once more ("007" became 7, "null" None); give the path of the '
                    ".jsonl file"
                )
            if not _has_times_of_day(column):
                self._date_columns.add(name)
            elif dataset.info.builder_name == "json":
                self.guessed_columns.add(name)
            if str(column.type) in NARROW_TYPES:
                self._narrow_types[name] = NARROW_TYPES[str(column.type)]

    def files(self, columns: Sequence[str]) -> Iterator[Row]:
        """Yield rows with these columns alone, in which pictures are not decoded."""
        stored = self._dataset.select_columns([*columns]).with_format("arrow")
        for index in range(len(stored)):
            yield stored[index].to_pylist()[0]

    def keep_files(self, columns: Sequence[str]) -> None:
        """Give pictures of these columns as files, `{"bytes": …, "path": …}`, and not decoded."""
        if columns:
            self._files = self._dataset.select_columns([*columns]).with_format("arrow")
            self._dataset = self._dataset.remove_columns([*columns])

    def __len__(self) -> int:
        return len(self._dataset if self._files is None else self._files)

    def __getitem__(self, index: int) -> Row:
        row = self._plain(self._dataset[index] if self._dataset.column_names else {})
        if self._files is not None:
            row.update(self._files[index].to_pylist()[0])
        return row

    def __iter__(self) -> Iterator[Row]:
        return self.every(1)

    def every(self, step: int) -> Iterator[Row]:
        """Yield the rows 0, `step`, 2 `step`, …"""
        if self._files is not None:
            yield from (self[index] for index in range(0, len(self), step))
            return
        chosen = self._dataset.select(range(0, len(self), step))
        yield from map(self._plain, chosen)

    def only(self, columns: Sequence[str]) -> Iterable[Row]:
        """Return these columns of all rows. Pictures in columns of `keep_files` are NOT_READ."""
        if not columns:
            return [{}] * len(self)
        if self._files is not None:
            return self._only_with_counts(columns)
        rows = self._dataset.select_columns([*columns]).to_list()
        return [self._plain(row) for row in rows]

    def _only_with_counts(self, columns: Sequence[str]) -> list[Row]:
        kept = self._files.column_names
        others = [name for name in columns if name not in kept]
        rows: list[Row] = [{} for _ in range(len(self))]
        if others:
            stored = self._dataset.select_columns(others).to_list()
            rows = [self._plain(row) for row in stored]
        for name in columns:
            if name in kept:
                pictures = _not_read(self._files.with_format("arrow")[:].column(name))
                for row, value in zip(rows, pictures, strict=True):
                    row[name] = value
        return rows

    def _plain(self, row: Row) -> Row:
        plain = {}
        for name, value in row.items():
            plain[name] = plain_value(value, is_date=name in self._date_columns)
        for name, narrow_type in self._narrow_types.items():
            if plain.get(name) is not None:
                digits = str(narrow_type(plain[name]))  # as few as tell it from its neighbours
                plain[name] = float(digits)
        return plain


def _not_read(column: Any) -> list[Any]:
    """Return the values of a column of pictures, or of lists of these. Every picture is NOT_READ,
    so that no content is loaded."""
    from pyarrow import compute, types

    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        counts = compute.list_value_length(column).to_pylist()
        return [None if count is None else [NOT_READ] * count for count in counts]
    are_valid = compute.is_valid(column).to_pylist()
    return [NOT_READ if is_valid else None for is_valid in are_valid]


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
