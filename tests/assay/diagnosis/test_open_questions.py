"""Open questions of the evidence are listed, and none if nothing is open."""

import pytest

from assay.diagnosis.faulty import report
from assay.diagnosis.targets import layer
from goldsmith import assay
from goldsmith.assay.diagnosis.facts.evidence import CULPRIT, OBSERVED, Evidence, StageState, WhatIf
from goldsmith.assay.diagnosis.report.sentences import open_questions

pytestmark = pytest.mark.sweep(8)


def evidence(state=CULPRIT, **more):
    stages = [StageState("h", "stage", state=state, text="the candidate ignores a substituted low")]
    return Evidence(report("y is wrong"), stages=stages, first_wrong="h", tensor="h", **more)


def change(cause, exact=True):
    return WhatIf(cause, f"a change of {cause}", "h", 1.0, exact)


def test_there_are_no_open_questions():
    result = evidence(whatif=[change("sign_flip"), change("sign_flip"), change("permuted", False)])
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


def test_a_step_that_was_left_out_is_named():
    (text,) = open_questions(evidence(left_out={"influence": "ValueError: no"}), [])
    assert text == "Left out: influence (ValueError: no)."


def test_a_diagnosis_prints_its_open_questions():
    diagnosis = assay.diagnose(layer("z", names=("h",)), probes="quick")
    assert "z" in diagnosis.suspects and any("The kernel names no stage" in s for s in diagnosis.undecided)
    assert "The kernel names no stage" in " ".join(str(diagnosis).split())
    assert assay.diagnose(layer("z"), probes="quick").undecided == []
