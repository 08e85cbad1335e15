"""A gradient's sum along another axis, with the factors outside or inside the sum.

    golden   f[t] sum_d p[t, d]    autograd: sum_d (p[t, d] f[t])
    kernel   f[t] sum_t p[t, d]    or sum_t (p[t, d] f[t]): equal along the right axis, but not along another one

An addend whose sum along the golden's axis is always 0 (the path of a mean through its variance) is in no kernel's sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...edits.golden_edit import CALL, NamedEdit, do, named
from ...edits.gradients.factors import forward_operands
from ...edits.primitives.formulas import other_result
from ...edits.reductions import axes_of
from ...graph.graph import Graph
from ...graph.node import Key, Node, maker_of
from ...graph.tensors import floating
from ..vanishing import vanishes

_SUMS, _FACTORS, _ADDENDS = 16, 6, 4


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[NamedEdit]:
    """Only sums that keep their axis are changed, so that shapes fit."""
    sums = [c for c in calls if c.backward and c.index in among and c.name == "sum" and floating(c.out)]
    known = [(o.name, o.tensor) for o in forward_operands(Graph(calls, among))] if sums else []
    for call in sums[:_SUMS]:
        x, axes = call.args[0], axes_of(call)
        if len(axes) != 1 or x.dim() < 2 or call.out.dim() != x.dim():
            continue
        axis = axes[0]
        addends = list(_addends(calls, call.makers[0], x, 1.0, _ADDENDS))
        kept = [t for t in addends if not vanishes(call, t)]
        if not kept:
            continue
        summed = torch.stack(kept).sum(0).detach()
        factors: list[tuple[str, Tensor | None]] = [("", None)] if len(kept) < len(addends) else []
        fitting = [(n, t.detach()) for n, t in known if _along_others(t, x, axis)]
        factors += [(f"1/{n}", 1 / t) for n, t in fitting[:_FACTORS]] + [(n, t) for n, t in fitting[:_FACTORS]]
        for other in (d for d in range(x.dim()) if d != axis and x.shape[d] > 1):
            for name, factor in factors:
                result = (summed if factor is None else summed * factor).sum(other, keepdim=True)
                result = (result if factor is None else result / factor).expand(x.shape)
                for share, how in ((x.shape[axis] / x.shape[other], ", and is divided by its length"), (1.0, "")):
                    inside = f", with {name} inside" if name else ""
                    text = f"{call.expression} runs along axis {other} instead of {axis}{inside}{how}"
                    other_sum = CALL, do(other_result, new=result * share)
                    yield named(call, "wrong_axis", 0.6, text, other_sum, input=call.operand(0), axis=other,
                                golden_axis=axis)  # fmt: skip


def _addends(calls: Sequence[Node], key: Key, value: Tensor, sign: float, most: int) -> Iterator[Tensor]:
    """The addends of a tensor, each with its sign."""
    maker = maker_of(calls, key)
    if maker is not None and maker.backward and maker.owns and maker.out.shape == value.shape and most:
        if maker.name == "neg":
            yield from _addends(calls, maker.makers[0], maker.args[0], -sign, most - 1)
            return
        same = len(maker.tensors) == 2 and all(t.shape == value.shape for t in maker.tensors)
        if maker.name in ("add", "sub") and same and not maker.kwargs:
            signs = (sign, sign if maker.name == "add" else -sign)
            for k, t, s in zip(maker.makers, maker.tensors, signs, strict=True):
                yield from _addends(calls, k, t, s, most - 1)
            return
    yield sign * value


def _along_others(t: Tensor, x: Tensor, axis: int) -> bool:
    """Whether a factor is constant along the summed axis and varies along others."""
    fits = t.dim() == x.dim() and t.shape[axis] == 1 and t.numel() > 1
    return fits and all(n in (1, m) for n, m in zip(t.shape, x.shape, strict=True)) and not bool((t == 0).any())
