"""Tracer: records the named stages of one run, and replaces some of them by the golden's values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..support.stage_tiles import StageTiles, chunk_of, part_of

_CORE = "triton.language.core"


class Tracer:
    """Records the stages of one run and substitutes some of them.

    substitute: stage name -> value to continue with, in the dtype of the stage. If `h` is substituted, autograd's
    backward continues with `h.grad`.
    debug: the answer of `tracing()`; `called_tracing` says whether it was called.
    live: keep the tensors themselves, so that autograd can compute their gradients (otherwise keep copies).
    store: (name, value) -> the value read back after a store (a golden models 16-bit stages with it).
    """

    def __init__(
        self,
        *,
        substitute: Mapping[str, Tensor] | None = None,
        debug: bool = False,
        live: bool = False,
        store: Callable[[str, Tensor], Tensor] | None = None,
    ):
        self.substitute = dict(substitute or {})
        self.debug = debug
        self.live = live
        self.store = store
        self.called_tracing = False
        self.records: dict[str, Tensor] = {}
        self.places: dict[str, Tensor] = {}  # the same stages in their original memory
        self.graph: dict[str, Tensor] = {}
        self.substituted: set[str] = set()
        self._seen: dict[str, int] = {}
        self._tiles: dict[str, StageTiles] = {}
        self._begun: dict[str, int] = {}  # stage -> how far its chunks have been replaced

    def wants(self, name: str | None) -> bool:
        self.called_tracing = True
        return self.debug or (name is not None and name in self.substitute)

    @property
    def covered(self) -> dict[str, Tensor]:
        """stage of tiles -> where one of them has come"""
        return {name: tiles.covered for name, tiles in self._tiles.items()}

    @property
    def flaws(self) -> dict[str, str]:
        """stage of tiles -> why they are not one stage"""
        return {name: tiles.flaw for name, tiles in self._tiles.items() if tiles.flaw}

    def visit(
        self, name: str, value: Tensor, at: tuple[object, ...] | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if _is_tile(value):
            return self._in_kernel(name, value, at, mask)
        if not isinstance(value, Tensor):
            raise TypeError(f"stage({name!r}, ...) takes a tensor, got {type(value).__name__}")
        if not isinstance(name, str):
            raise TypeError(f"stage({name!r}, ...) takes a name as a string, got {type(name).__name__}")
        if not name:
            raise TargetError("stage('', ...) needs a name for the value")
        if value.is_complex():  # recorded and judged as real and imaginary part
            parts = self.visit(name, torch.view_as_real(value.resolve_conj()), at, mask)
            return torch.view_as_complex(parts.contiguous())
        if at is not None:
            return self._tile(name, value, at, mask)
        if mask is not None:
            raise TargetError(f"stage({name!r}, ..., mask=...) needs at=..., the place of the tile that it masks")
        self._seen[name] = count = self._seen.get(name, 0) + 1
        if count > 1:
            name = f"{name}#{count}"
        if self.store is not None and name not in self.substitute:
            value = self.store(name, value)
        if self.live:
            self.records[name] = value
        else:
            place = value.detach()
            self.records[name] = place.clone()
            if not torch._C._functorch.is_functorch_wrapped_tensor(place):  # tensors of a transform have no memory
                self.places[name] = place
        first = name.partition("#")[0]
        if name in self.substitute:
            value = self._replace(name, value)
        elif count > 1 and first in self.substitute and first in self._begun:
            value = self._replace(first, value)
        if value.requires_grad:
            self.graph[name] = value
        return value

    def _in_kernel(self, name: str, value: Any, at: object, mask: object) -> Any:
        """A stage inside a Triton kernel: a tile of it if the kernel runs in the interpreter."""
        tile = _numbers(value)
        if tile is None:  # the kernel is being compiled
            return value
        if at is None:
            raise TargetError(
                f"stage({name!r}, ...) in a kernel needs at=..., the place of its tile of shape {list(tile.shape)} in "
                "the whole stage, such as at=(rows, columns)"
            )
        place = tuple(map(_place_of, at if isinstance(at, tuple) else (at,)))
        seen = self.visit(name, tile, place, _mask_of(name, mask, tile))
        return value if seen is tile else _tile_of(seen, value)

    def _tile(self, name: str, value: Tensor, at: tuple[object, ...], mask: Tensor | None) -> Tensor:
        """Records a tile of a stage, whose other parts are NaN until their tiles come."""
        tiles = self._tiles.setdefault(name, StageTiles())
        tiles.add(name, value.detach(), at, mask)
        self.records[name] = tiles.whole
        if tiles.flaw:
            del self.records[name]
        whole = self.substitute.get(name)
        if whole is None:
            return value
        self.substituted.add(name)
        part = part_of(name, whole, value, at, mask)
        return _Substitute.apply(value, part, None) if value.requires_grad else part.clone()

    def _replace(self, name: str, value: Tensor) -> Tensor:
        substitute, grad = self.substitute[name], self.substitute.get(f"{name}.grad")
        if substitute.shape != value.shape:
            begin = self._begun.get(name, 0)
            substitute, self._begun[name] = chunk_of(substitute, value, begin)
            grad = None if grad is None else chunk_of(grad, value, begin)[0]
        if substitute.shape != value.shape:
            raise ValueError(f"stage {name!r} has shape {list(value.shape)}, its substitute {list(substitute.shape)}")
        self.substituted.add(name)
        substitute = substitute.detach().to(device=value.device, dtype=value.dtype)
        if not value.requires_grad:
            return substitute.clone()
        return _Substitute.apply(value, substitute, None if grad is None else grad.detach().to(substitute))


class _Substitute(torch.autograd.Function):
    """y = substitute, with dy/dvalue = 1. It is exact, whereas value + (substitute - value) would round.

    If a gradient is given, the backward passes it on instead of the incoming one.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, substitute: Tensor, grad: Tensor | None) -> Tensor:
        ctx.grad = grad
        return substitute.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.grad is None else ctx.grad.clone()), None, None


# tiles of Triton kernels


def _is_tile(value: object) -> bool:
    """Whether it is a value of a Triton kernel, compiled or interpreted."""
    core = sys.modules.get(_CORE)
    return core is not None and isinstance(value, core.tensor)


def _numbers(value: Any) -> Tensor | None:
    """A copy of an interpreted tile's numbers; None while the kernel is compiled."""
    data = getattr(value.handle, "data", None)
    if data is None or value.dtype.is_ptr():
        return None
    shape = [int(n) for n in value.type.shape] if value.type.is_block() else []
    data = data.view("int16") if value.dtype.is_bf16() else data  # the interpreter holds its bits
    copy = torch.from_numpy(data.copy())  # a scan in reverse has negative strides
    copy = copy.view(torch.bfloat16) if value.dtype.is_bf16() else copy
    return (copy if shape else copy.reshape(())).broadcast_to(shape).clone()


def _tile_of(tensor: Tensor, like: Any) -> Any:
    """A tile with the numbers of a tensor, of the type of another tile."""
    data = tensor.view(torch.int16).numpy().view("uint16") if tensor.dtype == torch.bfloat16 else tensor.numpy()
    handle = type(like.handle)(data if like.type.is_block() else data.reshape(1), like.handle.dtype)
    return type(like)(handle, like.type)


def _place_of(entry: object) -> object:
    """An entry of `at`: tiles of indices become tensors, numbers of the kernel become 0-d tensors."""
    return _numbers(entry) if _is_tile(entry) else getattr(entry, "value", entry)


def _mask_of(name: str, value: object, tile: Tensor) -> Tensor | None:
    """The mask of a stage of a kernel, as large as the tile that it masks."""
    value = _place_of(value)
    if value is None:
        return None
    flags = torch.as_tensor(value).bool()
    try:
        return flags.broadcast_to(tile.shape)
    except RuntimeError:
        raise TargetError(
            f"stage({name!r}, ..., mask=...): shape {list(flags.shape)}, expected one that broadcasts to the tile's "
            f"{list(tile.shape)}"
        ) from None
