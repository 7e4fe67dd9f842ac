"""Settings of all tests, and what many of them need."""

import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from runs import SMALL, Finished, succeed, without_optional_libraries

# Machines are noisy: time proves nothing here. The default tests try the same examples each time,
# the long ones (`make test-long`) others.
settings.register_profile("random", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")

# Not the user's cache. All processes of a session share it, and its models are checked once.
if "PYTEST_XDIST_WORKER" not in os.environ:  # else it is set
    _cache = tempfile.TemporaryDirectory(prefix="easyrl-cache-")
    os.environ["XDG_CACHE_HOME"] = _cache.name
CACHE = Path(os.environ["XDG_CACHE_HOME"])

# Where the tests run in the background (`&`, nohup) these signals are ignored, here and in every
# run that they start, which then ignores the ones that a test sends.
for signum in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(
            signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked `alone` while the other process of tests waits."""
    with (CACHE / "tests").open("w") as tests, (CACHE / "next").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # in the order in which they ask
        fcntl.flock(tests, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny tensors need no more. Tests that use torch have imported it by now."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a test's `own.py` is no longer searched by the next test, whose file of that
    name would be another's."""
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run for tests that only look at what one leaves, made once for all processes of tests."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder, printed = shared / "finished" / "run", shared / "finished-out.txt"
    with FileLock(shared / "finished.lock"):
        if not printed.exists():
            # So long that some answers are right.
            words = (*SMALL, "rollout.max_completion_length=100", "output.samples=2")
            words = ("--output", str(folder), "--iterations", "3", *words)
            printed.write_text(succeed(*words, **without_optional_libraries(shared)))
    return Finished(folder, printed.read_text())
