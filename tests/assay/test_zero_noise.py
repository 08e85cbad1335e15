"""Where the golden and every honest run give 0, the noise is 0, so only the bound judges.

Otherwise any error would be 1e28 times the noise.
"""

import pytest
import torch
import torch.nn.functional as F

from assay.kernels import autograd, target, texts
from assay.ladder_bench import F32, reference, rungs, verdict
from goldsmith import assay


def standardised(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)


@assay.case(N=[1, 9], D=[1, 2])
def rows(make, N, D):
    return {"x": make.normal(N, D), "w": make.normal(D), "b": make.normal(D)}


@assay.case(N=[2], C=[2, 4], L=[1, 3])
def channels(make, N, C, L):
    return {"x": make.normal(N, C, L), "w": make.normal(C)}


def layer_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)


def group_norm(x, w):
    return F.group_norm(x, 2, w)


def layers(x, w, b):
    return standardised(x) * w + b


def groups(x, w):
    return standardised(x.reshape(x.shape[0], 2, -1)).reshape(x.shape) * w[:, None]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", rows, ids=str)
def test_a_layer_norm_of_one_column_is_right(case, seed):
    report = assay.check(target(layer_norm, layers, rows), case, seed=seed, raises=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("case", channels, ids=str)
def test_a_group_norm_of_one_element_is_right(case):
    report = assay.check(target(group_norm, groups, channels), case, raises=False)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "kernel, golden",
    [
        (lambda x: torch.softmax(x, -1), lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)),
        (lambda x: torch.log_softmax(x, -1), lambda x: x - torch.log(torch.exp(x).sum(-1, keepdim=True))),
        (lambda x: x.std(-1, unbiased=False, keepdim=True) * x, lambda x: (x - x.mean(-1, keepdim=True)).abs() * x),
    ],
    ids=["softmax", "log_softmax", "std"],
)
def test_other_functions_of_one_element_are_right(kernel, golden):
    case = assay.case(N=[5], D=[1])(lambda make, N, D: {"x": make.normal(N, D)})
    report = assay.check(target(kernel, golden, case), raises=False)
    assert report.ok, str(report)


def test_a_gradient_without_noise_beyond_its_bound_is_a_certain_finding():
    def doubled(x, w, g):
        return torch.zeros_like(x), (g * x).sum(0)

    kernel = autograd(lambda x, w: standardised(x) * w, doubled)
    case = assay.case(N=[9], D=[1])(lambda make, N, D: {"x": make.normal(N, D), "w": make.normal(D)})
    messages = texts(assay.check(target(kernel, lambda x, w: standardised(x) * w, case), raises=False), "values")
    assert any("w.grad exceeds its rounding bound" in text for text in messages), messages


def shifted(leaves):
    """Column 0 has no noise, the others are sums of their elements."""
    x = leaves["x"]
    return torch.cat([x[:, :1] - x[:, :1].mean(-1, keepdim=True), x.cumsum(-1)[:, 1:]], -1)


def draw(seed):
    return {"x": torch.randn(64, 512, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("factor", [1.0, 1 + 2.0**-14])
def test_next_to_elements_without_noise_the_noise_still_judges(factor):
    def candidate(leaves):
        y = shifted(leaves)
        y[:, 400:] *= factor
        y[:, 0] = 2.0**-25 * leaves["x"][:, 0]  # half a rounding of the subtracted number
        return y

    judgement = verdict(shifted, candidate, draw, F32)
    assert rungs(judgement) == ([] if factor == 1 else ["STATISTICAL"]), judgement.findings


def test_elements_without_noise_are_excluded_from_the_noise():
    """Pooled with 511 columns without error, the noise of one sum would look 20 times smaller than it is."""

    def alone(leaves):
        return leaves["x"].sum(-1, keepdim=True)

    def beside(leaves):
        x = leaves["x"]
        return torch.cat([alone(leaves), (x - x.unsqueeze(-1).mean(-1))[:, 1:]], -1)

    rms = [reference(golden, draw(0), F32).noise.rms for golden in (alone, beside)]
    assert rms[1] == pytest.approx(rms[0], rel=0.2)


def test_a_row_of_zeros_with_an_open_bound_is_judged_by_its_neighbours():
    def golden(leaves):
        y = torch.lgamma(leaves["x"].abs() + 2)
        return torch.where(leaves["x"][:, :1] > 0, y, 0 * y)

    def candidate(spoilt):
        return lambda leaves: golden(leaves) + torch.where(leaves["x"][:, :1] > 0, 0.0, spoilt)

    assert verdict(golden, candidate(1e-9), draw, F32).findings == []
    assert rungs(verdict(golden, candidate(1e-3), draw, F32)) == ["STATISTICAL"]
