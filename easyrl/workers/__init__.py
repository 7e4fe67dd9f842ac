"""The two loops, each readable top to bottom."""
