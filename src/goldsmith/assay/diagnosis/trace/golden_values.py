"""golden_values: every intermediate of the golden and of its gradients, in float64, with a name for each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...golden.golden_results import GoldenResults
from ...support.dispatch_mode import DispatchMode
from ...support.torch_settings import default_dtype
from ..graph.decompositions import Opened
from .lookup import GoldenValue

_MOST = 1500  # tensors
_MOST_ELEMENTS = 1 << 16  # of one tensor
_MOST_IN_ALL = 1 << 22


def golden_values(golden: GoldenResults) -> list[GoldenValue]:
    """The golden's inputs, results and intermediates; fused operators of torch also step by step."""
    mode = _Values()
    for name, tensor in (*golden.leaves.items(), *golden.values.items()):
        mode.keep(name, tensor, 0)
    for surroundings in (nullcontext(), Opened()):
        supply = {n: t.clone() for n, t in golden.leaves.items()}
        with warnings.catch_warnings(), default_dtype(torch.float64), surroundings, mode:
            warnings.simplefilter("ignore")
            golden.evaluate(supply)
    return mode.values


class _Values(DispatchMode):
    """Keeps the result of every operator, once."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[GoldenValue] = []
        self.known: set[tuple[object, ...]] = set()
        self.size = 0
        self.groups: dict[object, int] = {}
        self.muted = False

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.muted:
            return out
        self.muted = True
        try:
            name = func._schema.name.split("::")[1]
            group = self.groups.setdefault((name, _shape(out)), len(self.groups) + 1)
            for part in out if isinstance(out, list | tuple) else (out,):
                if isinstance(part, Tensor):
                    self.keep(name, part, group)
            for derived, tensor in _derived(name, args, kwargs or {}, out):
                self.keep(f"{derived} of {name}", tensor, 0)
        finally:
            self.muted = False
        return out

    def keep(self, name: str, tensor: Tensor, group: int) -> None:
        size = tensor.numel()
        if tensor.is_complex() or not 0 < size <= _MOST_ELEMENTS or tensor.is_sparse:
            return
        if len(self.values) >= _MOST or self.size + size > _MOST_IN_ALL:
            return
        kept = tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)
        kept = kept.contiguous()
        flat = kept.reshape(-1).double()
        weights = torch.arange(1, size + 1, dtype=torch.float64)
        key = (size, kept.dtype, float(flat.sum()), float(flat @ weights), float(flat.abs().max()))
        if key in self.known:
            return
        self.known.add(key)
        self.size += size
        self.values.append(GoldenValue(name, kept, group))


def _shape(out: object) -> object:
    return tuple(out.shape) if isinstance(out, Tensor) else None


def _derived(name: str, args: tuple, kwargs: dict, out: object) -> Iterator[tuple[str, Tensor]]:
    """Steps inside of an operator, as kernels compute them."""
    x = args[0] if args and isinstance(args[0], Tensor) and args[0].is_floating_point() else None
    if x is None or not isinstance(out, Tensor) or not x.numel() or x.numel() > _MOST_ELEMENTS:
        return
    if name in ("_softmax", "_log_softmax", "logsumexp") and len(args) > 1:
        axis = args[1] if isinstance(args[1], int) else args[1][0]
        top = x.amax(axis, keepdim=True)
        powers = (x - top).exp()
        total = powers.sum(axis, keepdim=True)
        yield "maximum", top
        yield "distance from the maximum", x - top
        yield "exponentials", powers
        yield "sum of exponentials", total
        yield "reciprocal sum", 1 / total
        yield "logarithm of the sum", total.log()
        yield "log-sum-exp", top + total.log()
        yield "in base 2", (top + total.log()) / math.log(2)
    elif name == "mean":
        axes = args[1] if len(args) > 1 and args[1] is not None else list(range(x.dim()))
        yield "sum", x.sum(axes)
    elif name in ("var", "std", "var_mean"):
        axes = args[1] if len(args) > 1 and isinstance(args[1], list) else list(range(x.dim()))
        apart = x - x.mean(axes, keepdim=True)
        yield "mean", x.mean(axes)
        yield "deviations", apart
        yield "squares", apart.square()
        yield "sum of squares", apart.square().sum(axes)
        yield "variance", apart.square().mean(axes)
    elif name == "rsqrt":
        yield "root", x.sqrt()
    elif name == "sqrt":
        yield "reciprocal", out.reciprocal()
    elif name in ("silu", "sigmoid", "silu_backward", "sigmoid_backward"):
        z = args[1] if name.startswith("silu_b") else x
        yield "exponential", (-z).exp()
        yield "denominator", 1 + (-z).exp()
        yield "sigmoid", z.sigmoid()
        yield "other half", 1 - z.sigmoid()
    elif name == "gelu":
        yield "distribution", 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        yield "error function", torch.erf(x / math.sqrt(2))
    elif name == "div" and len(args) > 1 and isinstance(args[1], Tensor) and args[1].is_floating_point():
        yield "reciprocal", args[1].reciprocal()
    elif name == "softplus":
        yield "exponential", x.exp()
        yield "sum", 1 + x.exp()
