"""No legal order of a dot product exceeds its bound; the worst order nearly reaches it."""

from fractions import Fraction

import pytest
import torch

from goldsmith.assay.bounds.running_errors import running_bounds
from goldsmith.assay.noise import summation_orders as orders

F32 = torch.float32
BITS = 20  # factors are integers below 2^20: products round in float32, and sums are exact in int64


def whole(shape, seed, spread):
    """Random signed integers; with `spread` their magnitudes cover 2^0 to 2^20, which makes sums cancel unevenly."""
    generator = torch.Generator().manual_seed(seed)
    top = 2.0 ** (torch.rand(shape, generator=generator, dtype=torch.float64) * BITS) if spread else 2.0**BITS
    return torch.trunc((torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * top)


def dot_bounds(a, b):
    """a, b: (m, n) float64 -> bounds of m dots"""
    fn = lambda L: {"y": (L["a"].unsqueeze(1) @ L["b"].unsqueeze(2)).reshape(-1)}  # noqa: E731
    return running_bounds(fn, {"a": a, "b": b}, compute=F32, stores={"y": F32})["y"]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("n,m", [(2, 8000), (7, 8000), (64, 8000), (300, 1000)])
def test_no_legal_order_exceeds_the_bound_in_100000_dots(n, m, spread):
    seen = 0
    for seed in range(2):
        a, b = whole((m, n), seed, spread), whole((m, n), seed + 100, spread)
        exact = (a.long() * b.long()).sum(1)
        bounded = dot_bounds(a, b)
        assert torch.equal(bounded.value, exact.double()) or n > 64
        terms = (a.float() * b.float()).T.contiguous()
        for style in ("as_stored", "permuted", "tiles", "pairwise"):
            y = orders.fold(terms, orders.Order(style, seed, 16))
            error = (y.double().long() - exact).abs().double()
            assert bool((error <= bounded.bound).all()), (style, float((error / bounded.bound).max()))
            seen += m
    assert seen == 2 * 4 * m  # 2 * 25,000 dots a value of spread: 100,000 in all, each in four orders


def test_the_sequential_order_of_a_large_term_first_nearly_reaches_the_bound():
    n = 1000
    a = torch.full((1, n), 2.0**-24, dtype=torch.float64)
    a[0, 0] = 1.0  # every later term is half a unit in the last place, and is lost
    b = torch.ones_like(a)
    bounded = dot_bounds(a, b)
    y = orders.fold((a * b).float().T.contiguous(), orders.Order("as_stored", 0, 16))
    error = abs(Fraction(float(y)) - sum(Fraction(v) for v in a[0].tolist()))
    share = float(error / Fraction(float(bounded.bound)))
    assert 0.9 < share <= 1.0


def test_the_bound_is_within_a_thousand_times_the_typical_error_of_64_terms():
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(2000, 64, generator=generator) for _ in range(2))
    bounded = dot_bounds(a.double(), b.double())
    y = orders.fold((a * b).T.contiguous(), orders.Order("as_stored", 0, 16)).double()
    typical = (y - bounded.value).square().mean().sqrt()
    assert bounded.bound.median() < 1e3 * typical


def test_the_running_bound_is_gamma_n_of_the_magnitudes_plus_the_store():
    a, b = whole((1, 10), 3, False), whole((1, 10), 4, False)
    bounded = dot_bounds(a, b)
    u = Fraction(1, 2**24)
    terms = [Fraction(x) * Fraction(y) for x, y in zip(a[0].tolist(), b[0].tolist(), strict=True)]
    gamma = 10 * u / (1 - 10 * u)
    e = gamma * sum(abs(t) for t in terms)
    expected = e + u * (abs(sum(terms)) + e) + Fraction(1, 2**150)
    assert float(bounded.bound) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("op", ["mm", "bmm", "addmm", "baddbmm", "mv", "dot", "einsum"])
def test_matrix_products_of_computed_operands_stay_within_their_bounds(op):
    """Operands with an error (x / 3 in float32), against exact rationals."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda *s: torch.randn(*s, generator=generator)  # noqa: E731
    shapes = {
        "mm": ((3, 9), (9, 2)), "bmm": ((2, 3, 9), (2, 9, 2)), "addmm": ((3, 9), (9, 2)), "mv": ((3, 9), (9,)),
        "baddbmm": ((2, 3, 9), (2, 9, 2)), "dot": ((9,), (9,)), "einsum": ((3, 9), (2, 9)),
    }  # fmt: skip
    calls = {
        "addmm": lambda a, b: torch.addmm(torch.full((3, 2), 0.1, dtype=a.dtype), a, b, beta=2, alpha=0.5),
        "baddbmm": lambda a, b: torch.baddbmm(torch.full((2, 3, 2), 0.1, dtype=a.dtype), a, b, beta=2, alpha=0.5),
        "einsum": lambda a, b: torch.einsum("ik,jk->ij", a, b),
    }
    call = calls.get(op, getattr(torch, op, None))
    fn = lambda L: {"y": call(L["a"] / 3, L["b"] / 3)}  # noqa: E731
    leaves = {name: draw(*s) for name, s in zip("ab", shapes[op], strict=True)}
    wide = {name: t.double() for name, t in leaves.items()}
    bounded = running_bounds(fn, wide, compute=F32, stores={"y": F32})["y"]
    error = (fn(leaves)["y"].double() - bounded.value).abs()
    assert bool((error <= bounded.bound).all()) and bool((error > 0).any())
    assert bool((bounded.bound < 100 * 2.0**-24 * (bounded.value.abs() + 10)).all())


def test_tf32_operands_widen_the_bound_of_products_only():
    generator = torch.Generator().manual_seed(8)
    a, b = (torch.randn(4, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    leaves = {"a": a.float().double(), "b": b.float().double()}
    fn = lambda L: {"dot": L["a"] @ L["b"].T, "sum": (L["a"] * L["b"]).sum(-1)}  # noqa: E731
    ieee = running_bounds(fn, leaves, compute=F32, stores={})
    tf32 = running_bounds(fn, leaves, compute=F32, stores={}, dot="tf32")
    assert bool((tf32["dot"].bound > 50 * ieee["dot"].bound).all())
    assert torch.equal(tf32["sum"].bound, ieee["sum"].bound)
    cut = {name: (t.float().view(torch.int32) & ~0x1FFF).view(torch.float32) for name, t in leaves.items()}
    error = (fn(cut)["dot"].double() - tf32["dot"].value).abs()
    assert bool((error <= tf32["dot"].bound).all())


def test_an_unknown_dot_is_refused():
    with pytest.raises(ValueError, match="unknown dot 'bf16'; known: ieee, tf32"):
        running_bounds(lambda L: L, {}, compute=F32, stores={}, dot="bf16")
