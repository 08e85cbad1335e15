"""Bad options and modules raise; the message names the argument, its value, what is wanted and a remedy."""

import pytest
import torch
from torch import nn

from goldsmith import Op, ShapeError, mhc
from mhc.calls import DIM, H_RES, F, X, connection, post, pre, says

INF, NAN = float("inf"), float("nan")


def test_numbers_out_of_range():
    says(ValueError, lambda: pre(iterations=0), "mhc.pre: iterations=0, expected a number of at least 1")
    says(TypeError, lambda: pre(iterations=2.5), "mhc.pre: iterations=2.5, expected a whole number of at least 1")
    says(TypeError, lambda: pre(iterations=True), "mhc.pre: iterations=True, expected a whole number of at least 1")
    for name in ("rms_eps", "pre_eps", "sinkhorn_eps"):
        for value in (-1e-6, NAN):
            bad = {name: value}
            says(ValueError, lambda bad=bad: pre(**bad), f"mhc.pre: {name}={value}, expected a number of at least 0.0")
    says(
        ValueError,
        lambda: pre(post_mult=0.0),
        "mhc.pre: post_mult=0.0, expected a number above 0",
    )
    says(ValueError, lambda: mhc.expand(F, 0), "mhc.expand: n=0, expected a number of at least 1")
    says(TypeError, lambda: mhc.expand(F, 2.0), "mhc.expand: n=2.0, expected a whole number of at least 1")


@pytest.mark.parametrize("name", ["rms_eps", "pre_eps", "sinkhorn_eps", "post_mult"])
def test_options_that_are_not_finite_numbers(name):
    for value in ("1", None, True, 1j, [1.0]):
        bad, sentence = {name: value}, f"{name}={value!r}, expected a number"
        says(TypeError, lambda bad=bad: pre(**bad), f"mhc.pre: {sentence}")
        says(TypeError, lambda bad=bad: connection(**bad), f"mhc.HyperConnection: {sentence}")
    tensor = {name: torch.tensor(1e-6)}
    says(TypeError, lambda: pre(**tensor), f"mhc.pre: {name} is a Tensor, expected a number")
    for value in (INF, 1e39, 10**400):
        bad, sentence = {name: value}, f"mhc.pre: {name}={value!r}, expected a number that is finite in float32"
        says(ValueError, lambda bad=bad: pre(**bad), sentence)


def test_numeric_options_of_the_other_operators():
    says(TypeError, lambda: mhc.sinkhorn(H_RES, eps="1"), "mhc.sinkhorn: eps='1', expected a number")
    infinite = "mhc.sinkhorn: eps=inf, expected a number that is finite in float32"
    says(ValueError, lambda: mhc.sinkhorn(H_RES, eps=INF), infinite)
    says(TypeError, lambda: mhc.HyperHead(DIM, rms_eps="1"), "mhc.HyperHead: rms_eps='1', expected a number")
    most = f"mhc.pre: iterations={10**30}, expected at most 2147483647"
    says(ValueError, lambda: pre(iterations=10**30), most)


def test_integers_are_accepted_as_numbers():
    whole, real = (pre(pre_eps=one(0), post_mult=one(2), rms_eps=one(1)) for one in (int, float))
    assert all(torch.equal(a, b) for a, b in zip(whole, real, strict=True))


def test_a_repeated_call_is_not_checked_again_but_an_equal_one_of_other_types_is(monkeypatch):
    pre(iterations=1)
    for value in (True, 1.0):
        message = f"mhc.pre: iterations={value}, expected a whole number of at least 1"
        says(TypeError, lambda value=value: pre(iterations=value), message)
    monkeypatch.setattr(Op.get("mhc.pre"), "check", None)
    pre(iterations=1)


def test_flags_that_are_not_bool():
    says(TypeError, lambda: pre(sinkhorn="false"), "mhc.pre: sinkhorn='false', expected True or False")
    name = "mhc.HyperConnection"
    says(TypeError, lambda: connection(recompute=1), f"{name}: recompute=1, expected True or False")
    says(TypeError, lambda: connection(gamma="no"), f"{name}: gamma='no', expected True or False")
    says(
        TypeError,
        lambda: connection(gamma=torch.ones(DIM)),
        f"{name}: gamma is a Tensor, expected True or False",
        "load norm_weight",
    )


def test_an_unknown_choice_lists_the_known_ones():
    forms = "choose one of: 'deepseek', 'megatron', 'log'"
    ways = "choose one of: 'in_out', 'out_in'"
    says(ValueError, lambda: pre(form="exact"), f"mhc.pre: form='exact' is unknown; {forms}")
    says(ValueError, lambda: connection(form="exact"), f"mhc.HyperConnection: form='exact' is unknown; {forms}")
    says(ValueError, lambda: post(orientation="out"), f"mhc.post: orientation='out' is unknown; {ways}")
    says(ValueError, lambda: connection(orientation="o"), f"mhc.HyperConnection: orientation='o' is unknown; {ways}")
    says(
        ValueError,
        lambda: connection(init="zero"),
        "mhc.HyperConnection: init='zero' is unknown; choose one of: 'deepseek', 'small', 'identity'",
    )
    says(ValueError, lambda: pre(backend="cuda"), "mhc.pre: unknown backend 'cuda'; known: auto, triton, reference")
    says(ValueError, lambda: pre(backend=["triton"]),
         "mhc.pre: unknown backend ['triton']; known: auto, triton, reference")  # fmt: skip
    with pytest.raises(TypeError, match="unexpected keyword argument 'iteration'"):
        pre(iteration=3)


def test_bad_arguments_of_a_connection():
    name = "mhc.HyperConnection"
    wanted = "expected [*batch, n=4, dim=7]"
    says(TypeError, lambda: connection()([1.0]), f"{name}: x is a list, expected a torch.Tensor")
    says(ShapeError, lambda: connection()(X.mT), f"{name}: x is [2, 7, 4], {wanted}", "use mhc.streams_from_te")
    says(ShapeError, lambda: connection()(F), f"{name}: x is [2, 7], {wanted}", "mhc.expand(x, 4)")
    says(ShapeError, lambda: connection()(X[..., :5]), f"{name}: x is [2, 4, 5], {wanted}")
    says(ValueError, lambda: connection(n=0), f"{name}: n=0, expected a whole number of at least 1")
    says(ValueError, lambda: connection(iterations=0), f"{name}: iterations=0, expected a number of at least 1")
    says(TypeError, lambda: connection(layer=3), f"{name}: layer is of type int, expected a module or function of h_in")
    returned = f"{name}: layer returned a NoneType, expected f [*batch, dim] or (f, *rest)"
    says(TypeError, lambda: connection(layer=lambda h: None)(X), returned)
    says(
        TypeError,
        lambda: connection(norm=3),
        f"{name}: norm is of type int, expected a module or function of h_in, or None",
    )
    for recompute in (False, True):
        bad = connection(norm=lambda h: (h,), recompute=recompute)
        says(TypeError, lambda bad=bad: bad(X), f"{name}: norm returned a tuple, expected one tensor")
    with pytest.raises(ShapeError, match="f has dim=5, but x has dim=7"):
        connection(layer=nn.Linear(7, 5))(X)
    known = "choose one of: None, torch.bfloat16, torch.float16, torch.float32"
    says(
        ValueError,
        lambda: connection(coefficient_dtype=torch.int8),
        f"{name}: coefficient_dtype=torch.int8 is unknown; {known}",
    )


def test_bad_arguments_of_a_stack():
    name = "mhc.HyperStack"
    wrong = [connection(), nn.Identity()]
    says(TypeError, lambda: mhc.HyperStack(wrong), f"{name}: connections[1] is an Identity", "mhc.HyperConnection(dim")
    empty = f"{name}: connections is empty, expected at least one mhc.HyperConnection"
    says(TypeError, lambda: mhc.HyperStack([]), empty)
    says(
        ValueError,
        lambda: mhc.HyperStack([connection()], keep_every=2),
        f"{name}: keep_every=2, but only 1 is supported",
    )
    for value, kind in ((connection(), "a HyperConnection"), (torch.ones(()), "a Tensor"), (3, "an int")):
        start = f"{name}: connections is {kind}, expected a list"
        says(TypeError, lambda value=value: mhc.HyperStack(value), start, "mhc.HyperStack([connection, ...])")
    two = [connection(), connection(n=2)]
    says(ValueError, lambda: mhc.HyperStack(two), f"{name}: connections differ in (n, dim): [(2, 7), (4, 7)]")
