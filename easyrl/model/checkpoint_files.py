"""Checkpoint folders: which are complete, which to use, which to delete. Needs no torch.

    RUN/checkpoints/12/              policy_version 12: it its name means it was written completely
        state.json                   everything but tensors, and the size of each file
        shard-*.safetensors          tensors (`model.checkpoint`)
    RUN/checkpoints/14.unfinished/   being written, or left by a killed run
    RUN/checkpoints/best             a link to the best checkpoint

A checkpoint is published by one rename, once all of it is on the disk, and unpublished by one
rename before any of it is deleted. Later damage (a full disk, an incomplete copy, a corrupt
header) is detected by the files' sizes and headers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_BYTES = 2**30
"""Approximate size of a safetensors file, which is assembled in memory before it is written."""
CHECKPOINTS = "checkpoints"
"""Name of the folder in a run folder."""
STATE = "state.json"
BEST = "best"
UNFINISHED, BROKEN = ".unfinished", ".broken"
FORMAT = 1
"""Format of state.json; incremented by changes that older versions cannot read."""


class BrokenCheckpoint(ValueError):
    """The folder is not a complete checkpoint; the message says why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    state: Mapping[str, Any]
    """The state given to `publish`."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises BrokenCheckpoint if a part is missing, truncated or corrupt."""
    state, files = _read(path)
    for name, size in files.items():
        try:
            there = (path / name).stat().st_size
        except OSError:  # e.g. its run is deleting it
            raise BrokenCheckpoint(f"{name} is missing") from None
        if there != size:
            raise BrokenCheckpoint(f"{name} has {there:,} of {size:,} bytes")
        if name.endswith(".safetensors"):
            _check_header(path / name)
    # All safetensors files in the folder are searched for tensors.
    for file in path.glob("*.safetensors"):
        if file.name not in files:
            raise BrokenCheckpoint(f"{file.name} does not belong to it: remove it")
    return Checkpoint(path, state)


def _check_header(file: Path) -> None:
    """Raise BrokenCheckpoint if the file's header cannot be read or does not match its length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise BrokenCheckpoint(f"{file.name} is not a valid safetensors file: {error}") from None
    except OSError as error:
        raise BrokenCheckpoint(f"{file.name} cannot be read: {error.strerror or error}") from None


def read_state(path: Path) -> Mapping[str, Any]:
    """Read the state alone. Raises BrokenCheckpoint if it cannot be read."""
    return _read(path)[0]


def _read(path: Path) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """Return the state and the sizes of the files."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        found, state, files = content["format"], content["state"], dict(content["files"])
    except FileNotFoundError:
        raise BrokenCheckpoint(f"has no {STATE}") from None
    except OSError as error:
        raise BrokenCheckpoint(f"{STATE} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise BrokenCheckpoint(f"{STATE} is truncated, or not a checkpoint's state") from None
    if found != FORMAT:
        raise BrokenCheckpoint(f"has format {found}, expected {FORMAT}")
    return state, files


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest complete checkpoint in `folder`, and the newer broken ones with reasons."""
    broken: dict[Path, str] = {}
    for path in reversed(checkpoints_in(folder)):
        try:
            return read_checkpoint(path), broken
        except BrokenCheckpoint as error:
            broken[path] = str(error)
    return None, broken


def checkpoints_in(folder: Path) -> list[Path]:
    """Return all published checkpoints, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))


def unfinished_name(path: Path) -> Path:
    """Return the folder in which the checkpoint `path` is written."""
    return path.with_name(path.name + UNFINISHED)


def unfinished(path: Path) -> Path:
    """Create `unfinished_name(path)` as an empty folder."""
    folder = unfinished_name(path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(path: Path, state: Mapping[str, Any]) -> None:
    """Publish the checkpoint that was written to `unfinished(path)`, with `state` (for JSON)."""
    written = unfinished_name(path)
    files = {file.name: file.stat().st_size for file in sorted(written.iterdir())}
    content = {"format": FORMAT, "files": files, "state": state}
    with (written / STATE).open("w", encoding="utf-8") as file:
        file.write(json.dumps(content))  # ends with a brace, so truncation is detected
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(written)
    written.rename(path)
    _sync_folder(path.parent)


def keep_newest(folder: Path, number: int, *, best_version: int | None = None) -> None:
    """Delete all complete checkpoints but the newest and the best, and leftovers of killed runs.
    Broken ones are not counted, and stay until the run is resumed."""
    for path in [path for path in checkpoints_in(folder) if _is_whole(path)][:-number]:
        if path.name != str(best_version):
            path.rename(unfinished_name(path))
    discard_unfinished(folder)


def name_best(folder: Path, version: int) -> int | None:
    """Link `folder`/best to the checkpoint of this version, atomically. Returns the version that is
    the best now: the previous one, if any, if this one could not be written."""
    link, new = folder / BEST, folder / f"{BEST}{UNFINISHED}"
    if not (folder / str(version)).is_dir():
        return int(link.readlink().name) if link.is_symlink() else None
    with contextlib.suppress(OSError):  # a file system without links: it is still kept
        new.unlink(missing_ok=True)
        new.symlink_to(str(version))
        new.replace(link)
    return version


def _is_whole(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except BrokenCheckpoint:
        return False
    return True


def discard_unfinished(folder: Path) -> None:
    for path in folder.glob(f"*{UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a broken checkpoint, so that the run can write it again; replaces an earlier one of
    that name. Returns its new path."""
    aside = path.with_name(path.name + BROKEN)
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):  # a read-only disk is reported later
        path.rename(aside)
    return aside


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
