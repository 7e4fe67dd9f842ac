"""Environments that a model acts in over several turns, and tools that it calls."""
