"""Every elementwise rule against mpmath, for exact arguments and for arguments with an error."""

import mpmath as mp
import pytest
import torch

from goldsmith.assay.bounds.bounded import unit_roundoff
from goldsmith.assay.bounds.running_errors import running_bounds, stored

F32, BF16 = torch.float32, torch.bfloat16
mp.mp.prec = 120


def grid(low, high, n=41):
    near = [low + (high - low) * i / (n - 1) for i in range(n)]
    small = [s * 10.0**-k for k in (1, 2, 4) for s in (1, -1)]
    return torch.tensor([v for v in near + small if low <= v <= high]).double()


def phi(x):
    return (1 + mp.erf(x / mp.sqrt(2))) / 2


def sigma(x):
    return 1 / (1 + mp.exp(-x))


FUNCTIONS = {
    "exp": (torch.exp, mp.exp, (-30, 10)),
    "exp2": (torch.exp2, lambda x: mp.power(2, x), (-20, 10)),
    "expm1": (torch.expm1, mp.expm1, (-5, 5)),
    "log": (torch.log, mp.log, (0.05, 20)),
    "log2": (torch.log2, lambda x: mp.log(x, 2), (0.05, 20)),
    "log1p": (torch.log1p, mp.log1p, (-0.8, 20)),
    "tanh": (torch.tanh, mp.tanh, (-6, 6)),
    "sigmoid": (torch.sigmoid, sigma, (-20, 20)),
    "silu": (torch.nn.functional.silu, lambda x: x * sigma(x), (-10, 10)),
    "gelu": (torch.nn.functional.gelu, lambda x: x * phi(x), (-4, 4)),
    "gelu_tanh": (
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda x: x / 2 * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (x + mp.mpf(0.044715) * x**3))),
        (-4, 4),
    ),
    "softplus": (torch.nn.functional.softplus, lambda x: mp.log1p(mp.exp(x)), (-10, 10)),
    "sqrt": (torch.sqrt, mp.sqrt, (0.05, 20)),
    "rsqrt": (torch.rsqrt, lambda x: 1 / mp.sqrt(x), (0.05, 20)),
    "reciprocal": (torch.reciprocal, lambda x: 1 / x, (0.05, 20)),
    "square": (torch.square, lambda x: x * x, (-5, 5)),
    "cube": (lambda x: x**3, lambda x: x**3, (-5, 5)),
    "power_1.7": (lambda x: x**1.7, lambda x: mp.power(x, mp.mpf(1.7)), (0.05, 20)),
    "power_-2": (lambda x: x**-2.0, lambda x: x**-2, (0.05, 20)),
    "sin": (torch.sin, mp.sin, (-6, 6)),
    "cos": (torch.cos, mp.cos, (-6, 6)),
    "erf": (torch.erf, mp.erf, (-4, 4)),
    "elu": (torch.nn.functional.elu, lambda x: x if x > 0 else mp.expm1(x), (-5, 5)),
    "leaky_relu": (lambda x: torch.nn.functional.leaky_relu(x, 0.25), lambda x: x if x > 0 else x / 4, (-5, 5)),
    "relu": (torch.relu, lambda x: max(x, mp.mpf(0)), (-5, 5)),
    "abs": (torch.abs, abs, (-5, 5)),
    "scaled": (lambda x: 0.1 * x + 0.3, lambda x: mp.mpf(0.1) * x + mp.mpf(0.3), (-5, 5)),
}
UNSMOOTH = {"elu", "leaky_relu", "relu", "abs"}


def check(fn, leaf, exact_at, argument, store_argument, mask=None):
    """The bound of fn covers a candidate that rounds its argument, computes exactly, and rounds the result."""
    bounded = running_bounds(fn, {"x": leaf}, compute=F32, stores={"y": F32})["y"]
    rounded = (leaf / 3).to(store_argument) if argument else leaf
    truth = torch.tensor([float(exact_at(mp.mpf(v))) for v in rounded.double().tolist()], dtype=torch.float64)
    own = torch.tensor(
        [float(exact_at(mp.mpf(v))) for v in (leaf / 3 if argument else leaf).tolist()], dtype=torch.float64
    )
    # no function here or its derivative has more than 16 operations or numbers beyond 4 (1 + |y|)
    assert bool(((bounded.value - own).abs() <= 64 * 2.0**-53 * (1 + own.abs())).all())
    error = (truth.to(F32).double() - bounded.value).abs()
    keep = ~bounded.open if mask is None else ~bounded.open & mask
    assert bool(keep.double().mean() > 0.5)
    assert bool((error <= bounded.bound)[keep].all()), leaf[keep & (error > bounded.bound)]
    return error[keep], bounded.bound[keep]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_rule_holds_for_an_exact_argument_and_is_tight(name):
    f, truth, span = FUNCTIONS[name]
    leaf = grid(*span).float().double()
    _, bound = check(lambda L: {"y": f(L["x"])}, leaf, truth, argument=False, store_argument=F32)
    value = torch.tensor([float(truth(mp.mpf(v))) for v in leaf.tolist()], dtype=torch.float64).abs()
    # rounding: a few units; exp and relatives up to 4 + 2 |x| units; 1 + erf cancels at the left end, and x / 2 in gelu
    # scales the 12 units of erf, or the 4 of tanh in its approximation
    units = 12 + leaf.abs() * {"gelu": 7, "gelu_tanh": 2}.get(name, 0)
    assert bool((bound <= 2.0**-24 * (value * (20 + 6 * leaf.abs()) + units) + 1e-30).all())


@pytest.mark.parametrize("argument", [F32, BF16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_rule_carries_an_error_of_the_argument(name, argument):
    f, truth, span = FUNCTIONS[name]
    leaf = 3 * grid(*span)
    leaf = leaf.float().double()
    fn = lambda L: {"y": f(stored(L["x"] / 3, argument))}  # noqa: E731
    error, bound = check(fn, leaf, truth, argument=True, store_argument=argument)
    if argument == BF16:
        assert bool((error > bound / 50).any())  # most of the bound comes from the store of the argument


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - UNSMOOTH))
def test_the_backward_rule_holds_against_the_derivative(name):
    f, truth, (low, high) = FUNCTIONS[name]
    leaf = 3 * grid(low + 0.01, high - 0.01, 15).float().double()

    def fn(leaves):
        x = leaves["x"].requires_grad_()
        t = x / 3
        (g,) = torch.autograd.grad(f(t).sum(), t)
        return {"y": g}

    check(fn, leaf, lambda x: mp.diff(truth, x), argument=True, store_argument=F32)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp", "maximum", "minimum", "pow"])
def test_operators_of_several_computed_arguments_stay_within_their_bounds(op):
    generator = torch.Generator().manual_seed(3)
    leaves = {k: torch.rand(4000, generator=generator) * 2 + 0.25 for k in "abc"}
    calls = {
        "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.3),
        "addcdiv": lambda a, b, c: torch.addcdiv(a, b, c, value=0.3),
        "lerp": torch.lerp,
    }
    call = calls.get(op) or (lambda a, b, c: getattr(torch, op)(a, b))
    fn = lambda L: {"y": call(L["a"] / 3, -L["b"] / 3 if op == "add" else L["b"] / 3, L["c"] / 3)}  # noqa: E731
    bounded = running_bounds(fn, {k: v.double() for k, v in leaves.items()}, compute=F32, stores={})["y"]
    error = (fn(leaves)["y"].double() - bounded.value).abs()
    assert bool((error <= bounded.bound).all())
    assert float((error / bounded.bound).max()) > 0.05  # not vacuous either


def test_a_divisor_known_to_less_than_ten_percent_opens_the_bound():
    # 1 + d - 1 has the absolute error 2^-24 of the first sum
    leaf = torch.tensor([2.0**-10, 2.0**-22], dtype=torch.float64)
    for f in (torch.reciprocal, torch.log, torch.rsqrt, lambda t: 1 / t, lambda t: t**-1.5):
        bounded = running_bounds(lambda L, f=f: {"y": f((1 + L["x"]) - 1)}, {"x": leaf}, compute=F32, stores={})["y"]
        assert bounded.open.tolist() == [False, True]
        assert bounded.notes == []


def test_constants_that_float32_cannot_represent_carry_their_rounding():
    one = torch.ones(1, dtype=torch.float64)
    for fn in (
        lambda L: {"y": L["x"] * 0 + 0.1},
        lambda L: {"y": L["x"] * 0 + torch.tensor(0.1, dtype=torch.float64)},
        lambda L: {"y": torch.full((1,), 0.1, dtype=torch.float64)},
        lambda L: {"y": torch.where(L["x"] > 0, 0.1, 0.0)},
    ):
        bound = running_bounds(fn, {"x": one}, compute=F32, stores={})["y"].bound
        assert float(bound) >= abs(0.1 - float(torch.tensor(0.1, dtype=F32)))


def test_powers_of_two_and_copies_are_exact():
    x = torch.randn(50, generator=torch.Generator().manual_seed(1)).double()
    for f in (lambda t: t * 0.5, lambda t: t / 4, torch.neg, torch.abs, lambda t: t**1, torch.relu, torch.clone):
        bounded = running_bounds(lambda L, f=f: {"y": f(L["x"])}, {"x": x}, compute=F32, stores={})["y"]
        assert bool((bounded.bound == 0).all())


def test_a_float64_candidate_is_judged_in_units_of_float64():
    x = torch.rand(500, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
    fn = lambda L: {"y": torch.tanh(L["x"] * 1.1) / L["x"]}  # noqa: E731
    bounded = running_bounds(fn, {"x": x}, compute=torch.float64, stores={"y": torch.float64})["y"]
    truth = [mp.tanh(mp.mpf(v) * mp.mpf(1.1)) / mp.mpf(v) for v in x.tolist()]
    other = torch.tensor([float(t) for t in truth], dtype=torch.float64)
    assert bool(((other - bounded.value).abs() <= bounded.bound).all())
    assert bool((bounded.bound < 60 * unit_roundoff(torch.float64) * bounded.value.abs()).all())


def test_an_intermediate_flushed_subnormal_is_within_the_bound():
    x = torch.tensor([2.0**-70], dtype=torch.float64)
    fn = lambda L: {"y": (L["x"] * 2.0**-3 * L["x"] * 1.5) * 2.0**120}  # noqa: E731
    bounded = running_bounds(fn, {"x": x}, compute=F32, stores={})["y"]
    assert float(bounded.bound) >= float(bounded.value)  # x x / 8 lies below 2^-126: a kernel may flush it to 0


# y of an argument whose value is 2 and whose error is inf * 0; z is an exact 1.5
OPEN = {
    "divided": lambda y, z: y / z,
    "root": lambda y, z: torch.sqrt(y),
    "compared": lambda y, z: (y > z).double() / 3,
    "chosen": lambda y, z: torch.where(y > z, y, z),
    "relu_backward": lambda y, z: torch.ops.aten.threshold_backward(z, y, 0.0),
    "largest_index": lambda y, z: torch.stack([y, z, z]).topk(1, 0).indices.double() / 3,
}


@pytest.mark.parametrize("name", OPEN)
def test_an_open_error_stays_open_where_it_is_no_number(name):
    def fn(leaves):
        nothing = 0 * torch.log((leaves["x"] / 3 - leaves["x"] / 3).abs() + 1e-30)
        return {"y": OPEN[name](nothing + 2, leaves["x"] + 0.5)}

    assert bool((running_bounds(fn, {"x": torch.ones(2).double()}, compute=F32, stores={})["y"].bound > 0.1).all())
