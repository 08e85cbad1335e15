"""The CPU lane beside a GPU: a thread of the library, or a Python thread, that computes one call at a time."""

import os

import pytest
import torch

from goldsmith.experts._native_abi import NativeCall
from goldsmith.offload.lanes import cpu_lane
from goldsmith.offload.lanes.kernels import Kernels
from offload import stores


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(0,))


@pytest.fixture(params=["native", "python"])
def cpu(request, monkeypatch, store):
    if request.param == "python":
        monkeypatch.setattr(cpu_lane, "_native_lane", lambda: None)
    result = cpu_lane.CpuLane(store.options, 1)
    if request.param == "native" and result._native is None:
        pytest.skip("the native library is not there, or is an older one")
    yield result
    result.close()


def inputs(store, T=3, k=2):
    x, ids, _ = stores.call(store, 0, T, k)
    rows, flags = torch.full((T * k, store.hidden_size), 9.0), torch.empty(T * k, dtype=torch.uint8)
    return x, ids, store.experts(0), rows, flags


def wanted(store, x, ids, base, rows, flags):
    result, at = torch.empty_like(rows), torch.empty_like(flags)
    Kernels(store.options, 1).rows(x, ids, base, result, at)
    return result


def test_end_returns_the_times_and_the_rows_are_there(cpu, store):
    call = inputs(store)
    for _ in range(20):
        call[3].fill_(9.0)
        cpu.begin(*call)
        begin, end = cpu.end()
        assert torch.equal(call[3], wanted(store, *call)) and begin < end


def test_buffers_can_be_reused_for_another_call(cpu, store):
    x, ids, base, rows, flags = inputs(store)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        ids.copy_((ids + 1) % store.num_experts(0))
        cpu.begin(x, ids, base, rows, flags)
        cpu.end()
        assert torch.equal(rows, wanted(store, x, ids, base, rows, flags))


@pytest.mark.parametrize("T", [3, 100])
def test_the_lane_keeps_its_inputs_alive_until_the_end(cpu, store, T):
    """Also the arguments of a call with many routes, which no cache holds."""
    call = inputs(store, T)
    if cpu._native is None:
        pytest.skip("the thread of Python holds what it is given")
    cpu.begin(*call)
    assert isinstance(cpu._busy[0], NativeCall) and all(
        mine is its for mine, its in zip(call, cpu._busy[1:], strict=True)
    )
    cpu.end()
    assert cpu._busy is None and torch.equal(call[3], wanted(store, *call))


def test_an_error_is_raised_at_the_end_and_the_next_call_is_right(cpu, store):
    x, ids, base, rows, flags = inputs(store)
    bad = ids.clone()
    bad[1, 1] = 99
    cpu.begin(x, bad, base, rows, flags)
    with pytest.raises(ValueError, match="99"):
        cpu.end()
    cpu.begin(x, ids, base, rows, flags)
    cpu.end()
    assert torch.equal(rows, wanted(store, x, ids, base, rows, flags))


def test_an_abandoned_call_is_waited_for(cpu, store):
    x, ids, base, rows, flags = inputs(store)
    cpu.begin(x, torch.full_like(ids, 99), base, rows, flags)
    cpu.begin(x, ids, base, rows, flags)
    cpu.end()
    assert torch.equal(rows, wanted(store, x, ids, base, rows, flags))
    cpu.begin(x, ids, base, rows, flags)
    cpu.close()
    cpu.close()


def test_a_forked_child_can_forget_it(cpu, store):
    cpu.begin(*inputs(store))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if cpu._native is not None:
                cpu._finalizer()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    cpu.end()
