"""Sentences of a diagnosis are true of the kernel: for integers and masks, a short budget, and cases that
contain NaN or Inf themselves.
"""

import time
from dataclasses import replace

import pytest
import torch

from assay.diagnosis.targets import session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.causes.rules import matches
from goldsmith.assay.diagnosis.facts.evidence import NOT_TRIED, OBSERVED, Evidence, RunFact, StageState
from goldsmith.assay.diagnosis.facts.ratios import ratios
from goldsmith.assay.diagnosis.report.sentences import open_questions
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.results import CERTAIN, FAIL, Finding

pytestmark = pytest.mark.sweep(8)


def target(candidate, golden, inputs, **more):
    return assay.Target(candidate, golden, cases=inputs, name="told", **more)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def examination(of):
    return session_of(of)


# time


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the golden advances."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def hurried(clock):
    def golden(a):
        clock[0] += 0.3
        return a * 1.0

    return assay.diagnose(target(lambda a: a * 1.1, golden, {"a": normal(64)}), budget_s=5)


def test_a_factor_is_reported_without_time_for_more(hurried):
    assert hurried.causes[0].id == "wrong_factor"
    assert "1.1 in every element" in hurried.causes[0].evidence[0]


def test_a_stage_without_time_for_isolation_is_not_tried(hurried):
    assert {s.state for s in hurried.stages} == {NOT_TRIED} and "isolation" in str(hurried)
    assert "assay.stage" not in str(hurried)


@pytest.mark.parametrize("message", ["ignores", "raised"])
def test_advice_on_stages_is_only_for_kernels_that_ignore_them(message):
    text = {"ignores": "wrong, and the candidate ignores a substituted h", "raised": "the isolated run raised"}[message]
    ignored = ("h",) if message == "ignores" else ()
    stages = [StageState("y", "output", state=OBSERVED, text=text, ignored=ignored)]
    evidence = Evidence(Report("told", FAIL), stages, "y", "y")
    assert ("assay.stage" in " ".join(open_questions(evidence, []))) is (message == "ignores")


# whole numbers and masks


def test_whole_numbers_have_a_ratio_and_no_sums():
    diagnosis = assay.diagnose(target(lambda i: i * 3, lambda i: i * 2, {"i": torch.arange(10)}, backward=None))
    assert diagnosis.causes[0].id == "wrong_factor" and "y / g is 1.5" in diagnosis.causes[0].evidence[0]
    assert not {"truncated_reduction", "lost_update"} & {c.id for c in diagnosis.causes}


def test_a_mask_has_no_counts_and_is_skipped():
    wrong = target(lambda a: a >= 0.5, lambda a: a > 0, {"a": normal(20)}, backward=None)
    diagnosis = assay.diagnose(wrong)
    assert diagnosis.verdict == FAIL and "influence" not in diagnosis.evidence.left_out
    assert not {"truncated_reduction", "lost_update"} & set(matches(diagnosis.evidence))
    assert not {"truncated_reduction", "lost_update"} & {c.id for c in diagnosis.causes}


def test_a_rounded_result_whose_bound_is_zero_has_its_ratio():
    of = target(lambda a: a * 1.1, lambda a: a * 1.0, {"a": normal(64)}, backward=None)
    (ratio,) = assay.diagnose(of, probes="quick").evidence.ratios
    assert ratio.scope == "tensor" and ratio.ratio == pytest.approx(1.1)


# non-finite values in the case itself


def test_ratios_skip_elements_that_are_not_finite_in_both():
    golden = torch.tensor([1.0, torch.nan, torch.inf, -2.0, 3.0], dtype=torch.float64)
    assert ratios("y", 1.25 * golden, golden)[0].ratio == 1.25
    other = (1.25 * golden).nan_to_num(0.0, 7.0, 7.0)
    assert not [r for r in ratios("y", other, golden) if r.scope == "tensor"]


def test_a_factor_is_reported_with_one_finite_number():
    x = normal(3, 8)
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    inputs = {"x": x, "w": normal(8, seed=1)}
    diagnosis = assay.diagnose(target(lambda x, w: (x * w).sum(-1) * 1.25, lambda x, w: (x * w).sum(-1), inputs))
    assert diagnosis.causes[0].id == "wrong_factor" and "1.25" in diagnosis.causes[0].evidence[0]


# the maximum


def lowered(original):
    kind = {"kind": "bound", "run": "values:offset", "values": {"zeros": True, "golden": -130.0}}
    report = Report("told", FAIL, findings=[Finding(CERTAIN, "values", "y", None, None, None, "y is wrong", **kind)])
    return Evidence(report, tensor="y", runs={"offset": RunFact("offset", wrong=("y",))}, operators=frozenset(original))


def test_a_padded_zero_is_blamed_only_if_the_golden_has_a_maximum():
    evidence = lowered(["amax"])
    assert "maximum" in matches(evidence)["wrong_mask"].sentences[0]
    assert "wrong_mask" not in matches(lowered(["mul"]))
    gradient = replace(
        evidence, report=Report("told", FAIL, findings=[replace(evidence.report.findings[0], tensor="x.grad")])
    )
    assert "wrong_mask" not in matches(gradient)
