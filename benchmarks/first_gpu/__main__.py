"""The first quarter of an hour on a GPU (docs/devices.md).

    python -m benchmarks.first_gpu                           # all parts: `make first-gpu`
    python -m benchmarks.first_gpu --list                    # print the steps, and stop
    python -m benchmarks.first_gpu --parts 1-3 --minutes 10  # in two calls
    python -m benchmarks.first_gpu --parts 4-5 --minutes 5   # results are added to those there

Each step is a command with a time limit: one that hangs is ended with its processes, and the next
one begins. After each step `results.json`, `table.md` and `log.txt` are written to $OUT, or to
build/first-gpu. Nothing is installed from a network.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.first_gpu import needs
from benchmarks.first_gpu.commands import ROOT, run_command
from benchmarks.first_gpu.results import Results, Status, StepResult, read_results, table
from easyrl.formatting import ConfigError

if TYPE_CHECKING:
    from benchmarks.first_gpu.steps import Setup, Step

DESCRIBE = """
import json, platform, sys, torch, transformers
from easyrl import __version__, devices
device = sys.argv[1]
kind, count = devices.accelerator(is_asked=device not in ("", "cpu"))
device = device or ("0" if count else "cpu")
label = "CPU" if device == "cpu" else devices.device_label(kind, int(device))
print(json.dumps({"device": device, "machine": {
    "device": label, "EasyRL": __version__, "torch": torch.__version__,
    "transformers": transformers.__version__, "Python": platform.python_version(),
}}))
"""
"""A program of its own: this process keeps no memory of a device."""
SHORTEST_SECONDS = 12.0
"""A step is not begun with less time."""
MAX_LOG_CHARACTERS = 200_000
"""Of a step, at the end of its output."""


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # clean up, too
    out = Path(os.environ.get("OUT") or ROOT / "build" / "first-gpu").resolve()
    with tempfile.TemporaryDirectory(prefix="easyrl-first-gpu-") as folder:
        if options.wheels is not None:
            _install(options.wheels, Path(folder, "site"))
        lacks = needs.missing_of(needs.CORE)
        if lacks:
            raise ConfigError(
                f"{lacks}; bring {needs.CORE.packages}, and name their folder: --wheels"
            )
        from benchmarks.first_gpu import steps  # imports what was missing

        found = _find_device(options.device)
        device = found["device"]
        machine = found["machine"]
        setup = steps.Setup(Path(folder), device, options.smollm2, options.rehearsal)
        chosen = [step for step in steps.all_steps(setup) if step.part in options.parts]
        for line in needs.inputs(options.smollm2):
            print(line)
        if options.list:
            for step in chosen:
                print(f"{step.part} {step.name}: {step.missing or ' '.join(step.command)}")
            return 0
        out.mkdir(parents=True, exist_ok=True)
        results = _results_before(out, machine, is_rehearsal=options.rehearsal)
        deadline = started + 60.0 * options.minutes
        try:
            _run(chosen, results, setup, deadline, out)
        finally:
            print("\n".join(table(results)), flush=True)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.first_gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", type=_parse_parts, default=range(1, 6), help="1-3, or 4")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit of the whole call")
    parser.add_argument("--device", default="", help="0, or cpu; default: 0, if it is there")
    parser.add_argument("--smollm2", type=_parse_folder, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--wheels", type=_parse_folder, help="folder of packages to use")
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes")
    parser.add_argument("--list", action="store_true", help="print the steps, and stop")
    return parser.parse_args(arguments)


def _parse_parts(text: str) -> range:
    first, _, last = text.partition("-")
    parts = range(int(first), int(last or first) + 1)
    if not parts or parts[0] < 1 or parts[-1] > 5:
        raise argparse.ArgumentTypeError(f"expected parts of 1-5, got {text}")
    return parts


def _parse_folder(text: str) -> Path:
    folder = Path(text).resolve()
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got {text}")
    return folder


def _install(packages: Path, site: Path) -> None:
    """Unpack wheels and source packages for this process and those that it starts."""
    files = sorted([*packages.glob("*.whl"), *packages.glob("*.tar.gz")])
    if not files:
        raise ConfigError(f"--wheels: expected .whl or .tar.gz files, got none in {packages}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-build-isolation", "--no-compile", "--target", str(site)]
    subprocess.run([*pip, *map(str, files)], check=True)
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, str(site))


def _find_device(asked: str) -> dict[str, Any]:
    """Return the device to use and a description of the machine. `asked`: "0", "cpu", or empty: the
    first accelerator, or the CPU if there is none."""
    command = [sys.executable, "-c", DESCRIBE, asked]
    described = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(described.stdout.splitlines()[-1])
    return found


def _results_before(out: Path, machine: dict[str, Any], *, is_rehearsal: bool) -> Results:
    """Return the results of an earlier call on this machine, which this one adds to; or none."""
    file = out / "results.json"
    if file.exists():
        found = read_results(file)
        if (found.machine, found.is_rehearsal) == (machine, is_rehearsal):
            return found
    return Results(machine, is_rehearsal)


def _run(
    chosen: Sequence["Step"], results: Results, setup: "Setup", deadline: float, out: Path
) -> None:
    """Run the steps, each part within its limit and all before `deadline`; keep their results."""
    from benchmarks.first_gpu.steps import PARTS, part_seconds

    for part, steps_of_part in groupby(chosen, key=lambda step: step.part):
        print(f"== part {part}: {PARTS[part]}", flush=True)
        end = min(deadline, time.monotonic() + part_seconds(part, setup))
        for step in steps_of_part:
            seconds = min(step.seconds, end - time.monotonic())
            result = _run_step(step, seconds, out / "log.txt")
            print(
                f"{step.name}: {result.status} ({result.seconds:.0f} s) {result.reason}", flush=True
            )
            results.add(result)
            results.write(out)


def _run_step(step: "Step", seconds: float, log: Path) -> StepResult:
    if step.missing:
        return StepResult(step.part, step.name, "skipped", reason=step.missing)
    if seconds < SHORTEST_SECONDS:
        return StepResult(step.part, step.name, "skipped", reason="no time was left")
    with tempfile.TemporaryDirectory(prefix="easyrl-first-gpu-") as folder:
        ended = run_command(step.command, seconds, Path(folder, "log"))
    with log.open("a") as file:
        command = " ".join(step.command)
        file.write(f"\n== {step.name}\n{command}\n{ended.output[-MAX_LOG_CHARACTERS:]}")
    reason = ""
    status: Status = "passed"
    if ended.exit_code is None:
        status = "ended"
        reason = f"at its limit of {seconds:.0f} s"
    elif ended.exit_code != 0:
        status = "failed"
        last_lines = ended.output.strip().splitlines()[-1:]
        reason = " ".join([f"exit code {ended.exit_code}", *last_lines])
    try:
        figures = step.read(ended.output)
    except (OSError, ValueError, LookupError, TypeError, ConfigError) as error:  # cut-off files
        figures = {}
        reason = f"{reason} (its figures cannot be read: {error!r})"
    return StepResult(step.part, step.name, status, ended.seconds, reason, figures)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"first-gpu: {error}")
