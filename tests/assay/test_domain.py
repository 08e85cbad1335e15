"""`where` of a case: no probe, no smaller case and no other draw leaves what the kernel must take."""

import pytest
import torch

from goldsmith import assay
from goldsmith.core.tracing import TargetError


def only_multiples_of_4(x, p):
    assert len(x) % 4 == 0 and bool((p >= 0).all())
    return x * p.abs() * 2


def golden(x, p):
    return x * p


def doubled(x, p):
    return x * p.abs()


def cases(where=None):
    @assay.case(N=[12, 16, 18], where=where)
    def rows(make, N):
        return {"x": make.normal(N, 3), "p": make.uniform(N, 3)}

    return rows


def multiple_of_4(N, p):
    return N % 4 == 0 and bool((p >= 0).all())


def test_sizes_that_where_excludes_are_no_cases():
    assert [c.sizes["N"] for c in cases(lambda N: N % 4 == 0)] == [12, 16]
    with pytest.raises(TargetError, match="excludes every combination"):
        cases(lambda N: N > 99)


def test_a_draw_outside_of_where_and_a_where_that_raises_are_mistakes():
    with pytest.raises(TargetError, match="draws inputs that `where` excludes"):
        cases(lambda p: bool((p < 0).all()))[0].build()
    with pytest.raises(TargetError, match=r"where: raised RuntimeError.*bool\(t.all\(\)\)"):
        cases(lambda p: p >= 0)[0].build()


def test_no_probe_leaves_the_domain():
    assert assay.check(assay.Target(doubled, golden, cases=cases()[0]), raises=False).verdict == "fail"
    within = assay.check(assay.Target(doubled, golden, cases=cases(lambda p: bool((p >= 0).all()))[0]))
    assert within.verdict == "pass" and within.notes[0].id == "not_needed" and "excludes" in within.notes[0].text


def test_the_smallest_case_and_all_evidence_stay_within_the_domain():
    target = assay.Target(only_multiples_of_4, golden, cases=cases(multiple_of_4)[:1])
    diagnosis = assay.diagnose(target)
    assert diagnosis.first_wrong_stage == "y" and diagnosis.case["sizes"] == {"N": 4}
    assert not any(f.kind == "raised" for f in diagnosis.report.findings)
    assert not [r for r in diagnosis.evidence.runs.values() if r.error]


def state(g):
    """The golden starts without a state, the kernel with zeros: exp(inf) * 0 is NaN in the kernel alone."""
    return torch.exp(g) * torch.zeros_like(g) + 1


def no_state(g):
    return torch.ones_like(g) + 0 * torch.zeros_like(g)


def reads(g):
    return 1 + torch.exp(g) * 1e-3


@pytest.mark.parametrize("declared", [(), ("g",)])
def test_nan_that_alone_spreads_is_a_note_unless_inputs_may_hold_it(declared):
    case = assay.case(N=[5])(lambda make, N: {"g": -make.uniform(N, 4)})
    target = assay.Target(state, no_state, cases=case, backward=None, holds_nan=declared)
    report = assay.check(target, raises=False)
    assert report.verdict == ("fail" if declared else "pass")
    assert declared or "nan_spread" in {n.id for n in report.notes}
    assert assay.check(assay.Target(reads, no_state, cases=case, backward=None), raises=False).verdict == "fail"
