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

pytest.register_assert_rewrite("runs")  # what differs is shown, as in a file of tests

from own_processes import processes_end  # noqa: E402
from runs import SMALL, Finished, succeed, without_optional_libraries  # noqa: E402

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
for name in ("tests", "next"):
    (CACHE / name).touch()

# Where the tests run in the background (`&`, nohup) these signals are ignored, here and in every
# run that they start, which then ignores the ones that a test sends.
for signum in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(
            signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        )


LONG_SECONDS = 3 * 3600.0
"""Limit of a test marked `long`; that of the others is `timeout` in pyproject.toml."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the limit of a test begins after its wait
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked `alone` while the other process of tests waits."""
    with (CACHE / "tests").open("r+b") as tests, (CACHE / "next").open("r+b") as turn:
        # These locks end with this process. (Those of `flock` are held by its forks, too, and so by
        # what a test, or a process of tests that was killed, has left behind.)
        fcntl.lockf(turn, fcntl.LOCK_EX)  # in the order in which they ask
        fcntl.lockf(tests, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.lockf(turn, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(autouse=True)
def started_processes_end() -> Generator[None]:
    """What a test starts ends with it, whatever fails."""
    with processes_end():
        yield


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
