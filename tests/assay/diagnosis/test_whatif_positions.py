"""Changed goldens: positions counted from another origin, windows, borders, one place for all, chunked sums."""

import pytest
import torch
from torch.nn import functional as F

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.experiments.influence import influence

pytestmark = pytest.mark.sweep(8)


def best(kernel, golden, cases, tensor="y"):
    examination = session_of(assay.Target(kernel, golden, cases=cases, backward=None), ("values", "ensemble"))
    changes = explain(examination, tensor, examination.first.outputs[tensor], examination.first)
    assert changes, f"nothing explains {tensor}"
    return changes[0]


@assay.case(P=[14], S=[3], D=[4], N=[5])
def packed(make, P, S, D, N):
    return {
        "x": make.normal(P, D),
        "col": make.integers(0, N, P),
        "table": make.normal(N, D),
        "ends": make.offsets(S, P),
    }


def summed(x, col, table, ends, *, of=lambda lo, hi: slice(lo, hi)):
    return torch.stack([(x[lo:hi] * table[col[of(lo, hi)]]).sum(0) for lo, hi in zip(ends, ends[1:], strict=False)])


def test_a_segments_offset_is_not_added():
    kernel = lambda x, col, table, ends: summed(x, col, table, ends, of=lambda lo, hi: slice(0, hi - lo))  # noqa: E731
    change = best(kernel, lambda x, col, table, ends: summed(x, col, table, ends), packed)
    assert (change.cause, change.exact) == ("invalid_index", True)
    assert change.text == "col is read from its beginning in every segment: the offset from ends is not added"


@assay.case(C=[2], H=[7], W=[9])
def maps(make, C, H, W):
    return {"x": make.uniform(C, H, W) - 2}


def pooled(x, *, rows=3, fill=-torch.inf):
    return F.pad(x, (1, 1, 1, 1), value=fill).unfold(1, 3, 2).unfold(2, 3, 2)[..., :rows, :].amax((-2, -1))


@assay.case(M=[6], G=[3], B=[4], N=[5])
def scaled(make, M, G, B, N):
    return {"a": make.normal(M, G * B), "s": make.uniform(M, G) + 0.5, "t": make.uniform(G, N) + 0.5}


def test_the_last_scales_used_for_all_blocks():
    def blocks(a, s, t, *, own):
        return sum(part.sum(1, keepdim=True) * s[:, g if own else -1, None] * t[g if own else -1]
                   for g, part in enumerate(a.split(4, 1)))  # fmt: skip

    change = best(lambda a, s, t: blocks(a, s, t, own=False), lambda a, s, t: blocks(a, s, t, own=True), scaled)
    assert (change.cause, change.exact) == ("wrong_factor", True) and change.text.endswith("is used for all")
    assert "axis 1 of s" in change.text and "axis 0 of t" in change.text


@assay.case(T=[11], D=[3])
def tokens(make, T, D):
    return {"q": make.uniform(T, D), "k": make.uniform(T, D), "v": make.normal(T, D)}


@assay.case(R=[3], T=[17])
def lines(make, R, T):
    return {"x": make.normal(R, T), "x0": make.normal(R)}


@assay.case(E=[9], N=[3], D=[4])
def edges(make, E, N, D):
    return {"s": make.normal(E), "x": make.normal(E, D), "node": make.integers(0, N, E)}


def test_only_the_last_addend_of_a_softmax_sum_survives():
    def attend(s, x, node, *, stored):
        out = []
        for n in range(3):
            e = torch.exp(s[node == n] - s[node == n].amax())
            out.append(((e / (e[-1] if stored else e.sum()))[:, None] * x[node == n]).sum(0))
        return torch.stack(out)

    def golden(s, x, node):
        return torch.stack([(torch.softmax(s[node == n], 0)[:, None] * x[node == n]).sum(0) for n in range(3)])

    change = best(lambda s, x, node: attend(s, x, node, stored=True), golden, edges)
    assert (change.cause, change.exact) == ("lost_update", True) and "a store stands" in change.text


@assay.case(T=[8], E=[3])
def chosen(make, T, E):
    return {"p": make.normal(T, E), "x": make.normal(T)}


def test_a_column_read_with_exchanged_axes():
    golden = lambda p, x: sum(torch.tanh(p[:, e] * x) for e in range(3))  # noqa: E731
    kernel = lambda p, x: sum(torch.tanh(p.flatten()[8 * e : 8 * e + 8] * x) for e in range(3))  # noqa: E731
    change = best(kernel, golden, chosen)
    assert (change.cause, change.exact) == ("wrong_stride", True)


# influence next to the borders of groups


@assay.case(K=[24])
def long(make, K):
    return {"x": make.normal(K), "ends": torch.tensor([0, 9, K])}


def test_a_leak_across_a_border_shows_in_the_influence_of_slices():
    def sums(x, ends, *, beyond=0):
        return torch.stack([torch.tanh(x[lo : hi + beyond]).sum() for lo, hi in zip(ends, ends[1:], strict=False)])

    examination = session_of(assay.Target(lambda x, ends: sums(x, ends, beyond=2), lambda x, ends: sums(x, ends),
                                      cases=long, backward=None), ("values",))  # fmt: skip
    influences = influence(examination, {"y"})
    assert influences["x[0]"].extra == ((9, 10),) and not influences["x[0]"].missing
    right = session_of(assay.Target(sums, lambda x, ends: sums(x, ends), cases=long, backward=None), ("values",))
    assert influence(right, {"y"}) == {}
