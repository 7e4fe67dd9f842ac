"""Load, forward and save a causal language model: knows tokens, not tasks."""

MIB = 2**20

CHUNK_BYTES = 1024 * MIB
"""Most bytes of a chunk of float32 logits (`logprobs`) on an accelerator."""
CPU_CHUNK_BYTES = 64 * MIB
"""Most bytes of a chunk of float32 logits on the CPU."""
CPU_KEPT_BYTES = 256 * MIB
"""Most bytes of float32 logits that are kept for backward on the CPU, where computing them again
takes a twentieth of a training step. Accelerators are faster, and their memory is scarcer. (A head
that ends with tanh keeps twice as much.)"""
FEATURES_BYTES = 256 * MIB
"""Most memory for the features of a frozen tower that are kept. 256 MiB hold a million tokens of a
model of width 64, or 30,000 of one of width 2,048 in float32."""
