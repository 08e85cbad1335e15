"""Ties that the assay itself creates never make a candidate fail."""

import torch

from assay.kernels import target, texts
from goldsmith import assay


@assay.case(N=[9])
def numbers(make, N):
    return {"x": make.normal(N)}


def ranks(x):
    """Equal numbers share a rank."""
    return (x[:, None] < x[None]).sum(1)


def places(x):
    """Equal numbers get consecutive ranks."""
    return torch.argsort(torch.argsort(-x))


def test_ranks_of_repeated_elements_are_a_note():
    report = assay.check(target(ranks, places, numbers, backward=None), raises=False)
    assert report.ok, str(report)
    assert any("layout:stride0(x)" in n.text for n in report.notes if n.id == "compute_range"), report.notes


def test_wrong_results_for_repeated_elements_are_still_found():
    def dense_at_stride_0(x):
        return ranks(x) + (x.stride(0) == 0) * 100  # no order of equal elements gives this result

    messages = texts(assay.check(target(dense_at_stride_0, places, numbers, backward=None), raises=False), "layouts")
    assert any("layout:stride0(x)" in text for text in messages), messages
