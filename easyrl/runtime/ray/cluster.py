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
        address = None if address in ("", "auto") else address
        if address not in (None, "local"):
            _check_reachable(address)
        quiet = {"namespace": "easyrl", "log_to_driver": False, "logging_level": logging.ERROR}
        on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray sets its own
        try:
            try:
                if address == "local":
                    raise ConnectionError
                ray.init(address=address or "auto", **quiet)
            except ConnectionError:
                if address not in (None, "local"):
                    raise
                num_cpus = max(num_cores(), num_workers)
                ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ConfigError(
                "devices.ray_address (--ray-address): expected a Ray cluster with this version of "
                f"Ray and Python, and its token, at {address or 'RAY_ADDRESS'}: "
                f"{' '.join(str(error).split())}"
            ) from None
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [node["Resources"] for node in alive]
    texts = sorted(f"{node['NodeManagerAddress']} ({text_of(node['Resources'])})" for node in alive)
    counts = {k: int(sum(node.get(n, 0) for node in nodes)) for k, n in RAY_RESOURCES.items()}
    kind = max(counts, key=lambda kind: counts[kind])
    return Machine(
        kind if counts[kind] else "cpu",
        counts[kind],
        tuple(int(node.get("CPU", 0)) for node in nodes),
        f"Ray cluster of {counted(len(nodes), 'node')}: {', '.join(texts)}",
    )


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
    found = {name: package_version(name) or "not installed" for name in ("torch", "transformers")}
    return {"Python": platform.python_version(), "easyrl": __version__, **found}


def reserve(bundles: Sequence[dict[str, float]], timeout_seconds: float) -> PlacementGroup:
    """Reserve the train ranks' devices, on as few nodes as possible. Raises ConfigError."""
    from ray.util import placement_group, remove_placement_group

    group = placement_group(list(bundles), strategy="PACK")
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if group.wait(POLL_SECONDS):  # a signal has no effect in it
            return group
    message = no_place("train", f"all {len(bundles)}", bundles[0], timeout_seconds)
    remove_placement_group(group)
    raise ConfigError(message)


def no_place(role: str, counts: str, bundle: dict[str, float], timeout_seconds: float) -> str:
    """The message that workers, `counts` of them, found no place."""
    side = "train" if role == "train" else "infer"
    return (
        f"devices.{side} (--{side}-devices): {counts} {role} workers, which need {text_of(bundle)} "
        f"each, found no place within {timeout_seconds:g} s (runtime.timeout_seconds); "
        f"{cluster_text()}"
    )


def cluster_text() -> str:
    """One line: what the cluster has, and what is free."""
    import ray

    free = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"the cluster has {text_of(ray.cluster_resources())}, of which are free: {text_of(free)}"


def text_of(resources: dict[str, float]) -> str:
    shown = (name for name in ("CPU", *RAY_RESOURCES.values()) if name in resources)
    return ", ".join(f"{resources[name]:g} {name}" for name in shown) or "none"
