"""The run folder: an observer that writes a run's files.

config.yaml          the resolved config                       (at the start)
metrics.jsonl        one line per iteration, which counts from 1
samples.jsonl        completions as text
reward_errors.jsonl  reward calls that failed                  (only if there are any)
pictures/            small pictures of the samples' prompts    (only if there are any)
logs/                of the controller and of each worker
summary.json         the result                                (at the end)
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import IO, Any, BinaryIO

from easyrl import __version__, events
from easyrl.config import INPUTS, ConfigError
from easyrl.events import Event
from easyrl.model.checkpoint_files import CHECKPOINTS, checkpoints_in, unfinished_name
from easyrl.processes import allow_long_integers

FULL_DISK_SECONDS = 2.0
"""Retry a write on a full disk for this long: a checkpoint that does not fit is soon removed."""
UNFINISHED_CONFIG = unfinished_name(Path("config.yaml")).name
UNFINISHED_SUMMARY = unfinished_name(Path("summary.json")).name
PRIVATE = 0o700  # mode of new run folders: prompts, completions and tracebacks concern nobody else
PICTURES = "pictures"  # folder of small pictures
ID_DIGITS = 16  # of a picture's file name
REWARD_ERRORS = "reward_errors.jsonl"
BLOCK_BYTES = 2**20  # that are read at a time
GROWING = ("metrics.jsonl", "samples.jsonl", REWARD_ERRORS)
"""Files that grow by whole lines; a resumed run cuts them back to its checkpoint."""


class RunFolderLost(OSError):
    """The folder was removed, or cannot be written any more."""


class RunFolder:
    """The folder of one run. It is locked until `close`."""

    def __init__(
        self,
        path: Path,
        config_yaml: str,
        lock: int | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """Create the folder, with this config; or open that of a resumed run, locked by `lock`, and
        cut its growing files back to `sizes` (in bytes). Raises ConfigError if it cannot be created
        or written."""
        self.path = path
        self.checkpoints = self.path / CHECKPOINTS
        self.model = self.path / "model"  # the final one, a Hugging Face folder
        is_new = not self.path.exists()
        try:
            if lock is None:
                if not has_only_inputs(self.path):
                    self.path.mkdir(mode=PRIVATE, parents=True)
                lock = lock_folder(self.path)
            self._lock = lock
            (self.path / "logs").mkdir(exist_ok=True)
            replace_file(self.path / "config.yaml", config_yaml)
            self._cut_back(sizes or {})
            (self.path / "summary.json").unlink(missing_ok=True)
            self._first = first_iteration(self.path)
        except OSError as error:
            if lock is not None:
                os.close(lock)
                if is_new:
                    shutil.rmtree(self.path, ignore_errors=True)
            raise ConfigError(
                "output.dir (--output, --resume): expected a folder that can be read and written, "
                f"got '{self.path}': {error.strerror}"
            ) from None

    def _cut_back(self, sizes: Mapping[str, int]) -> None:
        """Cut the growing files back to these sizes in bytes, 0 where there is none."""
        for name in self.file_sizes():
            file = self.path / name
            with file.open("r+b") as stream:
                stream.truncate(_end_of_line(stream, sizes.get(name, 0)))

    def close(self) -> None:
        os.close(self._lock)

    def file_sizes(self) -> dict[str, int]:
        """Return the sizes of the growing files, in bytes; part of each checkpoint."""
        sizes = {}
        for name in GROWING:
            file = self.path / name
            if file.exists():
                sizes[name] = file.stat().st_size
        return sizes

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(from_1(self.path, read_lines(self.path / "metrics.jsonl")))

    def log_of(self, worker: str) -> Path:
        return self.path / "logs" / f"{worker}.log"

    def observe(self, event: Event) -> None:
        """Write what the folder keeps. Raises RunFolderLost."""
        match event:
            case events.RunStarted(description=description):
                write_log(self.path, f"easyrl {__version__}\n{description}")
            case events.FromWorker(worker, _, events.Starting(what)):
                write_log(self.path, f"{worker}: {what}")
            case events.FromWorker(_, _, events.GroupScored(iteration, _, prompt) as group):
                append_errors(self._append, group.errors, iteration, prompt)
                if not group.is_rejected:
                    self._keep_pictures(group.pictures)
                    for sample in group.samples:
                        self._append("samples.jsonl", sample_line(group, sample))
            case events.FromWorker(_, _, events.PromptEvaluated(_, prompt) as evaluated):
                append_errors(self._append, evaluated.errors, None, prompt)
            case events.FromWorker(_, _, events.RewardFailed(call, iteration, prompt)):
                append_errors(self._append, [call], iteration, prompt)
            case events.IterationFinished(metrics=metrics):
                self._append("metrics.jsonl", metrics)
            case events.Note(text) if text:
                write_log(self.path, text)
            case events.RunFinished(summary=summary):
                text = json.dumps(finite(summary), indent=2, allow_nan=False)
                self._write(UNFINISHED_SUMMARY, text, mode="w")
                (self.path / UNFINISHED_SUMMARY).rename(self.path / "summary.json")
            case events.RunEnded(exit_code, message):
                write_log(self.path, f"ended with exit code {exit_code}\n{message}")

    def _keep_pictures(self, pictures: Sequence[bytes]) -> None:
        try:
            keep_pictures(self.path, pictures)
        except OSError as error:
            raise RunFolderLost(
                f"the run folder '{self.path}' cannot be written any more: {error.strerror} "
                f"({PICTURES}); make its disk writable or free space on it"
            ) from error

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        if self._first == 0 and line["iteration"] is not None:
            line = {**line, "iteration": line["iteration"] - 1}
        self._write(name, json.dumps(finite(line), allow_nan=False), mode="a")

    def _write(self, name: str, text: str, *, mode: str) -> None:
        try:
            with (self.path / name).open(f"{mode}b", buffering=0) as file:
                write_whole(file, f"{text}\n".encode())
        except OSError as error:
            raise RunFolderLost(
                f"the run folder '{self.path}' cannot be written any more: {error.strerror} "
                f"({name}); make its disk writable or free space on it, or use another output.dir "
                "(--output)"
            ) from error


def write_log(folder: Path, text: str) -> None:
    """Add to the controller's log. If it cannot be written, the run continues."""
    file = folder / "logs" / "easyrl.log"
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError), file.open("a", errors="backslashreplace") as log:
        log.write(f"{now}  {text.rstrip()}\n")


def replace_file(file: Path, text: str) -> None:
    """Write a file, which is published by one rename."""
    new = unfinished_name(file)
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def write_whole(file: IO[bytes], content: bytes) -> None:
    """Write the content to an unbuffered file as a whole or not at all. Raises OSError."""
    deadline = time.monotonic() + FULL_DISK_SECONDS
    size = file.tell()
    while content:
        try:
            num_written = file.write(content)
            content = content[num_written:]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() > deadline:
                file.truncate(size)
                raise
            time.sleep(0.05)


def picture_names(pictures: Sequence[bytes]) -> list[str]:
    """Return the files of small pictures, relative to their folder: a picture has one file, however
    often it is shown."""
    return [f"{PICTURES}/{hashlib.sha256(data).hexdigest()[:ID_DIGITS]}.jpg" for data in pictures]


def keep_pictures(folder: Path, pictures: Sequence[bytes]) -> None:
    """Write small pictures to a folder. Raises OSError."""
    for name, data in zip(picture_names(pictures), pictures, strict=True):
        file = folder / name
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)


def append_errors(
    append: Callable[[str, Mapping[str, Any]], None],
    calls: Sequence[events.FailedCall],
    iteration: int | None,
    prompt_index: int | None,
) -> None:
    """Write failed reward calls by `append(file name, line)`."""
    for call in calls:
        line = {"iteration": iteration, "prompt_index": prompt_index, **vars(call)}
        append(REWARD_ERRORS, line)


def sample_line(group: events.GroupScored, sample: events.Sample) -> dict[str, Any]:
    line = {
        "iteration": group.iteration,
        "prompt_index": group.prompt_index,
        "prompt": group.prompt,
        **sample_values(sample),
        "advantage": sample.advantage,
    }
    if group.pictures:
        line["pictures"] = picture_names(group.pictures)
    return events.with_columns(line, {**group.columns, **sample.columns})


def sample_values(sample: events.Sample) -> dict[str, Any]:
    """Return the values that samples of runs and of evaluations both have."""
    values = {name: getattr(sample, name) for name in events.SAMPLE_VALUES}
    return {**values, "rewards": finite(sample.rewards), **sample.episode}


def first_iteration(folder: Path) -> int:
    """Return the number of the first iteration in the files of a run: 1, or 0 if version 0.2 began
    the run. It stays what it is when the run is resumed."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        # Neither is there before the first iteration, and evaluations have no iterations.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            with (folder / name).open("rb") as file:
                first_line = json.loads(file.readline())
            return 1 if first_line["iteration"] > 0 else 0
    return 1


def from_1(folder: Path, lines: Iterable[Any]) -> Iterator[Any]:
    """Yield lines of the run in `folder` with the iterations counted from 1."""
    is_from_0 = first_iteration(folder) == 0
    for line in lines:
        yield {**line, "iteration": line["iteration"] + 1} if is_from_0 else line


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read a .jsonl file, if it is there, without an incomplete last line. Raises ConfigError for a
    broken line."""
    if not file.is_file():
        return []
    allow_long_integers()  # of columns that reward functions have logged
    *complete, _ = file.read_bytes().split(b"\n")
    lines = []
    for number, line in enumerate(complete, start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: expected a line of JSON: {error}") from None
    return lines


def folder_of(output_dir: str | None, datasets: Sequence[str], kind: str = "") -> Path:
    """Return the path of the run folder: `output.dir`, or a new name with the data sets' names and
    `kind` in it."""
    if output_dir:
        return Path(output_dir).expanduser()
    now = time.strftime("%Y%m%d-%H%M%S")
    task = "+".join(Path(name).stem for name in datasets)
    path = Path("runs") / f"{now}-{kind}{task}"
    return Path(free_name(path)) if path.exists() else path


def lock_folder(folder: Path) -> int:
    """Lock the folder until the descriptor is closed. Raises ConfigError if it is locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"output.dir (--output, --resume): the run in '{folder}' is still running; stop it "
            "first, or use another folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    return descriptor


def _end_of_line(stream: BinaryIO, most: int) -> int:
    """Return where the last whole line within the first `most` bytes ends. The file may be shorter,
    after a power failure, or of many GB."""
    end = min(most, stream.seek(0, os.SEEK_END))
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        stream.seek(start)
        newline = stream.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def is_locked(folder: Path) -> bool:
    """Return whether a run is writing the folder. Raises OSError if it cannot be opened."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: a run that has ended has a summary
        return not (folder / "summary.json").exists()
    finally:
        os.close(descriptor)
    return False


def is_run(folder: Path) -> bool:
    """Return whether this is the folder of a run, not that of an evaluation or any other one."""
    return (folder / "logs" / "easyrl.log").is_file()


def is_unstarted(folder: Path) -> bool:
    """Return whether a run ended in this folder without any result: a run may start again in it."""
    results = ("metrics.jsonl", "samples.jsonl", "summary.json", CHECKPOINTS, "model")
    has_result = any((folder / name).exists() for name in results)
    return is_run(folder) and not has_result


def has_only_inputs(folder: Path) -> bool:
    return folder.is_dir() and [path.name for path in folder.iterdir()] == [INPUTS]


def refuse_existing(folder: Path, *, but_inputs: bool = True) -> None:
    """Raise ConfigError if the path exists, unless it has nothing `but_inputs` of a new run."""
    if os.path.lexists(folder) and not (but_inputs and has_only_inputs(folder)):
        raise ConfigError(
            f"output.dir (--output): '{folder}' exists; expected a new folder, so that no run is "
            "overwritten (to continue a run: --resume)"
        )


def free_name(folder: Path) -> str:
    """Return a name for a run that follows the one in this folder: RUN-2, RUN-3, ..."""
    if folder.name in ("", ".."):  # `.`, which would give a hidden folder in it
        folder = folder.resolve()
    number = 2
    while Path(f"{folder}-{number}").exists():
        number += 1
    return f"{folder}-{number}"


def resume_hint(folder: Path) -> str:
    """Return the command that continues the run in a folder, or starts it again."""
    if checkpoints_in(folder / CHECKPOINTS):
        return f"\nto resume: easyrl grpo --resume {quote(str(folder))}"
    config_file = f"{folder}/config.yaml"
    output = str(folder) if is_unstarted(folder) else free_name(folder)
    command = f"easyrl grpo --config {quote(config_file)} --output {quote(output)}"
    return f"\nto start again (there is no checkpoint): {command}"


def finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite by None: JSON has no NaN."""
    values = dict(line)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None
    return values
