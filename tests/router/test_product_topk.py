"""Tests of product_topk that test_every_op does not cover: a total order, decided on raw sums, row by row."""

import itertools
from functools import partial

import pytest
import torch

from goldsmith import assay, router
from goldsmith.assay import Make
from goldsmith.cli.targets import op_target
from goldsmith.router import _common
from goldsmith.router.product_topk import reference
from goldsmith.router.product_topk.cases import logits
from goldsmith.router.product_topk.op import PRODUCT_TOPK
from router import full_sort

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILLS = ("normal", "tied", "masked", "zeros", "not_finite")
VARIANTS = [(log, weights) for log in (False, True) for weights in ("none", "exp", "softmax")]


topk = partial(router.product_topk, backend="reference")  # a kernel in the interpreter takes a hundred times as long


def drawn(seed, dtype, *shape, fill="normal"):
    return logits(Make(dtype, "cpu", seed), *shape, fill=fill)


@pytest.mark.parametrize("fill", FILLS)
def test_larger_rows_with_many_ties_equal_a_full_stable_sort(fill, seed):
    x, y = drawn(seed, torch.bfloat16, 2, 48, fill=fill), drawn(seed + 1, torch.bfloat16, 2, 31, fill=fill)
    for k in (1, 16, 64, 200):
        assert torch.equal(topk(x, y, k)[1], full_sort.indices(x, y, k))


@pytest.mark.parametrize("backend", PRODUCT_TOPK.backends)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fill", FILLS)
def test_every_backend_selects_as_a_full_stable_sort_does(fill, dtype, backend, seed):
    x, y = drawn(seed, dtype, 3, 13, fill=fill), drawn(seed + 1, dtype, 3, 9, fill=fill)
    for k in (1, 9, 31):
        indices = router.product_topk(x.to(DEVICE), y.to(DEVICE), k, weights="softmax", backend=backend)[1]
        assert torch.equal(indices.cpu(), full_sort.indices(x, y, k))


@pytest.mark.parametrize("name", ["log_softmax", "softmax", "not_finite", "nothing_left"])
def test_kernels_for_16_bit_logits_agree_with_the_golden(name):
    """In float32, the interpreter's usual dtype, other kernels run; its bfloat16 rounding is wrong."""
    case = next(case for case in PRODUCT_TOPK.cases if case.name == name)
    target = op_target(PRODUCT_TOPK, "triton", device=DEVICE)
    assay.check(target, case, dtype=torch.float16, device=DEVICE, probes=("values", "ensemble", "poison"))


@pytest.mark.parametrize("fill", ["sorted", "equal"])
def test_a_lane_whose_keys_are_used_up_reads_its_share_again(fill, seed):
    """For k > 64 a lane holds only part of its share; here one lane's share contains all selected logits."""
    x = drawn(seed, torch.bfloat16, 1, 512).sort(dim=-1, descending=True).values * (fill == "sorted")
    y = drawn(seed, torch.bfloat16, 1, 20)
    indices = router.product_topk(x.to(DEVICE), y.to(DEVICE), 66, backend="triton")[1]
    assert torch.equal(indices.cpu(), topk(x, y, 66)[1])
    assert len((indices[0] // 20).unique()) > 4


@pytest.mark.parametrize("fill, k", [("sorted", 12), ("equal", 12), ("equal", 33), ("few", 12), ("one", 33)])
def test_the_selection_is_correct_where_the_first_guess_of_a_limit_is_wrong(fill, k, seed):
    """Too many logits remain if the best are in two lanes or all tie; too few if one logit of x is in all pairs."""
    x = drawn(seed, torch.bfloat16, 1, 130).sort(dim=-1, descending=True).values * (fill != "equal")
    y = drawn(seed, torch.bfloat16, 1, 40)
    if fill == "few":
        y[:, 2:] = -torch.inf
    if fill == "one":
        x[:, 7] = 60.0
    indices = router.product_topk(x.to(DEVICE), y.to(DEVICE), k, backend="triton")[1]
    assert torch.equal(indices.cpu(), topk(x, y, k)[1])


@pytest.mark.parametrize("k", [9, 40])
def test_sums_that_need_all_their_bits_are_sorted_by_all_of_them(k, seed):
    """32-bit keys hold the pair's number in the last bits, which sums of 16-bit logits rarely need."""
    x = torch.tensor([1.0, 1.0, 2.0, 0.5], dtype=torch.bfloat16).repeat(1, 9)
    y = drawn(seed, torch.bfloat16, 1, 36) * 2.0**-19
    indices = router.product_topk(x.to(DEVICE), y.to(DEVICE), k, backend="triton")[1]
    assert torch.equal(indices.cpu(), topk(x, y, k)[1])


def on_every_backend(x, y, k):
    """(backend, indices) pairs; the interpreter is left out where it flushes subnormal bfloat16 numbers."""
    for backend in ("reference", *PRODUCT_TOPK.backends):
        if backend == "reference" or DEVICE == "cuda" or x.dtype != torch.bfloat16:
            yield backend, router.product_topk(x.to(DEVICE), y.to(DEVICE), k, backend=backend)[1].cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_subnormal_logits_are_numbers_and_not_zeros(dtype, seed):
    tiny = torch.finfo(dtype).tiny * 2.0**-7
    x, y = torch.zeros(1, 1, dtype=dtype), torch.tensor([[0.0, 0.0, tiny, -tiny]], dtype=dtype)
    assert y[0, 2] > 0
    for backend, indices in on_every_backend(x, y, 4):
        assert indices.tolist() == [[2, 0, 1, 3]], backend
        assert torch.equal(indices, full_sort.indices(x, y, 4))
    x, y = ((assay.Make(torch.float32, "cpu", seed + s).integers(-9, 10, 1, s) * tiny).to(dtype) for s in (5, 36))
    for k in (9, 40, 70):
        wanted = full_sort.indices(x, y, k)
        for backend, indices in on_every_backend(x, y, k):
            assert torch.equal(indices, wanted), backend


@pytest.mark.parametrize("fill", FILLS)
def test_neither_log_softmax_nor_weights_change_the_selection(fill, seed):
    x, y = drawn(seed, torch.float32, 16, 12, fill=fill), drawn(seed + 1, torch.float32, 16, 9, fill=fill)
    selections = [topk(x, y, 20, log_softmax=log, weights=w)[1] for log, w in VARIANTS]
    assert all(torch.equal(selections[0], other) for other in selections[1:])


def test_pairs_whose_sums_round_to_the_same_number_are_ordered_by_ranks():
    x, y = torch.tensor([1.0, 1.0 + 2.0**-23]), torch.tensor([2.0**10, 2.0**10 + 2.0**-13])
    assert topk(x, y, 4)[1].tolist() == [3, 1, 2, 0]
    exact = topk(x.double(), y.double(), 4)[1].tolist()
    x[0], y[0] = 1.0 - 2.0**-24, 2.0**10 - 2.0**-13
    assert exact == [3, 1, 2, 0]
    small = topk(torch.tensor([0.0, 2.0**-30]), torch.tensor([1.0, 1.0 - 2.0**-24]), 4)
    assert small[1].tolist() == [2, 0, 3, 1], "2^-30 + 1 is 1: the higher rank of x goes first"


def test_float64_logits_are_decided_in_float64():
    x, y = torch.tensor([0.0, 2.0**-40], dtype=torch.float64), torch.tensor([1.0, 1.0 + 2.0**-50], dtype=torch.float64)
    assert topk(x, y, 4)[1].tolist() == [3, 2, 1, 0]
    assert topk(x, y, 4)[0].dtype == torch.float64


def test_a_pair_with_minus_infinity_is_masked_even_with_nan_or_infinity():
    x, y = torch.tensor([-torch.inf, 1.0]), torch.tensor([torch.inf, torch.nan, 2.0])
    scores, indices = topk(x, y, 6)
    assert indices.tolist() == [4, 3, 5, -1, -1, -1]
    assert scores.isnan().tolist() == [True] + 5 * [False]
    assert scores[1:].tolist() == [torch.inf, 3.0] + 3 * [-torch.inf]


@pytest.mark.parametrize("log_softmax, weights", VARIANTS)
def test_masked_entries_get_no_gradient_for_any_incoming_gradient(log_softmax, weights, seed):
    x, y = drawn(seed, torch.float32, 8, 5, fill="masked"), drawn(seed + 1, torch.float32, 8, 4, fill="masked")
    x[0], y[1] = -torch.inf, -torch.inf
    x.requires_grad_()
    y.requires_grad_()
    scores, indices = topk(x, y, 15, log_softmax=log_softmax, weights=weights)
    assert (indices < 0).any() and (scores[indices < 0] == (-torch.inf if weights == "none" else 0)).all()
    g = torch.randn(scores.shape)
    clean = torch.autograd.grad(scores, (x, y), g, retain_graph=True)
    dirty = torch.autograd.grad(scores, (x, y), g.masked_fill(indices < 0, torch.nan))
    for a, b in zip(clean, dirty, strict=True):
        assert a.isfinite().all() and torch.equal(a, b)
        assert not a[:2].any(), "rows without a pair"


@pytest.mark.parametrize("log_softmax, weights", VARIANTS)
def test_a_row_depends_only_on_itself_bit_for_bit(log_softmax, weights, seed):
    shape = (67, 37)
    x, y, g = (drawn(seed + i, torch.float32, *shape) for i in range(3))
    g = g[:, :11].contiguous()

    def run(rows):
        leaves = [t[rows].clone().requires_grad_() for t in (x, y)]
        scores, indices = topk(*leaves, 11, log_softmax=log_softmax, weights=weights)
        return scores.detach(), indices, *torch.autograd.grad(scores, leaves, g[rows])

    whole = run(torch.arange(67))
    for rows in (torch.arange(1), torch.arange(3, 20), torch.randperm(67), torch.tensor([66]), torch.arange(50, 67)):
        assert all(torch.equal(part, full[rows]) for part, full in zip(run(rows), whole, strict=True))


def test_processing_rows_in_chunks_of_bounded_memory_changes_no_result(seed, monkeypatch):
    x, y = drawn(seed, torch.float32, 23, 16, fill="tied"), drawn(seed + 1, torch.float32, 23, 16, fill="tied")
    whole = topk(x, y, 12)
    monkeypatch.setattr(_common, "CHUNK_BYTES", 5 * 4 * 8 * 35)
    sizes = []
    inner = reference._select
    monkeypatch.setattr(reference, "_select", lambda x, *rest: sizes.append(len(x)) or inner(x, *rest))
    parts = topk(x, y, 12)
    assert len(sizes) > 3 and sum(sizes) == 23
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("k, count", [(8, 20), (16, 50), (32, 119), (64, 280), (128, 645)])
def test_candidates_are_far_fewer_than_k_times_k(k, count):
    a, b = reference.candidates(k, 1024, 1024, torch.device("cpu"))
    assert len(a) == count == len(set(zip(a.tolist(), b.tolist(), strict=True)))
    wanted = [(i, j) for i, j in itertools.product(range(k), range(k)) if (i + 1) * (j + 1) <= k]
    assert list(zip(a.tolist(), b.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("log_softmax, weights", VARIANTS)
def test_gradients_agree_with_finite_differences(log_softmax, weights, seed):
    x, y = (drawn(seed + i, torch.float64, 4, 6).requires_grad_() for i in range(2))
    torch.autograd.gradcheck(lambda x, y: topk(x, y, 7, log_softmax=log_softmax, weights=weights)[0], (x, y))


def test_log_softmax_scores_are_sums_of_log_probabilities(seed):
    """With k = all pairs, so that the probabilities sum to 1."""
    x, y = drawn(seed, torch.float32, 5, 9), drawn(seed + 1, torch.float32, 5, 7)
    places = topk(x, y, 63, log_softmax=True)[1].long()

    def candidate(x, y, places):
        scores, indices = topk(x, y, 63, log_softmax=True)
        assert torch.equal(indices.long(), places)
        return {"scores": scores, "total": scores.exp().sum(-1)}

    def golden(x, y, places):
        both = (x.log_softmax(-1)[:, :, None] + y.log_softmax(-1)[:, None, :]).flatten(1)
        scores = both.gather(-1, places)
        return {"scores": scores, "total": scores.exp().sum(-1)}

    inputs = {"x": x, "y": y, "places": places}
    assay.check(assay.Target(candidate, golden, cases=inputs), probes=("values", "ensemble"))


def test_results_are_repeated_bit_for_bit(seed):
    x, y = drawn(seed, torch.bfloat16, 64, 32).requires_grad_(), drawn(seed + 1, torch.bfloat16, 64, 32)

    def run():
        scores, indices = topk(x, y, 16, weights="softmax")
        return scores.detach(), indices, *torch.autograd.grad(scores, x, torch.ones_like(scores).cumsum(-1))

    first = run()
    assert all(torch.equal(a, b) for _ in range(19) for a, b in zip(first, run(), strict=True))


def test_a_float32_sum_that_overflows_is_infinite_and_selected_as_such():
    big = torch.tensor([3e38, 1.0])
    scores, indices = topk(big, big, 4)
    assert indices.tolist() == [0, 1, 2, 3] and scores[0] == torch.inf
    scores, indices = topk(-big, -big, 4)
    assert indices.tolist() == [3, 2, 1, -1] and scores[-1] == -torch.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [5, 70])
def test_the_weight_exp_of_infinity_is_infinity(k, dtype):
    x, y = torch.zeros(2, 1, 12, dtype=dtype)
    x[0, 3], y[0, 1:] = torch.inf, -torch.inf
    for backend in PRODUCT_TOPK.backends:
        weights, indices = router.product_topk(x.to(DEVICE), y.to(DEVICE), k, weights="exp", backend=backend)
        assert indices[0, 0] == 3 * 12
        assert weights[0, 0] == torch.inf and weights[0, 1:].isfinite().all(), (backend, weights)


@pytest.mark.parametrize("k", [5, 70])
def test_in_a_row_with_infinity_the_largest_finite_numbers_have_log_softmax_minus_infinity(k):
    x, y = torch.zeros(2, 1, 12)
    x[0, 3], x[0, 5] = torch.inf, 1e10
    for backend in PRODUCT_TOPK.backends:
        options = {"log_softmax": True, "backend": backend}
        scores, indices = router.product_topk(x.to(DEVICE), y.to(DEVICE), k, **options)
        infinite = indices[0] // 12 == 3
        assert scores[0, infinite].isnan().all() and (scores[0, ~infinite] == -torch.inf).all(), (backend, scores)


@pytest.mark.parametrize("weights, wanted", [("softmax", 0.0), ("exp", 0.0), ("none", -torch.inf)])
@pytest.mark.parametrize("k", [4, 70])
def test_a_masked_entry_of_a_row_with_nan_has_weight_0_and_no_gradient(weights, wanted, k):
    x, y = torch.zeros(1, 10), torch.full((1, 9), -torch.inf)
    x[0, 1], y[0, 4] = torch.nan, 0.0
    x[0, 2:] = -torch.inf
    for backend in PRODUCT_TOPK.backends:
        own = x.clone().to(DEVICE).requires_grad_()
        scores, indices = router.product_topk(own, y.to(DEVICE), k, weights=weights, backend=backend)
        assert indices[0, :3].tolist() == [1 * 9 + 4, 4, -1], backend
        assert (scores[0, 2:] == wanted).all() and scores[0, 0].isnan(), (backend, scores)
        scores.backward(torch.full_like(scores, torch.nan))
        assert (own.grad[0, 2:] == 0).all(), (backend, own.grad)


def test_a_long_row_alone_has_the_same_bits_as_among_others(seed):
    """torch sums a single row of more than 32,768 entries on several threads."""
    x, y, k = torch.randn(3, 300), torch.randn(3, 300), 50_000
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        options = {"weights": "softmax", "backend": "reference"}
        whole, _ = router.product_topk(x, y, k, **options)
        for row in range(3):
            alone, _ = router.product_topk(x[row : row + 1], y[row : row + 1], k, **options)
            assert torch.equal(alone[0], whole[row])
    finally:
        torch.set_num_threads(before)


def test_the_default_device_does_not_affect_tensors_on_another_device(seed):
    x, y = drawn(seed, torch.float32, 3, 11), drawn(seed + 1, torch.float32, 3, 13)
    with torch.device("meta"):
        results = topk(x, y, 29)
    assert all(torch.equal(a, b) for a, b in zip(results, topk(x, y, 29), strict=True))
