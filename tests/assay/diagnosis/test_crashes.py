"""A candidate that ends its process during a diagnosis: the caller lives, and keeps the earlier findings."""

import ctypes

import torch

from goldsmith import assay

LIBC = ctypes.CDLL(None)


@assay.case(N=[9], D=[3])
def rows(make, N, D):
    return {"x": make.normal(N, D)}


def golden(x):
    return x * 2


def aborts_when_small(x):
    if x.shape[0] < 4:
        LIBC.abort()
    return torch.cat([x[:1] * 3, x[1:] * 2])


def aborts_on_large_numbers(x):
    if x.abs().max().item() > 1000:
        LIBC.abort()
    return x * 3


small = assay.Target(aborts_when_small, golden, cases=rows)
large = assay.Target(aborts_on_large_numbers, golden, cases=rows)


def test_a_crash_at_a_size_that_no_case_declares_is_a_note():
    diagnosis = assay.diagnose(small)
    assert diagnosis.verdict == "fail" and diagnosis.first_wrong_stage == "y" and diagnosis.causes
    assert diagnosis.case["sizes"]["N"] == 4 and diagnosis.target is small
    notes = [s for s in diagnosis.traced if "which no case declares" in s]
    assert "SIGABRT" in notes[0] and "in aborts_when_small (test_crashes.py, line" in notes[0]
    assert [f.kind for f in diagnosis.report.findings] == ["bound", "bound"]


def test_a_crash_in_another_run_of_the_case_keeps_the_findings():
    diagnosis = assay.diagnose(large, probes="values")
    assert diagnosis.verdict == "fail" and diagnosis.first_wrong_stage == "y"
    assert diagnosis.evidence.runs["scale 2^12"].error.startswith("ProcessEnded: its process ended by signal 6")
    assert any("run 'scale 2^12'" in s for s in diagnosis.traced)
