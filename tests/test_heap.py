"""A process that keeps freed memory takes less of it from the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys
from resource import getpagesize

import pytest

PAGE_FAULTS = """
import resource, sys
import numpy as np
from easyrl.processes import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
np.ones(2**23)  # 64 MiB, freed at once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_faults(how: str) -> int:
    command = [sys.executable, "-c", PAGE_FAULTS, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_kept_memory_is_used_again_without_page_faults() -> None:
    pages = 20 * 2**26 // getpagesize()
    assert num_faults("give-back") > pages / 1024  # huge pages fault once for 512 small ones
    assert num_faults("keep") < pages / 10_000
