"""What strangers try first: torch's own functions, held to themselves and to their formulas."""

import pytest
import torch
import torch.nn.functional as F

from goldsmith import assay


def held(candidate, golden, std=1.0, **inputs):
    inputs = inputs or {"x": std * torch.randn(16, 256, generator=torch.Generator().manual_seed(3))}
    return assay.check(assay.Target(candidate, golden, cases=inputs, name="kernel"), raises=False)


def gelu(x):
    return F.gelu(x)


def erf_formula(x):
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


@pytest.mark.parametrize("golden", [gelu, erf_formula], ids=["itself", "formula"])
@pytest.mark.parametrize("std", [1.0, 2.0])
def test_torchs_gelu_is_right(golden, std):
    """Its vector kernel on a CPU has an erf that is off by 12 roundings of 1."""
    report = held(gelu, golden, std)
    assert report.verdict == "pass", str(report)


def test_the_tanh_approximation_is_not_gelu():
    report = held(lambda x: F.gelu(x, approximate="tanh"), gelu)
    assert report.verdict == "fail" and report.findings[0].measured > 100


def cholesky(x):
    return torch.linalg.cholesky(x @ x.mT + torch.eye(8, dtype=x.dtype))


@pytest.mark.parametrize("fn", [torch.linalg.inv, cholesky], ids=["inverse", "cholesky"])
def test_inputs_of_a_probe_that_the_golden_refuses_accuse_nobody(fn):
    def function(x):
        return fn(x)

    report = held(function, function, x=torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    assert report.verdict == "pass", str(report)
    assert any(n.id == "golden_raised" for n in report.notes)


def test_one_that_refuses_what_the_golden_takes_is_told_so():
    def picky(x):
        if bool((x == x[:1]).all()):
            raise ValueError("all the same")
        return x * 2

    report = held(picky, lambda x: x * 2)
    assert report.verdict == "fail" and any("all the same" in f.text for f in report.findings)


def test_a_declared_dtype_that_a_dict_of_tensors_does_not_have_is_refused():
    target = assay.Target(gelu, gelu, cases={"x": torch.randn(4, 8)}, name="kernel", dtypes=(torch.bfloat16,))
    with pytest.raises(
        assay.TargetError, match="dtypes: bfloat16 is declared, and case .* a dict of tensors in float32"
    ):
        assay.check(target, raises=False)
