"""An epsilon in another place than the golden's is named at any size of the case, near rounding or not."""

import pytest
import torch

from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[0, 13], D=[32])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


def square(x):
    return x.square().mean(-1, keepdim=True)


def norm(x):
    return x.square().sum(-1, keepdim=True).sqrt()


def root(x, w, eps):
    inv_rms = assay.stage("inv_rms", torch.rsqrt(square(x) + eps))
    return assay.stage("x_hat", x * inv_rms) * w


def over_norm(x, w, eps):
    return x / (norm(x) + eps) * w


def at_least(x, w, eps):
    return x / norm(x).clamp_min(eps) * w


def logarithm(x, w, eps):
    return (x.abs() + eps).log() * w


OTHERWISE = {
    "outside of sqrt": (root, lambda x, w, eps: x / (square(x).sqrt() + eps) * w),
    "another constant": (root, lambda x, w, eps: x * torch.rsqrt(square(x) + 10 * eps) * w),
    "none": (root, lambda x, w, eps: x * torch.rsqrt(square(x)) * w),
    "the larger of two": (root, lambda x, w, eps: x / square(x).sqrt().clamp_min(eps) * w),
    "beneath a root": (over_norm, lambda x, w, eps: x / (norm(x).square() + eps).sqrt() * w),
    "beneath a root, squared": (over_norm, lambda x, w, eps: x / (norm(x).square() + eps**2).sqrt() * w),
    "the larger one": (over_norm, at_least),
    "outside of a quotient": (over_norm, lambda x, w, eps: x * (1 / norm(x) + eps) * w),
    "added, not the larger": (at_least, over_norm),
    "beneath a root, not the larger": (at_least, lambda x, w, eps: x / (norm(x).square() + eps).sqrt() * w),
    "outside of a logarithm": (logarithm, lambda x, w, eps: (x.abs().log() + eps) * w),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_misplaced_epsilon_is_named_wherever_it_is(name):
    golden, kernel = OTHERWISE[name]
    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=tokens))
    assert diagnosis.verdict == "fail" and diagnosis.causes[0].id == "absolute_eps", str(diagnosis)
    assert diagnosis.causes[0].score > 0.8, str(diagnosis)


def test_rounding_alone_is_no_epsilon():
    @assay.case(T=[9], D=[64])
    def rows(make, T, D):
        return {"x": make.normal(T, D)}

    diagnosis = assay.diagnose(assay.Target(lambda x: x.half().cumsum(-1).float(), lambda x: x.cumsum(-1), cases=rows))
    assert "absolute_eps" not in [c.id for c in diagnosis.causes], str(diagnosis)
