"""What gate, up and down have in common: v -> W v + b + s B A (m * v), one expert after the other; and its gradients.

P routes in order, `at` the routes of an expert among them; v [n, in], d [n, out]; A [r, in], B [out, r].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..assay.stage import stage
from . import dropout
from ._common import TARGETS, flat, wide
from ._routes import Routes
from ._weights import Weights


class Call:
    """The arguments of experts.moe as its reference reads them; everything in `to`: float32, or float64 when x is.

    rows     x of every route [P, H]
    weights  of every route [P], 0 for the skipped ones; `tokens` and `expert` likewise
    """

    def __init__(self, op: str, tensors: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> None:
        self.x = _present(tensors, "x")
        self.to = wide(self.x.dtype)
        self.tensors, self.options = tensors, options
        self.of = Weights(_present(tensors, "gate_up"), _present(tensors, "down"), options["layout"], self.to)
        ids = _present(tensors, "topk_ids")
        self.routes = Routes(op, ids, self.of.experts)
        self.expert = ids.reshape(-1).long().clamp(min=0)
        self.tokens = self.routes.token(torch.arange(ids.numel(), device=ids.device))
        self.rows = flat(self.x).to(self.to).index_select(0, self.tokens)
        self.shape = ids.shape
        weights = tensors.get("topk_weights")
        self.weights = self.routes.kept((torch.ones_like(ids) if weights is None else weights).to(self.to))

    def gate_and_up(self) -> tuple[Tensor, Tensor]:
        """[P, I] each, in x's dtype: rounded here, once, since everything after goes on from what is saved."""
        g = stage("g", self.outputs("gate", self.rows).to(self.x.dtype))
        u = stage("u", self.outputs("up", self.rows).to(self.x.dtype))
        return g, u

    # -- one projection of all routes -------------------------------------------------------------------------------

    def outputs(self, name: str, inputs: Tensor) -> Tensor:
        """W v + b + s B A (m * v): [P, out]; 0 for skipped routes."""
        bias = self._bias(name)
        lora = self._factors(name)

        def of_expert(e: int, at: Tensor) -> Tensor:
            v = inputs.index_select(0, at)
            out = v @ self.of.weight(name, e).T
            if bias is not None:
                out = out + bias[e].to(self.to)
            if lora is not None:
                a, b, scale = lora[0][e].to(self.to), lora[1][e].to(self.to), lora[2]
                out = out + scale * (self._masked(name, v, at) @ a.T @ b.T)
            return out

        return self.routes.gather(self.rows, self.of.sizes(name)[0], of_expert)

    def inputs(self, name: str, grads: Tensor) -> Tensor:
        """W^T d + s m * (A^T B^T d): [P, in], the gradient of v; 0 for skipped routes."""
        lora = self._factors(name)

        def of_expert(e: int, at: Tensor) -> Tensor:
            d = grads.index_select(0, at)
            out = d @ self.of.weight(name, e)
            if lora is not None:
                a, b, scale = lora[0][e].to(self.to), lora[1][e].to(self.to), lora[2]
                out = out + scale * self._masked(name, d @ b @ a, at)
            return out

        return self.routes.gather(self.rows, self.of.sizes(name)[1], of_expert)

    def factors(self, name: str, grads: Tensor, inputs: Tensor, needs: frozenset) -> dict[str, Tensor]:
        """dA = s sum (B^T d) (m * v)^T and dB = s sum d (A (m * v))^T over the routes of each expert; else 0."""
        lora = self._factors(name)
        wanted = [n for n in (f"{name}_a", f"{name}_b") if n in needs]
        if lora is None or not wanted:
            return {}
        a, b, scale = lora
        found = {n: torch.zeros_like(_present(self.tensors, n), dtype=self.to) for n in wanted}
        for e, at in self.routes.of_each():
            d, v = grads.index_select(0, at), self._masked(name, inputs.index_select(0, at), at)
            if f"{name}_a" in wanted:
                found[f"{name}_a"][e] = scale * ((d @ b[e].to(self.to)).T @ v)
            if f"{name}_b" in wanted:
                found[f"{name}_b"][e] = scale * (d.T @ (v @ a[e].to(self.to).T))
        return found

    # -- float bases ------------------------------------------------------------------------------------------------

    def base(self, key: str, grads: tuple[Tensor, ...], inputs: Tensor, needs: frozenset) -> dict[str, Tensor]:
        """dW = sum d v^T and db = sum d of "gate_up" or "down" over the routes of each expert, else exactly 0."""
        found = {}
        for wanted in (n for n in (key, f"{key}_bias") if n in needs):
            like = _present(self.tensors, wanted)
            found[wanted] = total = torch.zeros_like(like, dtype=self.to)
            for e, at in self.routes.of_each():
                d = torch.cat([g.index_select(0, at) for g in grads], -1)
                total[e] = d.sum(0) if wanted.endswith("bias") else d.T @ inputs.index_select(0, at)
        return found

    # -- parts ------------------------------------------------------------------------------------------------------

    def _bias(self, name: str) -> Tensor | None:
        bias = self.tensors.get("down_bias" if name == "down" else "gate_up_bias")
        if bias is None or name == "down":
            return bias
        return bias.chunk(2, -1)[name == "up"]

    def _factors(self, name: str) -> tuple[Tensor, Tensor, float] | None:
        a, b = self.tensors.get(f"{name}_a"), self.tensors.get(f"{name}_b")
        return None if a is None or b is None else (a, b, self.options[f"{name}_scale"])

    def _masked(self, name: str, values: Tensor, at: Tensor) -> Tensor:
        """m * values of the routes `at`."""
        p = self.options.get("dropout", 0.0)
        if not p:
            return values
        seed = int(_present(self.tensors, "seed"))
        tokens, slots = self.tokens.index_select(0, at), at % self.routes.k
        kept = dropout.kept(seed, TARGETS.index(name), tokens, slots, values.shape[-1], p)
        return values.masked_fill(~kept, 0.0) * (1 / (1 - p))


def _present(tensors: Mapping[str, Tensor | None], name: str) -> Tensor:
    tensor = tensors[name]
    if tensor is None:
        raise TypeError(f"experts.moe: {name} is missing")
    return tensor
