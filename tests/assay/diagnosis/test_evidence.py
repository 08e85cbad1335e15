"""Evidence: every part is plain data with a usable default."""

from goldsmith.assay.diagnosis.facts.evidence import CULPRIT, Evidence, RunFact, StageState
from goldsmith.assay.report.check_report import Report


def test_evidence_begins_empty_and_finds_its_stages() -> None:
    evidence = Evidence(Report("t"), stages=[StageState("h", "stage", 3.0, 3.0, CULPRIT)])
    assert evidence.first_wrong is None and evidence.golden is None
    stage = evidence.stage("h")
    assert stage is not None and stage.state == CULPRIT
    assert evidence.stage("other") is None


def test_a_run_is_right_when_nothing_is_wrong_and_nothing_raised() -> None:
    assert RunFact("repeat 1", same=False, difference=1e-7).right
    assert not RunFact("one thread", wrong=("y",)).right
    assert not RunFact("second_call", error="IndexError: pop from empty list").right
