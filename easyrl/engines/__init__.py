"""Token ids in, completions out: an engine knows no reward and no task."""

MAX_PREFILL_TOKENS = 2048
"""Prompt tokens per step of the embedded engine, unless a single prompt is longer: bounds the delay
of a step. It is here for the memory estimate, which imports no torch."""
