"""Reads and writes safetensors: arrays by name, behind a JSON header; nothing in such a file is executed.

The file is 8 bytes with the length of the header, the header, and the arrays' bytes one after the other, all little-endian.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewise.core.errors import InputError
from placewise.formats.files import describe, parse_json, read_bytes, write_bytes

TYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}

MAX_HEADER = 2**24  # bytes

MAX_DIMENSIONS, MAX_SIZE = 32, 2**40  # of a shape; numpy refuses far larger ones

Arrays = dict[str, NDArray[Any]]


def write_safetensors(
    arrays: Mapping[str, NDArray[Any]], path: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays of float32, float64 or int64 to a file."""
    write_bytes(path, to_safetensors(arrays, metadata))


def read_safetensors(path: str | Path, error: type[InputError]) -> tuple[Arrays, dict[str, str]]:
    """Returns the arrays and the metadata of a file; an error names the file and the rule that does not hold."""
    return from_safetensors(read_bytes(path, error), str(path), error)


def to_safetensors(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns arrays as the bytes of a file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts, offset = list[bytes](), 0
    for name, array in arrays.items():
        kind = next(kind for kind, code in TYPES.items() if np.dtype(code) == array.dtype)
        parts.append(np.ascontiguousarray(array, TYPES[kind]).tobytes())
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, offset + len(parts[-1])]}
        offset += len(parts[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def from_safetensors(data: bytes, source: str, error: type[InputError]) -> tuple[Arrays, dict[str, str]]:
    """Returns the arrays and the metadata in the bytes of a file."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER):
        raise error(f"{source}: is not a safetensors file: its header has no end")
    header, body = parse_json(source, data[8 : 8 + length], error), data[8 + length :]
    if not isinstance(header, dict):
        raise error(f"{source}: is not a safetensors file: its header must be a dict")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise error(f"{source}: __metadata__ must be a dict of texts")
    return {name: _array(name, entry, body, source, error) for name, entry in header.items()}, metadata


def _array(name: str, entry: Any, body: bytes, source: str, error: type[InputError]) -> NDArray[Any]:
    wrong = f"{source}: {describe(name)}"
    if not isinstance(entry, dict) or entry.get("dtype") not in [*TYPES]:  # of any type
        raise error(f"{wrong}: dtype must be one of {', '.join(TYPES)}")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    for field, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(number) is int and 0 <= number < 2**48 for number in value):
            raise error(f"{wrong}: {field} must be a list of whole numbers of at least 0")
    kind = np.dtype(TYPES[entry["dtype"]])
    if len(shape) > MAX_DIMENSIONS or math.prod(max(number, 1) for number in shape) > MAX_SIZE:
        raise error(f"{wrong}: shape must have at most {MAX_DIMENSIONS} dimensions and {MAX_SIZE:,} entries")
    size = kind.itemsize * math.prod(shape)
    if len(offsets) != 2 or offsets[1] - offsets[0] != size or offsets[1] > len(body):
        raise error(f"{wrong}: data_offsets must be {size:,} bytes apart and inside the file, they are {offsets}")
    array = np.frombuffer(body[offsets[0] : offsets[1]], kind).reshape(shape)
    return array.astype(kind.newbyteorder("="))
