"""Kernels that are right in one order of their programs only, which a GPU does not promise."""

import sys

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.execute.interpreter import MODULE, programs_backwards
from goldsmith.assay.probes.repeats import ORDERED
from goldsmith.core.device import interpreter_unavailable

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(interpreter_unavailable() is not None, reason=str(interpreter_unavailable()))


@triton.jit
def _doubled(x, y, ready, count, BLOCK: tl.constexpr, OVER: tl.constexpr):
    """With OVER, each program zeroes the row after its own, which a later program writes."""
    row, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(y + row * BLOCK + lanes, 2 * tl.load(x + row * BLOCK + lanes))
    if OVER:
        tl.store(y + (row + 1) * BLOCK + lanes, 0.0, mask=lanes * 0 + row + 1 < count)


@triton.jit
def _total(x, y, ready, count, BLOCK: tl.constexpr, OVER: tl.constexpr):
    """With OVER, the first program sets what the others add to."""
    row, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    own = tl.load(x + row * BLOCK + lanes)
    if OVER and row == 0:
        tl.store(y + lanes, own)
    else:
        tl.atomic_add(y + lanes, own)


@triton.jit
def _in_turn(x, y, ready, count, BLOCK: tl.constexpr, OVER: tl.constexpr):
    """Each program adds its row to that of the one before. With OVER, it does not wait for it."""
    row, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    if not OVER:
        while tl.atomic_add(ready + row, 0) == 0:
            pass
    before = tl.load(y + (row - 1) * BLOCK + lanes, mask=lanes * 0 + row > 0, other=0.0)
    tl.store(y + row * BLOCK + lanes, before + tl.load(x + row * BLOCK + lanes))
    tl.atomic_add(ready + row + 1, 1)


def candidate(kernel, over):
    def call(x):
        x = x.contiguous()
        y = torch.zeros_like(x[0] if kernel is _total else x)
        ready = torch.zeros(len(x) + 1, dtype=torch.int32)
        ready[0] = 1
        kernel[(len(x),)](x, y, ready, len(x), BLOCK=x.shape[1], OVER=over)
        return y

    return call


@assay.case(T=[5], D=[16])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


GOLDENS = {_doubled: lambda x: x * 2, _total: lambda x: x.sum(0), _in_turn: lambda x: x.cumsum(0)}


def report(kernel, over, **more):
    target = assay.Target(candidate(kernel, over), GOLDENS[kernel], cases=rows, backward=None)
    return assay.check(target, **more)


@pytest.mark.parametrize("kernel", GOLDENS)
def test_a_kernel_that_needs_the_order_of_its_programs_fails(kernel):
    found = report(kernel, True, raises=False)
    assert [f.probe for f in found.findings] == ["repeats"] and ORDERED in found.findings[0].text


@pytest.mark.parametrize("kernel", GOLDENS)
def test_the_right_kernel_passes(kernel):
    found = report(kernel, False, probes="quick")
    assert found.verdict == "pass" and {n.id for n in found.notes} >= ({"one_order"} if kernel is _in_turn else set())


def test_the_order_of_programs_in_a_grid_of_three_axes():
    with programs_backwards():
        pass
    builder = sys.modules[MODULE].interpreter_builder
    before = dict(vars(builder))
    builder.set_grid_dim(2, 3, 4)
    with programs_backwards():
        builder.set_grid_idx(0, 1, 3)
        assert builder.grid_idx == (1, 1, 0)
    assert vars(builder).keys() - {"grid_idx", "grid_dim"} == before.keys() - {"grid_idx", "grid_dim"}
