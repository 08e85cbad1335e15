"""Influence names the rows that a leak reaches, and no edit of the golden explains what it cannot."""

import pytest
import torch

from assay.diagnosis.targets import session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.experiments.influence import influence

pytestmark = pytest.mark.sweep(8)


@assay.case(B=[4], T=[6], C=[3])
def sequences(make, B, T, C):
    return {"x": make.normal(B, T, C), "fade": make.uniform(C)}


def faded(x, fade):
    """s[t] = fade s[t - 1] + x[t], from zero in each sequence; y = tanh(s) + s of the last step"""
    rows = []
    for sequence in x:
        state = torch.zeros_like(fade)
        for step in sequence:
            state = fade * state + torch.tanh(step)
        rows.append(state.square() + state)
    return torch.stack(rows)


def set_up_once(x, fade):
    rows, state = [], torch.zeros_like(fade)
    for sequence in x:
        for step in sequence:
            state = fade * state + torch.tanh(step)
        rows.append(state.square() + state)
    return torch.stack(rows)


def first(target):
    diagnosis = assay.diagnose(target)
    return diagnosis.causes[0].id, diagnosis


def test_state_passed_to_the_next_row_is_stale():
    target = assay.Target(set_up_once, faded, cases=sequences, backward=None)
    examination = session_of(target)
    assert {i.onto for i in influence(examination, {"y"}).values()} == {"later"}
    name, cause = first(target)
    assert name == "stale_state", str(cause)


@pytest.mark.parametrize("step, onto", [(1, "next"), (-1, "last")])
def test_a_leak_names_the_rows_that_it_reaches(step, onto):
    def kernel(x, fade):
        y = faded(x, fade)
        beside = 0.1 * y.roll(step, 0)
        beside[0 if step > 0 else -1] = 0
        return y + beside

    ranges = influence(session_of(assay.Target(kernel, faded, cases=sequences, backward=None)), {"y"})
    assert {i.onto for i in ranges.values() if i.input == "x" and i.axis == 0} == {onto}


def test_a_change_that_fits_only_one_draw_explains_nothing():
    """Over twenty numbers, each as if a mask were shifted: but only in this draw."""

    @assay.case(T=[16], C=[14])
    def rows(make, T, C):
        return {"x": make.normal(T, C)}

    def golden(x):
        return torch.where(torch.ones(len(x), x.shape[1]).tril().bool(), x, 0.0)

    def shifted(x):
        return torch.where(torch.ones(len(x), x.shape[1]).tril(1).bool(), x, 0.0)

    mine = rows[0].build(torch.float32, "cpu", 0)
    one = mine["x"] if isinstance(mine, dict) else mine.inputs["x"]

    def kernel(x):
        return shifted(x) if torch.equal(x, one) else golden(x) * 1.5

    always, once = (
        assay.diagnose(assay.Target(k, golden, cases=rows, backward=None), seed=0) for k in (shifted, kernel)
    )
    assert always.causes[0].id == "mask_shift" and any(w.exact for w in always.evidence.whatif), str(always)
    assert not [w for w in once.evidence.whatif if w.exact and w.whole], str(once)


def test_no_changed_golden_explains_unwritten_memory():
    @assay.case(B=[3], N=[5])
    def matrices(make, B, N):
        return {"a": make.normal(B, N, N)}

    def golden(a):
        return a.tril() * 2

    def kernel(a):
        y = torch.empty_like(a)
        for i in range(a.shape[1]):
            y[:, i, : i + 1] = 2 * a[:, i, : i + 1]
        return y

    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=matrices, backward=None))
    assert diagnosis.causes[0].id == "never_written", str(diagnosis)
    assert not diagnosis.evidence.whatif and not diagnosis.evidence.grouped


def test_a_skipped_group_is_no_logarithm_of_zero():
    @assay.case(R=[4], N=[9])
    def rays(make, R, N):
        return {"x": make.normal(N, 3), "start": make.offsets(R, N)}

    def golden(x, start):
        return torch.stack([x[start[r] : start[r + 1]].sum(0) for r in range(len(start) - 1)])

    def kernel(x, start):
        y = torch.empty(len(start) - 1, x.shape[1])
        for r in range(len(y)):
            if start[r] < start[r + 1]:
                y[r] = x[start[r] : start[r + 1]].sum(0)
        return y

    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=rays, backward=None))
    assert {c.id for c in diagnosis.causes[:2]} & {"never_written", "empty_group"} and diagnosis.evidence.grouped, str(
        diagnosis
    )
    assert not diagnosis.evidence.whatif, str(diagnosis)
