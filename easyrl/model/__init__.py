"""Load, forward and save a causal language model: knows tokens, not tasks."""

CHUNK_BYTES = 2**30
"""Most bytes of a chunk of float32 logits (`logprobs`) on an accelerator."""
CPU_CHUNK_BYTES = 64 * 2**20
"""Most bytes of a chunk of float32 logits on the CPU."""
