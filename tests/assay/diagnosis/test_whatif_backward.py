"""Hand-written backwards: each mistake in loops, blocks, ranks and recomputed chunks has its own change."""

import pytest
import torch
from torch.nn import functional as F

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


def asserted(target, tensor, cause, text):
    examination = session_of(target)
    changes = explain(
        examination, tensor, examination.first.grads[tensor], examination.first, causes=frozenset((cause,))
    )
    assert any(w.exact and w.whole and w.cause == cause and text in w.text for w in changes), changes


# lost addends of a gradient


@assay.case(P=[23], V=[7], D=[3])
def table(make, P, V, D):
    return {"table": make.normal(V, D), "scale": make.normal(V, 1), "ids": make.integers(0, V, P)}


def looked_up(table, scale, ids):
    return torch.tanh((table * scale)[ids])


def stored(d, ids, into):
    into[ids] = d


def by_blocks(d, ids, into):
    for at in range(0, len(ids), 8):
        part = slice(at, at + 8)
        new = torch.zeros_like(into).index_add_(0, ids[part], d[part])
        hit = torch.bincount(ids[part], minlength=len(into)) > 0
        into.copy_(torch.where(hit[:, None], new, into))


def without_tail(d, ids, into):
    into.index_add_(0, ids[:16], d[:16])


@pytest.mark.parametrize(
    "put, cause, text",
    [(stored, "lost_update", ""), (by_blocks, "lost_update", "the last ones are left"),
     (without_tail, "truncated_reduction", "the last updates are lost")],
)  # fmt: skip
def test_lost_updates_of_a_row_are_explained(put, cause, text):
    def backward(table, scale, ids, y, grad_y):
        rows = torch.zeros_like(table)
        put(grad_y * (1 - y * y), ids, rows)
        return {"table": rows * scale}

    target = assay.Target(looked_up, looked_up, cases=table, backward=backward, grads=("table",))
    asserted(target, "table.grad", cause, text)


@assay.case(H=[6], W=[8])
def framed(make, H, W):
    return {"x": make.normal(2, H, W)}


def reflected(x):
    return F.pad(x, (1, 1, 1, 1), mode="reflect") ** 2


@pytest.mark.parametrize("lost, cause", [("border", "missing_term"), ("first", "lost_update")])
def test_lost_addends_at_a_padded_border_are_explained(lost, cause):
    def backward(x, y, grad_y):
        d = 2 * F.pad(x, (1, 1, 1, 1), mode="reflect") * grad_y
        if lost == "border":
            return {"x": d[:, 1:-1, 1:-1].clone()}
        rows, columns = torch.tensor([1, *range(6), 4]), torch.tensor([1, *range(8), 6])
        padded = torch.zeros(2, 6, 10).index_copy_(1, rows, d)
        return {"x": torch.zeros(2, 6, 8).index_add_(2, columns, padded)}

    asserted(assay.Target(reflected, reflected, cases=framed, backward=backward), "x.grad", cause, "of the addends of")


# loops and running sums in chunks


@assay.case(T=[8], D=[4])
def steps(make, T, D):
    return {"x": make.normal(T, D), "decay": make.uniform(T, D)}


@assay.case(T=[14], D=[3])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


# ranks and blocks


@assay.case(N=[7], D=[5])
def shared(make, N, D):
    return {"x": make.normal(N, D), "ranks": 3}


def centred(x, ranks):
    return (x - x.mean(0)) ** 3


@assay.case(K=[19], D=[4], offsets=[(0, 7, 13, 19)])
def packed(make, K, D, offsets):
    return {"q": make.normal(3, 5, D), "k": make.normal(K, D), "offsets": torch.tensor(offsets)}


def in_sequences(q, k, offsets):
    return torch.stack([(q[b] @ k[lo:hi].mT).exp().sum(1) for b, (lo, hi) in enumerate(spans(offsets))])


def spans(offsets):
    return list(zip(offsets.tolist(), offsets.tolist()[1:], strict=False))


def test_the_last_block_of_each_sequence_replaces_the_others():
    def backward(q, k, offsets, y, grad_y):
        dq = torch.zeros(q.shape)
        for b, (lo, hi) in enumerate(spans(offsets)):
            for at in range(lo, hi, 4):
                keys = k[at : min(at + 4, hi)]
                dq[b] = (grad_y[b].unsqueeze(1) * (q[b] @ keys.mT).exp()) @ keys
        return {"q": dq}

    target = assay.Target(in_sequences, in_sequences, cases=packed, backward=backward, grads=("q",))
    asserted(target, "q.grad", "overwritten_accumulator", "the last block of 4 alone, in 3 places")


def lower(w, v):
    return w.tril() @ v


# another matrix, other places


@assay.case(N=[6], D=[3])
def system(make, N, D):
    return {"a": make.normal(N, N, std=0.3) + 2 * torch.eye(N, dtype=make.dtype), "b": make.normal(N, D)}


def solved(a, b):
    solution = []
    for i in range(len(b)):
        solution.append((b[i] - sum((a[i, j] * solution[j] for j in range(i)), torch.zeros_like(b[i]))) / a[i, i])
    return torch.stack(solution)


def test_a_backward_that_reads_a_matrix_transposed_is_explained():
    def backward(a, b, y, grad_y):
        db = torch.empty(b.shape)
        for i in reversed(range(len(b))):
            db[i] = (grad_y[i] - a[i, i + 1 :] @ db[i + 1 :]) / a[i, i]
        return {"b": db}

    target = assay.Target(solved, solved, cases=system, backward=backward, grads=("b",))
    asserted(target, "b.grad", "transposed", "the backward reads a by its columns")


@assay.case(C=[2], H=[5], W=[8])
def maps(make, C, H, W):
    return {"x": make.normal(C, H, W)}


def pooled(x):
    return F.max_pool2d(x, 2, stride=1)


def test_positions_computed_with_a_wrong_stride_are_explained():
    def backward(x, y, grad_y):
        (C, H, W), places = x.shape, F.max_pool2d(x, 2, stride=1, return_indices=True)[1]
        places = places // W * H + places % W
        return {"x": torch.zeros(C, H * W).scatter_add(1, places.flatten(1), grad_y.flatten(1)).view(x.shape)}

    target = assay.Target(pooled, pooled, cases=maps, backward=backward)
    asserted(target, "x.grad", "wrong_stride", "are computed with rows of 5, not of 8")


def loss(x, w, label):
    return F.cross_entropy(x @ w.mT, label, label_smoothing=0.1)


@assay.case(P=[14], G=[5])
def owned(make, P, G):
    owner = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4])
    return {"x": make.normal(P, 3), "owner": owner, "groups": G}


def summed(x, owner, groups):
    return torch.zeros(groups, x.shape[1], dtype=x.dtype).index_add(0, owner, x.square())


@pytest.mark.parametrize("end", [0, -1])
def test_the_first_entry_of_a_group_counts_for_the_previous_group(end):
    def backward(x, owner, groups, y, grad_y):
        before = torch.cat((owner[:1] if end == 0 else owner.new_tensor([-1]), owner[:-1]))
        return {"x": 2 * x * grad_y[before]}

    target = assay.Target(summed, summed, cases=owned, backward=backward)
    asserted(target, "x.grad", "off_by_one", "the first entry of each group counts for the previous group")


# factors of addends, and forgotten masks


@assay.case(T=[8], N=[5], D=[6])
def linear(make, T, N, D):
    return {"x": make.normal(T, D), "v": make.normal(N, D), "gain": make.normal(D)}


def projected(x, v, gain):
    return (x * gain) @ (v / v.square().sum(1, keepdim=True).sqrt()).mT


@pytest.mark.parametrize(
    "wrong, cause, text",
    [("left out", "missing_term", "are lost in every element")],
)
def test_a_factor_for_each_addend_of_a_product(wrong, cause, text):
    def backward(x, v, gain, y, grad_y):
        norm = v.norm(dim=1, keepdim=True)
        weight = v / norm**2 if wrong == "twice" else v / norm * torch.tensor([1, 0, 1, 0, 1])[:, None]
        return {"x": grad_y @ weight * gain}

    target = assay.Target(projected, projected, cases=linear, backward=backward, grads=("x",))
    asserted(target, "x.grad", cause, text)


@assay.case(T=[6], D=[4])
def windows(make, T, D):
    region = torch.tensor([0, 0, 1, 1, 1, 0])
    return {"q": make.normal(2, T, D), "k": make.normal(2, T, D), "v": make.normal(2, T, D), "region": region}


def scores(q, k, region, masked=True):
    apart = region[:, None] != region
    result = q @ k.mT / q.shape[-1] ** 0.5
    return result.masked_fill(apart, -torch.inf) if masked else result


def attended(q, k, v, region):
    return torch.softmax(scores(q, k, region), -1) @ v


def test_weights_recomputed_without_the_mask_are_explained():
    def backward(q, k, v, region, y, grad_y):
        lse = torch.logsumexp(scores(q, k, region), -1, keepdim=True)
        p = torch.exp(scores(q, k, region, masked=False) - lse)
        ds = p * (grad_y @ v.mT - (grad_y * y).sum(-1, keepdim=True))
        return {"q": ds @ k / q.shape[-1] ** 0.5}

    target = assay.Target(attended, attended, cases=windows, backward=backward, grads=("q",))
    asserted(
        target, "q.grad", "wrong_mask", "the mask of masked_fill(...) is never taken, as the backward makes it again"
    )
