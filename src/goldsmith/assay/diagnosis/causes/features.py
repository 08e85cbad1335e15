"""Describes a failing case in yes-or-no statements that hold for any operator.

A rule looks for the mark of one mistake. These statements name no cause; `likelihood` learns how often each occurs
with which cause, from kernels with known faults. They name no kernels and no tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...report.results import QUALITY
from ..facts.evidence import OBSERVED, Evidence
from .rules.reading import Reading, ranges

_KINDS = {
    "exponentials": {"exp", "_softmax", "_log_softmax", "logsumexp", "log", "sigmoid", "exp2"},
    "running sums": {"cumsum", "cumprod", "logcumsumexp", "flip"},
    "choices": {"sort", "topk", "argmax", "max", "argsort", "argmin"},
    "lookups": {"index", "gather", "index_select", "embedding", "take_along_dim", "select", "slice_backward"},
    "scatters": {"index_add", "scatter_add", "index_put", "_index_put_impl_", "scatter", "index_add_", "bincount"},
    "products": {"mm", "bmm", "addmm", "matmul", "baddbmm", "mv", "dot"},
    "masks": {"where", "masked_fill", "tril", "triu", "masked_fill_"},
    "roots": {"rsqrt", "sqrt", "reciprocal", "linalg_vector_norm"},
    "rounding": {"round", "floor", "trunc", "bitwise_and", "__and__", "bitwise_right_shift", "__rshift__"},
    "means": {"mean", "var", "native_layer_norm", "var_mean"},
    "pieces": {"cat", "stack", "split", "unbind", "constant_pad_nd"},
}
_ALIKE = 1e-4  # relative distance below which rows count as equal


def features(evidence: Evidence) -> frozenset[str]:
    """Names of the true statements."""
    r = Reading(evidence)
    statements = _place(evidence) | _operators(evidence) | _runs(r) | _influence(r) | _facts(evidence)
    if r.wrong is not None and r.wrong_count:
        statements |= _shape(r, r.wrong)
    if r.pair is not None and r.wrong is not None:
        statements |= _numbers(r, *r.pair, r.wrong)
    return frozenset(statements)


def _place(e: Evidence) -> set[str]:
    """Statements about the position in the computation, and about which other tensors are wrong."""
    state, kind = e.stage(e.first_wrong or e.tensor), "stage"
    statements = {"a gradient" if e.tensor.endswith(".grad") else "a forward result"}
    if state is not None:
        kind = state.kind
        statements |= {"it could not be isolated"} if state.state == OBSERVED else set()
    statements.add(f"kind {kind}")
    wrong = {f.tensor for f in e.report.findings if f.rung != QUALITY}
    grads = {n for n in wrong if n.endswith(".grad")}
    statements |= {"several gradients are wrong"} if len(grads) > 1 else set()
    statements |= {"outputs are wrong"} if wrong - grads else {"gradients alone are wrong"}
    later = [s for s in e.stages if s.kind in ("output", "grad") and s.name != e.tensor]
    if later and not any(s.name in wrong for s in later):
        statements.add("nothing else is wrong")
    if e.tensor.endswith(".grad") and e.carriers is not None and e.carriers.always:
        statements.add("wrong without any output's gradient")
    if e.golden is not None:
        statements.add(f"{min(e.golden.dim(), 3)} axes")
    return statements


def _operators(e: Evidence) -> set[str]:
    names = {n.rstrip("_") for n in e.operators} | set(e.operators)
    return {f"golden has {kind}" for kind, known in _KINDS.items() if names & known}


def _facts(e: Evidence) -> set[str]:
    """Statements about memory, fits and changed goldens."""
    statements = {f"memory {m.kind}" for m in e.memory}
    statements |= {f"term {f.reading}" for f in e.fits if f.r2 > 0.98}
    statements |= {f"ratio of a {r.scope}" for r in e.ratios if r.fraction > 0.9}
    statements |= {f"pattern {p.kind}" for p in e.permutations if p.match >= 0.98}
    statements |= {"raises"} if e.error else set()
    statements |= {"it is another tensor of the golden"} if e.alike else set()
    statements |= {"an empty group"} if e.filled or e.unused else set()
    return statements


def _runs(r: Reading) -> set[str]:
    """Statements about other runs: which are right, and whether the wrong ones are wrong in the same way."""
    statements = set() if r.plain_wrong else {"the first call is right"}
    for name in ("second call", "other inputs", "back", "repeat", "2 threads", "zeroed memory", "flat", "offset"):
        if r.plain_wrong and r.right(name):
            statements.add(f"right in {name}")
        elif not r.plain_wrong and r.fails(name) is not None:
            statements.add(f"wrong in {name}")
    for name in ("scale 2^12", "scale 2^-12"):
        if r.plain_wrong and r.right(name):
            statements.add(f"right at {name}")
        elif not r.plain_wrong and r.fails(name) is not None:
            statements.add(f"wrong at {name}")
    if not r.plain_wrong and any(not run.right for run in r.runs("layout")):
        statements.add("wrong in a layout")
    return statements


def _influence(r: Reading) -> set[str]:
    """Statements about which slices of the inputs matter."""
    statements = set()
    for i in r.influences:
        last = i.length - 1
        if i.missing:
            statements.add("influence missing")
            statements.add("missing to the end" if last > 0 and i.missing[-1][1] == last else "missing, not to the end")
            statements |= {"missing in several ranges"} if len(i.missing) > 1 else set()
            statements |= {"missing from the beginning"} if i.missing[0][0] == 0 else set()
            single = len(i.missing) == 1 and i.missing[0][0] == i.missing[0][1]
            statements |= {"one slice missing"} if single else set()
            statements |= {"what is missing is where it is wrong"} if r.reached_by(i) else set()
            statements |= {"as if what is missing were zero"} if i.absent else set()
            statements |= {"not as if what is missing were zero"} if i.absent is False else set()
            statements |= {"nothing is summed along what is missing"} if i.summed is False else set()
            statements |= {"what goes with what is missing is read"} if i.beside else set()
        if i.extra:
            statements.add("influence extra")
            statements |= {"extra throughout"} if i.throughout else set()
            single = len(i.extra) == 1 and i.extra[0][0] == i.extra[0][1]
            statements |= {"one slice extra"} if single else set()
            statements |= {"it comes out elsewhere"} if i.elsewhere else set()
            statements |= {"of an input that should not matter"} if i.foreign else set()
        statements |= {f"rows leak into {i.onto} rows"} if i.onto else set()
        statements |= {"missing and extra"} if i.missing and i.extra else set()
    if any(r.absent(i) for i in r.e.influence.values()):
        statements.add("an input without influence")
    return statements


def _shape(r: Reading, wrong: Tensor) -> set[str]:
    """Statements about which elements are wrong."""
    share = r.share
    statements = {
        "all wrong" if share == 1 else "most wrong" if share > 0.8 else "many wrong" if share > 0.3 else "few wrong"
    }
    statements |= {"one element wrong"} if r.wrong_count == 1 and wrong.numel() > 4 else set()
    if share < 1:
        statements.add("a block" if r.block else "scattered")
    for axis, spans in r.spans.items():
        last = r.length(axis) - 1
        if last < 2:
            continue
        if len(spans) == 1:
            ((lo, hi),) = spans
            statements.add("one index" if lo == hi else "one range")
            statements |= {"to the end"} if hi == last else set()
            statements |= {"from the beginning"} if lo == 0 else set()
            statements |= {"all but the first"} if (lo, hi) == (1, last) else set()
            statements |= {"all but the last"} if (lo, hi) == (0, last - 1) else set()
            statements |= {"from a power of two"} if lo > 1 and lo & (lo - 1) == 0 and hi == last else set()
        else:
            statements.add("several ranges")
            starts = [lo for lo, _ in spans]
            steps = {b - a for a, b in zip(starts, starts[1:], strict=False)}
            statements |= {"periodic"} if len(starts) > 2 and len(steps) == 1 else set()
    return statements


def _numbers(r: Reading, y: Tensor, g: Tensor, wrong: Tensor) -> set[str]:
    """Statements that compare wrong elements with the golden's."""
    statements = set()
    if r.y is not None and not bool(torch.isfinite(r.y).all()):
        statements.add("holds NaN" if bool(torch.isnan(r.y).any()) else "holds Inf")
    a, b = y[wrong], g[wrong]
    norms = float(a.norm()), float(b.norm())
    if not norms[1]:
        return statements | {"the golden is zero there"}
    if not norms[0]:
        return statements | {"zeros there"}
    size, alike = norms[0] / norms[1], float((a * b).sum()) / (norms[0] * norms[1])
    error = float((a - b).norm()) / norms[1]
    statements.add(_named(error, (1e-3, "tiny errors"), (0.1, "small errors"), (0.8, "errors below its size"),
                    (3.0, "errors of its size"), (torch.inf, "errors beyond its size")))  # fmt: skip
    statements.add(_named(size, (0.5, "much smaller"), (0.9, "smaller"), (1.1, "as large"), (2.0, "larger"),
                    (torch.inf, "much larger")))  # fmt: skip
    statements.add(_named(alike, (-0.5, "opposite"), (0.3, "unlike"), (0.9, "akin"), (torch.inf, "alike")))
    if bool((b == 0).any()):
        statements.add("some of the golden is zero there")
    if bool((a == 0).any()):
        statements.add("some are zero there")
    if a.numel() > 3:
        between = (a.abs() <= b.abs() * (1 + 1e-6)) & (a * b >= 0)
        beyond = (a.abs() >= b.abs() * (1 - 1e-6)) & (a * b >= 0)
        statements |= {"each a part of the golden's"} if bool(between.all()) else set()
        statements |= {"each more than the golden's"} if bool(beyond.all()) else set()
        signs = (a - b).sign()
        statements |= {"all errors of one sign"} if bool((signs == signs[0]).all()) else set()
    return statements | _axes(y, g)


def _named(value: float, *steps: tuple[float, str]) -> str:
    """The name of the first step that exceeds the value."""
    return next((name for below, name in steps if value < below), steps[-1][1])


def _axes(y: Tensor, g: Tensor) -> set[str]:
    """Statements about axes: constant error or ratio, low rank, zero sum, rows that belong to other places."""
    statements, error = set(), y - g
    scale = float(error.norm())
    for axis in range(g.dim()):
        n = g.shape[axis]
        if n < 3 or not scale:
            continue
        mean = error.mean(axis, keepdim=True)
        if float((error - mean).norm()) < 1e-4 * scale:
            statements.add("the error is the same along an axis")
        if float(mean.norm()) * n**0.5 < 1e-4 * scale:
            statements.add("the error sums to zero along an axis")
        along, across = (y * g).sum(axis, keepdim=True), (g * g).sum(axis, keepdim=True)
        ratio = along / torch.where(across > 0, across, torch.ones_like(across))
        if float((y - ratio * g).norm()) < 1e-4 * scale:
            statements.add("a factor for each row")
        rows_y, rows_g = y.movedim(axis, 0).reshape(n, -1), g.movedim(axis, 0).reshape(n, -1)
        if n <= 512 and rows_g.shape[1] > 1:
            statements |= _rows(rows_y, rows_g)
    if g.dim() >= 2 and scale and min(error.flatten(1).shape) > 2 and error.numel() <= 1 << 16:
        values = torch.linalg.svdvals(error.flatten(1))
        if bool(torch.isfinite(values).all()) and float(values[1]) < 1e-4 * float(values[0]):
            statements.add("the error is of rank one")
    return statements


def _rows(y: Tensor, g: Tensor) -> set[str]:
    """Statements about wrong rows that equal the golden's rows of other places."""
    near = torch.cdist(y, g) <= _ALIKE * y.norm(dim=1, keepdim=True)
    own = near.diagonal()
    moved = near.any(1) & ~own & (y.norm(dim=1) > 0)
    if not bool(moved.any()):
        return set()
    flags = ranges(~own)
    share = float(moved.sum()) / max(1, int((~own).sum()))
    return {"rows of other places" if share > 0.9 else "some rows of other places"} if flags else set()
