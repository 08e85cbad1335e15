"""Tracer: records the named stages of one run, and replaces some of them by the golden's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..support.stage_tiles import StageTiles, chunk_of, part_of
from . import kernel_tiles


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
        if kernel_tiles.is_tile(value):
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

    def _in_kernel(self, name: str, value: Any, at: Any, mask: Any) -> Any:
        """A stage inside a Triton kernel: a tile of it if the kernel runs in the interpreter."""
        tile = kernel_tiles.numbers(value)
        if tile is None:  # the kernel is being compiled
            return value
        if at is None:
            raise TargetError(
                f"stage({name!r}, ...) in a kernel needs at=..., the place of its tile of shape {list(tile.shape)} in "
                "the whole stage, such as at=(rows, columns)"
            )
        place = tuple(map(kernel_tiles.index, at if isinstance(at, tuple) else (at,)))
        seen = self.visit(name, tile, place, kernel_tiles.mask(name, mask, tile))
        return value if seen is tile else kernel_tiles.tile_of(seen, value)

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
