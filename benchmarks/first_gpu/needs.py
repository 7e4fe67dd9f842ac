"""What the steps can use, and has to be brought to a machine without a network."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Needed(NamedTuple):
    """A thing that has to be brought to the machine, which may have no network."""

    what_for: str
    modules: tuple[str, ...]  # that have to be importable
    packages: str
    megabytes: float  # of their wheels, for Python 3.12 on x86-64


CORE = Needed(
    what_for="everything",
    modules=("torch", "transformers", "pydantic", "pebble", "typer", "rich", "cloudpickle"),
    packages="pydantic, pydantic-core, annotated-types, typing-inspection, pebble",
    megabytes=2.8,
)
TESTS = Needed(
    what_for="tests",
    modules=("filelock", "hypothesis", "psutil", "pytest", "pytest_timeout", "xdist"),
    packages="pytest, pytest-timeout, pytest-xdist, hypothesis, psutil, filelock",
    megabytes=3.2,
)
REASONING_GYM = Needed(
    what_for="SmolLM2's recipe",
    modules=("reasoning_gym",),
    packages="reasoning-gym, and what it needs",
    megabytes=9.6,
)
TRL = Needed(
    what_for="TRL",
    modules=("trl", "datasets", "accelerate"),
    packages="trl, datasets, dill, multiprocess",
    megabytes=1.8,
)
SMOLLM2_MEGABYTES = 270


def missing_of(needed: Needed) -> str:
    """Return the modules that are not installed, as a sentence; empty if all are."""
    missing = [module for module in needed.modules if find_spec(module) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def inputs(smollm2: Path | None) -> Iterator[str]:
    """Yield a line for each thing that can be brought: its size, and whether it is there."""
    for needed in (CORE, TESTS, REASONING_GYM, TRL):
        status = missing_of(needed) or "there"
        yield f"{needed.what_for}: {needed.packages} ({needed.megabytes} MB): {status}"
    status = "not given (--smollm2 FOLDER)" if smollm2 is None else str(smollm2)
    yield f"SmolLM2-135M-Instruct in bfloat16 ({SMOLLM2_MEGABYTES} MB): {status}"
