"""In-place writes to views under autograd, and other code that needs new tensors at the start of their storage."""

import ctypes

import pytest
import torch
from torch.nn.functional import pad

from goldsmith import assay
from goldsmith.assay.execute.memory import Arena, Poison
from goldsmith.assay.execute.memory_marks import band_read, poison_left

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool,
          torch.complex64, torch.float8_e4m3fn, torch.uint16)  # fmt: skip


@assay.case(T=[4, 0], D=[6])
def small(make, T, D):
    return {"x": make.normal(T, D)}


def signs(x, first):
    return torch.where(torch.arange(x.shape[1], device=x.device) % 2 == first, -1, 1)


def added_to_a_column(x):
    y = x * 1.0
    y[:, 0] += 1
    return y


def after_a_row_of_zeros(x):
    y = torch.zeros(len(x) + 1, x.shape[1], dtype=x.dtype, device=x.device)
    y[1:] = x
    return y


def half_turn(x):
    half = x.shape[1] // 2
    y = torch.empty_like(x)
    y[:, :half] = -x[:, half:]
    y[:, half:] = x[:, :half]
    return y


def before_three_rows_of_zeros(x):
    out = torch.empty(len(x) + 3, x.shape[1], dtype=x.dtype, device=x.device)
    out[: len(x)].copy_(x)
    out[len(x) :].zero_()
    return out


def every_other_negated(x):
    y = x * 1.0
    y[:, ::2].neg_()
    return y


def negated_in_columns_that_lie_dense(x):
    y = (x.mT * 1.0).mT
    y[:, 1::2].neg_()
    return y


def twice_by_offsets_of_its_own(x):
    n, d = x.shape
    y = torch.empty(n, 2 * d, dtype=x.dtype, device=x.device)
    for column in (0, d):
        torch.as_strided(y, (n, d), (2 * d, 1), column).copy_(x)
    return y


KERNELS = {
    added_to_a_column: lambda x: x + (torch.arange(x.shape[1], device=x.device) == 0).to(x.dtype),
    after_a_row_of_zeros: lambda x: pad(x, (0, 0, 1, 0)),
    half_turn: lambda x: torch.cat([-x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], -1),
    before_three_rows_of_zeros: lambda x: pad(x, (0, 0, 0, 3)),
    every_other_negated: lambda x: x * signs(x, 0),
    negated_in_columns_that_lie_dense: lambda x: x * signs(x, 1),
    twice_by_offsets_of_its_own: lambda x: torch.cat([x, x], -1),
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_right_write_in_place_on_a_view_passes(kernel, dtype):
    report = assay.check(assay.Target(kernel, KERNELS[kernel], cases=small), dtype=dtype, raises=False)
    assert report.ok and not report.findings, str(report)


def test_a_wrong_write_in_place_on_a_view_is_found():
    def next_column(x):
        y = x * 1.0
        y[:, 1] += 1
        return y

    def left_empty(x):
        y = torch.empty_like(x)
        y[:, 1:] = x[:, 1:]
        return y

    for kernel, probe in ((next_column, "values"), (left_empty, "poison")):
        report = assay.check(
            assay.Target(kernel, KERNELS[added_to_a_column], cases=small), probes="quick", raises=False
        )
        assert not report.ok and any(f.probe == probe and f.tensor == "y" for f in report.findings), str(report)


# fresh memory


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_tensors_begin_their_storage_in_any_dtype_and_layout(dtype):
    arena = Arena()
    with Poison(arena):
        tensors = [torch.empty(3, 5, dtype=dtype), torch.empty_strided((3, 5), (1, 4), dtype=dtype)]
        tensors += [
            torch.empty_like(tensors[1]),
            tensors[0].new_empty_strided((2, 2), (7, 3)),
            torch.empty(0, 3, dtype=dtype),
        ]
    assert [t.storage_offset() for t in tensors] == [0] * 5
    assert [t.stride() for t in tensors[:4]] == [(5, 1), (1, 4), (1, 3), (7, 3)]
    assert all(t.data_ptr() % 256 == 0 and t.dtype == dtype for t in tensors)
    owners = [arena.owner(t[1:]) for t in tensors[:4]]
    assert [o.tensor.data_ptr() for o in owners] == [t.data_ptr() for t in tensors[:4]]
    assert arena.owner(tensors[4]) is None and arena.owner(torch.zeros(3)) is None and not arena.overruns()


def test_a_write_before_or_past_an_empty_tensor_is_an_overrun():
    arena = Arena()
    with Poison(arena):
        y, other = torch.empty(15), torch.empty(15)
    arena.name({"y": y[3:], "no result": torch.zeros(3)})
    ctypes.memset(y.data_ptr() - 8, 0, 4)
    ctypes.memset(other.data_ptr() + 60, 0, 4)
    assert [h.text for h in arena.overruns()] == [
        "4 bytes written before the start of y (60 bytes), up to 8 bytes away",
        "4 bytes written past the end of scratch buffer 2 [15] (60 bytes), up to 4 bytes away",
    ]
    beyond = torch.as_strided(other, (17,), (1,))
    assert poison_left(beyond).tolist() == [True] * 15 + [False] * 2
    assert band_read(beyond).tolist() == [False] * 16 + [True]


def test_memory_outlives_the_arena():
    with Poison(Arena()):
        y = torch.empty(1000)
    churn = [torch.zeros(1000) for _ in range(50)]
    assert poison_left(y).all() and len(churn) == 50


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("size", (4, 4000))
def test_an_empty_tensor_can_grow(size):
    arena = Arena()
    with Poison(arena):
        first, y, out, read = torch.empty(3), torch.empty(3), torch.empty(3), torch.empty(size)
        y.fill_(7).resize_(size)
        read.fill_(2)
        torch.mul(read, 3, out=out)
    assert y.shape == (size,) and y[:3].tolist() == [7] * 3 and out.tolist() == [6] * size
    assert arena.owner(first) is not None and arena.owner(read) is not None and not arena.overruns()


def test_a_sparse_result_is_not_guarded():
    with Poison(Arena()):
        y = torch.empty(3, 3).fill_(1).to_sparse()
        out = torch.empty(0, layout=torch.sparse_coo)
        assert torch.add(y, y, out=out).to_dense().tolist() == [[2.0] * 3] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_views_pass_on_a_gpu():
    for kernel, golden in KERNELS.items():
        assay.check(assay.Target(kernel, golden, cases=small), device="cuda")
    with Poison(Arena()) as mode:
        y = torch.empty(5, device="cuda")
        y.resize_(4000)
    assert y.storage_offset() == 0 and mode.count == 1
