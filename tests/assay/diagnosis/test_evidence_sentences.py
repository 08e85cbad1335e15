"""Sentences of a diagnosis are true of the kernel: for integers and masks, a short budget, caches, small values, and
cases that contain NaN or Inf themselves.
"""

import time
from dataclasses import replace

import pytest
import torch

from assay.diagnosis.targets import session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.causes.rules import matches
from goldsmith.assay.diagnosis.experiments.stale_inputs import reordered, stale_inputs, unmoved_shares
from goldsmith.assay.diagnosis.facts.evidence import NOT_TRIED, OBSERVED, Evidence, RunFact, StageState
from goldsmith.assay.diagnosis.facts.ratios import ratios
from goldsmith.assay.diagnosis.report.open_questions import open_questions
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


# caches


def cached(key):
    store = {}

    def kernel(x, w):
        k = (w.shape, key(w))
        if k not in store:
            store[k] = w.detach().exp()
        return x * store[k]

    return kernel


KEYS = {
    "sum": lambda w: round(float(w.detach().sum()), 1),
    "first": lambda w: float(w.detach().flatten()[0]),
    "address": lambda w: w.data_ptr(),
    "id and version": lambda w: (id(w), w._version),
}
WEIGHTS = {"x": normal(4, 16), "w": normal(16, seed=1)}


@pytest.mark.parametrize("key", KEYS)
def test_a_cached_copy_of_weights_is_found(key):
    sentences = stale_inputs(examination(target(cached(KEYS[key]), lambda x, w: x * w.exp(), WEIGHTS, grads=("x",))))
    assert set(sentences) == {"w"} and "bit for bit" in sentences["w"]


def test_a_kernel_without_a_cache_has_no_stale_inputs():
    honest = [lambda x, w: x * w.exp(), cached(lambda w: tuple(w.detach().tolist()))]
    assert [stale_inputs(examination(target(k, lambda x, w: x * w.exp(), WEIGHTS, grads=("x",)))) for k in honest] == [
        {},
        {},
    ]


def test_runs_that_test_for_copies_have_guard_bands():
    """In every run, guard bands follow the inputs and the kernel's tensors, so an overrun hits no other memory."""
    behind = []

    def kernel(x, w):
        y = torch.empty_like(x)
        behind.append([t.untyped_storage().nbytes() - t.nbytes for t in (x, w, y)])
        return y.copy_(x * w.exp())

    of = examination(target(kernel, lambda x, w: x * w.exp(), WEIGHTS, backward=None))
    behind.clear()
    assert stale_inputs(of) == {} and len(behind) >= 8 and min(map(min, behind)) >= 1024


def test_the_same_numbers_in_another_order_keep_sum_and_ends():
    w = WEIGHTS["w"]
    other = reordered(w)
    assert not torch.equal(other, w) and torch.equal(other.sort()[0], w.sort()[0])
    assert other[0] == w[0] and other[-1] == w[-1]


@pytest.mark.parametrize("key", ["sum", "first"])
def test_a_cached_copy_is_the_first_cause(key):
    diagnosis = assay.diagnose(target(cached(KEYS[key]), lambda x, w: x * w.exp(), WEIGHTS, grads=("x",)))
    assert diagnosis.causes[0].id == "stale_copy" and "other numbers in w" in diagnosis.causes[0].evidence[0]
    assert "absolute_eps" not in {c.id for c in diagnosis.causes}


# small values


def flushed(x, w):
    y = x * w
    return torch.where(y.abs() < 1e-5, 0, y)


def fixed(x, w):
    return torch.where(x.abs() < 2**-8, (x * 2**12).round() * 2**-12, x) * w


def large_only():
    """Sixteen numbers, none of which is small."""
    x = normal(4, 16)
    return {"x": x.sign() * (1 + x.abs()), "w": 1 + normal(16, seed=1).abs()}


@pytest.mark.parametrize("kernel", [flushed, fixed])
def test_flushed_or_quantised_values_are_not_blamed_on_an_epsilon(kernel):
    diagnosis = assay.diagnose(target(kernel, lambda x, w: x * w, large_only()))
    assert diagnosis.verdict == FAIL and "absolute_eps" not in {c.id for c in diagnosis.causes}
    assert "bit for bit" in " ".join(diagnosis.undecided)


def test_a_value_with_an_epsilon_still_moves():
    def unit(x, eps):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    of = target(lambda x: unit(x, 1e-6), lambda x: unit(x, 0.0), {"x": 1 + normal(4, 16).abs()})
    assert unmoved_shares(examination(of)) == {}


# the maximum


def lowered(original):
    kind = {"kind": "bound", "run": "values:offset", "values": {"zeros": True, "golden": -130.0}}
    report = Report("told", FAIL, findings=[Finding(CERTAIN, "values", "y", None, None, None, "y is wrong", **kind)])
    return Evidence(report, tensor="y", runs={"offset": RunFact("offset", wrong=("y",))}, made_of=frozenset(original))


def test_a_padded_zero_is_blamed_only_if_the_golden_has_a_maximum():
    evidence = lowered(["amax"])
    assert "maximum" in matches(evidence)["wrong_mask"].sentences[0]
    assert "wrong_mask" not in matches(lowered(["mul"]))
    gradient = replace(
        evidence, report=Report("told", FAIL, findings=[replace(evidence.report.findings[0], tensor="x.grad")])
    )
    assert "wrong_mask" not in matches(gradient)
