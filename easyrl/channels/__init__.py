"""Channels between rollout and train workers: ring of finished groups, and weights.

Knows no model, loss or engine.
"""

# The sizes are here, and not in `weights`, for code that estimates memory without importing torch.
BUCKET_BYTES = 64 * 2**20
NUM_BUCKETS = 2
"""Buckets of weights: one is broadcast while the other is filled, or loaded."""
