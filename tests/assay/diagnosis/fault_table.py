"""One wrong kernel, or more, for each cause that evidence can show: (cause, name, evidence)."""

import math

import torch

from assay.diagnosis.faulty import checked, draw, pair, report
from goldsmith.assay.diagnosis.facts.evidence import (
    Evidence,
    Influence,
    MemoryFact,
    NonFiniteOrigin,
    RunFact,
    StageState,
)
from goldsmith.assay.diagnosis.facts.patterns import patterns
from goldsmith.assay.report.results import Location

A, B = draw(12, 40), draw(40, 16, seed=1)
G = A @ B
nan = math.nan
LAYOUTS = {"layout transposed(x)": True, "layout stride0(grad_y)": False}


def put(value, where, golden=G):
    got = golden.clone()
    got[where] = value
    return got


def cut(kept, *missing):
    return pair(A[:, kept] @ B[kept], G, influence={"a": Influence("a", 1, missing, outputs=("y",))})


def refused(probe, verdict, text, kind, **values):
    refusal = report(text, probe=probe, verdict=verdict, kind=kind, values=values)
    return Evidence(report=refusal, tensor="y")


def poisoned(share, right):
    where = Location("y", axes={"1": [(1, 3)]}, fraction=share, text="axis 1: 1..3")
    fact = MemoryFact("never_written", "y", "y holds uninitialised memory: axis 1: 1..3", where)
    zeroed = RunFact("zeroed memory", wrong=() if right else ("y",))
    return pair(put(nan, (slice(None), slice(1, 4))), G, memory=[fact], runs={"zeroed memory": zeroed})


def fact(kind, text="something was done", **values):
    return Evidence(report=report(text), tensor="y", memory=[MemoryFact(kind, "y", text, values=values)])


def late(**runs):
    """The first call is right; of other runs the named ones are wrong (True) or right (False)."""
    facts = {n.replace("__", "-"): wrong for n, wrong in runs.items()}
    named = {n: RunFact(n, wrong=("y",) if w else (), same=False) for n, w in facts.items()}
    return Evidence(report=report("y is wrong", probe="other"), tensor="y", golden=G, got=G.clone(), runs=named)


def ran(evidence, **runs):
    for name, (wrong, same) in runs.items():
        evidence.runs[name] = RunFact(name, wrong=("y",) if wrong else (), same=same)
    return evidence


def freed():
    origin = NonFiniteOrigin("nan", "y", "add", "use_after_free", ("memory that was freed is read",))
    return Evidence(report=report("y is wrong"), tensor="y", nonfinite_origin=origin)


def written_late():
    evidence = pair(put(0.0, 3), G)
    evidence.runs["watched afterwards"] = RunFact("watched afterwards", wrong=("y",), late=64)
    return evidence


def truncated(t):
    return (t.float().view(torch.int32) & -65536).view(torch.float32)


def low_precision(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for s, t in zip(a.float().split(4, 1), b.float().split(4, 0)):
        total = (total + s @ t).bfloat16()
    return total


def half_written():
    raw = torch.zeros(12 * 16, dtype=torch.float32)
    raw.view(torch.bfloat16)[: 12 * 16] = G.flatten().bfloat16()
    got = raw.view(12, 16)
    return pair(got, G, permutations=patterns("y", got, G))


def saves(text="y is right, x.grad is wrong"):
    stages = [StageState("y", "output", state="ok"), StageState("saved.act", "saved", state="culprit")]
    return pair(
        draw(12, 16, seed=3), G, tensor="x.grad", stages=stages, report=report(text), permutations=[], ratios=[]
    )


def swap():
    h = draw(12, 16, seed=4)
    return pair(h, G, tensor="w.grad", other={"b.grad": (G, h)})


def given_away():
    h = draw(12, 16, seed=4)
    return pair(torch.zeros_like(G), G, tensor="w.grad", other={"b.grad": (G + h, h)})


def dropped():
    kept = [draw(12, 16, seed=s) > 0 for s in (6, 7)]
    return pair(G * kept[0], G * kept[1])


def neighbour():
    golden = torch.ones(8, 6) + torch.arange(8).unsqueeze(1)
    got = golden.clone()
    got[:, -1] += 4
    return pair(got, golden)


def ranks():
    golden = draw(4, 6, 5, seed=2)
    got = golden.sum(0, keepdim=True).expand(4, 6, 5)
    return pair(got.sum(0), golden.sum(0), other={"partial": (got, golden)})


def group():
    golden = G.clone()
    golden[4] = 0
    return pair(put(nan, 4, golden), golden)


def far_inside():
    golden = G.float()
    values = torch.where(golden.abs() > 5, torch.inf * golden.sign(), golden)
    return pair(values, golden, other={"product": (values * 1e5, G * 1e5)})


def _max0(x):
    return torch.maximum(x.amax(1), torch.zeros(len(x)).double())


def keeps(x, w, _kept=[]):  # noqa: B006
    _kept.append((x * w).sum(-1))
    return _kept[0].clone()


TABLE = (
    ("never_written", "a grid too small", lambda: poisoned(0.2, right=False)),
    ("never_written", "a tail not stored, as checked", lambda: checked(_unstored, backward=None)),
    ("not_computed", "all zeros", lambda: pair(G * 0, G)),
    ("not_computed", "no tensor", lambda: Evidence(report=report("no tensor", kind="no_tensor"), tensor="y")),
    ("truncated_reduction", "the end is missing", lambda: cut(slice(0, 32), (32, 39))),
    ("off_by_one", "the last one is missing", lambda: cut(slice(0, 39), (39, 39))),
    ("wrong_mask", "what should be 0 is filled", lambda: pair(A, A.tril())),
    ("wrong_mask", "other=0 for a maximum", lambda: pair(_max0(A - 2), (A - 2).amax(1))),
    ("overwritten_accumulator", "the last block alone", lambda: cut(slice(32, 40), (0, 31))),
    ("uninitialised_accumulator", "added to poison", lambda: poisoned(1.0, right=True)),
    ("lost_update", "neither beginning nor end", lambda: cut(slice(8, 16), (0, 7), (16, 39))),
    ("low_precision_accumulation", "a bfloat16 sum", lambda: pair(low_precision(A, B), G)),
    ("repeated_term", "sixteen times", lambda: pair(G * 16, G, numbers={"n": 4})),
    ("sign_flip", "of the whole", lambda: pair(-G, G)),
    ("wrong_factor", "a scalar", lambda: pair(G * 0.37, G, numbers={"a_res": 0.37})),
    ("scale_bias", "times 1 + 2^-12", lambda: pair(G * (1 + 2.0**-12), G)),
    ("transposed", "square", lambda: pair(draw(9, 9).mT, draw(9, 9))),
    ("permuted", "rows", lambda: pair(G[torch.randperm(12, generator=torch.Generator().manual_seed(1))], G)),
    ("shifted", "by one", lambda: pair(G.roll(1, 0), G)),
    ("wrong_stride", "oblong", lambda: pair(G.mT.reshape(12, 16), G)),
    ("swapped_results", "exchanged", swap),
    ("swapped_results", "given to another input", given_away),
    ("dtype_width", "stored in 16 bits", half_written),
    ("wrong_format", "garbage", lambda: pair(torch.exp2(40 * draw(12, 16, seed=9)), G)),
    ("layout_assumption", "transposed input", lambda: late(**LAYOUTS)),
    ("layout_assumption", "as checked", lambda: checked(_dense_only, backward=None)),
    ("expanded_gradient", "stride 0 alone", lambda: late(**{k: not v for k, v in LAYOUTS.items()})),
    ("overrun", "guard", lambda: fact("overrun", bytes=4096, side="past")),
    ("stray_read", "guard", lambda: fact("stray_read")),
    ("aliased", "shared", lambda: fact("aliased")),
    ("input_modified", "as checked", lambda: checked(lambda x, w: x.detach().mul_(w).sum(-1), backward=None)),
    ("use_after_free", "freed", freed),
    ("stale_state", "second call", lambda: late(second_call=True, other_inputs=False)),
    ("stale_copy", "f(W + d) = f(W), as checked", lambda: checked(lambda x, w: keeps(x, w), backward=None)),
    ("stale_config", "other sizes", lambda: late(second_call=False, other_sizes=True)),
    ("race", "right at one thread", lambda: ran(pair(put(0.0, 3), G), **{"1 thread": (False, False)})),
    ("missing_sync", "written after it returned", written_late),
    ("overflow", "Inf", far_inside),
    ("missing_max_shift", "as checked", lambda: checked(_bare_softmax, _softmax, backward=None)),
    ("nan_swallowed", "as checked", lambda: checked(lambda x, w: (x * w).nan_to_num().sum(-1), backward=None)),
    ("absolute_eps", "as checked", lambda: checked(_eps_outside, _unit_rows, backward=None)),
    ("truncating_store", "bfloat16", lambda: pair(truncated(G), G, dtype="bfloat16")),
    ("index_overflow", "beyond 2^31", lambda: pair(put(0.0, slice(6, 12)), G, sizes={"stride": 2**31 + 8})),
    ("invalid_index", "-1 wraps", neighbour),
    ("wrong_decision", "an illegal choice", lambda: refused("decisions", "fail", "no", "illegal_choice")),
    ("wrong_saved_tensor", "saved pre-activation", saves),
    ("missing_partition", "each rank the whole", ranks),
    ("missing_partition", "no rank offset", lambda: pair(torch.cat([G[:6] + G[6:], G[6:] * 0]), G)),
    ("dropout_mismatch", "another seed", dropped),
    ("empty_group", "0 / 0", group),
    ("single_element", "one of 192", lambda: pair(put(9.0, (3, 4)), G)),
    ("exception", "raises", lambda: checked(_raises, backward=None)),
    ("bad_config", "group size 0", lambda: refused(
        "values", "fail", "it raised", "raised", error="ZeroDivisionError: integer modulo by zero")),
    ("reference_fault", "the golden", lambda: refused("golden", "reference_fault", "float32 inside", "golden")),
)  # fmt: skip


def _unstored(x, w):
    out = torch.empty(len(x))
    out[:-4] = (x * w).sum(-1)[:-4]
    return out


def _dense_only(x, w):
    dense = torch.as_strided(x, x.shape, (x.shape[1], 1))
    return (dense * w).sum(-1)


def _raises(x, w):
    raise KeyError("state")


def _softmax(x, w):
    return torch.softmax(x * 4, -1) @ w


def _bare_softmax(x, w):
    e = (x * 4).exp()
    return e / e.sum(-1, keepdim=True) @ w


def _unit_rows(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


def _eps_outside(x, w):
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-7)
