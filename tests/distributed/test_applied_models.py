"""Models of transformers whose hyper-connections are computed by goldsmith.mhc, under FSDP2."""

import pytest
import torch

from goldsmith import assay

pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from hf import hyper_models


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.sweep(4, part=n)) for n, f in enumerate(hyper_models.PRESENT)]
)
def test_a_step_on_two_ranks_has_the_gradients_of_one_process(family, pools):
    first, second = pools(2).run(hyper_models.sharded_step, [(family,)] * 2)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assay.check(hyper_models.gradients_target(first, hyper_models.model(family), family), probes=["values"])
