"""The file format of a store: one page of prefix, the blocks, then a JSON header.

prefix   magic, version, file size, offset and length of the JSON, its SHA-256, then the SHA-256 of all these;
         little-endian, zero-padded to 4096
blocks   from 4096 on, layer after layer, an expert every `stride` bytes
JSON     at the end, because the number of layers of an iterable source is known only then

A checksum is the first 16 bytes of SHA-256 of one section of a block. The JSON holds one hexadecimal text per layer:
for each expert in order, the checksums of gate, up, down, and of gate_up_bias and down_bias if they exist.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from ...core.json_values import parse_json
from ...core.shapes import check_choice
from ...experts._conventions import ACTIVATIONS, number
from ...experts.packed.formats import FORMATS, SCALE_NAMES
from ...experts.packed.layout import Layout
from ..errors import StoreCorrupt, StoreError
from .blocks import PACKING, PACKING_VERSION, PAGE, ExpertBlocks

MAGIC = b"GSEXPERT"
VERSION = 1
DIGEST = 16  # bytes of a checksum
SAMPLE = 8  # bytes of the digest of an expert's sample
_PREFIX = struct.Struct("<8sIIQQQ32s")
_PARTS = ("gate", "up", "down", "gate_up_bias", "down_bias")
_FLOATS = ("float32", "bfloat16", "float16", "codes")


class ActivationOptions(TypedDict):
    """The keywords of an activation, as `experts.slots` takes them."""

    activation: str
    alpha: float
    limit: float | None


@dataclass
class LayerEntry:
    """A layer of the file: its experts begin at `offset`; checksums and samples of all experts, concatenated."""

    layer: int
    experts: int
    offset: int
    checksums: bytes
    samples: bytes


@dataclass
class Header:
    """The contents of the JSON."""

    blocks: ExpertBlocks
    activation: str
    alpha: float
    limit: float | None
    source: str  # dtype of the weights from which it was built, or "codes"
    exact: bool
    fingerprint: str
    layers: list[LayerEntry]

    def summary(self) -> dict[str, Any]:
        """The JSON's contents without checksums and samples."""
        content = self._content()
        for entry in content["layers"]:
            del entry["checksums"], entry["samples"]
        return content

    def text(self) -> bytes:
        return json.dumps(self._content(), separators=(",", ":"), allow_nan=False).encode()

    def _content(self) -> dict[str, Any]:
        layout = self.blocks.layout
        return {
            "complete": True,
            "packing": {"name": PACKING, "version": PACKING_VERSION},
            "format": layout.format,
            "group_size": layout.group_size,
            "scale_dtype": SCALE_NAMES[layout.scale_dtype] if layout.scale_dtype else None,
            "hidden_size": layout.hidden_size,
            "intermediate_size": layout.intermediate_size,
            "activation": self.activation,
            "alpha": self.alpha,
            "limit": self.limit,
            "source": {"dtype": self.source, "exact": self.exact},
            "fingerprint": self.fingerprint,
            "stride": self.blocks.stride,
            "sections": {name: list(place) for name, place in self.blocks.sections.items()},
            "hash": {"name": "sha256", "bytes": DIGEST},
            "layers": [
                {
                    "layer": entry.layer,
                    "experts": entry.experts,
                    "offset": entry.offset,
                    "checksums": entry.checksums.hex(),
                    "samples": entry.samples.hex(),
                }
                for entry in self.layers
            ],
        }


def prefix(text: bytes, begin: int) -> bytes:
    """The first page of a file whose JSON `text` begins at `begin` and ends the file."""
    head = _PREFIX.pack(MAGIC, VERSION, 0, begin + len(text), begin, len(text), hashlib.sha256(text).digest())
    return (head + hashlib.sha256(head).digest()).ljust(PAGE, b"\0")


def checksum(data: bytes | memoryview) -> bytes:
    """The first 16 bytes of SHA-256 of a buffer."""
    return hashlib.sha256(data).digest()[:DIGEST]


def read(data: memoryview, path: str | os.PathLike[str], *, check: bool) -> Header:
    """The header of a mapped file. Raises StoreError for another kind of file, StoreCorrupt for a damaged store."""
    if len(data) < PAGE or bytes(data[:8]) != MAGIC:
        raise not_a_store(path, data)
    _, version, _, size, begin, length, digest = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise StoreError(
            f"ExpertStore.open: {path} has file version {version}, but this goldsmith reads version {VERSION}: "
            "update goldsmith, or build the store again"
        )
    written = bytes(data[_PREFIX.size : _PREFIX.size + 32])
    if written != hashlib.sha256(data[: _PREFIX.size]).digest():
        raise _corrupt(path, "its first page does not match its checksum")
    if check and bytes(data[_PREFIX.size + 32 : PAGE]).strip(b"\0"):
        raise _corrupt(path, "its first page has bytes after its checksum that are not zero")
    if len(data) != size:
        raise _corrupt(path, f"it has {len(data)} bytes but was written with {size}: it was truncated or appended to")
    if begin + length != size or begin % PAGE or begin < PAGE:
        raise _corrupt(path, f"its header would be {length} bytes from byte {begin} on, but the file has {size} bytes")
    text = bytes(data[begin : begin + length])
    if check and hashlib.sha256(text).digest() != digest:
        raise _corrupt(path, "its header does not match its checksum")
    try:
        return _parse(parse_json(text), begin)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, StoreError):
            raise type(error)(f"ExpertStore.open: {path}: {error}") from None
        raise _corrupt(path, f"its header is inconsistent ({error})") from None


def not_a_store(path: str | os.PathLike[str], data: memoryview) -> StoreError:
    """The error for a file that does not begin with the magic bytes of a store."""
    if bytes(data[:8]) == MAGIC:
        return _corrupt(path, f"it has {len(data)} bytes, less than its first page: it was truncated")
    what = f"begins with {bytes(data[:8])!r}" if len(data) else "is empty"
    return StoreError(f"ExpertStore.open: {path} is not a store of experts: it {what}, expected {MAGIC!r}")


def _corrupt(path: str | os.PathLike[str], why: str) -> StoreCorrupt:
    return StoreCorrupt(f"ExpertStore.open: {path} is damaged: {why}. Build it again from its source")


def _parse(content: dict[str, Any], end: int) -> Header:
    """The header from JSON; wrong content raises ValueError, KeyError, TypeError, AttributeError or OverflowError."""
    packing = content["packing"]
    if (packing["name"], packing["version"]) != (PACKING, PACKING_VERSION):
        raise StoreError(
            f"its weights are packed as {packing['name']} {packing['version']}, but this goldsmith reads {PACKING} "
            f"{PACKING_VERSION}: build the store again with this goldsmith"
        )
    if content["complete"] is not True or content["source"]["dtype"] not in _FLOATS or content["format"] not in FORMATS:
        raise ValueError(f"incomplete or unknown: format={content['format']!r}, source={content['source']!r}")
    scales = {name: dtype for dtype, name in SCALE_NAMES.items()} | {None: None}
    hidden, inner = content["hidden_size"], content["intermediate_size"]
    layout = Layout(
        content["format"], 1, hidden, inner, content["group_size"], scales[content["scale_dtype"]], (0, inner)
    )
    blocks = ExpertBlocks.of(layout, tuple(name for name in _PARTS[3:] if name in content["sections"]))
    sections = {name: tuple(place) for name, place in content["sections"].items()}
    if sections != blocks.sections or content["stride"] != blocks.stride:
        raise ValueError(
            f"sections {sections} of stride {content['stride']}, expected {blocks.sections} of {blocks.stride}"
        )
    each = DIGEST * len(blocks.sections)
    layers: list[LayerEntry] = []
    at = PAGE
    for part in content["layers"]:
        layer, experts, offset = (_whole(part[name]) for name in ("layer", "experts", "offset"))
        entry = LayerEntry(layer, experts, offset, bytes.fromhex(part["checksums"]), bytes.fromhex(part["samples"]))
        if entry.offset != at or entry.experts < 1 or len(entry.checksums) != each * entry.experts:
            raise ValueError(f"layer {entry.layer}: {entry.experts} experts at {entry.offset}, expected {at}")
        if len(entry.samples) != SAMPLE * entry.experts or any(entry.layer == other.layer for other in layers):
            raise ValueError(f"layer {entry.layer} occurs twice, or its samples are incomplete")
        layers.append(entry)
        at += blocks.stride * entry.experts
    if at != end or not layers:
        raise ValueError(f"its layers end at {at}, expected {end}")
    options, exact = checked_options("its header", content), content["source"]["exact"]
    if not isinstance(exact, bool) or not isinstance(content["fingerprint"], str):
        raise ValueError(
            f"its header has exact={exact!r}, fingerprint={content['fingerprint']!r}; expected a bool and a string"
        )
    return Header(
        blocks, **options, source=content["source"]["dtype"], exact=exact, fingerprint=content["fingerprint"],
        layers=layers,
    )  # fmt: skip


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number of at least 0, got {value!r}")
    return value


def checked_options(op: str, options: Mapping[str, object]) -> dict[str, Any]:
    """activation, alpha and limit, checked as `experts.slots` needs them and as JSON can hold them."""
    check_choice(op, "activation", options["activation"], ACTIVATIONS)
    checked: dict[str, Any] = {"activation": options["activation"]}
    for name in ("alpha", "limit"):
        value = options[name]
        if value is not None or name == "alpha":
            value = number(op, name, value)
            if not math.isfinite(value):
                raise ValueError(f"{op}: {name}={value}, expected a finite number")
        checked[name] = value
    return checked
