"""Values as tagged JSON, and tensors as raw bytes beside it. Decoding executes nothing.

Numbers, strings, None and lists stand for themselves. Everything else is a one-key object: {"tuple": [...]},
{"dict": [[key, value], ...]}, {"tensor": index}, {"dtype": "float32"}, ...
"""

from __future__ import annotations

import base64
import ctypes
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .protocol import Connection, Malformed

_DEPTH = 60  # of nested values
_LARGEST = 1 << 36  # bytes of a tensor
_EXPANDED = 1 << 24  # elements of one that spans fewer bytes than it has elements, all of which a copy of it takes


class Unsendable(TypeError):
    """A value that has no encoding."""


@dataclass(frozen=True)
class Spans:
    """Tensors as bytes: a row [dtype, shape, stride, bytes] for each, and the bytes."""

    table: list[list[object]]
    bytes: list[memoryview]
    owners: list[Tensor]  # keep the memory alive


def send(connection: Connection, number: int, value: object, *, pickled: bool = False) -> None:
    """Sends a value; raises Unsendable for one without an encoding."""
    tensors: list[Tensor] = []
    body = encode(value, tensors, pickled=pickled)
    spans = spans_of(tensors)
    connection.send(number, {"body": body, "tensors": spans.table}, spans.bytes)


def receive(connection: Connection, until: float | None = None, *, pickled: bool = False) -> tuple[int, Any]:
    """(number, value) of the next message. pickled: the other end is trusted, and may have pickled values."""
    number, message, data = connection.receive(until)
    if not isinstance(message, dict) or message.keys() != {"body", "tensors"}:
        raise Malformed("a message without body and tensors")
    return number, decode(message["body"], message["tensors"], data, pickled=pickled)


def encode(value: object, tensors: list[Tensor], *, pickled: bool = False) -> object:
    """The value as JSON; its tensors are appended to `tensors`. pickled: pickle what has no encoding."""

    def inner(v: object) -> object:
        if v is None or isinstance(v, bool | str):
            return v
        if type(v) in (int, float):
            return v
        if isinstance(v, Tensor):
            tensors.append(v)
            return {"tensor": len(tensors) - 1}
        if isinstance(v, torch.Size) or type(v) is tuple:
            return {"tuple": [inner(x) for x in v]}
        if type(v) is list:
            return [inner(x) for x in v]
        if type(v) is set or type(v) is frozenset:
            return {"set": [inner(x) for x in v]}
        if isinstance(v, Mapping) and (type(v) is dict or not pickled):
            return {"dict": [[inner(k), inner(x)] for k, x in v.items()]}
        if isinstance(v, torch.dtype):
            return {"dtype": str(v).removeprefix("torch.")}
        if isinstance(v, torch.device):
            return {"device": str(v)}
        if type(v) is complex:
            return {"complex": [v.real, v.imag]}
        if type(v) is bytes:
            return {"bytes": base64.b64encode(v).decode()}
        if pickled:
            try:
                return {"pickle": base64.b64encode(pickle.dumps(v)).decode()}
            except Exception as error:
                raise Unsendable(f"{type(v).__name__} {v!r}"[:200]) from error
        raise Unsendable(f"{type(v).__name__} {v!r}"[:200])

    return inner(value)


def spans_of(tensors: list[Tensor]) -> Spans:
    table, spans, owners = [], [], []
    for t in tensors:
        flat, stride = _flat(t.detach())
        size = flat.numel() * flat.element_size()
        table.append([str(flat.dtype).removeprefix("torch."), list(t.shape), stride, size, str(t.device)])
        owners.append(flat)
        spans.append(_memory(flat.data_ptr(), size) if size else memoryview(b""))
    return Spans(table, spans, owners)


def _flat(t: Tensor) -> tuple[Tensor, list[int]]:
    """The memory that a tensor spans, as one row on the CPU, and the strides to read it with."""
    if t.numel() == 0:
        return torch.empty(0, dtype=t.dtype), list(t.stride())
    if t.is_conj() or t.is_neg():
        t = t.clone()
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if span > 2 * t.numel():  # a slice of something larger
        t = t.contiguous()
        span = t.numel()
    return t.as_strided((span,), (1,)).cpu(), list(t.stride())


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def decode(body: object, table: Any, data: bytearray, *, pickled: bool = False) -> Any:
    """The value of a message; raises Malformed for anything that `encode` does not make."""
    try:
        tensors = _tensors(table, data)
        return _decode(body, tensors, pickled, 0)
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"a message with unreadable values ({type(error).__name__}: {error})"[:200]) from error


def _tensors(table: list, data: bytearray) -> list[Tensor]:
    tensors, start = [], 0
    for dtype_name, shape, stride, size, device in table:
        dtype = getattr(torch, dtype_name)
        if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in (*shape, *stride, size)):
            raise Malformed("a message with a malformed tensor")
        if len(shape) != len(stride) or size % dtype.itemsize or start + size > len(data):
            raise Malformed("a message with a tensor that its bytes do not fill")
        elements = math.prod(shape)
        if elements * dtype.itemsize > _LARGEST or elements > max(_EXPANDED, size // dtype.itemsize):
            raise Malformed("a message with a tensor that is too large to be real")
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if elements else 0
        if span * dtype.itemsize != size:
            raise Malformed("a message with a tensor that its bytes do not fill")
        if elements == 0:
            t = torch.empty(0, dtype=dtype).as_strided(shape, stride)
        else:
            flat = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start)
            t = flat.clone().view(dtype).as_strided(shape, stride)  # a copy, because offsets may be unaligned
        tensors.append(t if device == "cpu" else t.to(device))
        start += size
    if start != len(data):
        raise Malformed("a message with bytes that belong to no tensor")
    return tensors


def _decode(v: Any, tensors: list[Tensor], pickled: bool, depth: int) -> Any:
    if depth > _DEPTH:
        raise Malformed("a message with values nested too deeply")
    if v is None or isinstance(v, bool | int | float | str):
        return v
    if isinstance(v, list):
        return [_decode(x, tensors, pickled, depth + 1) for x in v]
    ((kind, content),) = v.items()
    if kind == "tensor":
        if type(content) is not int or not 0 <= content < len(tensors):
            raise Malformed("a message that names a tensor it does not hold")
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(x, tensors, pickled, depth + 1) for x in content)
    if kind == "set":
        return {_decode(x, tensors, pickled, depth + 1) for x in content}
    if kind == "dict":
        return {_decode(k, tensors, pickled, depth + 1): _decode(x, tensors, pickled, depth + 1) for k, x in content}
    if kind == "dtype" and isinstance(getattr(torch, content), torch.dtype):
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "pickle" and pickled:
        return pickle.loads(base64.b64decode(content))
    raise Malformed(f"a message with a value of kind {kind!r}"[:100])
