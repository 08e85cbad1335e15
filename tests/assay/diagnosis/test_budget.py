"""The budget of a diagnosis whose golden is slow: what there is no time for is left out, and said."""

import time

import torch

from goldsmith import assay
from goldsmith.assay import clock

INPUTS = {"x": torch.randn(40, 40, generator=torch.Generator().manual_seed(0)), "w": torch.ones(40, 40)}
HONEST = "honest runs of the golden in other orders: only what is certain was judged"


def slow(seconds):
    def golden(x, w):
        time.sleep(seconds)
        return x @ w

    return golden


def target(kernel, seconds):
    return assay.Target(kernel, slow(seconds), cases=INPUTS, backward=None, name="product")


def test_what_costs_much_is_left_out_and_named():
    """There are hundreds of runs of the golden in all, which would take some 20 seconds."""
    found = assay.diagnose(target(lambda x, w: x @ w, 0.05), budget_s=2)
    assert found.verdict == "pass" and "NOT FINISHED" in str(found)
    said = [n.text for n in found.report.notes if n.id == "budget"]
    assert any(HONEST in text for text in said) and any("taint" in text for text in said)
    assert "Left out: honest runs of the golden" in str(found)


def test_a_wrong_kernel_is_found_though_there_is_no_time_for_noise():
    found = assay.diagnose(target(lambda x, w: x @ w * 1.01, 0.05), budget_s=2)
    assert found.verdict == "fail" and found.report.findings[0].rung == "CERTAIN"


def test_with_time_enough_nothing_is_left_out():
    found = assay.diagnose(target(lambda x, w: x @ w, 0.0), budget_s=60)
    assert found.verdict == "pass" and not found.partial and not found.traced


def test_the_clock_leaves_out_what_takes_longer_than_is_left():
    assert not clock.lacks(1e9, "without an end") and not clock.cut()
    with clock.until(time.perf_counter() + 5) as left_out:
        assert not clock.lacks(1.0, "short") and not clock.cut()
        assert clock.lacks(10.0, "long") and clock.lacks(10.0, "long") and clock.cut()
    assert left_out == ["long"] and not clock.cut()
