"""Channels between rollout and train workers: ring of finished groups, and weights.

Knows no model, loss or engine.
"""

# Here, and not in `weights`, for those who count memory without torch.
BUCKET_BYTES, NUM_BUCKETS = 64 * 2**20, 2
"""Buckets of weights: one is broadcast while the other is filled, or loaded."""
