"""A packed base as a file: safetensors, row-major, so that a file written on one machine loads on any other.

    gate.codes, up.codes [E, I, H / per_code]    down.codes [E, H, I / per_code]    four bits: two in a byte, even k low
    gate.scales, ...     [E, rows, groups], fp8_block [E, ceil(rows / 128), ceil(inputs / 128)]; mxfp4: E8M0 bytes
    gate.zeros, ...      [E, rows, groups] uint8, int4_asym alone
    gate_up_bias, down_bias    where there are any

The metadata says what it is: format, sizes, group_size, scale_dtype, partitions, version, and a CRC-32 of every tensor.
Tensors are written and read an expert at a time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from .assembly import PackedWeights
from .formats import FP8_BLOCK, SCALE_NAMES
from .layout import Layout, read_expert

VERSION = "1"
OURS = "goldsmith.experts"  # the metadata's key that makes a safetensors file one of ours; its value is the version
SIZES = ("num_experts", "hidden_size", "intermediate_size", "partitions")
MATRICES = ("gate", "up", "down")
BIASES = ("gate_up_bias", "down_bias")
CRC = "crc32 "  # + a tensor's name

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass
class TensorEntry:
    """A tensor of the file: its bytes from `begin`, of which an expert has `each`; `crc` runs over them in order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0
    crc: int = 0

    @property
    def each(self) -> int:
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.each * self.shape[0]

    @property
    def header(self) -> dict[str, Any]:
        offsets = [self.begin, self.begin + self.nbytes]
        return {"dtype": DTYPES[self.dtype], "shape": list(self.shape), "data_offsets": offsets}


def entries_of(layout: Layout, biases: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    """Every tensor that a file of this layout holds, one after the other, wide dtypes first so that all are aligned."""
    E, H, I, fmt = layout.num_experts, layout.hidden_size, layout.intermediate_size, layout.kind
    found = [TensorEntry(name, *bias) for name, bias in biases.items()]
    for name, rows, inputs in (("gate", I, H), ("up", I, H), ("down", H, I)):
        found.append(TensorEntry(f"{name}.codes", fmt.codes, (E, rows, inputs // fmt.per_code)))
        if layout.scale_dtype is None:
            continue
        groups = -(-inputs // (layout.group_size or inputs))
        lines = -(-rows // FP8_BLOCK) if fmt.name == "fp8_block" else rows
        found.append(TensorEntry(f"{name}.scales", layout.scale_dtype, (E, lines, groups)))
        if fmt.zeros:
            found.append(TensorEntry(f"{name}.zeros", torch.uint8, (E, lines, groups)))
    found.sort(key=lambda entry: -entry.dtype.itemsize)
    at = 0
    for entry in found:
        entry.begin = at
        at += entry.nbytes
    return {entry.name: entry for entry in found}


def in_the_way(path: str | os.PathLike[str]) -> str | None:
    """What is at `path` that a file, renamed to there, would do away with; None for a regular file or nothing."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None  # nothing is there; what else is wrong is said by whoever writes
    return None if stat.S_ISREG(mode) else "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"


def refuse_what_is_no_file(op: str, path: str | os.PathLike[str]) -> None:
    """OSError when a file cannot take its place at `path`; a link is followed."""
    what = in_the_way(path)
    if what is not None:
        number = errno.EISDIR if what == "a folder" else errno.EINVAL
        raise OSError(number, f"{op}: this is {what}, no file; nothing was written, give another name", os.fspath(path))


# -- writing ----------------------------------------------------------------------------------------------------------


def save(weights: PackedWeights, path: str | os.PathLike[str]) -> None:
    """`weights` to a file beside `path`, which then takes its place."""
    refuse_what_is_no_file("PackedExperts.save", path)
    layout = weights.layout
    biases = {name: getattr(weights, name) for name in BIASES if getattr(weights, name) is not None}
    entries = entries_of(layout, {name: (bias.dtype, tuple(bias.shape)) for name, bias in biases.items()})
    with _told(path, sum(entry.nbytes for entry in entries.values())), replacing(path) as file:
        start = file.write(_header(layout, entries))  # checksums still 0: they take the same room
        for name, bias in biases.items():
            _write(file, start, entries[name], 0, bias)
        for e in range(layout.num_experts):
            expert = read_expert(layout, weights.gate_up, weights.down, e)
            for matrix in MATRICES:
                codes = getattr(expert, matrix)
                for part in ("codes", "scales", "zeros"):
                    if getattr(codes, part) is not None:
                        _write(file, start, entries[f"{matrix}.{part}"], e, getattr(codes, part))
        file.seek(0)
        file.write(_header(layout, entries))


def _write(file: IO[bytes], start: int, entry: TensorEntry, e: int, tensor: Tensor) -> None:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    entry.crc = zlib.crc32(data, entry.crc)
    file.seek(start + entry.begin + e * entry.each)
    file.write(data)


def _header(layout: Layout, entries: dict[str, TensorEntry]) -> bytes:
    metadata = {
        OURS: VERSION,
        "format": layout.format,
        "group_size": str(layout.group_size or ""),
        "scale_dtype": SCALE_NAMES[layout.scale_dtype] if layout.scale_dtype else "",
        **{name: str(getattr(layout, name)) for name in SIZES},
        **{CRC + name: f"{entry.crc:08x}" for name, entry in entries.items()},
    }
    content = {"__metadata__": metadata} | {name: entry.header for name, entry in entries.items()}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


@contextlib.contextmanager
def _told(path: str | os.PathLike[str], size: int) -> Iterator[None]:
    """What the system refuses, with the file's name and what it takes: the temporary file's says nothing to anybody."""
    try:
        yield
    except OSError as error:
        before = "; what was there is as it was" if os.path.exists(path) else ""
        said = f"PackedExperts.save: {error.strerror or error}; the file takes {size / 1e6:.1f} MB{before}"
        raise OSError(error.errno, said, os.fspath(path)) from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file beside `path`, on the disk and in its place when the block ends well, gone when it does not."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    handle, name = tempfile.mkstemp(prefix=f".{os.path.basename(target)}.", dir=folder)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        os.chmod(name, mode_for(target))
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    with contextlib.suppress(OSError):  # a file system that cannot sync a folder has nothing more to offer
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def mode_for(target: str | os.PathLike[str]) -> int:
    """What the file before had; for a new one what the umask leaves, since a temporary file is its owner's alone."""
    with contextlib.suppress(OSError):
        return os.stat(target).st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
