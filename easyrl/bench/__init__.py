"""`easyrl bench SUITE`: each suite has `run`, which returns rows, and `COLUMNS`, which it shows."""
