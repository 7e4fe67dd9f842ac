"""Load, forward and save a causal language model: knows tokens, not tasks."""

CHUNK_BYTES = 2**30
"""Most bytes of a chunk of float32 logits (`logprobs`) on an accelerator."""
CPU_CHUNK_BYTES = 64 * 2**20
"""Most bytes of a chunk of float32 logits on the CPU."""
FEATURES_BYTES = 2**28
"""Most memory for the features of a frozen tower that are kept. 256 MiB hold a million tokens of a
model of width 64, or 30,000 of one of width 2,048 in float32."""
