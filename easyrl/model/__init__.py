"""Load, forward and save a causal language model: knows tokens, not tasks."""
