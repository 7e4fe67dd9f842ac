"""Load, forward and save a causal language model: knows tokens, not tasks."""

CHUNK_BYTES = 64 * 2**20
"""Most bytes of a chunk of float32 logits (`logprobs`). It is here for the memory estimate, which
imports no torch."""
