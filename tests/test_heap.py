"""A process that keeps freed memory takes less of it from the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource, sys
import numpy as np
from easyrl.processes import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

np.ones(2**23)  # 64 MiB, freed at once
before = faults()
for _ in range(20):
    np.ones(2**23)
print(faults() - before)
"""


def num_faults(how: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS, how], capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_kept_memory_is_used_again_without_page_faults() -> None:
    pages = 20 * 2**26 // resource_page_size()
    assert num_faults("give-back") > pages / 1024  # huge pages fault once for 512 small ones
    assert num_faults("keep") < pages / 10_000


def resource_page_size() -> int:
    import resource

    return resource.getpagesize()
