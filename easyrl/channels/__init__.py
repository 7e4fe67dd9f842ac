"""Channels between rollout and train workers: ring of finished groups, and weights.

Knows no model, loss or engine. The sizes are here, and not in `weights`, for the memory estimate,
which imports no torch.
"""

BUCKET_BYTES = 64 * 2**20
NUM_BUCKETS = 2
"""Buckets of weights: one is broadcast while the other is filled, or loaded."""


def buckets_on_cpu(weights_bytes: int) -> int:
    """Return the bytes of the buckets in host memory, which all workers of a machine map, for
    weights of so many bytes."""
    return min(NUM_BUCKETS * BUCKET_BYTES, weights_bytes)  # other pages are never written


def buckets_on_accelerator(*, shares_device: bool, is_trainer: bool, cross_on_cpu: bool) -> int:
    """Return the bytes of the buckets that a worker allocates on its accelerator.

    `shares_device`: rollout and train worker are on one accelerator, where both use one bucket of
    the trainer's. `cross_on_cpu`: no backend connects the two kinds of workers, so that their
    buckets are in the host's memory.
    """
    if shares_device:
        return BUCKET_BYTES if is_trainer else 0
    return 0 if cross_on_cpu else NUM_BUCKETS * BUCKET_BYTES
