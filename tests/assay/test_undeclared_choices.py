"""Whole numbers that are no declared decisions: any right choice among ties is accepted, and nothing else."""

import pytest
import torch

from assay.kernels import texts
from goldsmith import assay


@assay.case(T=[6], E=[8])
def tied(make, T, E):
    return {"x": make.tied(T, E)}


@assay.case(T=[1, 6], E=[16])
def untied(make, T, E):
    return {"x": make.normal(T, E)}


@assay.case(T=[4], E=[8])
def equal(make, T, E):
    return {"x": make.normal(T, E) * 0}


@assay.case(T=[32], E=[8])
def alike(make, T, E):
    return {"x": make.normal(T, 1).expand(T, E).contiguous()}


def backwards(choose):
    """The same choice, with the last of equal scores in place of the first."""
    return lambda x: x.shape[-1] - 1 - choose(x.flip(-1))


def topk(x):
    values, index = x.softmax(-1).topk(3)
    return values, index


def router(x):
    """Weights that another table gives to the chosen experts: they jump where the choice does."""
    index = x.topk(2).indices
    return torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)[index] * x.gather(-1, index), index.int()


def stable_topk(x):
    values, index = x.softmax(-1).sort(dim=-1, descending=True, stable=True)
    return values[:, :3], index[:, :3]


def topk_of_logits(x):
    index = x.topk(3).indices
    return x.softmax(-1).gather(-1, index), index


def last_router(x):
    index = (x.shape[-1] - 1) - x.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :2]
    return torch.arange(x.shape[-1], dtype=x.dtype)[index] * x.gather(-1, index), index.int()


def argmax(x):
    return x.argmax(-1)


def argmin(x):
    return x.argmin(-1, keepdim=True)


def argmin_of_min(x):
    return x.min(-1, keepdim=True).indices.add(0)


def argsort(x):
    return x.argsort(0)


def last_argsort(x):
    return x.shape[0] - 1 - x.flip(0).argsort(dim=0, stable=True)


def maximum(x):
    return tuple(x.max(-1))


def last_maximum(x):
    index = backwards(argmax)(x)
    return x.gather(-1, index[:, None])[:, 0], index


def one_hot(x):
    return torch.nn.functional.one_hot(argmax(x), x.shape[-1])


def last_one_hot(x):
    return torch.nn.functional.one_hot(backwards(argmax)(x), x.shape[-1])


def quantised(x):
    scale = x.abs().amax(-1, keepdim=True) / 2**18
    return (x / scale).round().int(), scale


def quantised_by_a_reciprocal(x):
    largest = x.abs().amax(-1, keepdim=True)
    return (x * (2**18 / largest)).round().int(), largest / 2**18


def above_the_mean(x):
    return x.softmax(-1) > 1 / x.shape[-1]


def above_the_mean_of_logits(x):
    return x > x.logsumexp(-1, keepdim=True) - torch.full_like(x, x.shape[-1]).log()


RIGHT = [
    (topk, stable_topk, untied),
    (topk, topk_of_logits, tied),
    (router, last_router, tied),
    (argmax, backwards(argmax), tied),
    (argmin, argmin_of_min, tied),
    (argsort, last_argsort, tied),
    (maximum, last_maximum, tied),
    (one_hot, last_one_hot, tied),
    (quantised, quantised_by_a_reciprocal, untied),
    (above_the_mean, above_the_mean_of_logits, alike),
]


def judged(golden, candidate, cases):
    return assay.check(assay.Target(candidate, golden, cases=cases), raises=False)


@pytest.mark.parametrize("golden, candidate, cases", RIGHT)
def test_another_right_choice_is_accepted(golden, candidate, cases):
    report = judged(golden, candidate, cases)
    assert report.ok, str(report)


def zeros(golden):
    def candidate(x):
        result = golden(x)
        if isinstance(result, torch.Tensor):
            return torch.zeros_like(result)
        return tuple(r if r.is_floating_point() else torch.zeros_like(r) for r in result)

    return candidate


def second_best(x):
    values, index = x.softmax(-1).sort(-1, descending=True)
    return values[:, :3], index[:, 1:4]


def twice(x):
    values, index = topk(x)
    return values, torch.cat([index[:, :1], index[:, :1], index[:, 2:]], -1)


def reversed_order(x):
    values, index = topk(x)
    return values, index.flip(-1)


def truncated(x):
    scale = x.abs().amax(-1, keepdim=True) / 2**18
    return (x / scale).int(), scale


WRONG = [
    (topk, zeros(topk), tied),
    (topk, second_best, untied),
    (topk, twice, equal),
    (topk, reversed_order, untied),
    (argmax, lambda x: argmax(x).clamp(min=x.shape[-1] // 2), untied),
    (argmax, lambda x: argmax(x) * 0 - 1, equal),
    (argsort, lambda x: x.argsort(0).flip(0), tied),
    (one_hot, zeros(one_hot), untied),
    (quantised, truncated, tied),
    (quantised, zeros(quantised), tied),
    (above_the_mean, lambda x: x > 0, untied),
    (
        lambda x: x.argsort(dim=-1, stable=True),
        lambda x: x.shape[-1] - 1 - x.flip(-1).argsort(dim=-1, stable=True),
        tied,
    ),
]


@pytest.mark.parametrize("golden, candidate, cases", WRONG)
def test_a_choice_that_no_tie_explains_is_wrong(golden, candidate, cases):
    report = judged(golden, candidate, cases)
    assert report.verdict == "fail" and "exceeds its rounding bound" in " ".join(texts(report)), str(report)


@pytest.mark.parametrize("candidate", [argmax, backwards(argmax)], ids=["its own", "another"])
def test_a_case_in_which_all_scores_tie_is_told(candidate):
    notes = [n for n in judged(argmax, candidate, equal).notes if n.id == "undetermined"]
    assert [n.text for n in notes] == ["y: all scores tie in every row of equal[T=4,E=8], so any choice is right there"]


def test_no_note_where_the_choice_is_determined():
    assert not [n for n in judged(argmax, argmax, tied).notes if n.id == "undetermined"]


def test_a_result_that_is_rounding_alone_is_told():
    def noise(x):
        return x * 1.1 > x * 1.1000000001

    report = judged(noise, lambda x: ~noise(x), untied)
    assert [n.id for n in report.notes].count("undetermined") == 2, report.notes
