"""Kernels that raise: which mistake causes the error, and which numbers are wrong before it or in another case."""

import pytest
import torch

from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[9], E=[4], D=[3])
def rows(make, T, E, D):
    return {"x": make.normal(T, D), "w": make.normal(E, D), "which": torch.arange(T) % E}


def golden(x, w, which):
    return x * w[which]


@pytest.mark.parametrize(
    "first, kernel",
    [
        ("off_by_one", lambda x, w, which: x * w[which + 1]),
        ("invalid_index", lambda x, w, which: x * w[which * 3]),
        ("off_by_one", lambda x, w, which: x[:-1] * w[which]),
    ],
    ids=["one_beyond", "far_beyond", "sizes_one_apart"],
)
def test_an_error_names_its_mistake(first, kernel):
    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=rows, name="kernel", backward=None))
    assert diagnosis.first_wrong_stage == "forward"
    named = [c.id for c in diagnosis.causes]
    assert first in named[:3] and "exception" in named
    assert first == named[0] or first == "off_by_one"


@assay.case(T=[5], E=[4])
def idle(make, T, E):
    return {"x": make.normal(T), "which": torch.tensor([0, 1, 2, 1, 0])}


def sums(x, which):
    return torch.zeros(4, dtype=x.dtype).index_add(0, which, x)


def counted(x, which):
    counts = torch.bincount(which).tolist()
    order = which.argsort(stable=True)
    at = [sum(counts[:e]) for e in range(5)]
    return torch.stack([x[order[at[e] : at[e] + counts[e]]].sum() for e in range(4)])


def test_an_empty_group_without_a_count():
    diagnosis = assay.diagnose(assay.Target(counted, sums, cases=idle, name="kernel", backward=None))
    assert diagnosis.causes[0].id == "empty_group" and diagnosis.causes[0].params["unused"] == [3]


def backward_raises(x, w, which, grad_y):
    raise RuntimeError("index -4 is out of bounds for dimension 0 with size 4")


def test_an_error_before_the_raising_backward_comes_first():
    target = assay.Target(
        lambda x, w, which: -x * w[which], golden, cases=rows, name="kernel", backward=backward_raises
    )
    diagnosis = assay.diagnose(target)
    assert (diagnosis.first_wrong_stage, diagnosis.causes[0].id) == ("y", "sign_flip")
    assert "exception" in [c.id for c in diagnosis.causes] or any("raised" in f.text for f in diagnosis.report.findings)


@assay.case(T=[4, 6], E=[4], D=[3])
def two(make, T, E, D):
    return {"x": make.normal(T, D), "w": make.normal(E, D), "which": torch.arange(T) % E}


def short(x, w, which):
    if len(x) == 4:
        raise IndexError("list index out of range")
    return x * w[which.flip(0)]


def test_a_case_that_fails_with_numbers_says_more_than_one_that_raises():
    diagnosis = assay.diagnose(assay.Target(short, golden, cases=two, name="kernel", backward=None))
    assert diagnosis.first_wrong_stage == "y" and diagnosis.examined["sizes"]["T"] == 6
    assert diagnosis.causes[0].id == "permuted"


def bag_means(x, offsets):
    owner = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    total = torch.zeros(len(offsets) - 1, dtype=x.dtype).index_add(0, owner, x)
    return total / offsets.diff().clamp(min=1)


def first_counts(x, offsets):
    """Reads the first element of every bag, even of empty ones."""
    edges = list(zip(offsets.tolist(), offsets.tolist()[1:], strict=False))
    firsts = [x[lo:hi][0] for lo, hi in edges]
    return torch.stack(
        [(first + x[lo + 1 : hi].sum()) / (hi - lo) for first, (lo, hi) in zip(firsts, edges, strict=True)]
    )


@pytest.mark.parametrize(
    "index, first", [(torch.tensor([0, 5, 5, 8]), "empty_group"), (torch.tensor([0, 3, 5, 8]), "")]
)
def test_an_error_that_disappears_once_every_bag_has_members_is_due_to_an_empty_one(index, first):
    @assay.case(P=[8], G=[3])
    def draw_case(make, P, G):
        return {"x": make.normal(P), "offsets": index}

    diagnosis = assay.diagnose(assay.Target(first_counts, bag_means, cases=draw_case, name="kernel", backward=None))
    if not first:
        assert diagnosis.ok
        return
    assert diagnosis.causes[0].id == first
    assert any("offsets has nothing in group 1" in message for message in diagnosis.causes[0].evidence)
