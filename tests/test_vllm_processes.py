"""vLLM's processes are removed with their rollout worker, and its weights are verified."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from easyrl.engines.parameter_checksum import ChecksumVerifier, ParameterChecksum
from easyrl.engines.vllm.processes import processes_of

SECONDS = 5.0
HOLDER = """
import subprocess, time
from easyrl.engines.vllm.processes import Cleanup
cleanup = Cleanup()
open(cleanup.folder + "/socket", "w")
subprocess.Popen(["sleep", "1000"])
print(cleanup.folder, flush=True)
time.sleep(1000)
"""
MATRIX = ParameterChecksum("model.qkv.weight", is_matrix=True)
VECTOR = ParameterChecksum("model.decay")


def test_killed_worker_leaves_no_names_and_no_processes():
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    folder = holder.stdout.readline().strip()
    for is_alive in (True, False):
        if not is_alive:
            holder.kill()
            holder.communicate()
        deadline = time.monotonic() + SECONDS
        while {bool(processes_of(folder)), Path(folder, "socket").exists()} != {is_alive}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("of", "updates"),
    [
        # A load is skipped; a matrix must be right from the first update on.
        (MATRIX, [(10, [10]), (11, [10])]),
        (MATRIX, [(10, [9])]),
        # A vector that is kept in another form must change with what is sent.
        (VECTOR, [(10, [-77]), (11, [-78]), (11, [-78]), (12, [-78])]),
        # Two ranks hold shares, or the whole; or they share some heads.
        (MATRIX, [(10, [4, 6]), (11, [4, 6])]),
        (MATRIX, [(10, [10, 10]), (11, [10, 10])]),
        (MATRIX, [(10, [7, 8]), (12, [8, 9]), (13, [8, 9])]),
    ],
)
def test_the_last_of_these_updates_is_reported(of, updates):
    verifier = ChecksumVerifier()
    for version, (sent, held) in enumerate(updates):
        ranks = [[replace(of, sent=sent, held=each)] for each in held]
        if version < len(updates) - 1:
            verifier.check(version, ranks)
    with pytest.raises(RuntimeError, match=rf"weights {version} .* 1 of 1 .*{of.parameter}"):
        verifier.check(version, ranks)
