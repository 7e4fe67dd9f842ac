"""A ring and settings for workers that a test runs itself, with groups of `test_packing`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from test_packing import LONGEST_COMPLETION, LONGEST_PROMPT, NUM_GENERATIONS

from easyrl.channels.ring_buffer import RingBuffer, RingLayout
from easyrl.config import Config, load_config
from easyrl.runtime.fleet import Fleet
from easyrl.runtime.launchers import ProcessLauncher
from easyrl.runtime.placement import Placement
from easyrl.workers.settings import WorkerSettings


def make_ring(num_slots: int, num_owners: int = 2, num_groups: int = 64) -> RingBuffer:
    limits = NUM_GENERATIONS, LONGEST_PROMPT, LONGEST_COMPLETION
    return RingBuffer(RingLayout(num_slots, *limits, num_owners, num_groups))


def num_free(ring: RingBuffer) -> int:
    """Free slots; none is free twice."""
    free = ring.free_pipe.drain()
    for slot in free:
        ring.free_pipe.send(slot)
    assert len({*free}) == len(free)
    return len(free)


def settings_on_cpu(name: str, config: Config, **changes: Any) -> WorkerSettings:
    settings: dict[str, Any] = {
        "owner_id": 0,
        "device": "cpu",
        "weights_cross_on_cpu": True,
        "num_threads": 1,
        "max_concurrent_groups": 1,
        "store": "",
        "log_file": None,
    }
    return WorkerSettings(name=name, config=config, **(settings | changes))


def spawned_settings(placement: Placement) -> dict[str, WorkerSettings]:
    """Settings with which the workers of a run are spawned, by name, in order."""
    spawned: dict[str, WorkerSettings] = {}

    def spawn(name: str, target: Any, settings: WorkerSettings, *_: Any, **__: Any) -> Any:
        spawned[name] = settings
        return SimpleNamespace(name=name)

    supervisor: Any = SimpleNamespace(spawn=spawn)
    with ProcessLauncher() as launcher:
        Fleet(
            load_config(),
            placement,
            supervisor,
            launcher,
            log_of=Path,
            notify=lambda event: None,
        )
    return spawned
