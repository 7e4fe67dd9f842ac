"""The weight files of a model's folder: their headers, without the weights. No torch here.

A safetensors file: the length of its header (8 bytes, little-endian), the header (JSON: name to
dtype, shape and [start, stop] in the data), the data.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from easyrl.config import ConfigError
from easyrl.data.hub import FORMS, KEY

SAFETENSORS = "model.safetensors"
INDEX = f"{SAFETENSORS}.index.json"
NARROW_DTYPES = {"BF16": "bfloat16", "F16": "float16"}  # safetensors' names
FLOAT32 = "F32"
LENGTH = struct.Struct("<Q")  # of a safetensors file's header
METADATA = "__metadata__"  # the key of a header that names no weight


class StoredWeight(NamedTuple):
    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{KEY}: '{file}' cannot be read: {error}; {FORMS}") from None


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of the safetensors files, which may be missing; empty if none is named."""
    single = folder / SAFETENSORS
    if single.is_file():
        return [single]
    index = folder / INDEX
    if not index.is_file():
        return []
    file_of_weight = read_json(index).get("weight_map", {})
    return [folder / name for name in sorted(set(file_of_weight.values()))]


def read_headers(folder: Path, *, is_whole: bool) -> dict[str, StoredWeight]:
    """Return the weights in the safetensors files of a folder by their names; empty if there are no
    such files. Unless `is_whole`, files may be missing. Raises ConfigError for incomplete ones."""
    from safetensors import SafetensorError

    files = weight_files(folder)
    if not is_whole and not all(file.is_file() for file in files):
        return {}
    weights: dict[str, StoredWeight] = {}
    for file in files:
        try:
            found = read_header(file)
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{KEY}: '{file}' is not a complete safetensors file: {error}; download or save "
                "the model again"
            ) from None
        weights |= {weight.name: weight for weight in found}
    return weights


def read_header(file: Path) -> list[StoredWeight]:
    """Return the weights of a safetensors file. Raises SafetensorError if it is not complete (cut
    off, or a pointer of Git LFS), OSError if it cannot be read."""
    from safetensors import safe_open

    with safe_open(file, framework="numpy"):  # checks the header and the file's length
        pass
    with file.open("rb") as content:
        return stored_weights(content)


def stored_weights(content: BinaryIO) -> list[StoredWeight]:
    """Read the header of an open safetensors file. Return its weights in the order of their
    data."""
    content.seek(0)
    [length] = LENGTH.unpack(content.read(LENGTH.size))
    header = json.loads(content.read(length))
    header.pop(METADATA, None)
    weights = list[StoredWeight]()
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        first = LENGTH.size + length + start
        shape = tuple(entry["shape"])
        weights.append(StoredWeight(name, entry["dtype"], shape, first, stop - start))
    return sorted(weights, key=lambda weight: (weight.start, weight.name))


def dtype_of(weights: Iterable[StoredWeight]) -> str:
    """Return torch's name of the dtype of all weights; float32 if they differ."""
    dtypes = {NARROW_DTYPES.get(weight.dtype, "float32") for weight in weights}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def main_dtype_of(weights: Iterable[StoredWeight]) -> str:
    """Return torch's name of the dtype that most elements have; float32 if there are none."""
    num_elements = Counter[str]()
    for weight in weights:
        num_elements[NARROW_DTYPES.get(weight.dtype, "float32")] += weight.num_elements
    return max(num_elements, key=num_elements.__getitem__, default="float32")
