"""A check on the CPU runs compiled Triton kernels in the interpreter, without TRITON_INTERPRET and without warnings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import goldsmith
from goldsmith.core.device import interpreter_unavailable

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(interpreter_unavailable() is not None, reason=str(interpreter_unavailable()))
SOURCE = str(Path(goldsmith.__file__).resolve().parents[1])

KERNELS = """
import torch
import triton
import triton.language as tl
from triton.language.extra.libdevice import tanh as limited

from goldsmith import assay


@triton.jit
def doubled(a, factor):
    return a * factor


@triton.jit
def kernel(x_ptr, y_ptr, N, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total, largest = 0.0, -float("inf")
    for start in range(0, N, BLOCK):  # with a tensor as its end: the interpreter converts an array to a number
        d = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + d, mask=d < N, other=0.0)
        total += x.sum(0) + tl.sum(x, axis=0)
        largest = tl.maximum(largest, tl.max(x, axis=0))
    tl.store(y_ptr + row, doubled(total, 2.0) * factor.to(tl.float32) + limited(total))  # a float has no `to`


def sums(x):
    y = x.new_empty(len(x))
    kernel[(len(x),)](x.contiguous(), y, x.shape[1], FACTOR, BLOCK=16)
    return y


@assay.case(T=[3], D=[40])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


def golden(x):
    return 4 * x.sum(-1) + torch.tanh(2 * x.sum(-1))


target = assay.Target(sums, golden, cases=rows, backward=None)
"""
TEST = """
import triton
from kernels import target
from wrong_kernels import target as wrong

from goldsmith import assay


def test_sums(assay):
    run = triton.runtime.JITFunction.run
    report = assay.check(target)
    assert report.environment["interpreted"] > 20
    assert triton.runtime.JITFunction.run is run and "__get__" not in vars(triton.runtime.JITFunction)


def test_wrong_sums(assay):
    assay.check(wrong)
"""
LATE = """
import sys

import torch

from goldsmith import assay


def imports_late(x):
    import kernels

    return kernels.sums(x)


def test_sums():
    assert "triton" not in sys.modules
    case = {"x": torch.ones(3, 40)}
    golden = lambda x: 4 * x.sum(-1) + torch.tanh(2 * x.sum(-1))
    assay.check(assay.Target(imports_late, golden, cases=case, backward=None), probes="values")
"""


def session(folder, test):
    for name, factor in (("kernels", "1.0"), ("wrong_kernels", "1.5")):
        (folder / f"{name}.py").write_text(KERNELS.replace("FACTOR", factor))
    (folder / "test_kernels.py").write_text(test)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    installed = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; m.distribution('goldsmith')"], capture_output=True
    )
    plugins += [] if installed.returncode == 0 else ["-p", "goldsmith.pytest_plugin"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "-W", "ignore::pytest.PytestAssertRewriteWarning",
         "test_kernels.py"],
        cwd=folder, env=environment | {"PYTHONPATH": SOURCE}, capture_output=True, text=True,
    )  # fmt: skip


def test_a_session_needs_no_variable_shows_no_warning_and_a_wrong_kernel_fails_with_its_numbers(tmp_path):
    done = session(tmp_path, TEST)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "test_wrong_sums" in done.stdout and "y exceeds its rounding bound" in done.stdout, done.stdout
    assert "warning" not in done.stdout.lower()


def test_a_candidate_may_import_its_kernels_when_it_runs(tmp_path):
    done = session(tmp_path, LATE)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
