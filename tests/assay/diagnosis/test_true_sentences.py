"""What a diagnosis says is true of the kernel: whole numbers and masks, what is short of time, what is kept, what is
small, and what is not a number in the case itself."""

import time
from dataclasses import replace

import pytest
import torch

from assay.diagnosis.targets import session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.evidence import NOT_TRIED, OBSERVED, Evidence, RunFact, StageState
from goldsmith.assay.diagnosis.fits import fit
from goldsmith.assay.diagnosis.open_questions import open_questions
from goldsmith.assay.diagnosis.ratios import ratios
from goldsmith.assay.diagnosis.rules import matches
from goldsmith.assay.diagnosis.stale_inputs import reordered, stale_inputs, unmoved_shares
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.results import CERTAIN, FAIL, Finding


def target(candidate, golden, inputs, **more):
    return assay.Target(candidate, golden, cases=inputs, name="told", **more)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def examination(of):
    return session_of(of)


# time


@pytest.fixture
def clock(monkeypatch):
    """A clock that the golden moves on, and nothing else does."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def hurried(clock):
    def golden(a):
        clock[0] += 0.3
        return a * 1.0

    return assay.diagnose(target(lambda a: a * 1.1, golden, {"a": normal(64)}), budget_s=5)


def test_a_factor_is_told_though_there_is_no_time(hurried):
    assert hurried.causes[0].id == "wrong_factor"
    assert "1.1 in every element" in hurried.causes[0].evidence[0]


def test_what_there_was_no_time_for_is_not_tried(hurried):
    assert {s.state for s in hurried.stages} == {NOT_TRIED} and "isolation" in str(hurried)
    assert "assay.stage" not in str(hurried)


@pytest.mark.parametrize("said", ["ignores", "raised"])
def test_the_advice_on_stages_is_for_who_ignores_them(said):
    text = {"ignores": "wrong, and the candidate ignores a substituted h", "raised": "the isolated run raised"}[said]
    evidence = Evidence(Report("told", FAIL), [StageState("y", "output", state=OBSERVED, text=text)], "y", "y")
    assert ("assay.stage" in " ".join(open_questions(evidence, []))) is (said == "ignores")


# whole numbers and masks


def test_whole_numbers_have_a_ratio_and_no_sums():
    found = assay.diagnose(target(lambda i: i * 3, lambda i: i * 2, {"i": torch.arange(10)}, backward=None))
    assert found.causes[0].id == "wrong_factor" and "y / g is 1.5" in found.causes[0].evidence[0]
    assert not {"truncated_reduction", "lost_update"} & {c.id for c in found.causes}


def test_a_mask_counts_nothing_and_is_looked_through():
    wrong = target(lambda a: a >= 0.5, lambda a: a > 0, {"a": normal(20)}, backward=None)
    found = assay.diagnose(wrong)
    assert found.verdict == FAIL and "influence" not in found.evidence.left_out
    assert not {"truncated_reduction", "lost_update"} & set(matches(found.evidence))
    assert not {"truncated_reduction", "lost_update"} & {c.id for c in found.causes}


def test_a_rounded_result_whose_bound_is_zero_has_its_ratio():
    of = target(lambda a: a * 1.1, lambda a: a * 1.0, {"a": normal(64)}, backward=None)
    s = examination(of)
    found = fit(s, "y", "output", s.first.outputs["y"], terms=False)
    assert found.ratios[0].scope == "tensor" and found.ratios[0].ratio == pytest.approx(1.1)


# what is not a number in the case


def test_ratios_look_past_what_is_not_finite_in_both():
    golden = torch.tensor([1.0, torch.nan, torch.inf, -2.0, 3.0], dtype=torch.float64)
    assert ratios("y", 1.25 * golden, golden)[0].ratio == 1.25
    other = (1.25 * golden).nan_to_num(0.0, 7.0, 7.0)
    assert not [r for r in ratios("y", other, golden) if r.scope == "tensor"]


def test_a_factor_is_told_where_one_number_is_finite():
    x = normal(3, 8)
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    inputs = {"x": x, "w": normal(8, seed=1)}
    found = assay.diagnose(target(lambda x, w: (x * w).sum(-1) * 1.25, lambda x, w: (x * w).sum(-1), inputs))
    assert found.causes[0].id == "wrong_factor" and "1.25" in found.causes[0].evidence[0]


# what is kept


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
def test_a_copy_of_weights_that_is_kept_is_found(key):
    found = stale_inputs(examination(target(cached(KEYS[key]), lambda x, w: x * w.exp(), WEIGHTS, grads=("x",))))
    assert set(found) == {"w"} and "bit for bit" in found["w"]


def test_a_kernel_that_keeps_nothing_is_not_said_to():
    honest = [lambda x, w: x * w.exp(), cached(lambda w: tuple(w.detach().tolist()))]
    assert [stale_inputs(examination(target(k, lambda x, w: x * w.exp(), WEIGHTS, grads=("x",)))) for k in honest] == [
        {},
        {},
    ]


def test_runs_that_ask_for_copies_have_guard_bands_too():
    """In every run something lies behind the inputs and what the kernel makes: an overrun hits no memory of others."""
    behind = []

    def kernel(x, w):
        made = torch.empty_like(x)
        behind.append([t.untyped_storage().nbytes() - t.nbytes for t in (x, w, made)])
        return made.copy_(x * w.exp())

    of = examination(target(kernel, lambda x, w: x * w.exp(), WEIGHTS, backward=None))
    behind.clear()
    assert stale_inputs(of) == {} and len(behind) >= 8 and min(map(min, behind)) >= 1024


def test_the_same_numbers_in_another_order_keep_sum_and_ends():
    w = WEIGHTS["w"]
    other = reordered(w)
    assert not torch.equal(other, w) and torch.equal(other.sort()[0], w.sort()[0])
    assert other[0] == w[0] and other[-1] == w[-1]


@pytest.mark.parametrize("key", ["sum", "first"])
def test_a_kept_copy_is_told_as_one(key):
    found = assay.diagnose(target(cached(KEYS[key]), lambda x, w: x * w.exp(), WEIGHTS, grads=("x",)))
    assert found.causes[0].id == "stale_copy" and "other numbers of w" in found.causes[0].evidence[0]
    assert "absolute_eps" not in {c.id for c in found.causes}


# what is small


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
def test_what_is_flushed_or_in_fixed_steps_has_no_epsilon(kernel):
    found = assay.diagnose(target(kernel, lambda x, w: x * w, large_only()))
    assert found.verdict == FAIL and "absolute_eps" not in {c.id for c in found.causes}
    assert "bit for bit" in " ".join(found.undecided)


def test_an_epsilon_still_moves():
    def unit(x, eps):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    of = target(lambda x: unit(x, 1e-6), lambda x: unit(x, 0.0), {"x": 1 + normal(4, 16).abs()})
    assert unmoved_shares(examination(of)) == {}


# the maximum


def lowered(made):
    text = "y is wrong: every element; all zeros; worst at [0]: got 0, golden -130, bound 1 (values:offset)"
    report = Report("told", FAIL, findings=[Finding(CERTAIN, "values", "y", None, None, None, text)])
    return Evidence(report, tensor="y", runs={"offset": RunFact("offset", wrong=("y",))}, made_of=frozenset(made))


def test_a_padded_zero_enters_a_maximum_only_where_there_is_one():
    evidence = lowered(["amax"])
    assert "maximum" in matches(evidence)["wrong_mask"].sentences[0]
    assert "wrong_mask" not in matches(lowered(["mul"]))
    gradient = replace(
        evidence, report=Report("told", FAIL, findings=[replace(evidence.report.findings[0], tensor="x.grad")])
    )
    assert "wrong_mask" not in matches(gradient)
