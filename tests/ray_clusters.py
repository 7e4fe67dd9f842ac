"""Ray clusters of several nodes on this machine."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def cluster_of(*nodes):
    """Start a head and more nodes, each with these arguments of `Cluster.add_node`, on ports and in
    a folder of their own. `cluster.address` is for --ray-address."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'easyrl-train[ray]'")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-")  # a short name: it holds sockets
    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray writes there, whatever its `temp_dir`
    cluster = Cluster()
    try:
        for node in nodes:
            is_head = cluster.head_node is None
            of_head = {"include_dashboard": False, "temp_dir": folder} if is_head else {}
            cluster.add_node(**of_head, **node)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
