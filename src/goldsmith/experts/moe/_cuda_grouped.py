"""experts.moe on a GPU with a plain bfloat16 base: one grouped product for all experts.

Computes the reference's formulas with the routes sorted by expert: rows are gathered once and scattered once, and gate
and up are one product. Nothing synchronises with the GPU: it sorts and counts the routes. An id out of range, which
raises on a CPU, is skipped here and makes its token's y and dx NaN. Products are stored in bfloat16 (the only result
dtype of torch._grouped_mm); everything between them is float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import dropout
from .._activations import activate, slopes
from .._conventions import NAMES, TARGETS, MoeOptions, flat, named, wide
from .._projections import Factors, present

GRAIN = 8  # elements: torch._grouped_mm needs row strides that are multiples of 16 bytes


def unsupported(tensors: dict, options: dict) -> str | None:
    if options["layout"]:
        return f"the base is packed ({options['layout'].partition(':')[0]}); on a GPU it must be plain bfloat16 tensors"
    for name in ("x", "gate_up", "down"):
        if tensors[name].dtype != torch.bfloat16:
            return f"{name} is {named(tensors[name].dtype)}, expected bfloat16"
    _, hidden, inner = tensors["down"].shape
    if hidden % GRAIN or inner % GRAIN:
        return f"the base has hidden={hidden} and intermediate={inner}, expected multiples of {GRAIN}"
    return None


def forward(*tensors: Tensor | None, **options: Unpack[MoeOptions]) -> tuple[Tensor, Tensor, Tensor]:
    call = GroupedCall(dict(zip(NAMES, tensors, strict=True)), options)
    routes, x = call.routes, call.x
    g, u = call.gate_and_up()
    h = activate(options["activation"], g.to(call.to), u.to(call.to), options["alpha"], options["limit"])
    y = routes.sum_slots(call.outputs("down", h).mul_(call.weights)).to(x.dtype).view(x.shape)
    y = y.masked_fill(routes.lost.view(*x.shape[:-1], 1), math.nan)
    return (y, routes.by_slot(g), routes.by_slot(u)) if options["save"] else (y, x.new_empty(0), x.new_empty(0))


def backward(grads: dict, tensors: dict, options: MoeOptions, needs: frozenset) -> dict[str, Tensor]:
    call = GroupedCall(tensors, options)
    routes, to = call.routes, call.to
    saved = [tensors[name].index_select(0, routes.order) for name in "gu"] if options["save"] else call.gate_and_up()
    how: tuple[Any, ...] = (options["activation"], *(t.to(to) for t in saved), options["alpha"], options["limit"])
    h = activate(*how)
    dy = call.of_routes(flat(grads["y"]))
    gradients: dict[str, Tensor] = {}
    if needs - {"down", "down_bias", "down_a", "down_b"}:
        v = call.inputs("down", dy)
        if "topk_weights" in needs:
            dw, bias = (v * h).sum(-1), tensors.get("down_bias")
            if bias is not None:
                dw = dw + (dy * bias.to(to).index_select(0, routes.expert)).sum(-1)
            gradients["topk_weights"] = routes.by_slot(dw).view(call.shape)
        dh = v.mul_(call.weights)
        to_g, to_u = slopes(*how)
        both = torch.cat([to_g(dh), to_u(dh)], -1)
        d = both.to(call.store)
        if "x" in needs:
            gradients["x"] = routes.sum_slots(call.inputs("gate_up", d)).view(call.x.shape)
            gradients["x"] = gradients["x"].masked_fill(routes.lost.view(*call.x.shape[:-1], 1), math.nan)
        for name, part in zip(("gate", "up"), d.chunk(2, -1), strict=True):
            gradients |= call.of_factors(name, part, call.rows, needs)
        gradients |= call.of_base("gate_up", both, call.rows, needs)
    gradients |= call.of_factors("down", dy, h, needs, call.weights)
    if needs & {"down", "down_bias"}:
        gradients |= call.of_base("down", dy * call.weights, h, needs)
    return {name: value.to(tensors[name].dtype) for name, value in gradients.items()}


class GroupedRoutes:
    """Routes sorted by expert, without synchronising with the GPU; skipped routes and ids out of range come last.

    order, place   the route of each sorted row, the sorted row of each route
    expert, token  of each sorted row; skipped rows have an arbitrary expert
    ends           int32 [E]: end of the sorted rows of each expert; products write no row beyond the last end
    lost           bool [T]: tokens with an id out of range
    """

    def __init__(self, ids: Tensor, experts: int) -> None:
        of_token = flat(ids).long()
        self.tokens, self.k = of_token.shape
        wrong = (of_token < -1) | (of_token >= experts)
        self.lost = wrong.any(-1)
        expert = of_token.masked_fill(wrong | (of_token < 0), experts).reshape(-1)
        self.skipped = (expert == experts).unsqueeze(-1)
        ranked = expert.sort(stable=True)
        self.order, self.place = ranked.indices, ranked.indices.argsort()
        self.expert = ranked.values.clamp(max=max(0, experts - 1))
        self.token = self.order // max(1, self.k)
        self.ends = torch.searchsorted(ranked.values, torch.arange(experts, device=ids.device), right=True).int()

    def by_slot(self, rows: Tensor) -> Tensor:
        """Sorted rows in the order of the routes; 0 for skipped ones."""
        skipped = self.skipped if rows.dim() == 2 else self.skipped.squeeze(-1)
        return rows.index_select(0, self.place).masked_fill_(skipped, 0.0)

    def sum_slots(self, rows: Tensor) -> Tensor:
        """[T, width]: sorted rows summed over the slots of each token."""
        return self.by_slot(rows).view(self.tokens, self.k, rows.shape[-1]).sum(1)


class GroupedCall:
    """The arguments of experts.moe, gathered for the sorted routes.

    rows     x [P, H], in the dtype of products
    weights  float32 [P, 1]
    """

    store = torch.bfloat16

    def __init__(self, tensors: Mapping[str, Tensor | None], options: MoeOptions) -> None:
        self.x, ids = present(tensors, "x"), present(tensors, "topk_ids")
        self.to = wide(self.x.dtype)
        self.tensors, self.options, self.shape = tensors, options, ids.shape
        self.gate_up, self.down = readable(present(tensors, "gate_up")), readable(present(tensors, "down"))
        self.experts = len(self.down)
        self.routes = GroupedRoutes(ids, self.experts)
        self.rows = self.of_routes(flat(self.x))
        weights = present(tensors, "topk_weights").reshape(-1, 1)
        self.weights = weights.to(self.to).index_select(0, self.routes.order)
        self.lora = {target: self._factors(target) for target in TARGETS}

    def of_routes(self, of_tokens: Tensor) -> Tensor:
        return of_tokens.to(self.store).index_select(0, self.routes.token)

    # -- products -----------------------------------------------------------------------------------------------------

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """[P, n]: each row times its expert's matrix [m, n]."""
        return grouped(rows.to(self.store), matrices, self.routes.ends)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """[E, a, b]: the sum of left right^T over the routes of each expert; exactly 0 for an expert without routes."""
        return grouped(left.to(self.store).T, right.to(self.store), self.routes.ends).to(self.to)

    def gate_and_up(self) -> tuple[Tensor, Tensor]:
        """g and u, [P, I] each, in x's dtype: rounded once here, because all later steps use the saved values."""
        both = self.product(self.rows, self.gate_up.mT)
        bias = self.tensors.get("gate_up_bias")
        if bias is not None or self.lora["gate"] or self.lora["up"]:
            both = both.to(self.to)
            if bias is not None:
                both += bias.to(self.to).index_select(0, self.routes.expert)
            for name, part in zip(("gate", "up"), both.chunk(2, -1), strict=True):
                self._add_low(part, name, self.rows)
        g, u = both.to(self.x.dtype).chunk(2, -1)
        return g, u

    def outputs(self, name: str, inputs: Tensor) -> Tensor:
        """W v + b + s B A (m * v): [P, out], for down"""
        total = self.product(inputs, self.down.mT).to(self.to)
        bias = self.tensors.get("down_bias")
        if bias is not None:
            total += bias.to(self.to).index_select(0, self.routes.expert)
        self._add_low(total, name, inputs)
        return total

    def _add_low(self, total: Tensor, name: str, inputs: Tensor) -> None:
        lora = self.lora[name]
        if lora is not None:
            total.add_(self.product(self.low(name, inputs), lora.b.mT), alpha=lora.scale)

    def inputs(self, name: str, grads: Tensor) -> Tensor:
        """W^T d + s m * (A^T B^T d): [P, in], the gradient of v; for "gate_up" the sum of both gradients"""
        total = self.product(grads, self.down if name == "down" else self.gate_up).to(self.to)
        names = ("gate", "up") if name == "gate_up" else (name,)
        for target, part in zip(names, grads.chunk(len(names), -1), strict=True):
            lora = self.lora[target]
            if lora is not None:
                back = self.product(self.high(target, part), lora.a)
                total.add_(self.masked(target, back), alpha=lora.scale)
        return total

    def low(self, name: str, inputs: Tensor) -> Tensor:
        """A (m * v): [P, r], with r padded to a multiple of GRAIN"""
        return self._of_ranks(name, self.masked(name, inputs), self.lora[name].a.mT)  # type: ignore[union-attr]

    def high(self, name: str, grads: Tensor) -> Tensor:
        """B^T d: [P, r], with r padded to a multiple of GRAIN"""
        return self._of_ranks(name, grads, self.lora[name].b)  # type: ignore[union-attr]

    def _of_ranks(self, name: str, rows: Tensor, factor: Tensor) -> Tensor:
        out = self.product(rows, factor)
        out[:, present(self.tensors, f"{name}_a").shape[1] :] = 0  # clear the padding of the rank: 0 * inf is NaN
        return out

    def masked(self, name: str, values: Tensor) -> Tensor:
        """m * values"""
        p = self.options.get("dropout", 0.0)
        if not p:
            return values
        slots = self.routes.order % max(1, self.routes.k)
        seed, numbers = dropout.numbered(present(self.tensors, "seed"), self.routes.token)
        kept = dropout.kept(seed, TARGETS.index(name), numbers, slots, values.shape[-1], p)
        return values.to(self.to).masked_fill(~kept, 0.0) * (1 / (1 - p))

    # -- gradients of parameters --------------------------------------------------------------------------------------

    def of_factors(
        self, name: str, grads: Tensor, inputs: Tensor, needs: frozenset, weights: Tensor | float = 1.0
    ) -> dict[str, Tensor]:
        """dA = s sum (w B^T d) (m * v)^T and dB = s sum d (w A (m * v))^T; w is applied to the few ranks."""
        gradients: dict[str, Tensor] = {}
        if self.lora[name] is None:
            return gradients
        scale, rank = self.options[f"{name}_scale"], present(self.tensors, f"{name}_a").shape[1]  # type: ignore[literal-required]
        if f"{name}_a" in needs:
            high = self.high(name, grads) * weights
            gradients[f"{name}_a"] = scale * self.outer(high, self.masked(name, inputs))[:, :rank]
        if f"{name}_b" in needs:
            low = self.low(name, inputs) * weights
            gradients[f"{name}_b"] = scale * self.outer(grads, low)[..., :rank]
        return gradients

    def of_base(self, key: str, grads: Tensor, inputs: Tensor, needs: frozenset) -> dict[str, Tensor]:
        """dW = sum d v^T and db = sum d, for "gate_up" or "down" """
        gradients = {key: self.outer(grads, inputs)} if key in needs else {}
        if f"{key}_bias" in needs:
            skipped = self.routes.skipped.index_select(0, self.routes.order)
            kept = grads.to(self.to).masked_fill(skipped, 0.0)
            # index_put_ sorts, so it repeats bit for bit; index_add_ on a GPU does not
            sums = kept.new_zeros(self.experts, kept.shape[-1])
            gradients[f"{key}_bias"] = sums.index_put_((self.routes.expert,), kept, accumulate=True)
        return gradients

    def _factors(self, name: str) -> Factors | None:
        """The LoRA factors in the dtype of products, with the rank padded with 0 to a multiple of GRAIN."""
        a, b = self.tensors.get(f"{name}_a"), self.tensors.get(f"{name}_b")
        if a is None or b is None:
            return None
        a, b = a.to(self.store), b.to(self.store)
        if missing := -a.shape[1] % GRAIN:
            a, b = pad(a, (0, 0, 0, missing)), pad(b, (0, missing))
        return Factors(a.contiguous(), b.contiguous(), self.options[f"{name}_scale"])  # type: ignore[literal-required]


def readable(matrices: Tensor) -> Tensor:
    """[E, m, n] as torch._grouped_mm can read it: rows or columns without gaps, at multiples of 16 bytes."""
    of_expert, down, right = matrices.stride()
    m, n = matrices.shape[1:]
    in_rows, in_columns = right == 1 and down >= n, down == 1 and right >= m
    steps = (of_expert, down if in_rows else right, matrices.storage_offset())
    fits = (in_rows or in_columns) and not any(step % GRAIN for step in steps)
    return matrices if fits else matrices.clone(memory_format=torch.contiguous_format)


def grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """a [rows, m] b [E, m, n] -> [rows, n], by the expert of each row; or a [m, rows] b [rows, n] -> [E, m, n]."""
    if not a.numel() or not b.numel():
        return a.new_zeros((a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(ends), a.shape[0], b.shape[1]))
    return torch._grouped_mm(a, b, offs=ends)
