"""Changed goldens: choices, ignored lengths; which explanation wins, and on which draw."""

import math

import pytest
import torch

from assay.diagnosis.targets import best, session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.experiments.influence import influence
from goldsmith.assay.diagnosis.search.judge import Judge

pytestmark = pytest.mark.sweep(8)


@assay.case(N=[7], E=[6], k=[2])
def scores(make, N, E, k):
    return {"s": make.normal(N, E), "k": k}


@assay.case(M=[3], K=[6])
def square(make, M, K):
    return {"x": make.normal(M, K), "w": make.normal(K, K), "s": make.uniform(K) + 0.5}


@assay.case(T=[7], D=[4])
def padded(make, T, D):
    return {"q": make.normal(T, D), "k": make.normal(T, D), "n": 4}


def test_an_ignored_length():
    def attention(q, k, n):
        return torch.softmax(q @ k[:n].mT, -1) @ k[:n]

    change = best(lambda q, k, n: attention(q, k, len(k)), attention, padded)
    assert (change.cause, change.exact) == ("wrong_mask", True) and "all 7 positions count, not 4" in change.text


@assay.case(T=[7], C=[3])
def recurrent(make, T, C):
    return {"k": make.normal(T, C) * 2, "v": make.normal(T, C)}


def test_a_recurrent_softmax_rescaled_only_where_it_is_read():
    def golden(k, v):
        later = torch.ones(len(k), len(k), dtype=torch.bool).triu(1)[:, :, None]
        return (torch.softmax(k[None].expand(len(k), -1, -1).masked_fill(later, -math.inf), 1) * v).sum(1)

    def kernel(k, v):
        num, den, top = torch.zeros_like(k[0]), torch.zeros_like(k[0]), torch.full_like(k[0], -math.inf)
        rows = []
        for key, value in zip(k, v, strict=True):
            higher = torch.maximum(top, key)
            past, own = torch.exp(top - higher), torch.exp(key - higher)
            rows.append((past * num + own * value) / (past * den + own))
            num, den, top = past * num + own * value, den + own, higher
        return torch.stack(rows)

    change = best(kernel, golden, recurrent)
    assert (change.cause, change.exact) == ("missing_rescale", True) and "only where it is read" in change.text


@assay.case(T=[6], V=[9])
def rows(make, T, V):
    return {"x": make.normal(T, V)}


def test_an_error_where_no_bound_is_known():
    golden = torch.linspace(1, 2, 20, dtype=torch.float64)
    got = golden.clone()
    got[:8] *= 1.5
    judge = Judge(got.float(), golden, torch.full_like(golden, math.inf))
    assert judge.wrong_at.tolist() == [True] * 8 + [False] * 12
    assert judge.explained_where_wrong(golden * 1.5)[1]


@assay.case(B=[3], L=[9])
def steered(make, B, L):
    return {"x": make.normal(B, L), "lengths": make.integers(2, L + 1, B)}


def test_a_golden_that_loops_over_lengths_is_checked_on_draws_of_the_same_lengths():
    def golden(x, lengths, *, alone=False):
        rows = []
        for row, n in zip(x, lengths.tolist(), strict=True):
            total = row[0]
            for t in range(1, n):
                total = torch.tanh(total) + row[t]
            rows.append(total if alone else torch.logsumexp(torch.stack([total, row[0]]), 0))
        return torch.stack(rows)

    change = best(lambda x, lengths: golden(x, lengths, alone=True), golden, steered)
    assert (change.cause, change.exact) == ("off_by_one", True) and "in 3 places" in change.text


def test_a_single_index_reaches_part_of_the_wrong_rows():
    """The first query sees one key, without influence: a wrong influence there says nothing about other rows."""

    def attention(q, k, *, beyond=False):
        later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        if beyond:
            later = later & (torch.arange(len(q))[:, None] // 2 == torch.arange(len(k)) // 2)
        return torch.softmax((q @ k.mT).masked_fill(later, -math.inf), -1) @ k

    @assay.case(T=[6], D=[3])
    def tokens(make, T, D):
        return {"q": make.normal(T, D), "k": make.normal(T, D)}

    target = assay.Target(lambda q, k: attention(q, k, beyond=True), attention, cases=tokens, backward=None)
    examination = session_of(target, ("values",))
    influences = influence(examination, {"y"}, only=("q[0]",))["q[0]"]
    assert influences.extra == ((0, 0),) and influences.reached <= 0.5


@assay.case(N=[5], M=[9])
def meeting(make, N, M):
    return {"x": make.normal(N), "at": torch.randint(0, M, (N,), generator=make.generator)}


def test_a_tensor_right_on_the_first_draw_is_examined_on_another():
    def golden(x, at):
        return torch.zeros(9, dtype=x.dtype).index_add(0, at, x)

    def kernel(x, at):
        y = torch.zeros(9)
        y[at] = x
        return y

    target = assay.Target(kernel, golden, cases=meeting, backward=None)
    seed = next(s for s in range(60) if _meets(target, s) == (False, True))
    diagnosis = assay.diagnose(target, seed=seed)
    assert (diagnosis.verdict, diagnosis.causes[0].id) == ("fail", "lost_update")
    assert any("stores where it should add" in s or "a store stands" in s for s in diagnosis.causes[0].evidence)


def _meets(target, seed):
    """Whether indices meet at that seed, and at the other draw that a check makes of it."""
    repeats = []
    for case in (target.cases[0], target.cases[0].variant(1)):
        at = case.build(torch.float32, "cpu", seed)["at"]
        repeats.append(len(at.unique()) < len(at))
    return tuple(repeats)
