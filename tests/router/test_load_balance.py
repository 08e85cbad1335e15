"""Usage statistics and the load-balance loss."""

import math
from functools import partial

import pytest
import torch

from goldsmith import ShapeError, assay, router

KINDS = ("marginal", "joint")


def routed(seed, rows=(7, 3), sx=5, sy=4, k=6, dtype=torch.float64, masked=True):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(*rows, s, generator=generator, dtype=dtype) for s in (sx, sy))
    if masked:
        x[0, 0], y[1, 1, 1:] = -torch.inf, -torch.inf
    return x, y, router.product_topk(x, y, k, backend="reference")[1]


def by_definition(x, y, indices, kind):
    """The loss by its formula, entry by entry."""
    sx, sy = x.shape[-1], y.shape[-1]
    rows = [(a, b, i) for a, b, i in zip(x.flatten(0, -2), y.flatten(0, -2), indices.flatten(0, -2)) if (i >= 0).any()]
    if not rows:
        return torch.zeros(())
    f = torch.zeros(sx, sy, dtype=x.dtype)
    for _, _, listed in rows:
        for e in listed[listed >= 0].tolist():
            f[e // sy, e % sy] += 1
    f /= f.sum()
    P = sum(a.softmax(-1)[:, None] * b.softmax(-1)[None, :] for a, b, _ in rows) / len(rows)
    if kind == "joint":
        return sx * sy * (f * P).sum()
    return (sx * (f.sum(1) * P.sum(1)).sum() + sy * (f.sum(0) * P.sum(0)).sum()) / 2


def check_loss(candidate, golden, x, y, indices, **options):
    """Checks a loss in float32, with its gradients, against the formula in float64."""
    inputs = {"x": x.float(), "y": y.float(), "indices": indices}
    assay.check(assay.Target(candidate, golden, cases=inputs, **options), probes=("values", "ensemble"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_the_loss_and_its_gradient_agree_with_the_formula(kind, masked, seed):
    x, y, indices = routed(seed, masked=masked)
    assert (indices[0, 0] < 0).all() == masked
    check_loss(partial(router.load_balance_loss, kind=kind), partial(by_definition, kind=kind), x, y, indices)


def test_the_gradient_of_the_marginal_loss_is_the_published_one(seed):
    def gradient(x, y, indices):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            loss = router.load_balance_loss(x, y, indices)
        return torch.autograd.grad(loss, x)[0]

    def published(x, y, indices):
        p, rows, (sx, sy) = x.softmax(-1), 21, (5, 4)
        fx = torch.bincount(indices.flatten().long() // sy, minlength=sx).to(x.dtype) / indices.numel()
        return sx / (2 * rows) * p * (fx - (fx * p).sum(-1, keepdim=True))

    check_loss(gradient, published, *routed(seed, masked=False), backward=None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_uniform_routing_has_loss_1(kind):
    s = 4
    indices = torch.arange(s * s, dtype=torch.int32).view(-1, 2)
    x, y = torch.zeros(8, s), torch.zeros(8, s)
    loss = router.load_balance_loss(x, y, indices, kind=kind)
    assert loss.dtype == torch.float32 and loss.item() == 1.0


def test_joint_detects_that_only_pairs_with_equal_indices_are_used():
    s = 8
    x = 30 * torch.eye(s)
    indices = router.product_topk(x, x, 1, backend="reference")[1]
    assert router.usage(indices, s * s).share_used.item() == 1 / s
    assert router.load_balance_loss(x, x, indices).item() == 1
    assert router.load_balance_loss(x, x, indices, kind="joint").item() == s


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_valid_index_the_loss_is_0_and_has_gradient_0(kind):
    x = torch.full((3, 4), -torch.inf, requires_grad=True)
    y = torch.randn(3, 5, requires_grad=True)
    indices = router.product_topk(x, y, 4, backend="reference")[1]
    loss = router.load_balance_loss(x, y, indices, kind=kind)
    assert loss.item() == 0 and not any(g.any() for g in torch.autograd.grad(loss, (x, y)))
    empty = router.load_balance_loss(
        torch.zeros(0, 4), torch.zeros(0, 5), torch.zeros(0, 3, dtype=torch.int32), kind=kind
    )
    assert empty.item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_computed_in_float32_under_autocast_and_from_bfloat16(kind, seed):
    x, y, indices = routed(seed, dtype=torch.bfloat16, masked=False)
    wanted = router.load_balance_loss(x.float(), y.float(), indices, kind=kind)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router.load_balance_loss(x, y, indices, kind=kind), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_computed_in_float64_for_float64(kind):
    """In float32 the sum of 1/3 and 2/3 would not be 1."""
    x, y = torch.zeros(2, 1, 4, dtype=torch.float64)
    assert router.load_balance_loss(x, y, torch.tensor([[0, 5, 5]]), kind=kind) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_dtype_does_not_change_the_loss(kind, seed):
    x, y, indices = routed(seed, dtype=torch.float32)
    wanted = router.load_balance_loss(x, y, indices, kind=kind)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(router.load_balance_loss(x, y, indices, kind=kind), wanted)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_compiles_as_one_graph(kind, seed):
    x, y, indices = routed(seed)
    compiled = torch.compile(router.load_balance_loss, fullgraph=True, backend="aot_eager")
    loss = compiled(x.float(), y.float(), indices, kind=kind)  # compilers fail inside the assay
    check_loss(lambda x, y, indices: loss, partial(by_definition, kind=kind), x, y, indices, backward=None)


def near(value, wanted):
    """Equality within 8 roundings, for float64 sums of few terms below 2."""
    return abs(value.item() - wanted) <= 8 * 2.0**-53


def test_usage_counts_and_its_statistics():
    indices = torch.tensor([[3, -1, 3], [0, 3, -1]], dtype=torch.int32)
    usage = router.usage(indices, 4)
    assert usage.counts.tolist() == [1, 0, 0, 3] and usage.counts.dtype == torch.int64
    assert usage.mass.tolist() == [1, 0, 0, 3] and usage.mass.dtype == torch.float64
    assert usage.share_used.item() == 0.5 and usage.max_load.item() == 3.0
    assert near(usage.kl, 0.75 * math.log(3) + 0.25 * math.log(1))
    weighed = router.usage(indices, 4, weights=torch.tensor([[1.0, torch.nan, 2.0], [5.0, 3.0, torch.inf]]))
    assert weighed.mass.tolist() == [5, 0, 0, 6] and weighed.counts.tolist() == [1, 0, 0, 3]
    assert near(weighed.kl, sum(z * math.log(4 * z) for z in (5 / 11, 6 / 11)))


def test_uniform_usage_and_a_single_expert_give_the_extreme_values():
    uniform, single = router.usage(torch.arange(16), 16), router.usage(torch.full((5, 3), 7), 16)
    assert uniform.kl.item() == 0 and uniform.max_load.item() == 1 and uniform.share_used.item() == 1
    assert near(single.kl, math.log(16)) and single.max_load.item() == 16


def test_usage_without_entries_has_nan_statistics():
    for indices in (torch.full((4, 2), -1), torch.zeros(0, 2, dtype=torch.int64)):
        usage = router.usage(indices, 9)
        assert usage.share_used.item() == 0 and usage.kl.isnan() and usage.max_load.isnan()


def in_one_and_in_two(seed, weights=None):
    """The usage of 400 tokens, and the sum of the usages of the first 170 and the other 230."""
    indices = assay.Make(torch.float32, "cpu", seed).integers(-1, 30, 400, 8)
    parts = [router.usage(indices[at], 30, weights=None if weights is None else weights[at]) for at in HALVES]
    return router.usage(indices, 30, weights=weights), parts[0] + parts[1]


HALVES = (slice(0, 170), slice(170, 400))
MEASURES = ("counts", "mass", "share_used", "kl", "max_load")


def test_the_sum_of_two_usages_equals_counting_both_batches_at_once(seed):
    whole, both = in_one_and_in_two(seed)
    assert all(torch.equal(getattr(whole, name), getattr(both, name)) for name in MEASURES)


def test_masses_of_weights_add_up_within_rounding(seed):
    whole, both = in_one_and_in_two(seed, weights=torch.randn(400, 8).mul(5).softmax(-1))
    assert torch.equal(whole.counts, both.counts) and torch.equal(whole.share_used, both.share_used)
    assert ((whole.mass - both.mass).abs() <= whole.counts * 2.0**-52 * whole.mass).all()  # n - 1 roundings per expert
    assert not torch.equal(whole.mass, both.mass), "the documentation says that these sums are not exact"


@pytest.mark.parametrize(
    "error, text, call",
    [
        (TypeError, "router.usage: indices is float32", lambda: router.usage(torch.ones(2), 3)),
        (TypeError, "router.usage: num_experts=True", lambda: router.usage(torch.arange(2), True)),
        (IndexError, r"router.usage: indices range from 0 to 3, expected .* 0 <= index < 3",
         lambda: router.usage(torch.arange(4), 3)),
        (ShapeError, r"router.usage: weights is \[3\], expected the shape of indices, \[2\]",
         lambda: router.usage(torch.arange(2), 3, weights=torch.ones(3))),
        (ValueError, "router.Usage: cannot add usages of 3 and of 4 experts",
         lambda: router.usage(torch.arange(2), 3) + router.usage(torch.arange(2), 4)),
        (ValueError, "kind='both' is unknown; choose one of: 'marginal', 'joint'",
         lambda: router.load_balance_loss(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 1).int(), kind="both")),
        (ShapeError, r"x \[1, 2\], y \[2, 2\], indices \[1, 1\]; expected",
         lambda: router.load_balance_loss(torch.ones(1, 2), torch.ones(2, 2), torch.zeros(1, 1).int())),
        (IndexError, "router.load_balance_loss: indices range from 4 to 4",
         lambda: router.load_balance_loss(torch.ones(1, 2), torch.ones(1, 2), torch.full((1, 1), 4))),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_words(error, text, call):
    with pytest.raises(error, match=text):
        call()


def test_sum_adds_only_usages():
    some = [router.usage(torch.tensor([i, 3]), 4) for i in range(3)]
    assert sum(some).counts.tolist() == [1, 1, 1, 3]
    with pytest.raises(TypeError):
        sum(some, start=1)
