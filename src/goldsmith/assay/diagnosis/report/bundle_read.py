"""Reads bundles from untrusted sources: checks every number before it uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCHEMA = 1
JSON = "bundle.json"
FILES = ("inputs", "golden", "outputs")
MOST_JSON = 16 << 20
MOST_ELEMENTS = 1 << 34
MOST_REPEATED = 1 << 30  # bytes by which a dense copy of a tensor may exceed the bytes in its file
MOST_AXES = 64
DTYPES = {
    name: dtype
    for name in (
        "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
        "float8_e4m3fn float8_e5m2"
    ).split()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
TEXTS = ("target", "case", "dtype", "device", "verdict")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], dict[str, Any]]:
    """(tensors of the three files, scalars, bundle.json) of a bundle's folder."""
    meta = _meta(path)
    left_out = meta["left_out"]
    parts = {part: {} if part in left_out else _tensors(path, part, meta) for part in FILES}
    try:
        scalars = {name: _scalar(f"scalars.{name}", value) for name, value in meta["scalars"].items()}
    except RecursionError as error:
        raise ValueError(f"{JSON}: scalars are nested too deep") from error
    both = sorted(set(scalars) & set(parts["inputs"]))
    if both:
        raise ValueError(f"bundle {path.name}: {both[0]!r} is an input and a scalar")
    order, known = meta.get("order", []), [*parts["inputs"], *scalars]  # bundles of earlier versions have no order
    if not isinstance(order, list) or any(name not in known for name in order):
        raise ValueError(f"{JSON}: 'order' names something else than inputs and scalars: {str(order)[:80]}")
    if len(set(order)) < len(order):
        raise ValueError(f"{JSON}: 'order' names something twice: {str(order)[:80]}")
    return parts, scalars, meta


def _meta(path: Path) -> dict[str, Any]:
    file = _regular(path / JSON)
    if file.stat().st_size > MOST_JSON:
        raise ValueError(f"{JSON}: {file.stat().st_size} bytes; at most {MOST_JSON} are read")
    try:
        meta = json.loads(file.read_bytes(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{JSON}: cannot be read: {error}") from error
    if not isinstance(meta, dict) or type(meta.get("schema")) is not int or meta["schema"] != SCHEMA:
        schema = meta.get("schema") if isinstance(meta, dict) else None
        raise ValueError(f"{JSON}: schema {repr(schema)[:80]}; this version reads {SCHEMA}")
    wanted: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(TEXTS, str), "seed": int, "threads": int, "sizes": dict, "scalars": dict, "versions": dict,
        "layouts": dict, "tensors": dict, "causes": list, "left_out": list, "stage": (str, type(None)),
    }  # fmt: skip
    for name, kind in wanted.items():
        if name not in meta or not isinstance(meta[name], kind) or isinstance(meta[name], bool):
            raise ValueError(f"{JSON}: {name!r} is missing or of the wrong type: {str(meta.get(name))[:80]!r}")
    if meta["dtype"] not in DTYPES:
        raise ValueError(f"{JSON}: unknown dtype {meta['dtype'][:80]!r}; known: {', '.join(DTYPES)}")
    if not 0 <= meta["seed"] < 2**63 or not 1 <= meta["threads"] < 2**16:
        seed, threads = (
            f"{number:.4g}" if abs(number) < 2**64 else "of more than 64 bits"
            for number in (meta["seed"], meta["threads"])
        )
        raise ValueError(f"{JSON}: seed {seed} or threads {threads} out of range")
    if any(part not in ("golden", "outputs") for part in meta["left_out"]):
        raise ValueError(f"{JSON}: left_out is {str(meta['left_out'])[:80]}; it may name only golden and outputs")
    for name in ("layouts", "versions"):
        if not all(isinstance(value, str) for value in meta[name].values()):
            raise ValueError(f"{JSON}: {name!r} has a value that is not text")
    return meta


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _regular(file: Path) -> Path:
    if file.is_symlink() or not file.is_file():
        raise ValueError(f"bundle {file.parent.name}: has no file {file.name}")
    return file


def _tensors(path: Path, part: str, meta: dict[str, Any]) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    entries = meta["tensors"].get(part)
    if not isinstance(entries, dict):
        raise ValueError(f"{JSON}: has no entry for the tensors of {part}")
    file = _regular(path / f"{part}.safetensors")
    buffers: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as stored:
            keys = set(stored.keys())
            for name, entry in entries.items():
                label = f"{part}.{name}"
                key = entry.get("key") if isinstance(entry, dict) else None
                if not isinstance(key, str) or key not in keys:
                    raise ValueError(f"{label}: lies in {str(entry)[:80]}, which {file.name} does not hold")
                if key not in buffers:
                    buffers[key] = _bytes(stored.get_tensor(key))
                tensors[name] = _rebuilt(label, entry, buffers[key])
    except (SafetensorError, OSError, RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"{file.name}: cannot be read: {error}") from error
    return tensors


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes in a storage of their own, which ends where they end."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


def _rebuilt(label: str, entry: dict[str, Any], raw: Tensor) -> Tensor:
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if dtype is None:
        raise ValueError(f"{label}: unknown dtype {str(entry.get('dtype'))[:80]!r}; known: {', '.join(DTYPES)}")
    shape, stride = _list(entry.get("shape")), _list(entry.get("stride"))
    offset: Any = entry.get("offset")
    numbers = [*shape, *stride, offset]
    if any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
        raise ValueError(f"{label}: shape, stride and offset must be whole numbers from 0, got {str(entry)[:200]}")
    if len(shape) != len(stride) or len(shape) > MOST_AXES:
        raise ValueError(f"{label}: {len(shape)} sizes with {len(stride)} strides")
    elements = 1
    for size in shape:
        elements *= size
    if elements > MOST_ELEMENTS or (elements == 0 and max(shape) > MOST_ELEMENTS):
        raise ValueError(f"{label}: {elements} elements; at most {MOST_ELEMENTS} are read")
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    end = (last + 1) * dtype.itemsize if elements else offset * dtype.itemsize
    if end > raw.numel():
        raise ValueError(f"{label}: shape {shape}, strides {stride}, offset {offset} leave its {raw.numel()} bytes")
    dense = elements * dtype.itemsize
    if dense > raw.numel() + MOST_REPEATED:
        size_text = f"shape {shape} with strides {stride} repeats its {raw.numel()} bytes to {dense} in a dense copy"
        raise ValueError(f"{label}: {size_text}; at most {MOST_REPEATED} more are read")
    place = (raw.untyped_storage(), offset, tuple(shape), tuple(stride))
    if dtype is torch.bool and bool((torch.empty(0, dtype=torch.uint8).set_(*place) > 1).any()):
        raise ValueError(f"{label}: holds bytes that are neither 0 nor 1, but its dtype is bool")
    return torch.empty(0, dtype=dtype).set_(*place)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _scalar(label: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "float" and isinstance(inner, str) and re.fullmatch(r"[-+0-9a-fxp.in]{1,40}", inner):
            try:
                return float.fromhex(inner)
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{label}: {inner!r} is not a number") from error
        if kind == "dtype" and isinstance(inner, str) and inner in DTYPES:
            return DTYPES[inner]
        if kind in ("list", "tuple") and isinstance(inner, list):
            items = [_scalar(label, item) for item in inner]
            return items if kind == "list" else tuple(items)
        if kind == "text" and isinstance(inner, str):
            return inner
    raise ValueError(f"{label}: cannot be read: {str(value)[:80]}")
