"""If no rule is sure in a case, the sure cause of another case comes first and is marked as such."""

import pytest
import torch

from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[5, 8], D=[6])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def golden(x, w):
    return torch.tanh(x) * w


def unlike(x, w):
    """In the first case, numbers that no change of the golden makes; in the second, a flipped sign."""
    return torch.frac(1e3 * x * x * w) if len(x) == 5 else -golden(x, w)


def test_a_sure_rule_of_another_case_comes_first():
    target = assay.Target(unlike, golden, cases=rows, backward=None)
    diagnosis = assay.diagnose(target, target.cases[0])
    assert diagnosis.causes[0].id == "sign_flip", str(diagnosis)
    assert diagnosis.causes[0].evidence[0].startswith("in rows[T=8,D=6]: "), diagnosis.causes[0].evidence
    assert any("in rows[T=8,D=6], which fails at the same stage, one is" in message for message in diagnosis.traced), (
        diagnosis.traced
    )
    assert all(a.score >= b.score for a, b in zip(diagnosis.causes, diagnosis.causes[1:], strict=False))
    assert "sign_flip" not in {c.id for c in diagnosis.causes[1:]}


def test_a_case_with_a_sure_rule_needs_no_other_case():
    target = assay.Target(
        lambda x, w: -golden(x, w) if len(x) == 5 else unlike(x, w) * 2, golden, cases=rows, backward=None
    )
    diagnosis = assay.diagnose(target, target.cases[0])
    assert diagnosis.causes[0].id == "sign_flip" and not any(
        "No rule is sure" in message for message in diagnosis.traced
    ), str(diagnosis)


def test_empty_and_right_cases_are_skipped():
    @assay.case(T=[5, 0, 7, 6, 8], D=[6])
    def some(make, T, D):
        return {"x": make.normal(T, D), "w": make.normal(D)}

    def kernel(x, w):
        return golden(x, w) if len(x) in (0, 6, 7) else unlike(x, w)

    target = assay.Target(kernel, golden, cases=some, backward=None)
    diagnosis = assay.diagnose(target, target.cases[0])
    assert diagnosis.causes[0].id == "sign_flip" and "in some[T=8,D=6]: " in diagnosis.causes[0].evidence[0], str(
        diagnosis
    )
