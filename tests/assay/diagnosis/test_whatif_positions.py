"""Changed goldens: positions counted from another origin, windows, borders, one place for all, chunked sums."""

import pytest
import torch
from torch.nn import functional as F

from assay.diagnosis.targets import session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.experiments.influence import influence
from goldsmith.assay.diagnosis.whatif import explain

pytestmark = pytest.mark.sweep(5)


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


@assay.case(Q=[3], K=[6], H=[4])
def positions(make, Q, K, H):
    return {"scores": make.normal(H, Q, K), "slope": make.uniform(H)}


def alibi(scores, slope, *, ends=True):
    far = torch.arange(scores.shape[1])[:, None]
    if ends:
        far = far + scores.shape[2] - scores.shape[1]
    far = (far - torch.arange(scores.shape[2])).abs()
    return torch.softmax(scores - slope[:, None, None] * far, -1)


def test_positions_counted_from_the_wrong_end():
    change = best(lambda scores, slope: alibi(scores, slope, ends=False), alibi, positions)
    assert (change.cause, change.exact) == ("shifted", True) and "is left out, 2 times" in change.text


@assay.case(C=[2], H=[7], W=[9])
def maps(make, C, H, W):
    return {"x": make.uniform(C, H, W) - 2}


def pooled(x, *, rows=3, fill=-torch.inf):
    return F.pad(x, (1, 1, 1, 1), value=fill).unfold(1, 3, 2).unfold(2, 3, 2)[..., :rows, :].amax((-2, -1))


@pytest.mark.parametrize(
    "kernel, cause, text",
    [
        (lambda x: pooled(x, rows=2), "off_by_one", "the last row of every window"),
        (lambda x: pooled(x, fill=0.0), "wrong_mask", "padded with 0"),
    ],
    ids=["short", "padded"],
)
def test_windows_of_a_maximum(kernel, cause, text):
    golden = lambda x: F.max_pool2d(x, 3, 2, 1)  # noqa: E731
    right = assay.Target(pooled, golden, cases=maps, backward=None)
    assert assay.check(right, raises=False).ok
    change = best(kernel, golden, maps)
    assert (change.cause, change.exact) == (cause, True) and text in change.text


def mirrored(x, *, far):
    for axis in (1, 2):
        n = x.shape[axis]
        at = torch.arange(-1, n + 1).abs()
        x = x.index_select(axis, torch.where(at < n, at, 2 * (n - 1) + far - at))
    return x * 2


def test_the_far_border_repeats_its_last_position():
    golden = lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect") * 2  # noqa: E731
    assert assay.check(assay.Target(lambda x: mirrored(x, far=0), golden, cases=maps, backward=None), raises=False).ok
    change = best(lambda x: mirrored(x, far=1), golden, maps)
    assert (change.cause, change.exact) == ("off_by_one", True) and "the far border repeats" in change.text


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


@pytest.mark.parametrize("sums, products", [(True, False), (False, True)])
def test_a_running_sum_that_restarts_in_every_chunk(sums, products):
    def golden(q, k, v):
        weights = (q @ k.mT).tril()
        return weights @ v / weights.sum(-1, keepdim=True)

    def kernel(q, k, v):
        weights = (q @ k.mT).tril()
        at = torch.arange(len(q)) // 4
        inside = weights * (at[:, None] == at)
        return (inside if products else weights) @ v / (inside if sums else weights).sum(-1, keepdim=True)

    change = best(kernel, golden, tokens)
    assert (change.cause, change.exact) == ("overwritten_accumulator", True)
    assert "in chunks of 4 of" in change.text and "nothing is carried over" in change.text


@assay.case(R=[3], T=[17])
def lines(make, R, T):
    return {"x": make.normal(R, T), "x0": make.normal(R)}


@pytest.mark.parametrize(
    "reach, last, cause", [(4, True, "truncated_reduction"), (8, False, "overwritten_accumulator")]
)
def test_a_scan_in_blocks_that_begins_with_a_state(reach, last, cause):
    def scan(x, x0, *, reach, last=True):
        carry, out = x0[:, None], []
        for part in x.split(8, 1):
            own = [part[:, max(0, t - reach + 1) : t + 1].logsumexp(1) for t in range(part.shape[1])]
            result = torch.logaddexp(torch.stack(own, 1), carry)
            carry = result[:, -1:] if last else own[-1][:, None]
            out.append(result)
        return torch.cat(out, 1)

    golden = lambda x, x0: torch.logcumsumexp(torch.cat((x0[:, None], x), 1), 1)[:, 1:]  # noqa: E731
    right = assay.Target(lambda x, x0: scan(x, x0, reach=8), golden, cases=lines, backward=None)
    assert assay.check(right, raises=False).ok
    change = best(lambda x, x0: scan(x, x0, reach=reach, last=last), golden, lines)
    assert (change.cause, change.exact, change.params["block"]) == (cause, True, 8)


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
