"""The self-test of the devices. What fails is named, with a setting that passes if there is one.

    weights      broadcasts between the devices, and weights into engines; every bit is compared
    attention    short and long packed rows, forward and backward, against float64
    embedded     a short run: the engine's log-probabilities against the trainer's
    vllm         the same with vLLM

Each part has processes of its own (`self_test_part`). A run on accelerators that have not passed
with these versions tests the first two; `easyrl doctor --test` tests all.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from easyrl import DISTRIBUTION, devices, events
from easyrl.config.devices import range_words
from easyrl.engines.vllm.platforms import package_version, unsupported_reason, vllm_version
from easyrl.runtime.placement import Placement

PART_SECONDS = 180.0
DRIVERS = Path("/proc/driver/nvidia/version"), Path("/usr/local/Ascend/driver/version.info")


class Result(NamedTuple):
    part: str
    seconds: float
    error: str  # empty: it passed
    safe: str  # a setting or environment variable, KEY=VALUE, with which it passes


def before_run(placement: Placement, notify: events.Observer) -> tuple[dict[str, str], list[str]]:
    """Test a run's accelerators, unless they have passed. Return the settings to change, by their
    keys, and warnings."""
    if not placement.accelerators or placement.is_ray:
        return {}, []
    indices = sorted({*placement.spare, *placement.accelerators})
    try:
        text = _cache_file(placement.accelerator, indices).read_text()
        results = [Result(*each) for each in json.loads(text)]
    except (OSError, RuntimeError, ValueError, TypeError):
        notify(events.Note("testing the devices, once: about 20 seconds (easyrl doctor --test)"))
        results = list(check_devices(placement.accelerator, indices))
    changes: dict[str, str] = {}
    warnings = []
    for part, _, error, safe in results:
        key, _, value = safe.partition("=")
        if "." in key:
            changes[key] = value
        elif key:
            os.environ[key] = value
        if error:
            remedy = f"used instead: {safe}" if safe else "use other devices"
            warnings.append(f"warning: self-test, {part}: {error}; {remedy}")
    return changes, warnings


def check_all() -> Iterator[Result]:
    """Test all accelerators, or the CPU, and train on them."""
    kind, count = devices.accelerator()
    yield from check_devices(kind, range(count))
    half = max(1, count // 2)
    on_each_half = [range_words(range(half)), range_words(range(half, count) or [0])]
    sets = on_each_half if count else ["cpu", "cpu"]
    yield _check("embedded", sets, "")
    if vllm_version() and unsupported_reason(kind, "bfloat16") is None:
        yield _check("vllm", sets, "rollout.engine=embedded")


def check_devices(kind: str, indices: Sequence[int]) -> Iterator[Result]:
    """Test these accelerators, or the CPU if there are none."""
    first, *others = [*map(str, indices)] or ["cpu"]
    sets = [",".join(others) or first, first]
    each_alone = [devices.visible_environment(kind, [index]) for index in indices] or [{}]
    results = [_check("weights", sets, devices.NO_PEER_ACCESS)]
    yield results[0]
    results.append(_check("attention", sets, "model.attention=without_flex", each_alone))
    yield results[1]
    if indices and all(each.safe or not each.error for each in results):
        with suppress(OSError, RuntimeError):  # then the next run tests them again
            file = _cache_file(kind, indices)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results))


def _cache_file(kind: str, indices: Sequence[int]) -> Path:
    names = [(index, devices.device_label(kind, index)) for index in indices]
    packages = [package_version(name) for name in ("torch", DISTRIBUTION, "vllm")]
    drivers = [file.read_text() for file in DRIVERS if file.is_file()]
    system = platform.node(), drivers, os.environ.get(devices.VISIBLE_DEVICES[kind])
    digest = hashlib.sha256(repr((names, packages, system)).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return folder / "easyrl" / f"self-test-{digest[:16]}.json"


def _check(
    part: str, sets: Sequence[str], safe: str, environments: Sequence[Mapping[str, str]] = ({},)
) -> Result:
    """Run a part in each environment at once; if it fails, also with a safe setting."""

    def run(*words: str) -> str:
        with ThreadPoolExecutor() as pool:
            errors = pool.map(lambda each: _error([part, *sets, *words], each), environments)
            return next(filter(None, errors), "")

    started, error = time.monotonic(), run()
    helps = error and safe and not run(safe)
    return Result(part, time.monotonic() - started, error, safe if helps else "")


def _error(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a part in a process; return the last line of its error, or ""."""
    command = [sys.executable, "-m", "easyrl.runtime.self_test_part", *arguments]
    seen, limit = {**os.environ, **environment}, PART_SECONDS
    try:
        done = subprocess.run(
            command, env=seen, timeout=limit, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {limit:g} s"
    if done.returncode <= 0:
        return f"killed by signal {-done.returncode}" if done.returncode else ""
    return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
