#!/bin/bash
# datasets 5.2.0 with pyarrow 26.0.1 (Python 3.11), seen on 29 November 2026.
#
# A JSON file may hold integers of any size. Where one of a column needs more than 64 bits (above
# 2**63 - 1), `load_dataset("json")` makes the whole column floating-point numbers, without an error or
# a warning. Then other rows' integers lose digits as well: 9007199254740993 (2**53 + 1, which fits) becomes
# 9007199254740992.0, and an integer of 5,000 digits becomes infinity. The same holds within lists and
# dictionaries, as the arguments and results of programming problems are stored. `Dataset.from_list` raises
# an OverflowError for the same rows, and Python's `json` reads them exactly.
#
# A grader that compares with such a column accepts wrong answers and refuses right ones.
#
# Output seen:
#   fits: int64, first row 9007199254740993
#   one above 2**63 - 1: float64, first row 9007199254740992.0
#   10**30 + 1: float64, 1e+30
#   10**5000: float64, inf
#   in a list: List(Value('float64')), [9007199254740992.0]
#   in a dictionary: {'x': Value('float64')}, {'x': 9007199254740992.0}
#   from_list: OverflowError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
cat > "$folder/show.py" <<'END'
import json
import math
import sys

import datasets

sys.set_int_max_str_digits(0)
datasets.disable_progress_bars()
folder = sys.argv[1]
SMALL, LARGE = 2**53 + 1, 2**63


def load(name, *values):
    path = f"{folder}/{name}.jsonl"
    with open(path, "w") as file:
        file.writelines(json.dumps({"a": value}) + "\n" for value in values)
    options = {"data_files": path, "split": "train", "cache_dir": f"{folder}/cache"}
    rows = datasets.load_dataset("json", **options)
    return rows.features["a"], [row["a"] for row in rows]


kind, values = load("fits", SMALL, 1)
print(f"fits: {kind.dtype}, first row {values[0]}")
assert kind.dtype == "int64" and values == [SMALL, 1]
kind, values = load("above", SMALL, LARGE)
print(f"one above 2**63 - 1: {kind.dtype}, first row {values[0]}")
assert kind.dtype == "float64" and values[0] == SMALL - 1
kind, values = load("thirty", 10**30 + 1)
print(f"10**30 + 1: {kind.dtype}, {values[0]}")
assert kind.dtype == "float64" and values == [1e30]
kind, values = load("long", 10**5000)
print(f"10**5000: {kind.dtype}, {values[0]}")
assert kind.dtype == "float64" and math.isinf(values[0])
kind, values = load("lists", [SMALL], [LARGE])
print(f"in a list: {kind}, {values[0]}")
assert values[0] == [float(SMALL - 1)]
kind, values = load("mappings", {"x": SMALL}, {"x": LARGE})
print(f"in a dictionary: {kind}, {values[0]}")
assert values[0] == {"x": float(SMALL - 1)}
try:
    datasets.Dataset.from_list([{"a": LARGE}])
    sys.exit("from_list: no error")
except OverflowError:
    print("from_list: OverflowError")
END
HF_HUB_OFFLINE=1 HF_DATASETS_CACHE="$folder/cache" "$folder/venv/bin/python" "$folder/show.py" "$folder"
