"""Kernels without their mask, which copy memory beyond an input to memory beyond the output unchanged."""

import ctypes
import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from goldsmith import assay
from goldsmith.assay.execute import memory_marks
from goldsmith.assay.execute.memory_marks import band_mark, band_read, poison_left

BLOCK = 16
DTYPES = (torch.float32, torch.bfloat16, torch.int32)
WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
UNITS = {8: (torch.int64, np.int64), 4: (torch.int32, np.int32), 2: (torch.int16, np.int16)}


@triton.jit
def _copy(x, w, y, sx, sy, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i))


@triton.jit
def _twice(x, w, y, sx, sy, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i) * 2)


@triton.jit
def _add(x, w, y, sx, sy, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i) + tl.load(w + i))


def in_triton(kernel):
    def candidate(x, w):
        refuse(x, w)
        y = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), BLOCK),)](x, w, y, 0, 0, BLOCK=BLOCK)
        return y

    return candidate


def refuse(*tensors):
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError("contiguous only")


def memory(tensor, more):
    kind = {torch.float32: ctypes.c_float, torch.int32: ctypes.c_int32, torch.bfloat16: ctypes.c_int16}[tensor.dtype]
    return np.ctypeslib.as_array((kind * (tensor.numel() + more)).from_address(tensor.data_ptr()))


def copied_in_c(x, w):
    """A C loop that runs to n + 16."""
    refuse(x, w)
    y = torch.empty_like(x)
    ctypes.memmove(y.data_ptr(), x.data_ptr(), (x.numel() + 16) * x.element_size())
    return y


def added_in_c(x, w):
    refuse(x, w)
    y = torch.empty_like(x)
    with np.errstate(all="ignore"):
        np.add(memory(x, 16), memory(w, 16), out=memory(y, 16))
    return y


def transposed_in_c(x, w):
    """Whole tiles of 4 x 4 of a matrix whose row count is no multiple of 4."""
    refuse(x, w)
    rows, columns = x.shape
    y = torch.empty(columns, rows, dtype=x.dtype)
    beyond = (-rows % 4) * columns
    source, goal = memory(x, beyond), memory(y, beyond)
    tiles = source.reshape(-1, columns)  # rows rounded up
    for column in range(columns):
        goal[column * rows : column * rows + rows] = tiles[:rows, column]
    goal[rows * columns :] = tiles[rows:].reshape(-1)
    return y


def truncated(sums):
    return (sums >> 16).astype(np.int16)


def to_nearest(sums):
    """Round to nearest even by add and shift, which turns a NaN whose lower bits are ones into another number."""
    return ((sums + 0x7FFF + ((sums >> 16) & 1)) >> 16).astype(np.int16)


def quiet(sums):
    """The same, with every NaN mapped to one NaN."""
    nan = (sums & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, np.int16(0x7FC0), to_nearest(sums))


def added_in_c_of_16_bits(store):
    """A C loop over bfloat16 that adds in float32, to n + 16."""

    def candidate(x, w):
        refuse(x, w)
        if x.dtype != torch.bfloat16:
            raise ValueError("bfloat16 only")
        y = torch.empty_like(x)
        wide = [(memory(t, 16).astype(np.uint32) << 16).view(np.float32) for t in (x, w)]
        with np.errstate(all="ignore"):
            memory(y, 16)[:] = store((wide[0] + wide[1]).view(np.uint32))
        return y

    return candidate


KERNELS = {
    "triton copy": (in_triton(_copy), lambda x, w: x.clone()),
    "triton x2": (in_triton(_twice), lambda x, w: x * 2),
    "triton add": (in_triton(_add), lambda x, w: x + w),
    "C copy": (copied_in_c, lambda x, w: x.clone()),
    "C add": (added_in_c, lambda x, w: x + w),
    "C transpose": (transposed_in_c, lambda x, w: x.T.contiguous()),
    **{f"C add, {s.__name__}": (added_in_c_of_16_bits(s), lambda x, w: x + w) for s in (truncated, to_nearest, quiet)},
}


def overrunning(name, dtype):
    kernel, golden = KERNELS[name]

    @assay.case(N=[37])
    def one(make, N):
        def drawn():
            if dtype.is_floating_point:
                return make.normal(N, 3)
            return torch.arange(3 * N, device=make.device).view(N, 3).to(dtype)

        return {"x": drawn(), "w": drawn()}

    dtypes = (dtype,) if dtype.is_floating_point else (torch.float32,)
    return assay.Target(kernel, golden, cases=one, name=name, backward=None, dtypes=dtypes, layouts="contiguous")


def device_of(name):
    """The device of Triton kernels on this machine; C kernels run on the CPU."""
    return "cuda" if name.startswith("triton") and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"


# Triton's interpreter cannot multiply bfloat16 and numpy lacks it: compute from the bits, as the C kernel does
TRIED = [
    (name, dtype)
    for name in KERNELS
    for dtype in ((torch.bfloat16,) if ", " in name else DTYPES)
    if (name, dtype) not in [(n, torch.bfloat16) for n in ("triton x2", "C add")]
]


@pytest.mark.parametrize("name, dtype", TRIED, ids=lambda v: str(v).removeprefix("torch."))
def test_a_band_copied_over_another_one_is_detected(name, dtype):
    report = assay.check(overrunning(name, dtype), device=device_of(name), probes="quick", raises=False)
    assert report.verdict == "fail"
    assert any(f.probe == "guard" and "written past the end of y" in f.text for f in report.findings)


@pytest.mark.parametrize("name", ["triton add", "C copy"])
def test_a_copied_band_is_reported_as_an_overrun(name):
    diagnosis = assay.diagnose(overrunning(name, torch.float32), device=device_of(name), budget_s=20)
    assert diagnosis.verdict == "fail" and diagnosis.causes[0].id == "overrun" and diagnosis.causes[0].score > 0.9


# the bits


def every(dtype):
    """All marks of a dtype, and those of inputs separately."""
    bands_before = [band_mark(dtype, n, True)[0] for n in range(64)]
    bands_after = [band_mark(dtype, n, False)[0] for n in range(64)]
    return set(bands_before), set(bands_after), band_mark(dtype, 0, True)[1]


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_every_mark_is_a_nan_that_is_recognised_and_survives_arithmetic(dtype):
    bands_before, bands_after, unit = every(dtype)
    assert len(bands_before) == 18 and len(bands_after) >= 38 and not bands_before & bands_after
    bits = torch.tensor(sorted(bands_before | bands_after), dtype=unit)
    values = bits.view(dtype)
    assert values.isnan().all() and band_read(values).all() and poison_left(values) is None
    assert band_read(torch.full((3,), float("nan"), dtype=dtype)) is None
    assert band_read(torch.full((3,), -1, dtype=unit).view(dtype)) is None  # the NaN of vectorised code
    if dtype.itemsize > 2:  # torch computes 16-bit dtypes in float32 and rounds to its own NaN
        assert torch.equal((values * 2).view(unit), bits) and torch.equal((values + 1).view(unit), bits)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_a_converted_mark_matches_no_mark_of_the_new_width(dtype):
    bands_before, bands_after, unit = every(dtype)
    values = torch.tensor(sorted(bands_before | bands_after), dtype=unit).view(dtype)
    for other in WIDE:
        if other.itemsize == dtype.itemsize:
            continue
        its = every(other)
        assert not (its[0] | its[1]) & set(values.to(other).view(its[2]).tolist())
        if dtype != torch.bfloat16 != other:
            number = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}[other]
            assert not (its[0] | its[1]) & set(values.numpy().astype(number).view(UNITS[other.itemsize][1]).tolist())


def test_a_truncated_mark_is_recognised():
    mark, unit = band_mark(torch.float32, 3, True)
    cut = torch.tensor([mark, 0], dtype=unit).view(torch.int16)[1::2].view(torch.bfloat16)
    assert band_read(cut).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_integer_bands_are_small_and_differ_between_inputs_and_results(dtype):
    bands_before, bands_after, unit = every(dtype)
    assert unit.itemsize == dtype.itemsize and not bands_before & bands_after and min(bands_before | bands_after) >= -13
    sums = {a + b for a in bands_before | {0} for b in bands_before | {0}} | {2 * a for a in bands_before}
    assert not bands_after & sums
    assert not memory_marks.wide(dtype)
