"""A wrong candidate's verdict says what is likely wrong, if asked to: in JSON, on the terminal and on the page."""

import json

import pytest

from assay.gate.problems import RIGHT, candidate, problem
from goldsmith.assay import diagnose, gate
from goldsmith.assay.gate import candidate_diagnosis, verdict_page
from goldsmith.assay.gate.verdict import Verdict
from goldsmith.cli.gate import display
from goldsmith.cli.terminal import console

MINUTE = {"budget_s": 60.0}


def judged(one, **options):
    return next(iter(gate.judge_all([one], problem(), options=gate.GateOptions(seed=1, diagnose=True, **options))))


def test_a_wrong_softmax_is_explained(capsys):
    verdict = judged(candidate("return x.softmax(0) * w"))
    cause = "the golden gives it when softmax(x) runs along axis 0 instead of 1 (wrong_axis, score 0."
    assert verdict.status == "wrong"
    assert cause in verdict.diagnosis
    assert json.loads(json.dumps(verdict.to_json()))["diagnosis"] == verdict.diagnosis
    assert Verdict.from_json(verdict.to_json()).diagnosis == verdict.diagnosis
    assert "softmax(x) runs along axis 0 instead of 1" in verdict_page.page([verdict])
    display.show(console(), [verdict], every=False)
    assert "wrong_axis, score" in capsys.readouterr().out


def test_what_is_right_or_not_asked_for_has_no_diagnosis():
    assert judged(gate.Candidate("right", RIGHT), probes="values").diagnosis is None
    assert gate.judge(candidate("return x.softmax(0) * w"), problem(), probes="values").diagnosis is None


@pytest.mark.parametrize(
    "late, seconds, said",
    [
        ("os._exit(3)", 30.0, "its process ended with status 3"),  # on a busy machine a call may take two seconds
        ("while True: pass", 1.0, "2 calls had not ended after"),
    ],
)
def test_a_candidate_that_ends_the_diagnosis_is_not_explained(monkeypatch, late, seconds, said):
    monkeypatch.setattr(candidate_diagnosis, "BUDGET", seconds)
    monkeypatch.setattr(candidate_diagnosis, "diagnose", lambda *what, **options: diagnose(*what, **options | MINUTE))
    head = "import os\ncount = 0"
    body = f"""
global count
count += 1
if count > 3:
    {late}
return x.softmax(0) * w
"""
    one = candidate(body, head=head)
    verdict = judged(one, probes="values")
    assert verdict.status == "wrong"
    assert verdict.diagnosis.startswith(f"not explained: the diagnosis ended early, {said}")
