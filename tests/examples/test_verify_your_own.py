"""examples/verify_your_own.py: the right kernel passes, the wrong one fails where it is wrong."""

import importlib.util
from pathlib import Path

import pytest

from goldsmith import assay

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "verify_your_own.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("verify_your_own", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_right_kernel_passes(example):
    report = assay.check(example.target)
    assert report.ok and len(report.cases) == 8


def test_the_wrong_kernel_fails_on_rows_that_are_no_power_of_two(example):
    report = assay.check(example.wrong, raises=False)
    assert not report.ok
    assert {finding.case for finding in report.findings if finding.case} and all(
        "D=100" in finding.case for finding in report.findings if finding.case
    )
    assert any(finding.rung == "CERTAIN" and finding.tensor == "y" for finding in report.findings)
