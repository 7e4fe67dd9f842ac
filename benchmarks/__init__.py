"""Suites of `easyrl bench` for development, in a checkout of the repository only."""
