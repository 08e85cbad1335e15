"""Stages that a Triton kernel names in itself are judged and isolated in the interpreter, and compile to nothing."""

import ast
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.language.extra.libdevice import tanh
from triton.runtime.jit import JITFunction

from goldsmith import assay
from goldsmith.assay import stage
from goldsmith.assay.execute.tracer import Tracer
from goldsmith.core.tracing import listening


@triton.jit
def _weighted_rows_kernel(x_ptr, y_ptr, T, D, FAULT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < T)[:, None] & (cols < D)[None, :]
    x = tl.load(x_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 1)[:, None])
    p = e / (tl.sum(e, 1) + (0.5 if FAULT == 1 else 0.0))[:, None]
    p = assay.stage("p", p, at=(rows, cols), mask=mask)
    q = p * tl.where(mask, x, 0.0) + (0.25 if FAULT == 2 else 0.0)
    q = stage("q", q, at=(rows[:, None], cols[None, :]), mask=mask)
    tl.store(y_ptr + rows, tl.sum(tl.where(mask, q, 0.0), 1), mask=rows < T)


@triton.jit
def _chunks_kernel(x_ptr, w_ptr, y_ptr, D, FAULT: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((), tl.float32)
    for begin in range(0, D, BLOCK_D):
        cols = begin + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + row * D + cols, mask=cols < D, other=0.0)
        w = tl.load(w_ptr + cols, mask=cols < D, other=0.0)
        h = assay.stage("h", x * (x + (1.5 if FAULT == 1 else 1.0)), at=(row, cols), mask=cols < D)
        if FAULT == 3:
            assay.stage("total", total, at=(row,))
        total += tl.sum(h * w, 0) if FAULT != 2 else tl.sum(h, 0)
    total = assay.stage("total", total, at=(row,))
    tl.store(y_ptr + row, 2 * total)


@triton.jit
def _rests_kernel(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    row = tl.program_id(0) * D
    rest = tl.cumsum(tl.load(x_ptr + row + d, mask=d < D, other=0.0), 0, reverse=True)  # with negative strides
    rest = stage("rest", rest, at=(tl.program_id(0), d), mask=d < D)
    limited = tanh(tl.cumsum(rest, 0, reverse=True))
    tl.store(y_ptr + row + d, limited, mask=d < D)


def rests_candidate(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    _rests_kernel[(len(x),)](x, y, x.shape[1], BLOCK=8)
    return y


def rests_golden(x):
    sums = lambda t: t.flip(-1).cumsum(-1).flip(-1)  # noqa: E731
    return torch.tanh(sums(stage("rest", sums(x))))


def rows_golden(x):
    p = assay.stage("p", torch.softmax(x, -1))
    return assay.stage("q", p * x).sum(-1)


def chunks_golden(x, w):
    return 2 * assay.stage("total", assay.stage("h", x * (x + 1)) @ w)


def rows_candidate(fault):
    def forward(x):
        y = x.new_empty(len(x))
        _weighted_rows_kernel[(triton.cdiv(len(x), 2),)](x.contiguous(), y, *x.shape, FAULT=fault, BLOCK_T=2, BLOCK_D=8)
        return y

    return forward


def chunks_candidate(fault):
    def forward(x, w):
        y = x.new_empty(len(x))
        _chunks_kernel[(len(x),)](x.contiguous(), w.contiguous(), y, x.shape[1], FAULT=fault, BLOCK_D=4)
        return y

    return forward


@assay.case(T=[5], D=[6])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


@assay.case(T=[3], D=[10])
def chunks(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def rows_target(fault):
    return assay.Target(rows_candidate(fault), rows_golden, cases=rows, backward=None, name="rows")


def chunks_target(fault):
    return assay.Target(chunks_candidate(fault), chunks_golden, cases=chunks, backward=None, name="chunks")


@pytest.mark.parametrize("target", [rows_target, chunks_target])
def test_the_stages_of_a_right_kernel_are_right(target):
    report = assay.check(target(0), raises=False)
    assert report.verdict == "pass"
    judged = {row.tensor: row.state for row in report.rows}
    assert len(judged) == 3 and "bad" not in judged.values(), judged
    assert not [n for n in report.notes if "stage" in n.id]


@pytest.mark.parametrize(
    ("target", "fault", "states"),
    [
        (rows_target, 1, {"p": "culprit", "q": "inherited", "y": "inherited"}),
        (rows_target, 2, {"p": "ok", "q": "culprit", "y": "inherited"}),
        (chunks_target, 1, {"h": "culprit", "total": "inherited", "y": "inherited"}),
        (chunks_target, 2, {"h": "ok", "total": "culprit", "y": "inherited"}),
    ],
)
def test_a_wrong_stage_of_a_kernel_is_the_culprit(target, fault, states):
    diagnosis = assay.diagnose(target(fault), budget_s=5)
    assert {s.name: s.state for s in diagnosis.stages} == states


def test_sums_from_the_end_are_stages_and_operands():
    target = assay.Target(rests_candidate, rests_golden, cases=rows, backward=None, name="rests")
    report = assay.check(target, raises=False)
    assert {row.tensor: row.state for row in report.rows if row.run == "values"} == {"rest": "ok", "y": "ok"}
    assert report.verdict == "pass"


def test_tiles_that_differ_in_one_place_are_not_judged():
    report = assay.check(chunks_target(3), raises=False)
    assert report.verdict == "pass"
    notes = {n.tensor: n.text for n in report.notes if n.id == "stage_tiles"}
    assert list(notes) == ["total"] and "two of its tiles differ at [0]: 0, then" in notes["total"]
    assert {row.tensor for row in report.rows} == {"h", "y"}


@triton.jit
def _causal_kernel(x_ptr, y_ptr, SKIP: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    rows = tl.program_id(0) * BLOCK + lanes
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, (tl.program_id(0) + (0 if SKIP else 1)) * BLOCK, BLOCK):
        cols = begin + lanes
        seen = rows[:, None] >= cols[None, :]
        product = tl.load(x_ptr + rows)[:, None] * tl.load(x_ptr + cols)[None, :]
        total += tl.sum(tl.where(seen, assay.stage("scores", product, at=(rows, cols), mask=seen), 0.0), 1)
    tl.store(y_ptr + rows, total)


def causal_target(skip):
    def forward(x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _causal_kernel[(len(x) // 4,)](x.contiguous(), y, SKIP=skip, BLOCK=4)
        return y

    def golden(x):
        return assay.stage("scores", torch.outer(x, x).tril()).sum(-1)

    def case(make, T):
        return {"x": make.normal(T)}

    return assay.Target(forward, golden, cases=assay.case(T=[8])(case), backward=None, name="causal")


def test_a_place_without_a_tile_is_missing_unless_the_golden_has_a_zero_there():
    report = assay.check(causal_target(False), raises=False)
    assert report.verdict == "pass" and {r.tensor for r in report.rows} == {"scores", "y"}
    assert not [n for n in report.notes if "stage" in n.id]
    report = assay.check(causal_target(True), raises=False)
    assert {r.tensor: r.state for r in report.rows if r.run == "values"}["scores"] == "bad"


@triton.jit
def _flat_kernel(x_ptr, y_ptr, D, COUNT, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < COUNT)
    h = stage("h", x * x, at=((places // D) - SHIFT, places % D), mask=places < COUNT)
    tl.store(y_ptr + places, h + 1, mask=places < COUNT)


def flat_target(shift):
    def forward(x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _flat_kernel[(triton.cdiv(x.numel(), 8),)](x.contiguous(), y, x.shape[1], x.numel(), SHIFT=shift, BLOCK=8)
        return y

    def golden(x):
        return assay.stage("h", x * x) + 1

    return assay.Target(forward, golden, cases=rows, backward=None, name="flat")


def test_a_tile_may_have_an_index_for_each_of_its_elements():
    report = assay.check(flat_target(0), raises=False)
    assert report.verdict == "pass" and {r.tensor for r in report.rows} == {"h", "y"}


@pytest.mark.parametrize(("shift", "where"), [(1, r"\[-1, 0\] to \[0, 5\]"), (-(2**30), r"\[1073741824, 0\] to")])
def test_a_tile_where_no_stage_can_be_is_not_judged(shift, where):
    report = assay.check(flat_target(shift), raises=False)
    assert report.verdict == "pass"
    assert [n.tensor for n in report.notes if n.id == "stage_tiles"] == ["h"]
    assert where.replace("\\", "") in next(n.text for n in report.notes if n.id == "stage_tiles")


@triton.jit
def _mistaken_kernel(x_ptr, y_ptr, MISTAKE: tl.constexpr):
    rows, cols = tl.arange(0, 4), tl.arange(0, 2)
    offsets = rows[:, None] * 2 + cols[None, :]
    x = tl.load(x_ptr + offsets)
    if MISTAKE == 0:
        x = assay.stage("h", x)
    elif MISTAKE == 1:
        x = assay.stage("h", x, at=(cols, rows))
    elif MISTAKE == 2:
        x = assay.stage("h", x, at=(rows, cols), mask=rows < 4)
    else:
        x = assay.stage("h", x, at=("rows", cols))
    tl.store(y_ptr + offsets, x)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (0, r"stage\('h', ...\) in a kernel needs at=..., the place of its tile of shape \[4, 2\] in the whole stage"),
        (1, r"stage\('h', ..., at=...\): 2 indices for 4 places of axis 0"),
        (2, r"stage\('h', ..., mask=...\): shape \[4\], expected one that broadcasts to the tile's \[4, 2\]"),
        (3, r"stage\('h', ..., at=...\) takes slices, ranges, numbers and tensors, got 'rows'"),
    ],
)
def test_a_mistake_in_a_kernel_names_its_argument(mistake, message):
    def forward(x):
        y = torch.empty(4, 2)
        _mistaken_kernel[(1,)](x.contiguous(), y, MISTAKE=mistake)
        return y

    def case(make, T, D):
        return {"x": make.normal(T, D)}

    target = assay.Target(
        forward, lambda x: assay.stage("h", x), cases=assay.case(T=[4], D=[2])(case), backward=None, name="mistaken"
    )
    with pytest.raises(assay.TargetError, match=message):
        assay.check(target)


def test_a_mask_needs_a_place():
    with pytest.raises(assay.TargetError, match=r"stage\('h', ..., mask=...\) needs at="):
        assay.check(
            assay.Target(
                lambda x: assay.stage("h", x, mask=x > 0), lambda x: assay.stage("h", x), cases=rows, backward=None,
                name="masked",
            )
        )  # fmt: skip


@triton.jit
def _plain_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places)
    x = x * x
    tl.store(y_ptr + places, x)


@triton.jit
def _named_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places)
    x = assay.stage("x", x * x, at=(places,), mask=places < BLOCK - 1)
    tl.store(y_ptr + places, x)


def _compiled(listens):
    """The PTX of both kernels, without comments and labels of debugging."""
    texts = []
    with listening(Tracer()) if listens else nullcontext():
        for kernel in (_plain_kernel, _named_kernel):
            types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "BLOCK": "constexpr"}
            source = ASTSource(JITFunction(kernel.fn), types, {"BLOCK": 16})
            ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
            code = re.sub(r"\s*//.*|\.(loc|file|section).*", "", ptx).replace("_named_kernel", "_plain_kernel")
            texts.append([line for line in code.splitlines() if line.strip() and "$L__tmp" not in line])
    return texts


def test_a_stage_in_a_compiled_kernel_changes_nothing():
    """In a process of its own: an interpreted kernel that raised may have left its functions in triton.language."""
    program = (
        "from assay import test_kernel_stages as t; print([(len(a), a == b) for a, b in map(t._compiled, (0, 1))])"
    )
    environment = os.environ | {"TRITON_ALWAYS_COMPILE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    (lines, same), (_, listened) = ast.literal_eval(child.stdout or repr(child.stderr))
    assert lines > 20 and same and listened
