"""The residual's terms: every kind of mistake is recovered with its exact coefficient, and clean data has no terms."""

import pytest
import torch

from goldsmith.assay.diagnosis.fitting.regression import CONDITION, regress

NUMBERS = {"a_res": 0.37, "n": 4.0, "T": 12.0}


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def three_addends(seed=0):
    """g = A r + B - 1.5 C, with a factor r per row, like a backward's sum of paths."""
    a, b, c = (draw(12, 40, seed=10 * seed + i) for i in range(3))
    r = draw(12, 1, seed=10 * seed + 5).abs() + 0.3
    golden = a * r + b - 1.5 * c
    return {"A": a, "B": b, "C": c}, {"r": r}, golden


def with_noise(y, golden, seed=7):
    bound = 2.0**-21 * golden.abs() + 1e-7
    noise = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    return y + noise * bound, bound


def fit(y, golden, terms, factors, **more):
    got, bound = with_noise(y, golden)
    return regress("y", got, golden, terms, factors=factors, bound=bound, numbers=NUMBERS, **more)


@pytest.mark.parametrize("seed", range(10))
def test_clean_data_has_no_terms(seed):
    terms, factors, golden = three_addends(seed)
    assert fit(golden, golden, terms, factors) == []


@pytest.mark.parametrize("seed", range(10))
def test_random_errors_are_explained_by_nothing(seed):
    terms, factors, golden = three_addends(seed)
    assert fit(golden + 0.1 * draw(12, 40, seed=seed + 900), golden, terms, factors) == []


@pytest.mark.parametrize(
    "change, term, reading, coefficient, named",
    [
        (lambda t, r: -t["B"], "B", "missing", -1.0, "-1"),
        (lambda t, r: t["B"], "B", "repeated", 1.0, "1"),
        (lambda t, r: -2 * t["B"], "B", "sign_flipped", -2.0, "-2"),
        (lambda t, r: 1.5 * t["C"], "C", "missing", 1.5, "-1"),
        (lambda t, r: 3 * t["C"], "C", "sign_flipped", 3.0, "-2"),
        (lambda t, r: (0.37 - 1) * t["B"], "B", "factor", 0.37 - 1, "a_res"),
        (lambda t, r: 15 * t["B"], "B", "repeated", 15.0, "n^2"),
        (lambda t, r: -1.5 * 15 * t["C"], "C", "repeated", -22.5, "n^2"),
    ],
)
def test_one_term_and_its_exact_coefficient(change, term, reading, coefficient, named):
    terms, factors, golden = three_addends()
    (result,) = fit(golden + change(terms, factors["r"]), golden, terms, factors)
    assert (result.term, result.factor, result.reading, result.named) == (term, "1", reading, named)
    assert result.exact == pytest.approx(coefficient, rel=1e-6)
    assert result.coefficient == pytest.approx(coefficient, rel=1e-5) and result.r2 > 0.99999
    assert result.also == () and result.condition < CONDITION


def test_a_missing_term_with_a_factor_per_row():
    terms, factors, golden = three_addends()
    (term,) = fit(golden - terms["A"] * factors["r"], golden, terms, factors)
    assert (term.term, term.factor, term.reading, term.exact) == ("A", "r", "missing", pytest.approx(-1))


@pytest.mark.parametrize("seed", range(10))
def test_many_columns_do_not_explain_a_few_elements(seed):
    golden = draw(24, seed=seed)
    terms = {f"t{i}": draw(24, seed=100 * seed + i + 1) for i in range(30)}
    wrong = golden.clone()
    wrong[8:] *= 0.37
    assert fit(wrong, golden, terms, {}) == []


@pytest.mark.parametrize("power, named", [(0, "1/r"), (2, "r")])
def test_a_row_factor_dropped_or_taken_twice(power, named):
    terms, factors, golden = three_addends()
    wrong = golden - terms["A"] * factors["r"] + terms["A"] * factors["r"] ** power
    (term,) = fit(wrong, golden, terms, factors)
    assert (term.term, term.factor, term.reading, term.named) == ("A", "r", "factor", named)


def test_a_row_factor_missing_from_a_term_that_already_contains_it():
    terms, factors, golden = three_addends()
    terms["A"] = terms["A"] * factors["r"]
    (term,) = fit(golden - terms["A"] + terms["A"] / factors["r"], golden, terms, factors)
    assert (term.term, term.reading, term.named) == ("A", "factor", "1/r")


def test_a_dropped_factor_next_to_an_unnamed_addend():
    terms, factors, golden = three_addends()
    golden = golden + draw(12, 40, seed=55)
    (term,) = fit(golden - terms["A"] * factors["r"] + terms["A"], golden, terms, factors)
    assert (term.term, term.factor, term.reading, term.named) == ("A", "r", "factor", "1/r")


def test_two_mistakes_are_two_terms():
    terms, factors, golden = three_addends()
    term = fit(golden - terms["B"] + 3 * terms["C"], golden, terms, factors)
    assert {(f.term, f.reading) for f in term} == {("B", "missing"), ("C", "sign_flipped")}


def test_both_of_two_equivalent_terms_are_listed():
    terms, factors, golden = three_addends()
    terms["B_again"] = terms["B"] * 2
    (term,) = fit(golden - terms["B"], golden, terms, factors)
    assert term.term == "B" and "B_again" in term.also


def test_terms_that_rounding_cannot_distinguish_are_both_listed():
    terms, factors, golden = three_addends()
    terms["nearly_B"] = terms["B"] * (1 + 1e-8 * draw(12, 40, seed=77))
    (term,) = fit(golden - terms["B"], golden, terms, factors)
    assert {term.term, *term.also} >= {"B", "nearly_B"}


def test_a_scale_of_everything_is_a_factor_of_the_tensor_itself():
    terms, factors, golden = three_addends()
    (term,) = fit(golden * (1 + 2.0**-12), golden, terms, factors)
    assert (term.term, term.reading, term.named) == ("y", "factor", "1+2^-12")


def test_shapes_that_do_not_fit_are_left_out():
    terms, factors, golden = three_addends()
    terms["odd"] = draw(7, 3, seed=1)
    (term,) = fit(golden - terms["B"], golden, terms, factors | {"odd": draw(5, seed=2)})
    assert term.term == "B"
    assert regress("y", draw(3, seed=0), golden, terms) == []


def test_a_large_tensor_is_sampled():
    b, c = draw(400, 200, seed=1), draw(400, 200, seed=2)
    (term,) = fit(b, b + c, {"b": b, "c": c}, {})
    assert (term.term, term.reading) == ("c", "missing")
