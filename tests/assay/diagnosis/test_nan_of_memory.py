"""NaN that memory held, after arithmetic that keeps no NaN's bits: as compiled kernels leave it."""

import math

import pytest
import torch

from goldsmith import assay


@assay.case(T=[6], D=[20], E=[12])
def tokens(make, T, D, E):
    return {"x": make.normal(T, D), "w": make.normal(D, E)}


def golden(x, w):
    return assay.stage("product", x @ w) * 2


def canonical(t):
    """What tensor cores and atomic additions make of a NaN: one of their own."""
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
def test_where_the_nan_came_from(kernel, cause):
    found = assay.diagnose(assay.Target(kernel, golden, cases=tokens, backward=None), probes="quick")
    assert (found.verdict, found.first_wrong_stage) == ("fail", "product")
    assert found.causes[0].id == cause, str(found)
    assert not any("NaN" in f.text and f.probe in ("poison", "guard") for f in found.report.findings)


def test_a_nan_that_the_kernel_makes_itself_came_from_no_memory():
    def kernel(x, w):
        return assay.stage("product", (x @ w - 40).log()) * 2

    found = assay.diagnose(assay.Target(kernel, golden, cases=tokens, backward=None), probes="quick")
    ids = {c.id for c in found.causes}
    assert found.verdict == "fail" and not ids & {"uninitialised_accumulator", "never_written", "stray_read"}, str(
        found
    )


def test_a_write_beyond_a_stage_is_that_stage_s():
    def kernel(x, w):
        y = torch.empty(x.shape[0], w.shape[1]).copy_(x @ w)
        y.as_strided((1,), (1,), y.numel()).fill_(3.0)
        return assay.stage("product", y) * 2

    found = assay.diagnose(assay.Target(kernel, golden, cases=tokens, backward=None), probes="quick")
    assert (found.first_wrong_stage, found.causes[0].id) == ("product", "overrun"), str(found)


def test_nan_that_leaks_is_looked_for_from_the_first_stage_on():
    """The row's neighbour takes part where it is large, which the values do not show."""

    def kernel(x, w):
        return assay.stage("product", x @ w + torch.relu(x.roll(1, 0) - 40) @ w) * 2

    found = assay.diagnose(assay.Target(kernel, golden, cases=tokens, backward=None))
    assert (found.verdict, found.first_wrong_stage) == ("fail", "product"), str(found)
