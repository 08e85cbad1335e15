"""A candidate that raises where its golden raises too is not at fault."""

import pytest
import torch

from assay.kernels import plain_sum, rows, target, texts
from goldsmith import assay


@assay.case(N=[0], D=[3])
def none(make, N, D):
    return {"x": make.normal(N, D)}


def largest(x):
    return x.amax(0)


def refusing(x):
    if len(x) == 0:
        raise ValueError("no rows")
    return x.amax(0)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return plain_sum(x, w)

    @staticmethod
    def backward(ctx, g):
        raise ValueError("not written")


@pytest.mark.parametrize("kernel", [largest, refusing])
@pytest.mark.parametrize("verb", [lambda t: assay.check(t, raises=False), lambda t: assay.diagnose(t).report])
def test_a_candidate_may_raise_where_the_golden_raises(verb, kernel):
    report = verb(target(kernel, largest, none))
    assert report.verdict == "reference_fault" and len(report.findings) == 1
    assert texts(report, "golden")[0].startswith("the golden raised IndexError: amax()"), texts(report)


def test_a_backward_may_raise_where_the_golden_has_no_gradient():
    report = assay.check(target(NoBackward.apply, NoBackward.apply, rows), raises=False)
    assert report.verdict == "reference_fault"
    assert texts(report)[0].startswith("the golden's backward raised ValueError: not written"), texts(report)


def test_a_candidate_that_raises_where_the_golden_runs_fails():
    report = assay.check(target(refusing, lambda x: x.sum(0), none), raises=False)
    assert report.verdict == "fail" and "the candidate raised in its forward" in texts(report, "values")[0]
    report = assay.check(target(NoBackward.apply), raises=False)
    assert report.verdict == "fail" and "the candidate raised in its backward" in texts(report, "values")[0]
