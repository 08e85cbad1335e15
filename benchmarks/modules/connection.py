"""mhc.HyperConnection as one subject: pre, the layer, and post."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from goldsmith.assay.bounds.running_errors import stored
from goldsmith.assay.declare.target import Target
from goldsmith.cli.bench.subject import OURS, ModuleSubject, Subject, Tensors, Variant
from goldsmith.core.bench import BenchCase
from goldsmith.core.op import Op
from goldsmith.core.tracing import stage

PRE_OPTIONS = ("rms_eps", "pre_eps", "post_mult", "iterations", "sinkhorn_eps", "form")


class Connection(ModuleSubject):
    """mhc.HyperConnection around the identity: x_next = post(x, h_in, ...) with h_in of pre(x, ...).

    All parameters are trained. Forward moves 36*dim bytes per token, backward 56*dim (dx is written once).
    """

    def __init__(self, entry: BenchCase, device: str) -> None:
        Subject.__init__(self, Op.get("mhc.pre"), entry, device)
        self.name = "mhc.connection"

    @classmethod
    def entries(cls) -> list[BenchCase]:
        entries = []
        for entry in Op.get("mhc.pre").bench:
            tokens, dim = entry.sizes["T"], entry.sizes["dim"]
            moved = tokens * dim * torch.finfo(entry.dtype).bits // 8
            fixed = entry.forward_bytes - 9 * moved  # the bytes of phi, which pre counts too
            backward = None if entry.backward_bytes is None else 28 * moved
            why = "forward 36*dim bytes a token: pre 18, post 18; backward 56*dim: dx is written once"
            entries.append(replace(entry, forward_bytes=18 * moved + fixed, backward_bytes=backward, why=why))
        return entries

    def reference(self) -> Callable[[Tensors], tuple[Tensor, ...]]:
        return _reference(self.options)

    def ours(self, backend: str) -> Variant:
        module, x = self._module(backend), self.tensors["x"]
        if x is None:
            raise ValueError("mhc.pre's case has no x")
        leaf = x.detach().requires_grad_()
        return Variant(OURS, lambda: module(leaf), [leaf, *module.parameters()], backend)

    def _module(self, backend: str) -> torch.nn.Module:
        from goldsmith.mhc.modules import HyperConnection

        sizes, options = self.entry.sizes, {name: self.options[name] for name in PRE_OPTIONS}
        module = HyperConnection(
            sizes["dim"], torch.nn.Identity(), n=sizes["n"], backend=backend, device=self.device, **options
        )
        with torch.no_grad():
            for parameter, name in (("fn", "phi"), ("base", "bias"), ("scale", "alpha")):
                getattr(module, parameter).copy_(self.tensors[name])
        return module

    def target(self, backend: str) -> Target:
        from goldsmith.mhc.modules import HyperConnection

        def candidate(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, **options: Any) -> dict[str, Tensor]:
            chosen = {name: options[name] for name in PRE_OPTIONS}
            module = HyperConnection(
                x.shape[-1], partial(stage, "h_in"), n=x.shape[-2], backend=backend, device=x.device, **chosen
            )
            weights = {"fn": phi, "base": bias, "scale": alpha}
            return {"x_next": torch.func.functional_call(module, weights, (x,))}

        def golden(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, **options: Any) -> dict[str, Tensor]:
            tensors = {"x": x, "phi": phi, "alpha": alpha, "bias": bias, "gamma": None}
            return {"x_next": _reference({o: options[o] for o in self.op.options}, self.entry.dtype)(tensors)[0]}

        cases = [c for c in self.op.cases if c.name in ("one_token", "published", "odd_dim", "three_streams")]
        return Target(
            candidate,
            golden,
            cases=[replace(c, sizes={**c.sizes, "gamma": False}) for c in cases],
            name=f"{self.name} on {backend}",
            outputs=("x_next",),
            grads=("x", "phi", "alpha", "bias"),
            dtypes=(self.entry.dtype,),
        )


def _reference(options: dict[str, Any], between: torch.dtype | None = None) -> Callable[[Tensors], tuple[Tensor, ...]]:
    """pre and post in plain torch; `between` is the dtype in which a candidate stores h_in and its gradient."""
    pre, post = Op.get("mhc.pre").reference.forward, Op.get("mhc.post").reference.forward

    def reference(tensors: Tensors) -> tuple[Tensor, ...]:
        h_in, h_post, h_res = pre(*tensors.values(), **options)[:3]
        if between is not None:
            h_in = _StoredGradient.apply(stage("h_in", h_in), between)
        return (post(tensors["x"], h_in, h_post, h_res, orientation="in_out")[0],)

    return reference


class _StoredGradient(torch.autograd.Function):
    """The identity; its gradient is rounded as the candidate rounds what it stores."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return stored(grad, ctx.dtype), None
