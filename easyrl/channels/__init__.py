"""Channels between rollout and train workers: ring of finished groups, and weights.

Knows no model, loss or engine.
"""

# Here, and not in `weights`, for those who count memory without torch.
BUCKET_BYTES, NUM_BUCKETS = 64 * 2**20, 2
"""Buckets of weights: one is broadcast while the other is filled, or loaded."""
ALONE_BYTES = 2**20
"""A weight of this size or more skips the buckets on the CPU, where a copy of its bytes costs more
than the 0.1 ms of a broadcast of its own. Between accelerators a bucket's size decides."""
