"""One wrong tensor of a target, explained by what its golden names."""

import pytest
import torch

from assay.diagnosis.targets import adapter, layer, session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.experiments.isolate import isolate, named
from goldsmith.assay.diagnosis.fitting.fits import aligned, fit

pytestmark = pytest.mark.sweep(5)


def first_fit(target):
    examination = session_of(target)
    table = isolate(examination)
    kind, got = named(table.run)[table.first_wrong]
    return table.first_wrong, fit(examination, table.first_wrong, kind, got)


def test_a_flipped_bias():
    stage, result = first_fit(layer("z"))
    (term,) = result.fits
    assert (stage, term.term, term.reading, term.exact) == ("z", "b", "sign_flipped", -2.0)
    assert result.ratios == [] and result.patterns == []


def test_another_factor_of_an_output():
    stage, result = first_fit(layer("y"))
    (ratio,) = result.ratios
    assert (stage, ratio.scope, ratio.ratio) == ("y", "tensor", pytest.approx(1.25, rel=1e-6))


def test_a_missing_addend_of_a_backward():
    stage, result = first_fit(adapter("missing"))
    (term,) = result.fits
    assert (stage, term.term, term.reading) == ("x.grad", "base", "missing")


def test_a_missing_scalar_is_named():
    stage, result = first_fit(adapter("dlow"))
    (ratio,) = result.ratios
    assert (stage, ratio.ratio) == ("dlow", pytest.approx(1 / 0.3)) and "1/scale" in (ratio.named, *ratio.also)


def test_an_uncomputed_result_is_the_golden_times_zero():
    stage, result = first_fit(adapter("not_computed"))
    assert (stage, result.ratios[0].ratio, result.fits[0].reading) == ("a.grad", 0.0, "missing")


def test_a_truncated_sum_has_no_terms_ratios_or_patterns():
    stage, result = first_fit(layer("h"))
    assert stage == "h" and not result.fits and not result.ratios and not result.patterns


@assay.case(T=[7], D=[24])
def norm_case(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-5}


def norm_golden(x, w, eps):
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1) + eps))
    return x * inv_rms[:, None] * w


class NormWithoutTheRms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, w, r)
        return x * r * w

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        return g * w * r, (g * x * r).sum(0), None


def test_a_path_of_a_gradient_is_a_term_without_being_declared():
    stage, result = first_fit(assay.Target(NormWithoutTheRms.apply, norm_golden, cases=norm_case, outputs=("y",)))
    (term,) = result.fits
    assert (stage, term.term, term.reading) == ("x.grad", "path through inv_rms", "missing")


def test_how_tensors_are_laid_out():
    like = torch.zeros(5, 4)
    assert aligned(torch.zeros(4), like).shape == (4,)
    assert aligned(torch.zeros(5), like).shape == (5, 1)
    assert aligned(torch.zeros(3), like) is None
    assert aligned(torch.zeros(20), like).shape == (5, 4)
