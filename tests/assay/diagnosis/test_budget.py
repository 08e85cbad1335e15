"""The budget of a diagnosis with a slow golden: steps without time are left out and named."""

import time

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.diagnosis import driver
from goldsmith.assay.support import deadline

pytestmark = pytest.mark.sweep(8)

INPUTS = {"x": torch.randn(40, 40, generator=torch.Generator().manual_seed(0)), "w": torch.ones(40, 40)}
HONEST = "honest runs of the golden in other orders, so only CERTAIN findings are possible"


def slow(seconds):
    def golden(x, w):
        time.sleep(seconds)
        return x @ w

    return golden


def target(kernel, seconds):
    return assay.Target(kernel, slow(seconds), cases=INPUTS, backward=None, name="product")


def test_costly_steps_are_left_out_and_named():
    """In all there are hundreds of runs of the golden, which would take some 20 seconds."""
    diagnosis = assay.diagnose(target(lambda x, w: x @ w, 0.05), budget_s=2)
    assert diagnosis.verdict == "pass" and "NOT FINISHED" in str(diagnosis)
    message = [n.text for n in diagnosis.report.notes if n.id == "budget"]
    assert any(HONEST in text for text in message) and any("taint" in text for text in message)
    assert "Left out: honest runs of the golden" in str(diagnosis)


def test_a_wrong_kernel_is_found_without_time_for_noise():
    diagnosis = assay.diagnose(target(lambda x, w: x @ w * 1.01, 0.05), budget_s=2)
    assert diagnosis.verdict == "fail" and diagnosis.report.findings[0].rung == "CERTAIN"


def test_nothing_is_left_out_with_enough_time():
    diagnosis = assay.diagnose(target(lambda x, w: x @ w, 0.0), budget_s=60)
    assert diagnosis.verdict == "pass" and not diagnosis.partial and not diagnosis.traced


@pytest.fixture
def seconds(monkeypatch):
    """A clock that only golden and kernels advance."""
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
    diagnosis = assay.diagnose(product, budget_s=budget)
    assert diagnosis.verdict == "fail" and diagnosis.seconds <= 1.2 * budget
    assert diagnosis.partial and "Left out: statistics" in str(diagnosis)
    if fault != "gradient":  # a slice of zeros is named before its golden is changed
        assert "Left out, or ended early, for lack of time: " in str(diagnosis)


def test_few_samples_at_kinks_show_that_there_are_none(seconds):
    product = assay.Target(FAULTS["gradient"], seconds(1.0, lambda x, w: x @ w), cases=INPUTS, name="product")
    report = assay.check(product, probes="values", budget_s=25, raises=False)
    assert [f.tensor for f in report.findings] == ["w.grad"] and report.seconds <= 30
    assert any("most tests of ties and kinks" in n.text for n in report.notes if n.id == "budget")


def test_few_samples_at_kinks_do_not_accuse_another_choice(seconds):
    """The golden's maximum ties everywhere, and the kernel gives each of the equal elements its share."""
    tied = {"x": torch.full((13, 40), 2.0), "w": torch.ones(13, 1)}
    golden = seconds(1.0, lambda x, w: x.max(-1).values * w.squeeze(-1))
    shared = assay.Target(lambda x, w: x.amax(-1) * w.squeeze(-1), golden, cases=tied, name="shared")
    report = assay.check(shared, probes="values", budget_s=25, raises=False)
    assert report.verdict == "pass" and any("most tests" in n.text for n in report.notes)


def test_the_clock_leaves_out_steps_longer_than_the_remaining_time():
    assert not deadline.lacks(1e9, "without an end") and not deadline.cut()
    with deadline.until(time.perf_counter() + 5) as left_out:
        assert not deadline.lacks(1.0, "short") and not deadline.cut()
        assert deadline.lacks(10.0, "long") and deadline.lacks(10.0, "long") and deadline.cut()
    assert left_out == ["long"] and not deadline.cut()


@pytest.mark.parametrize("budget", [20, 40, 60, 80, 100, 200, 300, 400, 500])
def test_only_a_partial_diagnosis_says_what_was_left_out(seconds, budget):
    product = assay.Target(seconds(0.5, FAULTS["gradient"]), seconds(1.0, lambda x, w: x @ w), cases=INPUTS, name="p")
    diagnosis = assay.diagnose(product, budget_s=budget)
    assert bool(diagnosis.partial) == ("Left out" in str(diagnosis)), str(diagnosis)
    assert diagnosis.partial or budget > 100
    assert diagnosis.partial in (
        "",
        f"the budget of {budget} s was {'spent' if diagnosis.seconds > budget else 'too short for all of it'}",
    )


def test_an_interrupt_names_the_steps_that_it_left_out(monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    of = target(lambda x, w: x @ w * 1.01, 0.0)
    for step, omitted in (
        ("collect", "further evidence, and a smaller case"),
        ("smallest_case", "a smaller case"),
        ("_in_float32", "the same case with float32 inputs, and what other cases show"),
        ("_use_other_case", "what other cases show"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(driver, step, interrupted)
            result = assay.diagnose(of, probes="quick")
        assert result.partial == "interrupted" and result.traced[-1] == f"Left out: {omitted}."


def test_a_pass_is_not_finished_unless_costly_probes_ran_on_every_case(seconds):
    """The cheap probes judged all of them."""

    @assay.case(N=[4, 5, 6, 7, 8, 9])
    def squares(make, N):
        return {"x": make.normal(N, N), "w": make.normal(N, N)}

    right = assay.Target(lambda x, w: x @ w, seconds(0.05, lambda x, w: x @ w), cases=squares, backward=None)
    diagnosis = assay.diagnose(right, budget_s=50)
    assert diagnosis.verdict == "pass" and diagnosis.partial and "NOT FINISHED" in str(diagnosis)
    assert any("taint on squares[N=" in line for line in diagnosis.traced), str(diagnosis)


def test_cases_that_did_not_run_are_put_down_to_a_failure_only_if_there_is_one(seconds):
    """The clock of this test leaves no time for all cases."""

    @assay.case(T=[4, 5, 6, 7])
    def rows(make, T):
        return {"x": make.normal(T, 8), "w": make.normal(8, 3)}

    for factor, because in ((1.0, False), (1.01, True)):
        candidate, golden = seconds(1.0, lambda x, w, f=factor: x @ w * f), seconds(1.0, lambda x, w: x @ w)
        diagnosis = assay.diagnose(assay.Target(candidate, golden, cases=rows, backward=None), budget_s=16)
        text = " ".join(str(diagnosis).split())
        assert "not run" in text and ("because one failing case is enough" in text) == because, text
