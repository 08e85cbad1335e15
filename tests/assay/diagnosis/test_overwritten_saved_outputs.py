"""A saved output that is right when it is returned, but that a later call overwrites: no wrong tensor was saved."""

import pytest
import torch

from goldsmith import assay


@assay.case(N=[5], C=[3])
def rows(make, N, C):
    return {"x": make.normal(N, C)}


def unit(x):
    length = x.square().sum(1).sqrt()
    return x / length[:, None], length


def gradient(x, y, length, grad_y):
    return {"x": (grad_y - y * (grad_y * y).sum(1, keepdim=True)) / length[:, None]}


def of_its_own(x, y, grad_y):
    return gradient(x, y, x.square().sum(1).sqrt(), grad_y)


@pytest.mark.parametrize(("backward", "cause"), [(gradient, "stale_state"), (of_its_own, "aliased")])
def test_a_saved_output_in_a_buffer_cached_by_shape(backward, cause):
    """The next forward overwrites it: then the backward reads another call's values, or only the caller has lost
    them.
    """
    buffers = {}

    def kernel(x):
        y, length = unit(x)
        return y, buffers.setdefault(length.shape, torch.empty_like(length)).copy_(length)

    target = assay.Target(
        kernel, unit, cases=rows, name="unit", outputs=("y", "length"), saved=("length",), backward=backward
    )
    diagnosis = assay.diagnose(target, budget_s=None)
    assert (diagnosis.first_wrong_stage, diagnosis.causes[0].id) == ("saved.length", cause), str(diagnosis)
    assert "wrong_saved_tensor" not in [c.id for c in diagnosis.causes]
    assert any("a later call overwrote what the first returned" in s for c in diagnosis.causes for s in c.evidence)
