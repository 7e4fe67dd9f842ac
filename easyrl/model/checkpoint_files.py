"""Checkpoint folders: which are complete, which to use, which to delete. Needs no torch.

    RUN/checkpoints/12/              policy_version 12: the name means that it is complete
        state.json                   everything but tensors, and the names of the files
        shard-*.safetensors          tensors (`model.checkpoint`)
    RUN/checkpoints/14.unfinished/   being written, or left by a killed run
    RUN/checkpoints/best             a link to the best checkpoint

A checkpoint is published by one rename, once all of it is on the disk, and unpublished by one
rename before any of it is deleted. Later damage (a full disk, an incomplete copy, a corrupt
header) is detected by the files' headers.
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
    from safetensors import SafetensorError, safe_open

    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        found, state, names = content["format"], content["state"], sorted(content["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BrokenCheckpoint(f"{STATE} cannot be read: {error}") from None
    if found != FORMAT:
        raise BrokenCheckpoint(f"{STATE}: expected format {FORMAT}, got {found}")
    for name in names:
        try:
            with safe_open(path / name, framework="numpy"):  # compares header and length
                pass
        except (SafetensorError, OSError) as error:
            raise BrokenCheckpoint(f"{name} cannot be read: {error}") from None
    return Checkpoint(path, state)


def find_checkpoint(source: Path) -> tuple[Checkpoint, dict[Path, str]]:
    """Return the checkpoint `source`, or the newest complete one of a run folder with the newer
    broken ones. Raises ValueError if there is none."""
    if (source / STATE).is_file():
        if source.is_symlink():  # `best` may change later
            source = source.parent / source.readlink()
        try:
            return read_checkpoint(source), {}
        except BrokenCheckpoint as error:
            raise ValueError(f"'{source}' is no complete checkpoint: {error}") from None
    found, broken = newest_checkpoint(source / CHECKPOINTS)
    if found is None:
        reasons = "".join(f"\n{path}: {why}" for path, why in broken.items())
        raise ValueError(
            f"expected a complete checkpoint or a run folder with one, got '{source}'{reasons}"
        )
    return found, broken


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
    num_whole = 0
    for path in reversed(checkpoints_in(folder)):
        with contextlib.suppress(BrokenCheckpoint):
            read_checkpoint(path)
            num_whole += 1
            if num_whole > number and path.name != str(best_version):
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


def discard_unfinished(folder: Path) -> None:
    for path in folder.glob(f"*{UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> None:
    """Rename a broken checkpoint, so that the run can write it again; replaces an earlier one of
    that name."""
    aside = path.with_name(path.name + BROKEN)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
