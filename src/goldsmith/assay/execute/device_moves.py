"""The arguments and results of a run on another device, so that a judge on the CPU can check a candidate on a GPU.

A small case costs a GPU launches, not arithmetic: its golden, bounds and ensembles are some ten thousand operations on
a few hundred numbers. On the CPU they take a tenth of the time, and processes that share a GPU do not wait for each
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..declare.target import Target
from .records import Material

_APART = 16  # bytes to which block tensors are aligned
MOST = 1 << 16  # elements of a small case's inputs
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, type(None))
T = TypeVar("T")


def placed(drawn: Material, device: torch.device) -> Material | None:
    """Arguments drawn on the CPU for a candidate on `device`: a small case stays, and only its runs move there.

    None where something cannot move: a tensor that was not drawn on the CPU, or a scalar that may hold tensors.
    """
    there = any(t.device.type != "cpu" for t in drawn.inputs.values())
    if there or not drawn.inputs or not all(map(_plain, drawn.scalars.values())):
        return None
    small = sum(t.numel() for t in drawn.inputs.values()) <= MOST
    return replace(drawn, runs_on=device) if small else moved(drawn, device)


def moved(value: T, device: torch.device) -> T:
    """The value with all of its tensors on `device`, with their strides. One object stays one object."""
    tensors: dict[int, Tensor] = {}
    if device.type == "cpu":
        _find(value, tensors)
    return _moved(value, device, _together(tensors, device))


def _find(value: object, tensors: dict[int, Tensor]) -> None:
    """Adds the tensors on a GPU that can be copied as bytes."""
    if isinstance(value, Tensor):
        there = next(iter(tensors.values()), value).device
        if value.is_cuda and value.device == there and _span(value.detach()) is not None:
            tensors[id(value)] = value
    elif isinstance(value, Mapping):
        for each in value.values():
            _find(each, tensors)
    elif type(value) in (list, tuple):
        for each in value:  # type: ignore[attr-defined]
            _find(each, tensors)
    elif is_dataclass(value) and not isinstance(value, type | Target):
        for f in fields(value):
            _find(getattr(value, f.name), tensors)


def _together(tensors: Mapping[int, Tensor], device: torch.device) -> dict[int, object]:
    """Copies of the tensors on the CPU, by id, for which a GPU is waited once."""
    if not tensors:
        return {}
    pieces = {key: _bytes(t.detach()) for key, t in tensors.items()}
    sizes = [len(piece) for piece in pieces.values()]
    room = [-(-size // _APART) * _APART for size in sizes]
    gap = torch.zeros(_APART, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    block = torch.cat(
        [part for n, r, p in zip(sizes, room, pieces.values(), strict=True) for part in (p, gap[: r - n])]
    )
    parts = block.to(device).split(room)
    return {
        key: part[:size].clone().view(t.dtype).as_strided(t.shape, t.stride())
        for (key, t), part, size in zip(tensors.items(), parts, sizes, strict=True)
    }


def _bytes(t: Tensor) -> Tensor:
    return t.as_strided((_span(t) or 0,), (1,)).view(torch.uint8)


def _span(t: Tensor) -> int | None:
    """Elements from the first to the last of a tensor that is copied with what lies between them; else None."""
    if t.numel() == 0 or t.is_conj() or t.is_neg() or t.layout != torch.strided:
        return None
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return span if span <= 2 * t.numel() else None  # else a slice of something larger


def _moved(value: Any, device: torch.device, done: dict[int, object]) -> Any:
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Tensor):
        new: object = tensor_on(value, device)
    elif isinstance(value, Mapping):
        new = {k: _moved(v, device, done) for k, v in value.items()}
    elif type(value) in (list, tuple):
        new = type(value)(_moved(v, device, done) for v in value)
    elif is_dataclass(value) and not isinstance(value, type | Target):
        new = replace(value, **{f.name: _moved(getattr(value, f.name), device, done) for f in fields(value)})
    else:
        return value
    done[id(value)] = new
    return new


def tensor_on(t: Tensor, device: torch.device) -> Tensor:
    """A copy of the tensor on `device` with its strides, overlapping and expanded ones, too."""
    if t.device == device:
        return t
    t = t.detach()
    span = _span(t)
    if span is not None:  # without a wait for a GPU
        return (
            t.as_strided((span,), (1,)).to(device, non_blocking=device.type == "cuda").as_strided(t.shape, t.stride())
        )
    if t.numel() == 0 or t.is_conj() or t.is_neg() or t.layout != torch.strided:
        return t.to(device)
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)


def _plain(value: object) -> bool:
    if type(value) in (list, tuple):
        return all(map(_plain, value))  # type: ignore[call-overload]
    return isinstance(value, _PLAIN)
