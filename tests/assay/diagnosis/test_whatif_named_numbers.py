"""Indices that count from the end, and names of numbers."""

import math

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.diagnosis.facts import numbers
from goldsmith.assay.diagnosis.facts.patterns import patterns

pytestmark = pytest.mark.sweep(8)


def diagnosed(kernel, golden, cases, **more):
    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=cases, **more))
    return diagnosis.causes[0], " ".join(diagnosis.causes[0].evidence), diagnosis


@assay.case(N=[20], K=[6])
def scatter(make, N, K):
    return {"i": make.integers(-1, K, N), "x": make.normal(N, 3), "K": K}


def clamped(i, x, K):
    return torch.zeros(K, x.shape[1], dtype=x.dtype).index_add(0, i.clamp_min(0), x * (i >= 0)[:, None])


def chosen(i, x, K):
    valid = i != -1
    return torch.zeros(K, x.shape[1], dtype=x.dtype).index_add(0, torch.where(valid, i, 0), x * valid[:, None])


def from_the_end(i, x, K):
    return torch.zeros(K, x.shape[1], dtype=x.dtype).index_put((i,), x, accumulate=True)


@pytest.mark.parametrize(("golden", "condition"), [(clamped, "i >= 0"), (chosen, "i != -1")])
def test_an_unguarded_index_of_minus_one_counts_from_the_end(golden, condition):
    best, sentence, diagnosis = diagnosed(from_the_end, golden, scatter)
    assert best.id == "invalid_index" and f"nothing checks whether {condition}" in sentence, str(diagnosis)
    assert "count from the end" in sentence


def test_repeated_numbers_identify_no_places():
    golden = torch.tensor([[1.0, 2.0, 2.0], [3.0, 4.0, 5.0]], dtype=torch.float64)
    got = golden.flatten()[torch.tensor([3, 0, 4, 2, 1, 5])].view(2, 3).float()
    assert not [p for p in patterns("y", got, golden) if "bit for bit" in p.text]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.sqrt(11 / 12), "sqrt((N-1)/N)"),
        (12 / 11, "N/(N-1)"),
        (1 / math.log(2), "1/ln 2"),
        (math.log(2), "ln 2"),
        (1 / 0.3, "1/(1-a)"),
        (math.sqrt(0.3), "sqrt(1-a)"),
    ],
)
def test_a_number_has_a_name(value, text):
    assert numbers.name(value, 1e-6, {"N": 12.0, "a": 0.7}).name == text


def test_lengths_of_axes_have_names_where_no_size_is_known():
    known = numbers.known({}, {}, {"x": torch.ones(12, 7)})
    assert numbers.name(math.sqrt(11 / 12), 1e-9, known).name == "sqrt((x.shape[0]-1)/x.shape[0])"
    assert not [n for n in numbers.known({}, {"N": 12}, {"x": torch.ones(12, 7)}) if "shape" in n]


def test_a_standard_deviation_divided_by_n():
    @assay.case(N=[12], D=[7])
    def rows(make, N, D):
        return {"x": make.normal(N, D)}

    best, sentence, diagnosis = diagnosed(
        lambda x: x / assay.stage("s", x.std(0, keepdim=True, unbiased=False)),
        lambda x: x / assay.stage("s", x.std(0, keepdim=True)),
        rows,
    )
    assert best.id == "wrong_factor" and "sqrt((N-1)/N) in every element" in sentence, str(diagnosis)


def test_a_divergence_computed_with_logarithms_to_base_2():
    @assay.case(N=[5], D=[8])
    def rows(make, N, D):
        return {"p": make.normal(N, D), "q": make.normal(N, D)}

    def golden(p, q):
        return (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)

    best, sentence, diagnosis = diagnosed(lambda p, q: golden(p, q) / math.log(2), golden, rows)
    assert best.id == "wrong_factor" and "1/ln 2 in every element" in sentence, str(diagnosis)
    assert "and so 2 times" not in sentence
