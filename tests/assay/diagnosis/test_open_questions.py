"""Open questions of the evidence are listed, and none if nothing is open."""

import pytest
import torch

from assay.diagnosis.faulty import report
from assay.diagnosis.targets import layer, session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.facts.evidence import CULPRIT, OBSERVED, Evidence, Fit, StageState, WhatIf
from goldsmith.assay.diagnosis.fitting.fits import fit, wrong_block
from goldsmith.assay.diagnosis.report.open_questions import open_questions

pytestmark = pytest.mark.sweep(5)


def evidence(state=CULPRIT, **more):
    stages = [StageState("h", "stage", state=state, text="the candidate ignores a substituted low")]
    return Evidence(report("y is wrong"), stages=stages, first_wrong="h", tensor="h", **more)


def change(cause, exact=True):
    return WhatIf(cause, f"a change of {cause}", "h", 1.0, exact)


def term(condition):
    return Fit("h", "x", "1", "missing", -1.0, 1e-7, condition=condition)


def test_there_are_no_open_questions():
    result = evidence(whatif=[change("sign_flip"), change("sign_flip"), change("permuted", False)], fits=[term(10.0)])
    assert open_questions(result, []) == []


def test_a_stage_that_could_not_be_isolated():
    (text,) = open_questions(evidence(OBSERVED), [])
    assert text.startswith("h could not be isolated (the candidate ignores a substituted low)")


def test_stages_that_the_kernel_does_not_name():
    (text,) = open_questions(evidence(), ["low", "mid"])
    assert "low, mid could be wrong, too" in text and "assay.stage" in text


def test_changes_that_make_the_same_numbers():
    (text,) = open_questions(evidence(whatif=[change("off_by_one"), change("truncated_reduction")]), [])
    assert "equally well in this case: off_by_one, truncated_reduction" in text


def test_terms_that_are_nearly_dependent():
    (text,) = open_questions(evidence(fits=[term(10.0), term(3e7)]), [])
    assert "condition 3e+07" in text and "cannot be told apart" in text


def test_a_step_that_was_left_out_is_named():
    (text,) = open_questions(evidence(left_out={"influence": "ValueError: no"}), [])
    assert text == "Left out: influence (ValueError: no)."


def test_a_diagnosis_prints_its_open_questions():
    diagnosis = assay.diagnose(layer("z", names=("h",)), probes="quick")
    assert "z" in diagnosis.suspects and any("The kernel names no stage" in s for s in diagnosis.undecided)
    assert "The kernel names no stage" in " ".join(str(diagnosis).split())
    assert assay.diagnose(layer("z"), probes="quick").undecided == []


# fits in the wrong part


def partly(rows):
    """The layer's z with the bias subtracted in some rows."""

    def kernel(x, w, b):
        h = assay.stage("h", x @ w)
        z = h + b
        z[rows] = (h - b)[rows]
        return torch.softmax(assay.stage("z", z), -1) * 2

    plain = layer()
    return assay.Target(kernel, plain.golden, cases=plain.cases, backward=None)


def test_a_term_is_found_in_the_wrong_rows():
    examination = session_of(partly(slice(2, 5)))
    (result,) = fit(examination, "z", "stage", examination.first.stages["z"]).fits
    assert (result.term, result.reading, result.exact) == ("b", "sign_flipped", -2.0)
    assert result.where == "axis 0 [2..4]"


def test_a_factor_is_found_in_the_wrong_columns():
    plain = layer()

    def kernel(x, w, b):
        y = plain.candidate(x, w, b).clone()
        y[1:5, 3:9] *= 1.25
        return y

    examination = session_of(assay.Target(kernel, plain.golden, cases=plain.cases, backward=None))
    (result,) = fit(examination, "y", "output", examination.first.outputs["y"]).ratios
    assert (result.scope, result.group) == ("segment", "axis 0 [1..4], axis 1 [3..8]")
    assert abs(result.ratio - 1.25) < 1e-6


def test_wrong_elements_that_fill_one_block_are_located():
    golden, bound = torch.ones(6, 8).double(), torch.full((6, 8), 1e-6).double()
    got = golden.clone()
    assert wrong_block(got, golden, bound) is None  # nothing is wrong
    got[2:4, 5:] = 2
    assert wrong_block(got, golden, bound) == {0: (2, 4), 1: (5, 8)}
    got[0, 0] = 2
    assert wrong_block(got, golden, bound) is None  # scattered
    assert wrong_block(golden + 1, golden, bound) is None  # all of it
    got[:, :] = golden
    got[3, 3] = 2
    assert wrong_block(got, golden, bound) is None  # one element
