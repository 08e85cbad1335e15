"""Where no rule is sure in a case, what one is sure of in another case of the target comes first, and is said so."""

import torch

from goldsmith import assay


@assay.case(T=[5, 8], D=[6])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def golden(x, w):
    return torch.tanh(x) * w


def unlike(x, w):
    """Numbers that no change of the golden makes, in the first case; the second one's sign is flipped."""
    return torch.frac(1e3 * x * x * w) if len(x) == 5 else -golden(x, w)


def test_a_sure_rule_of_another_case_comes_first():
    target = assay.Target(unlike, golden, cases=rows, backward=None)
    found = assay.diagnose(target, target.cases[0])
    assert found.causes[0].id == "sign_flip", str(found)
    assert found.causes[0].evidence[0].startswith("in rows[T=8,D=6]: "), found.causes[0].evidence
    assert any("in rows[T=8,D=6], which fails at the same stage, one is" in said for said in found.traced), found.traced
    assert all(a.score >= b.score for a, b in zip(found.causes, found.causes[1:], strict=False))
    assert "sign_flip" not in {c.id for c in found.causes[1:]}


def test_a_case_that_is_sure_by_itself_asks_no_other():
    target = assay.Target(
        lambda x, w: -golden(x, w) if len(x) == 5 else unlike(x, w) * 2, golden, cases=rows, backward=None
    )
    found = assay.diagnose(target, target.cases[0])
    assert found.causes[0].id == "sign_flip" and not any("No rule is sure" in said for said in found.traced), str(found)


def test_cases_without_elements_and_right_ones_are_passed_over():
    @assay.case(T=[5, 0, 7, 6, 8], D=[6])
    def some(make, T, D):
        return {"x": make.normal(T, D), "w": make.normal(D)}

    def kernel(x, w):
        return golden(x, w) if len(x) in (0, 6, 7) else unlike(x, w)

    target = assay.Target(kernel, golden, cases=some, backward=None)
    found = assay.diagnose(target, target.cases[0])
    assert found.causes[0].id == "sign_flip" and "in some[T=8,D=6]: " in found.causes[0].evidence[0], str(found)
