"""KernelFault's M32 on a GPU: weights copied on their own stream, and a product that does not wait for them."""

import pytest
import torch

from goldsmith import assay

pytestmark = pytest.mark.gpu
LATE = 20_000_000  # cycles of a GPU: about 10 ms


@assay.case(T=[6], H=[64], O=[48])
def tokens(make, T, H, O):
    return {"x": make.normal(T, H), "w": make.normal(O, H, std=H**-0.5)}


def golden(x, w):
    return x @ assay.stage("staged", w * 1).mT


def expert(*, waits):
    """x w^T with weights that arrive late, on a side stream."""

    def forward(x, w):
        source, slot = w.detach().cpu().pin_memory(), torch.empty_like(w)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            slot.copy_(source, non_blocking=True)
        slot.record_stream(side)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        return x @ assay.stage("staged", slot).mT

    return assay.Target(forward, golden, cases=tokens, name="copied", backward=None, dtypes=(torch.float32,))


def test_a_copy_that_is_waited_for_passes():
    assay.check(expert(waits=True), device="cuda", probes=["values", "second_call"])


@pytest.fixture(scope="module")
def diagnosis():
    return assay.diagnose(expert(waits=False), device="cuda", budget_s=20)


def test_a_copy_without_a_wait_is_found_at_the_stage_that_reads_it(diagnosis):
    assert diagnosis.verdict == "fail" and diagnosis.first_wrong_stage == "staged"


def test_the_cause_is_a_missing_synchronisation(diagnosis):
    assert diagnosis.causes[0].id == "missing_sync"
