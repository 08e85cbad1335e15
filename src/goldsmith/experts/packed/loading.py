"""Loading of saved weights, an expert at a time; errors name the tensor or the metadata key."""

from __future__ import annotations

import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, TypeAlias, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from ...core.json_values import parse_json
from .assembly import PackedWeights, assemble, check_nodes, cut
from .files import BIASES, CRC, DTYPES, MATRICES, OURS, SIZES, VERSION, TensorEntry, entries_of
from .formats import FORMATS, SCALE_NAMES, Codes
from .inputs import MOST_PARTITIONS
from .layout import Expert, Layout
from .memory import frozen

_OP = "PackedExperts.load"
_MAX_HEADER = 100_000_000  # bytes, as in safetensors

Path: TypeAlias = str | os.PathLike[str]
Known = TypeVar("Known")
Header: TypeAlias = dict[str, Any]  # parsed JSON, checked where it is used


class TensorHeader(TypedDict):
    """A tensor's entry in a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


Read = Callable[[int, int], bytearray]  # (begin, size) -> bytes of the file's tensor section


def load(path: Path, partitions: int | None, nodes: Sequence[int] | None, mapped: bool) -> PackedWeights:
    """The packed weights in a file that `save` wrote."""
    with open(path, "rb") as file, frozen():
        content, start, size = _content(file, path)
        metadata = content["__metadata__"]
        layout = _layout(metadata, path)
        slices = layout.partitions if partitions is None else partitions
        layout = cut(layout, slices, _OP)
        chosen = check_nodes(_OP, slices, nodes)
        entries = _entries(layout, content, size - start, path)
        read = _reader(file, start, mapped)
        biases = {name: _tensor(read, entries[name], None) for name in BIASES if name in entries}
        experts = _experts(read, layout, entries)
        base = assemble(layout, experts, None, (biases.get(BIASES[0]), biases.get(BIASES[1])), chosen)
    for name, entry in entries.items():
        if metadata.get(CRC + name) != f"{entry.crc:08x}":
            raise _damaged(path, f"the bytes of {name} have changed since it was saved (its checksum does not match)")
    return base


def _experts(read: Read, layout: Layout, entries: dict[str, TensorEntry]) -> Iterator[Expert]:
    for e in range(layout.num_experts):
        yield Expert(*(_codes(read, entries, matrix, e) for matrix in MATRICES))


def _codes(read: Read, entries: dict[str, TensorEntry], matrix: str, e: int) -> Codes:
    parts = [part for part in ("codes", "scales", "zeros") if f"{matrix}.{part}" in entries]
    return Codes(**{part: _tensor(read, entries[f"{matrix}.{part}"], e) for part in parts})


def _tensor(read: Read, entry: TensorEntry, e: int | None) -> Tensor:
    """An expert's part of a tensor, or the whole tensor if e is None; updates the checksum."""
    data = read(entry.begin, entry.nbytes) if e is None else read(entry.begin + e * entry.each, entry.each)
    entry.crc = zlib.crc32(data, entry.crc)
    shape = entry.shape if e is None else entry.shape[1:]
    return torch.frombuffer(data, dtype=torch.uint8).view(entry.dtype).view(shape)


def _reader(file: IO[bytes], start: int, mapped: bool) -> Read:
    if mapped:
        pages = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return lambda begin, size: bytearray(pages[start + begin : start + begin + size])

    def read(begin: int, size: int) -> bytearray:
        file.seek(start + begin)
        data = bytearray(size)
        if file.readinto(data) != size:  # type: ignore[attr-defined]
            raise OSError(f"{_OP}: {file.name} was truncated while it was read")
        return data

    return read


# -- validation -------------------------------------------------------------------------------------------------------


def _foreign(path: Path, why: str) -> ValueError:
    return ValueError(f"{_OP}: {path} is not a file that PackedExperts.save wrote: {why}")


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{_OP}: {path} is damaged: {why}. Save it again from its source")


def _content(file: IO[bytes], path: Path) -> tuple[Header, int, int]:
    """(header, offset of the first tensor, size of the file)"""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 10 or not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise _foreign(path, f"its {size} bytes have no safetensors header")
    try:
        content = parse_json(file.read(length))
    except ValueError:
        raise _foreign(path, "its header is not JSON") from None
    metadata = content.get("__metadata__") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or OURS not in metadata:
        keys = ", ".join(map(repr, metadata)) if isinstance(metadata, dict) else ""
        raise _foreign(path, f"its metadata has no key {OURS!r} (keys: {keys or 'none'})")
    if metadata[OURS] != VERSION:
        raise ValueError(
            f"{_OP}: {path}: the metadata's {OURS!r} is {metadata[OURS]!r}, but this goldsmith reads {VERSION!r}: "
            "load it with the version of goldsmith that wrote it, or update goldsmith"
        )
    return content, 8 + length, size


def _layout(metadata: dict[str, object], path: Path) -> Layout:
    def number(key: str) -> int:
        text = metadata.get(key)
        if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
            raise _damaged(path, f"the metadata's {key!r} is {text!r}, expected a number of at least 1")
        return int(text)

    def named(key: str, known: dict[str, Known]) -> Known:
        text = metadata.get(key)
        if not isinstance(text, str) or text not in known:
            raise _damaged(path, f"the metadata's {key!r} is {text!r}, expected one of {', '.join(map(repr, known))}")
        return known[text]

    sizes = {key: number(key) for key in SIZES}
    fmt = named("format", FORMATS)
    scale = named("scale_dtype", {name: dtype for dtype, name in SCALE_NAMES.items()} | {"": None})
    group = None if metadata.get("group_size") == "" else number("group_size")
    partitions, inner = sizes.pop("partitions"), sizes["intermediate_size"]
    if partitions > MOST_PARTITIONS:
        raise _damaged(path, f"the metadata's 'partitions' is {partitions}, expected at most {MOST_PARTITIONS}")
    try:
        layout = Layout(fmt.name, **sizes, group_size=group, scale_dtype=scale, cuts=(0, inner))
    except ValueError as error:
        raise _damaged(path, f"its metadata is inconsistent ({error})") from None
    return cut(layout, partitions, _OP)


def _entries(layout: Layout, content: Header, room: int, path: Path) -> dict[str, TensorEntry]:
    """The entry of each tensor of the layout; raises unless the file holds exactly these tensors, each complete."""
    headers = {name: _header(content, name, path) for name in content if name != "__metadata__"}
    dtypes = {text: dtype for dtype, text in DTYPES.items()}
    biases = {}
    for name, width in zip(BIASES, (2 * layout.intermediate_size, layout.hidden_size)):
        if name in headers:
            if headers[name]["dtype"] not in ("F32", "BF16", "F16"):
                raise _damaged(path, f"{name} has dtype {headers[name]['dtype']!r}, expected F32, BF16 or F16")
            biases[name] = (dtypes[headers[name]["dtype"]], (layout.num_experts, width))
    entries = entries_of(layout, biases)
    for name in [*entries, *headers]:
        if name not in headers:
            raise _damaged(path, f"the tensor {name!r} is missing")
        if name not in entries:
            raise _damaged(path, f"there is no tensor {name!r} in the format {layout.format}")
    for name, entry in entries.items():
        for key in ("dtype", "shape"):
            if headers[name][key] != entry.header[key]:
                raise _damaged(path, f"{name} has {key} {headers[name][key]!r}, expected {entry.header[key]!r}")
        begin, end = headers[name]["data_offsets"]
        if begin < 0:
            raise _damaged(path, f"{name} begins before the first tensor: data_offsets {[begin, end]}")
        if end - begin != entry.nbytes:
            raise _damaged(path, f"{name} has {end - begin} bytes by its data_offsets, expected {entry.nbytes}")
        if end > room:
            raise _damaged(path, f"{name} is truncated: the file is {end - room} bytes too short for it")
        entry.begin = begin
    return entries


def _header(content: Header, name: str, path: Path) -> TensorHeader:
    """A tensor's entry in the header; raises unless it has the keys and types of safetensors."""
    header = content[name]
    if isinstance(header, dict):
        numbers = [header.get("shape"), header.get("data_offsets")]
        lists = all(isinstance(part, list) and all(type(n) is int for n in part) for part in numbers)
        if isinstance(header.get("dtype"), str) and lists and len(header["data_offsets"]) == 2:
            return cast(TensorHeader, header)
    raise _damaged(path, f"the header's entry of {name!r} is not a dtype, a shape and two data_offsets")
