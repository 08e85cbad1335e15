"""NaN from memory after arithmetic that does not preserve its bits, as in compiled kernels."""

import math

import pytest
import torch

from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[6], D=[20], E=[12])
def tokens(make, T, D, E):
    return {"x": make.normal(T, D), "w": make.normal(D, E)}


def golden(x, w):
    return assay.stage("product", x @ w) * 2


def canonical(t):
    """Tensor cores and atomic additions turn every NaN into this one."""
    return torch.where(torch.isnan(t), torch.full((), math.nan), t)


def added_to_what_was_there(x, w):
    y = torch.empty(x.shape[0], w.shape[1])
    return assay.stage("product", canonical(y + x @ w)) * 2


def never_written(x, w):
    y = torch.empty(x.shape[0], w.shape[1])
    y[:4] = (x @ w)[:4] / 1.5
    return assay.stage("product", canonical(y * 1.5)) * 2


def beyond_the_row(x, w):
    wide = x.as_strided((x.shape[0], x.shape[1] + 4), (x.shape[1], 1))
    return assay.stage("product", canonical(wide @ torch.cat([w, torch.zeros(4, w.shape[1])]))) * 2


def beyond_a_scratch(x, w):
    own = torch.zeros(x.shape).copy_(x)
    return beyond_the_row(own, w)


@pytest.mark.parametrize(
    "kernel, cause",
    [
        (added_to_what_was_there, "uninitialised_accumulator"),
        (never_written, "never_written"),
        (beyond_the_row, "stray_read"),
        (beyond_a_scratch, "stray_read"),
    ],
)
def test_the_origin_of_nan(kernel, cause):
    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=tokens, backward=None), probes="quick")
    assert (diagnosis.verdict, diagnosis.first_wrong_stage) == ("fail", "product")
    assert diagnosis.causes[0].id == cause, str(diagnosis)
    assert not any("NaN" in f.text and f.probe in ("poison", "guard") for f in diagnosis.report.findings)


def test_nan_computed_by_the_kernel_is_not_blamed_on_memory():
    def kernel(x, w):
        return assay.stage("product", (x @ w - 40).log()) * 2

    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=tokens, backward=None), probes="quick")
    ids = {c.id for c in diagnosis.causes}
    assert diagnosis.verdict == "fail" and not ids & {"uninitialised_accumulator", "never_written", "stray_read"}, str(
        diagnosis
    )


def test_a_write_beyond_a_stage_belongs_to_that_stage():
    def kernel(x, w):
        y = torch.empty(x.shape[0], w.shape[1]).copy_(x @ w)
        y.as_strided((1,), (1,), y.numel()).fill_(3.0)
        return assay.stage("product", y) * 2

    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=tokens, backward=None), probes="quick")
    assert (diagnosis.first_wrong_stage, diagnosis.causes[0].id) == ("product", "overrun"), str(diagnosis)


def test_leaking_nan_is_traced_from_the_first_stage():
    """The row's neighbour takes part if it is large, which the plain values do not show."""

    def kernel(x, w):
        return assay.stage("product", x @ w + torch.relu(x.roll(1, 0) - 40) @ w) * 2

    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=tokens, backward=None))
    assert (diagnosis.verdict, diagnosis.first_wrong_stage) == ("fail", "product"), str(diagnosis)
