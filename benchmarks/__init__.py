"""Suites of `easyrl bench` that measure single parts, in a checkout of the repository only."""
