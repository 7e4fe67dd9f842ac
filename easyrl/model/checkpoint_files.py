"""Checkpoint folders: which are complete, which to use, which to delete. Needs no torch.

    RUN/checkpoints/12/              policy_version 12: the name means that it is complete
        state.json                   everything but tensors; names and checksums of the files
        shard-*.safetensors          tensors (`model.checkpoint`)
    RUN/checkpoints/14.unfinished/   being written, or left by a killed run
    RUN/checkpoints/best             a link to the best checkpoint

A checkpoint is published by one rename, once all of it is on the disk, and unpublished by one
rename before any of it is deleted. The SHA-256 of each file and of state.json itself are verified
before the checkpoint is used.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from easyrl.config import ConfigError, move_inputs
from easyrl.formatting import printable

FILE_BYTES = 2**28  # of a safetensors file, roughly; one is synced while the next is written
CHECKPOINTS = "checkpoints"  # name of the folder in a run folder
STATE = "state.json"
BEST = "best"
UNFINISHED = ".unfinished"
DAMAGED = ".damaged"
FORMAT = 1  # format of state.json; incremented by changes that older versions cannot read
OWN_CHECKSUM = "content_sha256"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    state: Mapping[str, Any]  # the state given to `publish`


def read_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint, and `verify` its tensors. Raises ConfigError if it is damaged."""
    file = path / STATE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {content['format']}")
        if content.pop(OWN_CHECKSUM) != _content_sha256(content):
            raise ValueError("the content does not match its checksum")
        if verify:
            for name, expected in sorted(content["sha256"].items()):
                file = path / name
                if _sha256(file) != expected:
                    raise ValueError("the content does not match its checksum")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"the checkpoint '{path}' cannot be read: {file.name}: {error}") from None
    state = content["state"]
    if "config" in state:
        state["config"] = move_inputs(state["config"], path.parent.parent)
    return Checkpoint(path, state)


def find_checkpoint(source: Path, *, verify: bool = True) -> Checkpoint:
    """Read the checkpoint `source`, or the newest complete one of a run folder, and report newer
    damaged ones. Raises ConfigError if it is damaged, or there is none."""
    if (source / STATE).is_file():
        path = source.parent / source.readlink() if source.is_symlink() else source
        try:
            return read_checkpoint(path, verify=verify)  # `best` may change later
        except ConfigError as error:
            others = f"to use the newest whole checkpoint of its run: '{path.parent.parent}'"
            raise ConfigError(f"{error}\n{others}") from None
    found, damaged = newest_checkpoint(source / CHECKPOINTS, verify=verify)
    if found is None:
        problem = f"expected a checkpoint or a run folder with one, got '{source}'"
        if (source / "settings.json").is_file():
            problem += ", the folder of an evaluation; its eval.json names the model"
        raise ConfigError("\n".join([problem, *damaged.values()]))
    if damaged:
        text = "\n".join([*damaged.values(), f"'{found.path}' is used instead"])
        print(printable(text, keep="\n"), file=sys.stderr)
    return found


class Newest(NamedTuple):
    checkpoint: Checkpoint | None  # the newest complete one
    damaged: dict[Path, str]  # newer ones, with each one's error


def newest_checkpoint(folder: Path, *, verify: bool = True) -> Newest:
    """Find the newest complete checkpoint."""
    damaged: dict[Path, str] = {}
    for path in reversed(checkpoints_in(folder)):
        try:
            return Newest(read_checkpoint(path, verify=verify), damaged)
        except ConfigError as error:
            if not path.exists():  # a running run has deleted it and published newer ones
                return newest_checkpoint(folder, verify=verify)
            damaged[path] = str(error)
    return Newest(None, damaged)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return all published checkpoints, the oldest first."""
    if not folder.is_dir():
        return []
    published = [path for path in folder.iterdir() if path.name.isdecimal()]
    return sorted(published, key=lambda path: int(path.name))


def unfinished_name(path: Path) -> Path:
    """Return where the checkpoint, or another file, `path` is written."""
    return path.with_name(path.name + UNFINISHED)


def publish(path: Path, state: Mapping[str, Any], known: Mapping[str, str] | None = None) -> None:
    """Publish the checkpoint in `unfinished_name(path)`. `known`: SHA-256 of some of its files."""
    written = unfinished_name(path)
    digests = dict(known or {})
    for file in sorted(written.iterdir()):
        if file.name not in digests:
            digests[file.name] = _sha256(file)
    content = {"format": FORMAT, "sha256": digests, "state": state}
    content[OWN_CHECKSUM] = _content_sha256(content)
    state_file = written / STATE
    state_file.write_text(json.dumps(content))  # ends with a brace, so truncation is detected
    _sync(state_file)
    _sync(written)
    written.rename(path)
    _sync(path.parent)


def keep_newest(folder: Path, number: int) -> None:
    """Delete all checkpoints but the newest and the best, and leftovers of killed runs."""
    link = folder / BEST
    best = link.readlink().name if link.is_symlink() else None
    for path in checkpoints_in(folder)[:-number]:
        if path.name != best:
            path.rename(unfinished_name(path))
    discard_unfinished(folder)


def name_best(folder: Path, version: int) -> None:
    """Link `folder`/best to the checkpoint of this version, atomically, if that was written."""
    new = folder / f"{BEST}{UNFINISHED}"
    if (folder / str(version)).is_dir():
        new.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a file system without links
            new.symlink_to(str(version))
            new.replace(folder / BEST)


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `folder`/best is a link to, if there is one."""
    link = folder / BEST
    if not link.is_symlink() or not link.is_dir():
        return None
    return folder / link.readlink()


def discard_unfinished(folder: Path) -> None:
    """Remove the checkpoints and models that a killed run has left in its folders."""
    for path in folder.glob(f"*{UNFINISHED}"):
        if re.fullmatch(r"\d+|(model|adapter)\.[0-9a-f]{8}", path.stem):
            shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that the run can write it again."""
    aside = path.with_name(path.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def finish_file(file: Path) -> str:
    """Return the SHA-256 of a file once it is on the disk."""
    _sync(file)
    return _sha256(file)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _content_sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
