"""A matrix product with a factor on each addend: values applied once more, or left out, on the inner axis.

The factors are the least-squares solution for the candidate's gradient. If there are many more elements than factors
and all elements fit exactly, the factors are real. Tensors of the golden give them a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Key, Node
from ...graph.tensors import floating
from ..change import Change, with_result
from ..judge import Judge

_MOST = 256  # factors
_TIMES = 2  # elements per factor, at least
_FACTORS = 24


def changes(calls: Sequence[Node], among: set[int], judge: Judge) -> Iterator[Change]:
    for call in calls:
        product = call.name in ("mm", "bmm") and call.backward and call.index in among and floating(call.out)
        if not product or call.out.numel() != judge.golden.numel() or not bool(judge.finite.all()):
            continue
        for view in (call.out, call.out.mT):
            if torch.equal(view.reshape(-1), judge.golden.reshape(-1)):
                got, bound = (t.reshape(view.shape) for t in (judge.got, judge.bound))
                flipped = view is not call.out
                change = _weighed(calls, call, got.mT if flipped else got, bound.mT if flipped else bound)
                if change is not None:
                    yield change
                break
        else:
            yield from _scaled(calls, call, judge)


def _scaled(calls: Sequence[Node], call: Node, judge: Judge) -> Iterator[Change]:
    """The same if the gradient is the product times a factor at each place."""
    out = call.out.detach()
    if bool((out == 0).any()) or bool((judge.golden == 0).any()):
        return
    times = judge.golden.reshape(out.shape) / out
    got, bound = judge.got.reshape(out.shape) / times, judge.bound.reshape(out.shape) / times.abs()
    change = _weighed(calls, call, got, bound)
    if change is not None:
        yield change


def _weighed(calls: Sequence[Node], call: Node, got: Tensor, bound: Tensor) -> Change | None:
    a, b = call.args[0].detach(), call.args[1].detach()
    n = a.shape[-1]
    if not 1 < n <= _MOST or got.numel() < _TIMES * n + 2:
        return None
    columns = (a.unsqueeze(-2) * b.mT.unsqueeze(-3)).reshape(-1, n)
    weight = 1 / bound.reshape(-1, 1)
    factors = torch.linalg.lstsq(columns * weight, got.reshape(-1, 1) * weight).solution[:, 0]
    near = (factors - 1).abs() < 1e-4
    if not bool(torch.isfinite(factors).all()) or bool(near.all()):
        return None
    product = (a * factors) @ b
    if bool(((product - got).abs() > 4 * bound * factors.abs().max().clamp_min(1)).any()):
        return None
    where = f"each addend of {call.expression} has a wrong factor of its own"
    if bool((near | (factors.abs() < 1e-4)).all()):
        gone = (~near).nonzero().flatten().tolist()
        params = {"axis": call.args[0].dim() - 1, "missing": [gone[0], gone[-1] + 1]}
        text = f"{len(gone)} of the {n} addends of {call.expression} are left out"
        # a loop that loses its beginning seldom starts late: each iteration overwrites the one before
        begins = gone == list(range(len(gone)))
        cause, *also = ("overwritten_accumulator", "truncated_reduction") if begins else ("truncated_reduction",)
        return Change(cause, text, call.index, with_result(lambda out: product), params, 0.5,
                      also=(*also, "missing_term", "lost_update"))  # fmt: skip
    name = _name(calls, factors)
    text = f"{where}, {name}" if name else f"{where}, {float(factors.min()):.3g} to {float(factors.max()):.3g}"
    params = {"factor": name, "named": name}
    return Change("wrong_factor", text, call.index, with_result(lambda out: product), params, 0.5 if name else 0.4,
                  also=("repeated_term",))  # fmt: skip


def _name(calls: Sequence[Node], factors: Tensor) -> str:
    """The factors' name in the golden: a row of it, an inverse, or a quotient or product of two."""
    rows: dict[Key, tuple[str, Tensor]] = {}
    for call in calls:
        for key, name, t in zip(call.makers, call.operands, call.tensors, strict=True):
            if not call.backward and floating(t) and t.numel() == len(factors) and name:
                rows[key] = name, t.detach().reshape(-1)
    candidates = list(rows.values())[:_FACTORS]

    def same(t: Tensor) -> bool:
        return bool(((t - factors).abs() <= 1e-4 * factors.abs()).all())

    for name, t in candidates:
        if same(t):
            return name
        if same(1 / t):
            return f"1/{name}"
    for i, (name, t) in enumerate(candidates):
        for j, (other, u) in enumerate(candidates):
            if i != j and same(t / u):
                return f"{name}/{other}"
            if i < j and same(t * u):
                return f"{name} * {other}"
    return ""
