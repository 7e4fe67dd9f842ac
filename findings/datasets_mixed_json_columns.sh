#!/usr/bin/env bash
# datasets 5.2.0 (pyarrow 26.0.1, pandas 3.1.1), Python 3.11, November 2026.
#
# A column of a JSON lines file that has values of several types gets the type Json, and its texts are
# then read as JSON once more: the text "007" becomes the number 7, "null" becomes None, "true" becomes
# True, "1e3" becomes 1000.0. Other texts of the same column stay texts. Nothing is printed. What the
# file had cannot be recovered from the table: "7" and 7 are stored alike.
# A column of texts that all look like dates becomes timestamps, and the time zone of "…Z" is lost.
#
# Why it matters here: an answer "007" or "2024-01-02" that is compared as text is then never found.
#
# Output seen:
#     mixed: Json(decode=True) [7, None, True, 1000.0, 'seven', 7]
#     dates: timestamp[s] datetime.datetime(2024, 1, 2, 0, 0)
#     times: timestamp[s] datetime.datetime(2024, 1, 2, 10, 30)
# Exits with 1 if the library behaves otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1
cat > mixed.jsonl <<'END'
{"mixed": "007", "dates": "2024-01-02", "times": "2024-01-02T10:30:00Z"}
{"mixed": "null", "dates": "2024-01-03", "times": "2024-01-03T10:30:00Z"}
{"mixed": "true", "dates": "2024-01-04", "times": "2024-01-04T10:30:00Z"}
{"mixed": "1e3", "dates": "2024-01-05", "times": "2024-01-05T10:30:00Z"}
{"mixed": "seven", "dates": "2024-01-06", "times": "2024-01-06T10:30:00Z"}
{"mixed": 7, "dates": "2024-01-07", "times": "2024-01-07T10:30:00Z"}
END
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 venv/bin/python - <<'END'
import datetime
import sys

import datasets

datasets.disable_progress_bars()
table = datasets.load_dataset("json", data_files="mixed.jsonl", split="train")
mixed = list(table["mixed"])
date, time = table[0]["dates"], table[0]["times"]
print("mixed:", table.features["mixed"], mixed)
print("dates:", table.features["dates"].dtype, repr(date))
print("times:", table.features["times"].dtype, repr(time))
is_as_before = (
    mixed == [7, None, True, 1000.0, "seven", 7]
    and date == datetime.datetime(2024, 1, 2)
    and time == datetime.datetime(2024, 1, 2, 10, 30)
)
sys.exit(0 if is_as_before else 1)
END
