"""A stage that a kernel may round to an input's dtype: the bound allows that rounding and no other."""

import pytest
import torch

from goldsmith import assay


@assay.case(T=[5], D=[40], why="sums long enough for a rounding of an operand to show")
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D, D)}


def golden(x, w):
    h = assay.stage("h", torch.exp(x))
    return h @ w


def kernel(x, w, *, of_h=None, of_w=None):
    h, w = torch.exp(x.float()), w.float()
    h = h if of_h is None else h.to(of_h).float()
    w = w if of_w is None else w.to(of_w).float()
    return (h @ w).float()


def target(stored, **rounded):
    return assay.Target(lambda x, w: kernel(x, w, **rounded), golden, cases=rows, backward=None, stored=stored)


def verdict(target, dtype):
    return assay.check(target, dtype=dtype, raises=False, probes=("values", "ensemble", "statistics")).verdict


def test_a_kernel_may_round_a_declared_stage():
    assert verdict(target({"h": "x"}, of_h=torch.bfloat16), torch.bfloat16) == "pass"


@pytest.mark.parametrize(
    "stored, rounded, dtype",
    [
        ({}, {"of_h": torch.bfloat16}, torch.bfloat16),
        ({"h": "x"}, {"of_h": torch.bfloat16}, torch.float32),
        ({"h": "x"}, {"of_h": torch.float8_e4m3fn}, torch.bfloat16),
    ],
    ids=["undeclared", "to_less_than_the_input", "to_less_than_declared"],
)
def test_a_kernel_that_rounds_further_fails(stored, rounded, dtype):
    assert verdict(target(stored, **rounded), dtype) == "fail"


def test_an_unknown_input_is_an_error():
    with pytest.raises(assay.TargetError, match="stored: 'z' is not among the floating-point inputs; there are: x, w"):
        target({"h": "z"})


def test_a_stage_that_the_golden_lacks_is_an_error():
    with pytest.raises(assay.TargetError, match="stored: 'hh' is not among the golden's stages; there are: h$"):
        verdict(target({"hh": "x"}), torch.bfloat16)
    with pytest.raises(TypeError, match="stored: expected a dict from stages to inputs, got list"):
        target(["h"])
