"""The header of a GGUF file, read with every length checked against the file's size.

The package gguf believes a file's own counts: a changed byte can make it loop for hours. This reader comes first and
names what is wrong; it skips the elements of long arrays.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
DIMENSIONS = 4


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    fields: the scalars and strings of the metadata; tensors: name -> (shape, outermost axis first; ggml type).
    """

    architecture: str
    fields: dict[str, object]
    tensors: dict[str, tuple[tuple[int, ...], int]]


def check_header(file: Path) -> GgufHeader:
    """The header; raises ValueError for a file that is not GGUF, is cut off, or contradicts itself."""
    stat = file.stat()
    return _read(file, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read(file: Path, size: int, changed: int) -> GgufHeader:
    if size < 24:
        raise ValueError(f"{file}: not a whole GGUF file: it has {size} bytes")
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, size)
        try:
            return _parsed(file, cursor)
        except (struct.error, _BeyondFile):
            message = "it ends inside its header, or a length in it is wrong"
        except UnicodeDecodeError:
            message = "a name in its header is not text"
    raise ValueError(f"{file}: not a whole GGUF file: {message}")


class _BeyondFile(Exception):
    """A length that reaches beyond the file."""


class _Cursor:
    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.data, self.size, self.at = data, size, 0

    def number(self, form: str) -> int | float | bool:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def count(self, form: str = "<Q") -> int:
        return int(self.number(form))

    def skip(self, size: int) -> None:
        if size > self.size - self.at:
            raise _BeyondFile
        self.at += size

    def text(self) -> str:
        length, begin = self.count(), self.at
        self.skip(length)
        return bytes(self.data[begin : self.at]).decode()

    def value(self, kind: int) -> object:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise _BeyondFile
        inner, length = self.count("<I"), self.count()
        if inner in SCALARS:
            self.skip(length * struct.calcsize(SCALARS[inner]))
            return None
        if length > self.size - self.at:  # every element takes at least a byte
            raise _BeyondFile
        for _ in range(length):
            if inner == STRING:
                self.skip(self.count())
            else:
                self.value(inner)
        return None


def _parsed(file: Path, cursor: _Cursor) -> GgufHeader:
    if cursor.data[:4] != b"GGUF":
        raise ValueError(f"{file}: not a GGUF file: it does not begin with the letters GGUF")
    cursor.at = 4
    version = cursor.count("<I")
    if version not in VERSIONS:
        raise ValueError(f"{file}: GGUF of version {version}; supported are 2 and 3, little-endian")
    tensor_count, field_count = cursor.count(), cursor.count()
    fields: dict[str, object] = {}
    for _ in range(field_count):
        name = cursor.text()
        if name in fields:
            raise ValueError(f"{file}: its metadata has {name} twice")
        fields[name] = cursor.value(cursor.count("<I"))
    places = []
    tensors: dict[str, tuple[tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name, rank = cursor.text(), cursor.count("<I")
        if rank > DIMENSIONS or name in tensors:
            raise ValueError(f"{file}: the tensor {name} is there twice, or has {rank} dimensions")
        shape = tuple(cursor.count() for _ in range(rank))[::-1]
        kind = cursor.count("<I")
        tensors[name] = shape, kind
        places.append((name, shape, kind, cursor.count()))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{file}: general.alignment is {alignment}, expected a power of two")
    begin = -(-cursor.at // alignment) * alignment
    for place in places:
        _check_place(file, *place, begin=begin, size=cursor.size)
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"{file}: its metadata has no general.architecture")
    return GgufHeader(architecture, fields, tensors)


def _check_place(
    file: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, *, begin: int, size: int
) -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        per_block, bytes_per_block = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ValueError(f"{file}: {name} has the type {kind}, which this version of the package gguf lacks") from None
    count = math.prod(shape)
    if not count:
        raise ValueError(f"{file}: {name} is {list(shape)}: it has no elements")
    if not shape or shape[-1] % per_block:
        raise ValueError(f"{file}: {name} is {list(shape)}, but its type has blocks of {per_block}")
    end = begin + offset + count // per_block * bytes_per_block
    if end > size:
        raise ValueError(f"{file}: not a whole GGUF file: {name} ends at byte {end:,}, but the file has {size:,}")
