"""Members of the ensemble differ, are legal, round where they should, and leave everything else unchanged."""

from fractions import Fraction

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.bounds.running_errors import stored
from goldsmith.assay.noise import summation_orders as orders
from goldsmith.assay.noise.ensemble import STYLES, LegalOrder, legal_runs

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
ORDERS = ("as_stored", "permuted", "tiles", "pairwise")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def runs(fn, k=8, compute=F32, stores=None, seed=0, **leaves):
    return legal_runs(fn, leaves, compute=compute, stores=stores or {}, k=k, seed=seed)


def gamma(n):
    """Largest error of a sum of n terms in any order, relative to the sum of their absolute values."""
    return n * 2.0**-24 / (1 - n * 2.0**-24)


def looped(rows):
    acc = rows[0]
    for row in rows[1:]:
        acc = acc + row
    return acc


@pytest.mark.parametrize("shape", [(1000, 1), (1000, 2), (1000, 3), (300, 64), (5, 1000)])
def test_the_sequential_order_adds_one_term_after_another(shape):
    rows = normal(*shape)
    assert torch.equal(orders.fold(rows, orders.Order("as_stored", 0, 16)), looped(rows))
    permuted = rows[torch.randperm(shape[0], generator=torch.Generator().manual_seed(4))]
    assert torch.equal(orders.fold(rows, orders.Order("permuted", 4, 16)), looped(permuted))


def test_tiles_are_summed_separately_and_then_added_up():
    rows = normal(100, 7)
    shuffled = rows[torch.randperm(100, generator=torch.Generator().manual_seed(4))]
    expected = looped(torch.stack([looped(tile) for tile in shuffled.split(16)]))
    assert torch.equal(orders.fold(rows, orders.Order("tiles", 4, 16)), expected)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000])
def test_pairwise_errors_stay_within_the_logarithm_of_the_length(n):
    rows = normal(n, 5)
    y = orders.pairwise(rows)
    exact = torch.tensor([float(sum(Fraction(v) for v in column)) for column in rows.T.tolist()])
    assert bool(((y - exact).abs() <= 2.0**-24 * (n.bit_length() + 1) * rows.abs().sum(0)).all())


@pytest.mark.parametrize("style", ORDERS)
@pytest.mark.parametrize("dim,keepdim", [(None, False), (0, True), ([0, 2], False), (-1, False), ([], True)])
def test_a_reduction_has_the_shape_and_the_value_of_torch(style, dim, keepdim):
    x = normal(6, 40, 3)
    y = orders.reduce(x, dim, keepdim, orders.Order(style, 1, 16))
    expected, size = (
        t.sum() if dim in (None, []) and not keepdim else t.sum([] if dim is None else dim, keepdim=keepdim)
        for t in (x.double(), x.double().abs())
    )
    assert y.shape == expected.shape
    assert bool(((y.double() - expected).abs() <= gamma(x.numel() // y.numel()) * size).all())


@pytest.mark.parametrize("style", ORDERS)
@pytest.mark.parametrize("k", [1, 3, 64, 1000, 5000])
def test_each_element_of_a_matrix_product_is_a_legal_sum_of_its_products(style, k):
    a, b = normal(2, 4, k), normal(2, k, 3, seed=1)
    y = orders.matmul(a, b, orders.Order(style, 1, 32)).double()
    exact = a.double() @ b.double()
    bound = 1.01 * k * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert y.shape == exact.shape and bool(((y - exact).abs() <= bound).all())
    if style == "as_stored" and k <= 1000:
        terms = (a.unsqueeze(-1) * b.unsqueeze(-3)).movedim(-2, 0)
        assert torch.equal(y.float(), looped(terms))


@pytest.mark.parametrize("block", [2**20, 100])
def test_a_large_product_is_as_noisy_as_a_plain_loop(block, monkeypatch):
    """Adding four terms at a time would halve the noise; the largest error of a loop is already seven times its rms."""
    monkeypatch.setattr(orders, "_MOST_AT_ONCE", 0)
    monkeypatch.setattr(orders, "_ACCUMULATORS", block)
    a, b = normal(2, 40, 500), normal(2, 500, 30, seed=1)
    acc = torch.zeros(2, 40, 30)
    for k in range(500):
        acc.addcmul_(a[..., k : k + 1], b[..., k : k + 1, :])
    assert torch.equal(orders.matmul(a, b, orders.Order("as_stored", 0, 16)), acc)


@pytest.mark.parametrize(
    ("steps", "numbers", "dtype", "quicker"),
    [(1000, 8000, F32, True), (1000, 8000, BF16, False), (1000, 9000, F64, False), (16, 8, F32, False)],
)
def test_a_gpus_loops_of_few_numbers_are_computed_on_the_cpu(steps, numbers, dtype, quicker):
    there = torch.empty(1, dtype=dtype, device="meta")
    assert orders._quicker_on_cpu(there, steps, numbers) is quicker
    assert not orders._quicker_on_cpu(torch.empty(1, dtype=dtype), steps, numbers)


@pytest.mark.gpu
@pytest.mark.parametrize("style", ORDERS)
def test_sums_of_a_gpus_tensors_are_those_of_the_cpu(style):
    x, order = normal(300, 40), orders.Order(style, 4, 16)
    assert torch.equal(orders.fold(x.cuda(), order).cpu(), orders.fold(x, order))
    assert torch.equal(orders.scan(x.cuda(), 0, order).cpu(), orders.scan(x, 0, order))
    a, b = normal(3, 300), normal(300, 5, seed=1)
    y = orders.matmul(a.cuda(), b.cuda(), order)
    assert y.is_cuda and bool(((y.cpu() - a @ b).abs() <= gamma(300) * (a.abs() @ b.abs())).all())


@pytest.mark.parametrize("style", ORDERS)
def test_a_running_sum_rounds_its_partial_sums_to_its_own_precision(style):
    x = normal(3, 1000)
    y = orders.scan(x, 1, orders.Order(style, 1, 16))
    exact = x.double().cumsum(1)
    error = (y.double() - exact).abs()
    assert bool((error <= 1.01 * 1000 * 2.0**-24 * x.double().abs().cumsum(1)).all())
    assert error.max() > (x.cumsum(1).double() - exact).abs().max()  # torch.cumsum keeps partial sums in float64


def test_a_sequential_sum_is_the_noisiest_member():
    x = normal(4096, 200)
    exact = x.double().sum(0)
    rms = {s: float((orders.fold(x, orders.Order(s, 1, 64)).double() - exact).square().mean().sqrt()) for s in ORDERS}
    assert rms["permuted"] > 3 * rms["tiles"] > 3 * rms["pairwise"]
    assert {"as_stored", "permuted"} <= set(STYLES[:8])


def test_members_differ_from_one_another_and_repeat_for_a_seed():
    x = normal(20, 500).double()
    fn = lambda L: {"y": torch.softmax(L["x"], -1) @ L["x"].T, "n": L["x"].norm()}  # noqa: E731
    first, again, other = runs(fn, x=x), runs(fn, x=x), runs(fn, x=x, seed=1)
    for i in range(8):
        assert torch.equal(first[i]["y"], again[i]["y"])
        assert not torch.equal(first[i]["y"], other[i]["y"])
        assert all(not torch.equal(first[i]["y"], first[j]["y"]) for j in range(i))


def test_the_backward_pass_takes_legal_orders_too():
    def fn(leaves):
        w = leaves["w"].requires_grad_()
        return {"w.grad": torch.autograd.grad((leaves["x"] * w).tanh().sum(), w)[0]}

    grads = [r["w.grad"] for r in runs(fn, x=normal(2000, 4).double(), w=normal(4).double())]
    assert len({tuple(g.tolist()) for g in grads}) > 4


@pytest.mark.parametrize("name", ["index_add", "scatter_add", "index_put"])
def test_scatters_add_in_different_orders(name):
    index = torch.randint(0, 3, (3000,), generator=torch.Generator().manual_seed(1))

    def fn(leaves):
        x, out = leaves["x"], torch.zeros(3)
        if name == "index_put":
            return {"y": out.index_put((index,), x, accumulate=True)}
        return {"y": getattr(out, name)(0, index, x)}

    x = normal(3000)
    members = [r["y"] for r in runs(fn, x=x.double())]
    exact, size = (torch.zeros(3, dtype=F64).index_add(0, index, t) for t in (x.double(), x.double().abs()))
    terms = index.bincount(minlength=3).double()
    assert len({tuple(y.tolist()) for y in members}) > 4
    for y in members:
        assert bool(((y.double() - exact).abs() <= gamma(terms) * size).all())


def test_results_are_rounded_once_to_their_store():
    x = normal(50).double()
    members = runs(lambda L: {"y": L["x"] * 3, "z": L["x"] * 3, "i": L["x"].argmax()}, stores={"y": BF16}, x=x)
    for member in members:
        assert member["y"].dtype == BF16 and member["z"].dtype == F32 and member["i"].dtype == torch.int64
        assert torch.equal(member["y"], (x.float() * 3).to(BF16))


def test_every_reader_of_a_stored_stage_sees_it_rounded_backward_included():
    def fn(leaves):
        x = leaves["x"].requires_grad_()
        h = stored(torch.tanh(x), BF16)
        return {"h": h, "y": h * 1.5, "x.grad": torch.autograd.grad(h.sum(), x)[0]}

    x = normal(50)
    (member,) = runs(fn, k=1, x=x.double())
    h = torch.tanh(x).to(BF16).float()
    assert torch.equal(member["h"], h) and torch.equal(member["y"], h * 1.5)
    exact = 1 - h.double().square()  # h * h fits in 16 bits, so only the difference is rounded
    assert bool(((member["x.grad"].double() - exact).abs() <= 2.0**-24 * exact.abs()).all())


def test_members_round_numbers_near_a_midpoint_of_a_stored_stage_either_way():
    ulp = 2.0**-7
    middles = 1 + ulp * (torch.arange(40) + 0.5)
    exact = torch.tensor([0.0, 1.0, -1.0, 2.0**-133, 3.0, 2.0**20, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([middles, exact]).double()

    def fn(leaves):
        h = stored(leaves["x"] * 1, BF16)
        again = stored(h, BF16)
        return {"h": h, "again": again, "read": h + 0, "written": stored(h * 1, BF16).add_(1)}

    members = runs(fn, stores={"h": BF16, "again": BF16}, x=x)
    nearest = x.float().to(BF16)
    for member in members:
        # the judged result itself is rounded to nearest, even if its readers saw it dithered
        assert torch.equal(member["h"].nan_to_num(1e3), nearest.nan_to_num(1e3)) and member["h"].dtype == BF16
        assert torch.equal(member["again"].nan_to_num(1e3), nearest.nan_to_num(1e3))
        assert torch.equal(member["read"][40:].nan_to_num(1e3), exact.nan_to_num(1e3))
        assert bool(((member["read"][:40] - middles).abs() <= ulp / 2).all())
        assert torch.equal(member["written"].nan_to_num(1e3), (member["read"] + 1).nan_to_num(1e3))
    read = torch.stack([m["read"][:40] for m in members])
    assert torch.equal(read[0::2], nearest[:40].float().expand(4, 40))
    ways = {tuple((r > middles).tolist()) for r in read[1::2]}
    assert len(ways) == 4 and all(10 <= sum(way) <= 30 for way in ways)
    assert torch.equal(read, torch.stack([m["read"][:40] for m in runs(fn, stores={"h": BF16}, x=x)]))


def test_float32_stores_are_never_dithered():
    members = runs(lambda L: {"y": stored(L["x"] * 3, F32) + 0}, x=normal(200).double())
    assert all(torch.equal(m["y"], members[0]["y"]) for m in members)


def test_a_stored_view_of_an_input_leaves_the_input_alone():
    x = normal(4, 4)
    (member,) = runs(lambda L: {"t": stored(L["x"].T, BF16), "x": L["x"] * 1}, k=1, x=x.double())
    assert torch.equal(member["x"], x)
    expanded = runs(lambda L: {"e": stored((L["x"][:1] * 3).expand(4, 4), BF16)}, k=1, x=x.double())[0]["e"]
    assert torch.equal(expanded, (x[:1] * 3).to(BF16).float().expand(4, 4))


def test_a_golden_that_requests_float64_gets_the_compute_precision():
    fn = lambda L: {"y": L["x"].double() * torch.ones(3, dtype=F64) + torch.full((3,), 0.1)}  # noqa: E731
    x = normal(3)
    for member in runs(fn, x=x.double()):
        assert torch.equal(member["y"], x + torch.tensor(0.1))


def test_tf32_operands_keep_eleven_bits():
    a, b = normal(8, 8), normal(8, 8, seed=1)
    fn = lambda L: {"y": L["a"] @ L["b"]}  # noqa: E731
    leaves = {"a": a.double(), "b": b.double()}
    members = legal_runs(fn, leaves, compute=F32, stores={}, dot="tf32")
    cut = [(t.view(torch.int32) & ~0x1FFF).view(F32) for t in (a, b)]
    rounded = [((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(F32) for t in (a, b)]
    close = [
        [
            bool(
                (
                    (m["y"].double() - x.double() @ y.double()).abs()
                    <= gamma(8) * (x.double().abs() @ y.double().abs())
                ).all()
            )
            for x, y in (cut, rounded)
        ]
        for m in members
    ]
    assert all(any(c) for c in close) and {tuple(c) for c in close} == {(True, False), (False, True)}


def test_legal_formulas_of_functions_are_among_the_members():
    x = normal(300)
    fn = lambda L: {"e": torch.exp(L["x"] * 5), "d": L["x"] / (L["x"] * L["x"] + 1), "s": torch.sigmoid(L["x"])}  # noqa: E731
    members = runs(fn, x=x.double())
    for name in "eds":
        assert len({tuple(m[name].tolist()) for m in members}) == 2, name


def test_division_by_a_reciprocal_that_overflows_is_still_a_division():
    mode = LegalOrder("as_stored", F32, "ieee", 0, [])
    mode.divides_by_reciprocal = True
    with mode:
        y = torch.tensor([1e-39, 0.0, 1.0]) / torch.tensor([1e-39, 0.0, 0.0])
    assert y[0] == 1 and torch.isnan(y[1]) and torch.isinf(y[2])


def test_the_leaves_and_the_default_dtype_are_unchanged():
    x = normal(4).double()
    before = x.clone()
    runs(lambda L: {"y": L["x"].mul_(2) + torch.ones(4)}, x=x)
    runs(lambda L: {"y": L["x"].mul_(2)}, compute=F64, x=x)
    assert torch.equal(x, before) and torch.get_default_dtype() == F32


def test_a_kernel_may_add_equal_rows_in_different_orders():
    """In one order the rows' difference is exactly 0, and what is left has next to no noise."""

    def golden(x, w):
        y = torch.stack([x, x], 1) @ w
        return y[:, 0] - y[:, 1] + y[:, 0] / 1024

    def candidate(x, w):
        y, other = x @ w, x.flip(1) @ w.flip(0)
        return y - other + y / 1024

    @assay.case(n=[512])
    def drawn(make, n):
        return {"x": make.normal(8, n), "w": make.normal(n, 16)}

    assay.check(
        assay.Target(candidate, golden, cases=drawn, dtypes=(F32,), backward=None), probes=["values", "ensemble"]
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_sums_of_a_convolution_and_of_its_gradients_have_legal_orders(groups, transposed):
    x, bias = normal(6, 32, 9, 9, seed=1).double(), normal(16, seed=3).double()
    w = normal(*((32, 16 // groups) if transposed else (16, 32 // groups)), 3, 3, seed=2).double()
    how = ((2, 2), (1, 1), (1, 1), transposed, (0, 0), groups)

    def convolved(leaves):
        x, w, bias = (leaves[n].requires_grad_() for n in ("x", "w", "bias"))
        y = torch.ops.aten.convolution(x, w, bias, *how)
        grads = torch.autograd.grad(y, (x, w, bias), normal(*y.shape, seed=4).to(y))
        return {"y": y, **dict(zip(("dx", "dw", "db"), grads, strict=True))}

    exact = {n: t.detach() for n, t in convolved({"x": x, "w": w, "bias": bias}).items()}
    members = runs(convolved, x=x, w=w, bias=bias)
    for name, values in exact.items():
        errors = [member[name].double() - values for member in members]
        largest = float(values.abs().max())
        assert all(float(e.abs().max()) <= gamma(4000) * largest for e in errors), name
        # members in one order are one sample, and say nothing about a kernel's own order
        assert len({e.numpy().tobytes() for e in errors}) >= 6, name
