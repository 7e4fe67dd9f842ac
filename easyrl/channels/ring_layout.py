"""Where everything stands in the ring's memory, and whether that much memory may be had.

    [ moves: one int64 per owner ][ slot 0 ][ slot 1 ] …
    slot = header (int64 fields), then the arrays of one RolloutGroup, each at its full capacity

The whole layout is two tables (`HEADER`, `ARRAYS`) and four limits, so its size is known
before anything is allocated. Plain numbers only: nothing here is ever pickled.

Shapes: P prompt tokens, G completions of one prompt, ΣR completion tokens of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from easyrl.channels.ring_resources import available_memory_bytes
from easyrl.types import RolloutGroup
from easyrl.wording import counted

DIMENSIONS = ("num_prompt_tokens", "num_generations", "num_completion_tokens")

HEADER = (
    "status",  # state and owner in one word, so that both change in one store
    "iteration",
    "policy_version",
    "place",
    "prompt_index",  # NO_PROMPT while the slot holds no group
    *DIMENSIONS,  # how long this group's arrays are
)

ARRAYS = (  # field of RolloutGroup, element type, its one dimension
    ("prompt_ids", np.int32, "num_prompt_tokens"),
    ("completion_lengths", np.int32, "num_generations"),
    ("completion_ids", np.int32, "num_completion_tokens"),
    ("rollout_logprobs", np.float32, "num_completion_tokens"),
    ("loss_mask", np.bool_, "num_completion_tokens"),
    ("rewards", np.float32, "num_generations"),
    ("advantages", np.float32, "num_generations"),
    ("truncated", np.bool_, "num_generations"),
)

NO_PROMPT = -1
CACHE_LINE_BYTES = 64
MAX_SLOT_BYTES = 2**31  # of a NumPy record


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The ring's four limits, and every size that follows from them.

    Raises ValueError where a limit is below 1.
    """

    num_slots: int
    """Groups that can be in the ring at once, those being written or read included."""
    num_generations: int
    max_prompt_length: int
    """In tokens."""
    max_completion_length: int
    """In tokens, tool and environment tokens included."""
    num_owners: int
    """Worker numbers in use are 0 … num_owners − 1."""

    def __post_init__(self) -> None:
        for key, value in (
            ("rollout.ring_slots", self.num_slots),
            ("rollout.num_generations", self.num_generations),
            ("data.max_prompt_length", self.max_prompt_length),
            ("rollout.max_completion_length", self.max_completion_length),
            ("the number of workers", self.num_owners),
        ):
            if value < 1:
                raise ValueError(f"{key}: expected at least 1, got {value}")

    def capacity(self, dimension: str) -> int:
        """How many elements an array of this dimension (a header field) can have."""
        return {
            "num_prompt_tokens": self.max_prompt_length,
            "num_generations": self.num_generations,
            "num_completion_tokens": self.num_generations * self.max_completion_length,
        }[dimension]

    def slot_dtype(self) -> np.dtype[np.void]:
        """One slot as a NumPy record: header fields, then arrays at 64-byte boundaries."""
        names: list[str] = list(HEADER)
        formats: list[object] = [np.int64] * len(HEADER)
        offsets = [8 * i for i in range(len(HEADER))]
        end = 8 * len(HEADER)
        for name, element, dimension in ARRAYS:
            end = _aligned(end)
            if end + np.dtype(element).itemsize * self.capacity(dimension) >= MAX_SLOT_BYTES:
                raise ValueError(
                    "a group may have 2 GiB in the ring buffer, and these limits allow more: lower "
                    f"rollout.num_generations ({self.num_generations}), "
                    f"rollout.max_completion_length ({self.max_completion_length}) or "
                    f"data.max_prompt_length ({self.max_prompt_length})"
                )
            names.append(name)
            formats.append((element, (self.capacity(dimension),)))
            offsets.append(end)
            end += np.dtype(element).itemsize * self.capacity(dimension)
        return np.dtype(
            {"names": names, "formats": formats, "offsets": offsets, "itemsize": _aligned(end)}
        )

    @property
    def slots_offset_bytes(self) -> int:
        """Where the first slot begins."""
        return _aligned(8 * self.num_owners)

    @property
    def total_bytes(self) -> int:
        """The ring's whole memory: what `check_memory` compares, and all that is ever used."""
        return self.slots_offset_bytes + self.num_slots * self.slot_dtype().itemsize

    def check_memory(self, available_bytes: int | None = None) -> None:
        """Raise ValueError where the ring does not fit what machine and cgroup have left."""
        if available_bytes is None:
            available_bytes = available_memory_bytes()
        if self.total_bytes > available_bytes:
            raise ValueError(
                f"the ring buffer needs {self.total_bytes / 2**20:,.0f} MiB "
                f"({counted(self.num_slots, 'slot')} of "
                f"{self.slot_dtype().itemsize / 2**20:,.2f} MiB), but "
                f"this machine and its cgroup have {available_bytes / 2**20:,.0f} MiB left: lower "
                f"rollout.ring_slots ({self.num_slots}), "
                f"rollout.num_generations ({self.num_generations}), "
                f"rollout.max_completion_length ({self.max_completion_length}) or "
                f"data.max_prompt_length ({self.max_prompt_length})"
            )

    def lengths(self, group: RolloutGroup) -> dict[str, int]:
        """The header's three lengths for this group.

        Raises ValueError where the group is too large for a slot, or where an array has another
        length or element type than the group's fields call for.
        """
        lengths = {
            "num_prompt_tokens": len(group.prompt_ids),
            "num_generations": group.num_generations,
            "num_completion_tokens": group.num_completion_tokens,
        }
        too_large = [
            f"{dimension} is {length}, a slot holds {self.capacity(dimension)}"
            for dimension, length in lengths.items()
            if length > self.capacity(dimension)
        ]
        if too_large:
            raise ValueError(
                f"group of prompt {group.prompt_index} is too large for the ring: "
                f"{'; '.join(too_large)} (data.max_prompt_length, rollout.num_generations, "
                f"rollout.max_completion_length)"
            )
        for name, element, dimension in ARRAYS:
            array = getattr(group, name)
            if array.shape != (lengths[dimension],) or array.dtype != element:
                raise ValueError(
                    f"group of prompt {group.prompt_index}: expected {name} to be "
                    f"{np.dtype(element)} of shape ({lengths[dimension]},), "
                    f"got {array.dtype} of shape {array.shape}"
                )
        return lengths
