"""Packed weights as a safetensors file: row-major, so that a file written on one machine loads on any other.

    gate.codes, up.codes [E, I, H / per_code]    down.codes [E, H, I / per_code]    four bits: two in a byte, even k low
    gate.scales, ...     [E, rows, groups], fp8_block [E, ceil(rows / 128), ceil(inputs / 128)]; mxfp4: E8M0 bytes
    gate.zeros, ...      [E, rows, groups] uint8, int4_asym alone
    gate_up_bias, down_bias    if the base has biases

The metadata holds format, sizes, group_size, scale_dtype, partitions, version, and a CRC-32 of every tensor.
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
from typing import IO

import torch
from torch import Tensor

from .assembly import PackedWeights
from .formats import FP8_BLOCK, SCALE_NAMES
from .layout import Layout, read_expert

VERSION = "1"
OURS = "goldsmith.experts"  # the metadata key that identifies our files; its value is the version
SIZES = ("num_experts", "hidden_size", "intermediate_size", "partitions")
MATRICES = ("gate", "up", "down")
BIASES = ("gate_up_bias", "down_bias")
CRC = "crc32 "  # followed by a tensor's name

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
    """A tensor of the file: its bytes start at `begin`, an expert has `each` of them; `crc` is their running CRC-32."""

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
    def header(self) -> dict[str, object]:
        offsets = [self.begin, self.begin + self.nbytes]
        return {"dtype": DTYPES[self.dtype], "shape": list(self.shape), "data_offsets": offsets}


def entries_of(layout: Layout, biases: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    """All tensors of a file with this layout, by name: wide dtypes come first, so that every tensor is aligned."""
    E, H, I, fmt = layout.num_experts, layout.hidden_size, layout.intermediate_size, layout.kind
    entries = [TensorEntry(name, *bias) for name, bias in biases.items()]
    for name, rows, inputs in (("gate", I, H), ("up", I, H), ("down", H, I)):
        entries.append(TensorEntry(f"{name}.codes", fmt.codes, (E, rows, inputs // fmt.per_code)))
        if layout.scale_dtype is None:
            continue
        groups = -(-inputs // (layout.group_size or inputs))
        lines = -(-rows // FP8_BLOCK) if fmt.name == "fp8_block" else rows
        entries.append(TensorEntry(f"{name}.scales", layout.scale_dtype, (E, lines, groups)))
        if fmt.zeros:
            entries.append(TensorEntry(f"{name}.zeros", torch.uint8, (E, lines, groups)))
    entries.sort(key=lambda entry: -entry.dtype.itemsize)
    at = 0
    for entry in entries:
        entry.begin = at
        at += entry.nbytes
    return {entry.name: entry for entry in entries}


def in_the_way(path: str | os.PathLike[str]) -> str | None:
    """The kind of thing at `path` that renaming a file onto it would destroy; None for a regular file or nothing."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None  # nothing there; the writer reports any other problem
    return None if stat.S_ISREG(mode) else "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"


def refuse_what_is_no_file(op: str, path: str | os.PathLike[str]) -> None:
    """Raise OSError if `path` is not a regular file and not free; links are followed."""
    what = in_the_way(path)
    if what is not None:
        number = errno.EISDIR if what == "a folder" else errno.EINVAL
        raise OSError(
            number, f"{op}: the path is {what}, not a file; nothing was written, use another path", os.fspath(path)
        )


# -- writing ----------------------------------------------------------------------------------------------------------


def save(weights: PackedWeights, path: str | os.PathLike[str]) -> None:
    """Write `weights` to a temporary file beside `path`, then rename it to `path`."""
    refuse_what_is_no_file("PackedExperts.save", path)
    layout = weights.layout
    biases = {name: getattr(weights, name) for name in BIASES if getattr(weights, name) is not None}
    entries = entries_of(layout, {name: (bias.dtype, tuple(bias.shape)) for name, bias in biases.items()})
    with _explained(path, sum(entry.nbytes for entry in entries.values())), replacing(path) as file:
        start = file.write(_header(layout, entries))  # checksums are still 0, but the header's length is final
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
def _explained(path: str | os.PathLike[str], size: int) -> Iterator[None]:
    """Raise an OSError again with the file's own name and size, because the temporary file's name means nothing."""
    try:
        yield
    except OSError as error:
        before = "; the previous file is unchanged" if os.path.exists(path) else ""
        message = f"PackedExperts.save: {error.strerror or error}; the file needs {size / 1e6:.1f} MB{before}"
        raise OSError(error.errno, message, os.fspath(path)) from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A temporary file beside `path`: synced and renamed to `path` if the block succeeds, removed if it fails."""
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
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def mode_for(target: str | os.PathLike[str]) -> int:
    """The mode of the existing file, or the umask's default for a new one: a temporary file has mode 600."""
    with contextlib.suppress(OSError):
        return os.stat(target).st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
