"""examples/assay_liger.py: what the assay says about Liger-Kernel's functions, and about edited copies of them.

The example itself takes minutes in the interpreter; here every target is held to its values, and one goes through all.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from goldsmith import assay

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "assay_liger.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUICK = ("values", "ensemble", "poison", "guard", "alias")

MISSING = importlib.util.find_spec("liger_kernel") is None
pytestmark = [
    pytest.mark.skipif(MISSING, reason="needs liger-kernel, whose kernels these are"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, about the NaN that the assay feeds
]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("assay_liger", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules():
    """Liger's mhc and swiglu."""
    from liger_kernel.ops import mhc, swiglu

    return mhc, swiglu


def last_case(target: assay.Target) -> str:
    return target.cases[-1].name


@pytest.mark.parametrize("name", ["pre", "post_res", "coefficients"])
def test_ligers_hyper_connections_pass(name, example, modules):
    target = example.targets(*modules, DEVICE)[name]
    report = assay.check(target, last_case(target), device=DEVICE, probes=QUICK, raises=False)
    assert report.ok, str(report)


def test_ligers_swiglu_writes_its_gradients_over_its_inputs(example, modules):
    target = example.targets(*modules, DEVICE)["swiglu"]
    report = assay.check(target, last_case(target), device=DEVICE, probes=QUICK, raises=False)
    assert report.verdict == "fail" and example.expected("swiglu", report)
    assert {f.tensor for f in report.findings if "was modified" in f.text} == {"a", "b"}
    assert {f.probe for f in report.findings} == {"alias"}  # the values themselves are right
    report.findings[0] = dataclasses.replace(report.findings[0], tensor="y", probe="values")
    assert not example.expected("swiglu", report)  # any other finding is not excused by these


def test_ligers_swiglu_passes_in_float32_where_the_overwritten_inputs_are_declared(example, modules):
    target = example.targets(*modules, DEVICE)["swiglu"]
    declared = dataclasses.replace(target, mutates=("a", "b"), dtypes=(torch.float32,))
    report = assay.check(declared, last_case(declared), device=DEVICE, raises=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("fault", ["addend_dropped", "narrowed_block", "mask_removed"])
def test_a_planted_fault_in_a_copy_of_liger_is_detected(fault, example, modules, tmp_path):
    name, old, new = example.FAULTS[fault]
    target = example.targets(example.edited(modules[0], tmp_path, old, new), modules[1], DEVICE)[name]
    case = next(c.name for c in target.cases if c.sizes["T"] > 1 and c.sizes["C"] < 128)
    report = assay.check(target, case, device=DEVICE, probes=QUICK, raises=False)
    assert report.verdict == "fail"
    wrong = {f.tensor for f in report.findings}
    assert "x.grad" in wrong
    assert fault != "addend_dropped" or wrong == {"x.grad"}  # the other gradients do not have that addend


def run(*args: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1] / "src")}
    command = [sys.executable, str(EXAMPLE), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.sweep(3, part=1)
def test_the_command_writes_every_report_with_the_versions(tmp_path):
    done = run("--only", "pre", "--json", str(tmp_path / "liger.json"), "--html", str(tmp_path / "liger.html"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "liger.json").read_text())
    assert result["versions"].keys() == {"liger-kernel", "torch", "triton"} and result["expected"] == {"pre": True}
    report = assay.Report.from_json(result["reports"]["pre"])
    assert report.ok and all(probe.ran or probe.reason for probe in report.probes)
    assert "liger.pre" in (tmp_path / "liger.html").read_text()
    assert "PASS" in done.stdout and done.stderr == ""


def test_a_missing_gpu_is_reported_in_one_sentence():
    if DEVICE == "cuda":
        pytest.skip("there is a GPU here")
    done = run("--device", "cuda")
    assert done.returncode == 2
    assert (
        done.stderr.startswith("assay_liger: --device cuda: torch sees no CUDA device") and done.stderr.count("\n") == 1
    )


def test_runs_of_different_functions_are_joined_if_they_are_from_one_machine():
    spec = importlib.util.spec_from_file_location("liger_tables", EXAMPLE.parents[1] / "scripts" / "liger.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    one = {"machine": "a", "versions": {"torch": "2"}, "reports": {"swiglu": 1, "pre": 2}}
    both = tables.joined([one, {**one, "reports": {"pre": 3, "post_res": 4}}])
    assert both == {**one, "reports": {"pre": 3, "post_res": 4, "swiglu": 1}}
    assert list(both["reports"]) == ["pre", "post_res", "swiglu"]
    with pytest.raises(SystemExit, match="machine: b in one file, a in another; join runs of one machine"):
        tables.joined([one, {**one, "machine": "b"}])
