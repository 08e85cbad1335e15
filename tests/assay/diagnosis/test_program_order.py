"""Kernels whose programs overwrite each other's results: an edit that is right in one order of programs is no patch."""

import pytest

from assay.diagnosis.targets import session_of
from assay.diagnosis.test_patch_acceptance import judged
from assay.diagnosis.written_modules import forget, load
from goldsmith.assay.diagnosis.experiments.runs import facts
from goldsmith.assay.probes.repeats import BACKWARDS
from goldsmith.core.device import interpreter_unavailable

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(interpreter_unavailable() is not None, reason=str(interpreter_unavailable()))

KERNEL = """
import torch
import triton
import triton.language as tl

from goldsmith import assay


@triton.jit
def doubled(x, y, count, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(y + row * BLOCK + lanes, 2 * tl.load(x + row * BLOCK + lanes))
    if row + 1 < count:
        tl.store(y + (row + 1) * BLOCK + lanes, 0.0)


def double(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    doubled[(len(x),)](x, y, len(x), BLOCK=x.shape[1])
    return y


@assay.case(T=[3], D=[16])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


target = assay.Target(double, lambda x: 2 * x, cases=rows, backward=None)
"""
PROGRAM = "tl.program_id(0), tl"
TURNED = KERNEL.replace(PROGRAM, f"count - 1 - {PROGRAM}")


@pytest.fixture(autouse=True)
def _modules():
    yield
    forget()


def test_another_order_of_programs_is_no_patch(tmp_path):
    turned, right = judged(tmp_path, TURNED, [("count - 1 - tl", "tl")], [("row + 1 < count", "False")])
    assert turned[0] == right[0] == "right"
    assert turned[3] is None and right[3] is not None


@pytest.mark.sweep(2, part=1)
def test_what_only_another_order_shows_has_a_patch(tmp_path):
    wrong, right = judged(tmp_path, KERNEL, [("count:\n", "count + 0:\n")], [("row + 1 < count", "False")])
    assert wrong[0] == "wrong" and right[0] == "right" and right[3] is not None


def test_a_run_in_another_order_is_right(tmp_path):
    examination = session_of(load(tmp_path, TURNED).target)
    fact = facts(examination, only=(BACKWARDS,))[BACKWARDS]
    assert fact.right and not fact.same
