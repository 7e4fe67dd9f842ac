"""The self-test of the devices. What fails is named, with a setting that passes if there is one.

    weights      broadcasts between the devices, and weights into engines; every bit is compared
    attention    short and long packed rows, forward and backward, against float64
    states       the same for a hybrid, whose layers have a state
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
"""A part that takes longer has failed."""
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/usr/local/Ascend/driver/version.info"))
"""Files with the driver's version, where there is one."""


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
    for result in results:
        key, _, value = result.safe.partition("=")
        if "." in key:  # a setting
            changes[key] = value
        elif key:  # an environment variable
            os.environ[key] = value
        if result.error:
            remedy = f"used instead: {result.safe}" if result.safe else "use other devices"
            warnings.append(f"warning: self-test, {result.part}: {result.error}; {remedy}")
    return changes, warnings


def check_all() -> Iterator[Result]:
    """Test all accelerators, or the CPU, and train on them."""
    kind, count = devices.accelerator()
    yield from check_devices(kind, range(count))
    yield _check("states", ["cpu", "cpu"] if count == 0 else ["0", "0"], "model.attention=repeated")
    if count > 0:
        half = max(1, count // 2)
        rest = range(half, count) or [0]  # one device infers and trains
        device_sets = [range_words(range(half)), range_words(rest)]
    else:
        device_sets = ["cpu", "cpu"]
    yield _check("embedded", device_sets, "")
    if vllm_version() and unsupported_reason(kind, "bfloat16") is None:
        yield _check("vllm", device_sets, "rollout.engine=embedded")


def check_devices(kind: str, indices: Sequence[int]) -> Iterator[Result]:
    """Test these accelerators, or the CPU if there are none."""
    each_alone: list[Mapping[str, str]] = [{}]  # environments
    device_sets = ["cpu", "cpu"]  # of the engines and of the trainer
    if indices:
        first, *others = map(str, indices)
        engines = ",".join(others) or first
        device_sets = [engines, first]
        each_alone = [devices.visible_environment(kind, [index]) for index in indices]
    weights = _check("weights", device_sets, devices.NO_PEER_ACCESS)
    yield weights
    attention = _check("attention", device_sets, "model.attention=without_flex", each_alone)
    yield attention
    results = [weights, attention]
    all_pass = all(result.safe or not result.error for result in results)
    if indices and all_pass:
        with suppress(OSError, RuntimeError):  # then the next run tests them again
            file = _cache_file(kind, indices)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results))


def _cache_file(kind: str, indices: Sequence[int]) -> Path:
    """Return the file with the results for these devices on this machine, with these versions."""
    tested = _describe_tested(kind, indices)
    digest = hashlib.sha256(tested.encode()).hexdigest()
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return cache_home.expanduser() / "easyrl" / f"self-test-{digest[:16]}.json"


def _describe_tested(kind: str, indices: Sequence[int]) -> str:
    """Describe everything that the results depend on."""
    names = [(index, devices.device_label(kind, index)) for index in indices]
    packages = [package_version(name) for name in ("torch", DISTRIBUTION, "vllm")]
    drivers = [file.read_text() for file in DRIVERS if file.is_file()]
    visible = os.environ.get(devices.VISIBLE_DEVICES[kind])
    system = (platform.node(), drivers, visible)
    return repr((names, packages, system))


def _check(
    part: str,
    device_sets: Sequence[str],
    safe: str,
    environments: Sequence[Mapping[str, str]] = ({},),
) -> Result:
    """Run a part in each environment at once; if it fails, also with a safe setting.

    `device_sets` has the devices of the engines and of the trainer; `safe` is empty if there is no
    such setting."""
    started = time.monotonic()
    error = _run_part([part, *device_sets], environments)
    if error and safe:
        error_if_safe = _run_part([part, *device_sets, safe], environments)
        if error_if_safe:
            safe = ""  # it does not help
    else:
        safe = ""  # not needed
    return Result(part, time.monotonic() - started, error, safe)


def _run_part(arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> str:
    """Run a part in each environment at once; return the first error, or ""."""
    with ThreadPoolExecutor() as pool:
        errors = pool.map(lambda environment: _error(arguments, environment), environments)
        for error in errors:
            if error:
                return error
    return ""


def _error(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a part in a process; return the last line of its error, or ""."""
    command = [sys.executable, "-m", "easyrl.runtime.self_test_part", *arguments]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            timeout=PART_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {PART_SECONDS:g} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    message = done.stderr.strip() or f"exit code {done.returncode}"
    return message.splitlines()[-1]
