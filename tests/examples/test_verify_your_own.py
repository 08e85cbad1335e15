"""examples/verify_your_own.py: the right kernel passes, the wrong one fails where it is wrong."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from goldsmith import assay

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # the interpreter's, about the NaN that the assay feeds
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "verify_your_own.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("verify_your_own", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verdict(target: assay.Target, case: str) -> assay.Report:
    return assay.check(target, case, device=DEVICE, probes="values", raises=False)


def test_the_wrong_kernel_is_right_where_a_row_fills_its_block(example):
    assert verdict(example.wrong, "tokens[T=13,D=32]").ok


def test_the_wrong_kernel_fails_on_rows_that_are_no_power_of_two(example):
    assert verdict(example.target, "tokens[T=13,D=100]").ok
    report = verdict(example.wrong, "tokens[T=13,D=100]")
    assert not report.ok
    assert {finding.tensor for finding in report.findings if finding.rung == "CERTAIN"} == {"y", "x.grad", "w.grad"}


@pytest.mark.sweep(3, part=2)
def test_the_command_shows_both_and_succeeds():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1] / "src")}
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("PASS  rmsnorm: ") and "right in 8 cases" in done.stdout
    assert "\nFAIL  rmsnorm_padded: " in done.stdout
