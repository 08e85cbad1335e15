"""Describes a failing case in yes-or-no statements that hold for any operator.

A rule looks for the mark of one mistake. These statements name no cause; `likelihood` learns how often each occurs
with which cause, from kernels with known faults. They name no kernels and no tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...report.results import QUALITY
from ..facts.evidence import OBSERVED, Evidence
from .rules.reading import Reading

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
    if e.golden is not None:
        statements.add(f"{min(e.golden.dim(), 3)} axes")
    return statements


def _operators(e: Evidence) -> set[str]:
    names = {n.rstrip("_") for n in e.operators} | set(e.operators)
    return {f"golden has {kind}" for kind, known in _KINDS.items() if names & known}


def _facts(e: Evidence) -> set[str]:
    """Statements about memory, ratios and rearrangements."""
    statements = {f"memory {m.kind}" for m in e.memory}
    statements |= {f"ratio of a {r.scope}" for r in e.ratios}
    statements |= {f"pattern {p.kind}" for p in e.permutations if p.match >= 0.98}
    return statements | ({"an empty group"} if e.filled or e.unused else set())


def _runs(r: Reading) -> set[str]:
    """Statements about other runs: which are right, and whether the wrong ones are wrong in the same way."""
    statements = set() if r.plain_wrong else {"the first call is right"}
    for name in ("other inputs", "flat", "offset"):
        if r.plain_wrong and r.right(name):
            statements.add(f"right in {name}")
        elif not r.plain_wrong and r.fails(name) is not None:
            statements.add(f"wrong in {name}")
    for name in ("scale 2^12", "scale 2^-12"):
        if r.plain_wrong and r.right(name):
            statements.add(f"right at {name}")
        elif not r.plain_wrong and r.fails(name) is not None:
            statements.add(f"wrong at {name}")
    return statements


def _influence(r: Reading) -> set[str]:
    """Statements about which slices of the inputs matter."""
    statements = set()
    for i in r.influences:
        last = i.length - 1
        if i.missing:
            statements.add("influence missing")
            statements.add("missing to the end" if last > 0 and i.missing[-1][1] == last else "missing, not to the end")
            statements |= {"missing from the beginning"} if i.missing[0][0] == 0 else set()
        if i.extra:
            statements.add("influence extra")
            statements |= {"extra throughout"} if i.throughout else set()
            statements |= {"it comes out elsewhere"} if i.elsewhere else set()
        statements |= {f"rows leak into {i.onto} rows"} if i.onto else set()
        statements |= {"missing and extra"} if i.missing and i.extra else set()
    return statements


def _shape(r: Reading, wrong: Tensor) -> set[str]:
    """Statements about which elements are wrong."""
    share = r.share
    statements = {
        "all wrong" if share == 1 else "most wrong" if share > 0.8 else "many wrong" if share > 0.3 else "few wrong"
    }
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
        else:
            statements.add("several ranges")
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
        signs = (a - b).sign()
        statements |= {"all errors of one sign"} if bool((signs == signs[0]).all()) else set()
    return statements


def _named(value: float, *steps: tuple[float, str]) -> str:
    """The name of the first step that exceeds the value."""
    return next((name for below, name in steps if value < below), steps[-1][1])
