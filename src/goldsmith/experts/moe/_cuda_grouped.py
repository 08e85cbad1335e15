"""experts.moe: how it is fast on a GPU, where the base is bfloat16: one grouped product for all experts.

The reference's formulas, with the loops over the experts replaced. Nothing waits for the card: routes are sorted and
counted there, and an id out of range, which on a CPU raises, is skipped and makes its token's y and dx NaN.
Products are stored in bfloat16 (torch._grouped_mm has no other result); what is between them is float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...assay.stage import silent
from .._common import NAMES, flat, named
from .._projections import Call
from .._routes import Routes
from .._weights import Matrices
from . import reference

GRAIN = 8  # numbers: torch._grouped_mm wants rows that are multiples of 16 bytes apart


def unsupported(tensors: dict, options: dict) -> str | None:
    if options["layout"]:
        return f"the base is packed ({options['layout'].partition(':')[0]}); on a GPU it must be plain bfloat16 tensors"
    for name in ("x", "gate_up", "down"):
        if tensors[name].dtype != torch.bfloat16:
            return f"{name} is {named(tensors[name].dtype)}, wanted bfloat16"
    _, hidden, inner = tensors["down"].shape
    if hidden % GRAIN or inner % GRAIN:
        return f"the base has hidden={hidden} and intermediate={inner}, wanted multiples of {GRAIN}"
    return None


def forward(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    with silent():  # the reference's stages are not where this rounds
        call = GroupedCall("experts.moe", dict(zip(NAMES, tensors, strict=True)), options)
        y, g, u = reference.forward_of(call)
    return y.masked_fill(call.routes.lost.view(*y.shape[:-1], 1), math.nan), g, u


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    with silent():
        call = GroupedCall("experts.moe", tensors, options)
        found = reference.backward_of(call, grads, needs)
    if "x" in found:
        found["x"] = found["x"].masked_fill(call.routes.lost.view(*call.x.shape[:-1], 1), math.nan)
    return found


class Sorted(Routes):
    """Routes by expert, without waiting for the card: skipped ones, and those out of range, come last.

    order, place   route of each sorted row, sorted row of each route
    ends           int32 [E]: the sorted rows of expert e end there
    lost           bool [T]: tokens with an id out of range
    """

    def __init__(self, ids: Tensor, experts: int) -> None:
        of_token = flat(ids).long()
        self.tokens, self.k = of_token.shape
        self.experts = experts
        wrong = (of_token < -1) | (of_token >= experts)
        self.lost = wrong.any(-1)
        expert = of_token.masked_fill(wrong | (of_token < 0), experts).reshape(-1)
        self.skipped = expert == experts
        ranked = expert.sort(stable=True)
        self.order, self.place = ranked.indices, ranked.indices.argsort()
        numbers = torch.arange(experts, device=ids.device)
        self.ends = torch.searchsorted(ranked.values, numbers, right=True).int()


class GroupedCall(Call):
    """The three loops of `Call`, each as one grouped product."""

    routes: Sorted
    store = torch.bfloat16

    def routed(self, op: str, ids: Tensor) -> Routes:
        return Sorted(ids, self.base.experts)

    def product(self, rows: Tensor, width: int, matrices: Matrices) -> Tensor:
        out = grouped(self._sorted(rows), self._padded(matrices, (-2, -1)), self.routes.ends)[:, :width]
        # rows beyond the last expert's are never written
        found = out.index_select(0, self.routes.place).masked_fill(self.routes.skipped.unsqueeze(-1), 0.0)
        return found.to(self.to)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        total = grouped(self._sorted(left).T, self._sorted(right), self.routes.ends)
        return total[:, : left.shape[-1], : right.shape[-1]].to(self.to)

    def sums(self, rows: Tensor) -> Tensor:
        # index_put_ sorts, and so repeats bit for bit, which index_add_ on a card does not
        kept = rows.masked_fill(self.routes.skipped.unsqueeze(-1), 0.0)
        return rows.new_zeros(self.base.experts, rows.shape[-1]).index_put_((self.expert,), kept, accumulate=True)

    def _sorted(self, rows: Tensor) -> Tensor:
        return self._padded(rows.to(self.store).index_select(0, self.routes.order), (-1,))

    def _padded(self, t: Any, axes: tuple[int, ...]) -> Tensor:
        """As products take it: these axes filled up with 0 to multiples of 8. Ranks may be anything."""
        t = t.to(self.store)
        missing = {axis: -t.shape[axis] % GRAIN for axis in axes}
        if not any(missing.values()):
            return t
        return torch.nn.functional.pad(t, (0, missing.get(-1, 0), 0, missing.get(-2, 0)))


def grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """a [rows, m] b [E, m, n] -> [rows, n], by the expert of each row; a [m, rows] b [rows, n] -> [E, m, n]."""
    if not a.numel() or not b.numel():
        return a.new_zeros((a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(ends), a.shape[0], b.shape[1]))
    return torch._grouped_mm(a, b, offs=ends)
