"""The projections gate, up and down: v -> W v + b + s B A (m * v), and its gradients, in plain torch.

P routes in order; v [P, in], d [P, out]; A [E, r, in], B [E, out, r]. Rows of skipped routes are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.tracing import stage
from . import dropout
from ._conventions import TARGETS, flat, wide
from ._routes import Routes
from ._weights import Matrices, Weights


class Factors(NamedTuple):
    """The LoRA of one projection."""

    a: Tensor
    b: Tensor
    scale: float


class ReferenceCall:
    """The arguments of experts.moe in the form of its reference, in the dtype `to`: float64 if x is, else float32.

    rows     x of each route [P, H]
    weights  weight of each route [P], 0 for skipped ones; `tokens` and `expert` likewise
    """

    def __init__(self, op: str, tensors: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> None:
        self.x = present(tensors, "x")
        self.to = wide(self.x.dtype)
        self.tensors, self.options = tensors, options
        self.base = Weights(present(tensors, "gate_up"), present(tensors, "down"), options["layout"], self.to)
        ids = present(tensors, "topk_ids")
        self.shape = ids.shape
        self.routes = Routes(op, ids, self.base.experts)
        self.expert = ids.reshape(-1).long().clamp(0, self.base.experts - 1)
        self.tokens = self.routes.token(torch.arange(ids.numel(), device=ids.device))
        self.rows = flat(self.x).to(self.to).index_select(0, self.tokens)
        weights = tensors.get("topk_weights")
        self.weights = self.routes.kept((torch.ones_like(ids) if weights is None else weights).to(self.to))
        self.lora = {target: self._factors(target) for target in TARGETS}

    # -- loops over the experts ---------------------------------------------------------------------------------------

    def product(self, rows: Tensor, width: int, matrices: Matrices) -> Tensor:
        """[P, width]: the row of each route times the matrix [in, width] of its expert."""

        def of_expert(e: int, at: Tensor) -> Tensor:
            return rows.index_select(0, at) @ matrices[e].to(self.to)

        return self.routes.gather(rows, width, of_expert)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """[E, a, b]: the sum of left right^T over the routes of each expert; exactly 0 for an expert without routes."""
        total = left.new_zeros(self.base.experts, left.shape[-1], right.shape[-1])
        for e, at in self.routes.of_each():
            total[e] = left.index_select(0, at).T @ right.index_select(0, at)
        return total

    def sums(self, rows: Tensor) -> Tensor:
        """[E, a]: the sum over the routes of each expert."""
        total = rows.new_zeros(self.base.experts, rows.shape[-1])
        for e, at in self.routes.of_each():
            total[e] = rows.index_select(0, at).sum(0)
        return total

    # -- one projection -----------------------------------------------------------------------------------------------

    def gate_and_up(self) -> tuple[Tensor, Tensor]:
        """g and u, [P, I] each, in x's dtype: rounded once here, because all later steps use the saved values."""
        g = stage("g", self.outputs("gate", self.rows).to(self.x.dtype))
        u = stage("u", self.outputs("up", self.rows).to(self.x.dtype))
        return g, u

    def base_product(self, name: str, inputs: Tensor, width: int) -> Tensor:
        """W v: [P, out]"""
        return self.product(inputs, width, self.base.matrices(name).mT)

    def outputs(self, name: str, inputs: Tensor) -> Tensor:
        """W v + b + s B A (m * v): [P, out]"""
        out, _ = self.base.sizes(name)
        total = stage(f"{name}_product", self.base_product(name, inputs, out))
        bias = self.bias(name)
        if bias is not None:
            rows = bias.to(self.to).index_select(0, self.expert)
            total = total + rows.masked_fill(self.routes.skipped.unsqueeze(-1), 0.0)
        lora = self.lora[name]
        if lora is not None:
            total = total + lora.scale * stage(f"{name}_lora", self.product(self.low(name, inputs), out, lora.b.mT))
        return total

    def inputs(self, name: str, grads: Tensor) -> Tensor:
        """W^T d + s m * (A^T B^T d): [P, in], the gradient of v"""
        _, width = self.base.sizes(name)
        total = stage(f"{name}_back", self.product(grads, width, self.base.matrices(name)))
        lora = self.lora[name]
        if lora is not None:
            back = stage(f"{name}_lora_back", self.product(self.high(name, grads), width, lora.a))
            total = total + lora.scale * self.masked(name, back)
        return total

    def low(self, name: str, inputs: Tensor) -> Tensor:
        """A (m * v): [P, r]"""
        a, _, _ = self.lora[name]  # type: ignore[misc]
        return stage(f"{name}_low", self.product(self.masked(name, inputs), a.shape[1], a.mT))

    def high(self, name: str, grads: Tensor) -> Tensor:
        """B^T d: [P, r]"""
        _, b, _ = self.lora[name]  # type: ignore[misc]
        return stage(f"{name}_high", self.product(grads, b.shape[2], b))

    def masked(self, name: str, values: Tensor) -> Tensor:
        """m * values"""
        p = self.options.get("dropout", 0.0)
        if not p:
            return values
        slots = torch.arange(len(values), device=values.device) % max(1, self.routes.k)
        seed, numbers = dropout.numbered(present(self.tensors, "seed"), self.tokens)
        kept = dropout.kept(seed, TARGETS.index(name), numbers, slots, values.shape[-1], p)
        return stage(f"{name}_masked", values.masked_fill(~kept, 0.0) * (1 / (1 - p)))

    # -- gradients of parameters --------------------------------------------------------------------------------------

    def of_factors(self, name: str, grads: Tensor, inputs: Tensor, needs: frozenset) -> dict[str, Tensor]:
        """dA = s sum (B^T d) (m * v)^T and dB = s sum d (A (m * v))^T"""
        lora, gradients = self.lora[name], {}
        if lora is not None and f"{name}_a" in needs:
            gradients[f"{name}_a"] = lora.scale * self.outer(self.high(name, grads), self.masked(name, inputs))
        if lora is not None and f"{name}_b" in needs:
            gradients[f"{name}_b"] = lora.scale * self.outer(grads, self.low(name, inputs))
        return gradients

    def of_base(self, key: str, grads: Tensor, inputs: Tensor, needs: frozenset) -> dict[str, Tensor]:
        """dW = sum d v^T and db = sum d, of "gate_up" or "down" """
        gradients = {key: self.outer(grads, inputs)} if key in needs else {}
        return gradients | ({f"{key}_bias": self.sums(grads)} if f"{key}_bias" in needs else {})

    # -- arguments ----------------------------------------------------------------------------------------------------

    def bias(self, name: str) -> Tensor | None:
        """[E, out]"""
        bias = self.tensors.get("down_bias" if name == "down" else "gate_up_bias")
        if bias is None or name == "down":
            return bias
        return bias.chunk(2, -1)[name == "up"]

    def _factors(self, name: str) -> Factors | None:
        a, b = self.tensors.get(f"{name}_a"), self.tensors.get(f"{name}_b")
        if a is None or b is None:
            return None
        a, b = stage(f"{name}_a_read", a.to(self.to)), stage(f"{name}_b_read", b.to(self.to))
        return Factors(a, b, self.options[f"{name}_scale"])


def present(tensors: Mapping[str, Tensor | None], name: str) -> Tensor:
    tensor = tensors[name]
    if tensor is None:
        raise TypeError(f"experts.moe: {name} is missing")
    return tensor
