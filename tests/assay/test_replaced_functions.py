"""A candidate that replaces functions of torch or of the assay is wrong, and harms no later check."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay import checks


def target(kernel):
    return assay.Target(kernel, lambda x, w: (x * w).sum(-1), cases={"x": torch.randn(12, 40), "w": torch.randn(40)})


def plain_sum(x, w):
    return (x * w).sum(-1)


@pytest.mark.parametrize("owner, name", [(torch.Tensor, "clone"), (torch, "zeros_like"), (checks, "_verdict")])
def test_what_a_candidate_replaces_is_reported_and_put_back(owner, name):
    before = getattr(owner, name)

    def replacing(x, w):
        setattr(owner, name, lambda *args, **named: before(*args, **named))
        return plain_sum(x, w)

    report = assay.check(target(replacing), probes="values", raises=False)
    assert any(f.trick == "patched_runtime" and f"{name}, which everything else" in f.text for f in report.findings)
    assert getattr(owner, name) is before or getattr(owner, name) == before
    assert assay.check(target(plain_sum), probes="values", raises=False).ok
