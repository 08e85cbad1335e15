"""The merge and the cached arguments of the CPU's kernels: shortcuts for small calls give the same results."""

import warnings

import pytest
import torch

from goldsmith.core import native
from goldsmith.offload.guard import finiteness
from goldsmith.offload.lanes import merge
from goldsmith.offload.lanes.kernels import Kernels
from offload import stores

native_only = pytest.mark.skipif(native.reason() is not None, reason="needs the native library")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("T, k, H", [(1, 8, 300), (3, 2, 1), (1, 9, 1), (5, 1, 7), (0, 2, 4), (2, 0, 3)])
def test_few_numbers_have_the_bits_of_many(monkeypatch, T, k, H, dtype):
    make = torch.Generator().manual_seed(T + k + H)
    rows, weights = torch.randn(T * k, H, generator=make), torch.rand(T, k, generator=make)
    few = merge.merge(rows, weights.requires_grad_(), dtype)
    monkeypatch.setattr(merge, "FEW", -1)
    assert torch.equal(few, merge.merge(rows, weights.detach(), dtype)) and few.dtype == dtype


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("few", [-1, 1 << 15])
def test_nonfinite_numbers_pass_without_warnings_and_are_detected(monkeypatch, value, few):
    monkeypatch.setattr(merge, "FEW", few)
    monkeypatch.setattr(finiteness, "FEW", few)
    rows, weights = torch.ones(4, 3), torch.ones(2, 2)
    rows[2, 1], rows[3, 1] = value, -value
    with warnings.catch_warnings(action="error"):
        out = merge.merge(rows, weights, torch.bfloat16)
        assert finiteness.finite(out[:1]) and not finiteness.finite(out)
        assert not finiteness.finite(torch.tensor([value], dtype=torch.bfloat16))
    assert torch.isfinite(out).tolist() == [[True] * 3, [True, False, True]]


@native_only
def test_cached_arguments_are_updated_for_each_call(tmp_path):
    """The same sizes at other addresses, in other orders, of another layer."""
    with stores.build(tmp_path / "a.store") as store:
        kept, makes = Kernels(store.options, 2), 0
        for seed in range(4):
            for layer in (0, 1):
                x, ids, _ = stores.call(store, layer, 3, 2, seed=seed)
                for layout in (ids, ids.T.contiguous().T, ids.int()):
                    result = torch.full((6, store.hidden_size), 9.0), torch.full((6,), 9, dtype=torch.uint8)
                    wanted = torch.empty_like(result[0]), torch.empty_like(result[1])
                    kept.rows(x, layout, store.experts(layer), *result)
                    Kernels(store.options, 2).rows(x, layout, store.experts(layer), *wanted)
                    assert all(map(torch.equal, result, wanted))
            makes = makes or len(kept._calls)
        assert len(kept._calls) == makes == 6


@native_only
def test_a_call_with_little_to_do_wakes_no_threads(tmp_path):
    def threads(store, requested, T=1):
        x, ids, _ = stores.call(store, 0, T, 2)
        rows, flags = torch.empty(2 * T, store.hidden_size), torch.empty(2 * T, dtype=torch.uint8)
        return Kernels(store.options, requested).call(x, ids, store.experts(0), rows, flags).args.threads

    with stores.build(tmp_path / "small.store", layers=(0,)) as small:
        assert threads(small, 8) == 1
    with stores.build(tmp_path / "large.store", layers=(0,), H=512, I=512) as large:
        assert (threads(large, 8), threads(large, 2), threads(large, 8, T=100)) == (7, 2, 8)
