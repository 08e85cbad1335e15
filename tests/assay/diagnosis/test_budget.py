"""The budget of a diagnosis whose golden is slow: what there is no time for is left out, and said."""

import time

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.diagnosis import diagnosis
from goldsmith.assay.support import deadline

INPUTS = {"x": torch.randn(40, 40, generator=torch.Generator().manual_seed(0)), "w": torch.ones(40, 40)}
HONEST = "honest runs of the golden in other orders: only certain findings were looked for"


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


@pytest.fixture
def seconds(monkeypatch):
    """A clock that golden and kernels move on, and nothing else does."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def takes(count, fn):
        def timed(x, w):
            now[0] += count
            return fn(x, w)

        return timed

    return takes


class LastRowLost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dw = x.mT @ g
        dw[-1] = 0
        return g @ w.mT, dw


FAULTS = {"gradient": LastRowLost.apply, "factor": lambda x, w: x @ w * 1.01, "tail": lambda x, w: x[:, :-1] @ w[:-1]}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("budget", [30, 90, 150])
def test_a_failing_case_keeps_the_budget(seconds, fault, budget):
    """A run of the golden takes a second: nudges at kinks alone are 32 of them, the other steps hundreds."""
    product = assay.Target(seconds(0.5, FAULTS[fault]), seconds(1.0, lambda x, w: x @ w), cases=INPUTS, name="product")
    found = assay.diagnose(product, budget_s=budget)
    assert found.verdict == "fail" and found.seconds <= 1.2 * budget
    assert found.partial and "Left out: statistics" in str(found)
    if fault != "gradient":  # a slice of zeros is named before its golden is changed
        assert "Left out, or ended early, for want of time: " in str(found)


def test_few_looks_at_kinks_tell_that_there_are_none(seconds):
    product = assay.Target(FAULTS["gradient"], seconds(1.0, lambda x, w: x @ w), cases=INPUTS, name="product")
    report = assay.check(product, probes="values", budget_s=25, raises=False)
    assert [f.tensor for f in report.findings] == ["w.grad"] and report.seconds <= 30
    assert any("most looks at ties and kinks" in n.text for n in report.notes if n.id == "budget")


def test_few_looks_at_kinks_accuse_no_other_choice(seconds):
    """The golden's maximum ties everywhere, and the kernel gives each of the equal elements its share."""
    tied = {"x": torch.full((13, 40), 2.0), "w": torch.ones(13, 1)}
    golden = seconds(1.0, lambda x, w: x.max(-1).values * w.squeeze(-1))
    shared = assay.Target(lambda x, w: x.amax(-1) * w.squeeze(-1), golden, cases=tied, name="shared")
    report = assay.check(shared, probes="values", budget_s=25, raises=False)
    assert report.verdict == "pass" and any("most looks" in n.text for n in report.notes)


def test_the_clock_leaves_out_what_takes_longer_than_is_left():
    assert not deadline.lacks(1e9, "without an end") and not deadline.cut()
    with deadline.until(time.perf_counter() + 5) as left_out:
        assert not deadline.lacks(1.0, "short") and not deadline.cut()
        assert deadline.lacks(10.0, "long") and deadline.lacks(10.0, "long") and deadline.cut()
    assert left_out == ["long"] and not deadline.cut()


@pytest.mark.parametrize("budget", [20, 40, 60, 80, 100, 200, 300, 400, 500])
def test_what_is_partial_says_what_was_left_out_and_nothing_else_does(seconds, budget):
    product = assay.Target(seconds(0.5, FAULTS["gradient"]), seconds(1.0, lambda x, w: x @ w), cases=INPUTS, name="p")
    found = assay.diagnose(product, budget_s=budget)
    assert bool(found.partial) == ("Left out" in str(found)), str(found)
    assert found.partial or budget > 100
    assert found.partial in (
        "",
        f"the budget of {budget} s was {'spent' if found.seconds > budget else 'too short for all of it'}",
    )


def test_an_interrupt_says_what_comes_after_it(monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    of = target(lambda x, w: x @ w * 1.01, 0.0)
    for step, said in (
        ("collect", "further evidence, and a smaller case"),
        ("smallest", "a smaller case"),
        ("_wider", "the same case with float32 inputs, and what other cases show"),
        ("_beside", "what other cases show"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(diagnosis, step, interrupted)
            found = assay.diagnose(of, probes="quick")
        assert found.partial == "interrupted" and found.traced[-1] == f"Left out: {said}."


def test_a_pass_is_not_finished_where_costly_probes_did_not_run_on_every_case(seconds):
    """The cheap ones judged all of them."""

    @assay.case(N=[4, 5, 6, 7, 8, 9])
    def squares(make, N):
        return {"x": make.normal(N, N), "w": make.normal(N, N)}

    right = assay.Target(lambda x, w: x @ w, seconds(0.05, lambda x, w: x @ w), cases=squares, backward=None)
    found = assay.diagnose(right, budget_s=44)
    assert found.verdict == "pass" and found.partial and "NOT FINISHED" in str(found)
    assert any("taint on squares[N=" in line for line in found.traced), str(found)
