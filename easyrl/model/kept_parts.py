"""The parts of a model's folder that a run does not train, written as the source has them.

    source/  config.json                         config.json, with the dtype of the written weights
             preprocessor_config.json, …   ──►   the same files
             *.safetensors, kept names     ──►   model-0000N-of-0000M.safetensors, byte for byte
             *.safetensors, other names          (the trained weights are written by transformers)

Weights are copied in pieces from file to file: none is whole in memory. The source's files are open
from the beginning, so they can be read even if the folder is removed during a run. No torch here.
"""

import json
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from easyrl.model.weight_files import INDEX, LENGTH, METADATA, StoredWeight, stored_weights

ALIGNMENT = 8  # bytes, of the data behind the header
PIECE_BYTES = 2**24  # copied at a time
CONFIG = "config.json"
WEIGHTS = "model*.safetensors"
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of config.json that name the weights' dtype; the second is the older one."""
PROCESSOR_FILES = ("*processor*.json", "chat_template*", "audio_tokenizer*.json")
"""Patterns of the files from which transformers makes a processor: what a tower gets."""


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A safetensors file of the source, and those of its weights that are kept, in its order."""

    content: BinaryIO
    kept: Sequence[StoredWeight]


class KeptParts:
    """What a run keeps of the folder of a model."""

    def __init__(self, folder: Path, files: Iterable[Path], names: Collection[str]) -> None:
        """`files`: the source's weight files; `names`: those of the kept weights in them."""
        self._config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        self._processor: dict[str, bytes] = {}
        for pattern in PROCESSOR_FILES:
            for file in folder.glob(pattern):
                if file.is_file():
                    self._processor[file.name] = file.read_bytes()
        self._files = list[_OpenFile]()
        for path in sorted(files):
            content = path.open("rb")
            kept = [weight for weight in stored_weights(content) if weight.name in names]
            if kept:
                self._files.append(_OpenFile(content, kept))
            else:
                content.close()

    def write(self, folder: Path) -> None:
        """Add the kept parts to a folder to which transformers has written the trained weights, the
        configuration and the tokenizer. Raises OSError."""
        for name, content in self._processor.items():
            if not (folder / name).exists():  # the tokenizer's template may be another one
                (folder / name).write_bytes(content)
        self._write_config(folder / CONFIG)
        if self._files:
            self._write_weights(folder)

    def _write_config(self, file: Path) -> None:
        """Replace the configuration by the source's, with the dtype of the weights as written."""
        written = _read_json(file)
        config = dict(self._config)
        if _vocabulary_size(config) not in (None, _vocabulary_size(written)):
            # Embeddings were added: transformers knows where their number stands.
            config = written | {"architectures": config.get("architectures")}
        parts = [config]
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = dict(config["text_config"])
            parts.append(config["text_config"])
        for part in parts:
            for key in DTYPE_KEYS:
                if key in part:
                    part[key] = written["dtype"]
        if not any(key in config for key in DTYPE_KEYS):
            config["dtype"] = written["dtype"]
        _write_json(file, config)

    def _write_weights(self, folder: Path) -> None:
        """Write the kept weights beside the trained ones, and the index of all files."""
        trained = sorted(folder.glob(WEIGHTS))
        num_files = len(trained) + len(self._files)
        file_of_weight: dict[str, str] = {}
        num_bytes = 0
        for number, old in enumerate(trained):
            file = old.rename(folder / _file_name(number, num_files))
            with file.open("rb") as content:
                for weight in stored_weights(content):
                    file_of_weight[weight.name] = file.name
                    num_bytes += weight.num_bytes
        for number, source in enumerate(self._files, start=len(trained)):
            _check_unchanged(source)
            # A weight that is trained after all counts as trained.
            kept = [weight for weight in source.kept if weight.name not in file_of_weight]
            file = folder / _file_name(number, num_files)
            with file.open("wb") as target:
                _copy_weights(source.content, kept, target)
            for weight in kept:
                file_of_weight[weight.name] = file.name
                num_bytes += weight.num_bytes
        index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of_weight}
        _write_json(folder / INDEX, index)


def _file_name(number: int, num_files: int) -> str:
    """Return the name of a model's weight file, as transformers names several of them."""
    return f"model-{number + 1:05}-of-{num_files:05}.safetensors"


def _check_unchanged(source: _OpenFile) -> None:
    """Raise OSError if a file of the source has other weights than when it was opened."""
    try:
        found = set(stored_weights(source.content))
    except (ValueError, struct.error):  # its header was overwritten, or is no longer there
        found = set()
    if not found.issuperset(source.kept):
        raise OSError(f"'{source.content.name}' has changed since the model was loaded")


def _copy_weights(source: BinaryIO, kept: Sequence[StoredWeight], target: BinaryIO) -> None:
    """Write a safetensors file with some weights of another one. They have the order of the source,
    in which the data of every dtype are aligned."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    num_bytes = 0
    for weight in kept:
        offsets = [num_bytes, num_bytes + weight.num_bytes]
        header[weight.name] = {
            "dtype": weight.dtype,
            "shape": weight.shape,
            "data_offsets": offsets,
        }
        num_bytes = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    target.write(LENGTH.pack(len(text)))
    target.write(text)
    for weight in kept:
        _copy_bytes(source, weight.start, weight.num_bytes, target)


def _copy_bytes(source: BinaryIO, start: int, num_bytes: int, target: BinaryIO) -> None:
    source.seek(start)
    num_left = num_bytes
    while num_left > 0:
        piece = source.read(min(num_left, PIECE_BYTES))
        if not piece:
            raise OSError(f"'{source.name}' is shorter than when the model was loaded")
        target.write(piece)
        num_left -= len(piece)


def _vocabulary_size(config: dict[str, Any]) -> int | None:
    text_config = config.get("text_config") or config
    size: int | None = text_config.get("vocab_size")
    return size


def _read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
