"""The Ray cluster: connect, count its devices, and reserve those of a run.

Imports ray where it is used: this module is imported only for `ray:` devices.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from easyrl import __version__
from easyrl.config import ConfigError
from easyrl.devices import RAY_RESOURCES
from easyrl.engines.vllm.platforms import package_version
from easyrl.formatting import counted, require
from easyrl.processes import num_cores
from easyrl.runtime.placement import Machine

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

CONNECT_SECONDS = 10.0
POLL_SECONDS = 1.0


def connect(given_address: str | None, num_workers: int) -> Machine:
    """Connect to the cluster at `devices.ray_address`, or start one on this machine for
    `num_workers`, and return what it has. Raises ConfigError without Ray, or without a cluster at
    the address."""
    require("ray", "devices: a device set of Ray (ray:)")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # or a lost node is 20 lines of output
    import ray
    from ray.exceptions import RayError

    if not ray.is_initialized():
        address = given_address or os.environ.get("RAY_ADDRESS")
        if address in ("", "auto"):
            address = None
        if address not in (None, "local"):
            _check_reachable(address)
        on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray sets its own
        try:
            _init(address, num_cpus=max(num_cores(), num_workers))
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ConfigError(
                "devices.ray_address (--ray-address): expected a Ray cluster with this version of "
                f"Ray and Python, and its token, at {address or 'RAY_ADDRESS'}: "
                f"{' '.join(str(error).split())}"
            ) from None
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)

    alive = [node for node in ray.nodes() if node["Alive"]]
    counts = dict.fromkeys(RAY_RESOURCES, 0)  # accelerators of each kind
    texts = []
    cores = []
    for node in alive:
        resources = node["Resources"]
        texts.append(f"{node['NodeManagerAddress']} ({text_of(resources)})")
        cores.append(int(resources.get("CPU", 0)))
        for kind, name in RAY_RESOURCES.items():
            counts[kind] += resources.get(name, 0)
    kind = max(counts, key=lambda kind: counts[kind])
    num_accelerators = int(counts[kind])
    return Machine(
        kind if num_accelerators > 0 else "cpu",
        num_accelerators,
        tuple(cores),
        f"Ray cluster of {counted(len(alive), 'node')}: {', '.join(sorted(texts))}",
    )


def _init(address: str | None, num_cpus: int) -> None:
    """Connect to the cluster at `address`; None: to the one of this machine, or start one; local:
    start one on this machine. Raises ConnectionError if there is none at an address."""
    import ray

    quiet = {"namespace": "easyrl", "log_to_driver": False, "logging_level": logging.ERROR}
    if address != "local":
        try:
            ray.init(address=address or "auto", **quiet)
            return
        except ConnectionError:
            if address is not None:
                raise
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)


def _check_reachable(address: str) -> None:
    """Raise ConfigError unless a server listens there: Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"devices.ray_address (--ray-address): expected the address of a Ray cluster, like "
            f"10.0.0.1:6379, got '{address}': {error}"
        ) from None


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    return {
        "Python": platform.python_version(),
        "easyrl": __version__,
        "torch": package_version("torch") or "not installed",
        "transformers": package_version("transformers") or "not installed",
    }


def reserve(bundles: Sequence[dict[str, float]], timeout_seconds: float) -> PlacementGroup:
    """Reserve the train ranks' devices, on as few nodes as possible. Raises ConfigError."""
    from ray.util import placement_group, remove_placement_group

    group = placement_group(list(bundles), strategy="PACK")
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if group.wait(POLL_SECONDS):  # short: a signal has no effect in it
            return group
    message = no_place("train", f"all {len(bundles)}", bundles[0], timeout_seconds)
    remove_placement_group(group)
    raise ConfigError(message)


def no_place(role: str, counts: str, bundle: dict[str, float], timeout_seconds: float) -> str:
    """Return the message that workers found no place. `counts`: how many, as "2 of 4"."""
    side = "train" if role == "train" else "infer"
    return (
        f"devices.{side} (--{side}-devices): {counts} {role} workers, which need {text_of(bundle)} "
        f"each, found no place within {timeout_seconds:g} s (runtime.timeout_seconds); "
        f"{cluster_text()}"
    )


def cluster_text() -> str:
    """Return one line: what the cluster has, and what is free."""
    import ray

    free = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"the cluster has {text_of(ray.cluster_resources())}, of which are free: {text_of(free)}"


def text_of(resources: dict[str, float]) -> str:
    """Return the cores and accelerators, as "8 CPU, 2 GPU"."""
    texts = []
    for name in ("CPU", *RAY_RESOURCES.values()):
        if name in resources:
            texts.append(f"{resources[name]:g} {name}")
    return ", ".join(texts) or "none"
