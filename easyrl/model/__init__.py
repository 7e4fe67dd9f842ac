"""Load, forward and save a causal language model: knows tokens, not tasks."""

CHUNK_BYTES, CPU_CHUNK_BYTES = 2**30, 64 * 2**20
"""Most bytes of a chunk of float32 logits (`logprobs`), on accelerators and on the CPU."""
