"""Numbers of rows and repetitions: lengths that are off by one or filled up, and an addend that every block adds."""

import pytest
import torch

from goldsmith import assay

pytestmark = pytest.mark.sweep(8)

BLOCK = 4


@assay.case(B=[3], T=[11], D=[3])
def rows(make, B, T, D):
    return {"x": make.normal(B, T, D), "length": make.integers(2, 10, B), "bias": make.normal(D)}


def golden(x, length, bias):
    return torch.stack([row[:n].sum(0) for row, n in zip(x, length, strict=True)]) + bias


def kernel(last=lambda n, longest: n):
    """Sums over the rows below `last`, a function of a sequence's length and the longest one's."""

    def sums(x, length, bias):
        ends = [min(x.shape[1], last(int(n), int(length.max()))) for n in length]
        return torch.stack([x[b, :end].sum(0) for b, end in enumerate(ends)]) + bias

    return sums


@pytest.mark.parametrize(
    "wrong, cause, message",
    [
        (kernel(lambda n, _: n - 1), "off_by_one", "every number in length is -1"),
        (kernel(lambda n, _: n + 1), "off_by_one", "every number in length is +1"),
        (kernel(lambda n, _: -(-n // BLOCK) * BLOCK), "wrong_mask", f"to the end of its block of {BLOCK}"),
        (kernel(lambda n, longest: longest), "wrong_mask", "the largest of length is used for all"),
    ],
)
def test_the_cause_is_named(wrong, cause, message):
    diagnosis = assay.diagnose(assay.Target(wrong, golden, cases=rows, name="sums"), device="cpu")
    assert diagnosis.causes[0].id == cause and message in " ".join(diagnosis.causes[0].evidence), diagnosis


def test_the_right_kernel_is_not_accused():
    assert assay.diagnose(assay.Target(kernel(), golden, cases=rows, name="sums"), device="cpu").verdict == "pass"
