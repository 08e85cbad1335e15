"""Memory of atomic_experts' kernels: 64 bytes per pair and three float32 [T, max(D, E)]; dense needs 128 MiB more.

The starts of the experts' pairs take 4 bytes per expert, a thousandth of the dense gradients that need them. On the
meta device nothing is computed and no kernel is launched, so real sizes are counted within milliseconds. The memory of
torch.sort shows only on a GPU (test_on_a_gpu.py).
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from goldsmith.assay import Make
from goldsmith.router import _common
from goldsmith.router._kernels import dense_products, table_gradients, table_lookups
from goldsmith.router.atomic_experts import _triton, reference
from goldsmith.router.atomic_experts.cases import inputs
from goldsmith.router.atomic_experts.op import ATOMIC_EXPERTS

pytestmark = pytest.mark.sweep(2)

PER_PAIR, ROWS, CHUNKS, PER_EXPERT = 64, 3, 128 * 2**20, 4


def stored(tree):
    """The tensors that hold a result's storage; a sparse tensor consists of others."""
    dense_ones = (t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout == torch.strided)
    return [(t, t.untyped_storage()) for t in dense_ones]


class Allocations(TorchDispatchMode):
    """Records in order when storages are allocated and freed."""

    def __init__(self):
        super().__init__()
        self.events, self.holders = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {storage._cdata for _, storage in stored((args, kwargs))}
        for tensor, storage in stored(result):
            if storage._cdata not in self.holders and storage._cdata not in known:
                self.holders[storage._cdata] = 0
                self.events.append((storage._cdata, storage.nbytes()))
            if storage._cdata in self.holders:
                self.holders[storage._cdata] += 1
                weakref.finalize(tensor, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key, nbytes):
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key]
            self.events.append((key, -nbytes))

    def peak(self, results):
        """The peak number of bytes that did not belong to a result."""
        kept = {t.untyped_storage()._cdata for t in results}
        now = most = 0
        for place, (key, nbytes) in enumerate(self.events):
            if key not in kept or any(k == key for k, _ in self.events[place + 1 :]):
                now += nbytes
                most = max(most, now)
        return most


@pytest.fixture
def kept(monkeypatch):
    """Launches no kernel; returns the parts of sparse gradients, whose storage would otherwise not be counted."""
    for module in (dense_products, table_lookups, table_gradients):
        monkeypatch.setattr(module, "run", lambda *args, **meta: None)
    # as many experts as there are pairs
    monkeypatch.setattr(
        table_gradients, "PendingCount", lambda upto: SimpleNamespace(value=lambda: 1 + upto.storage_offset())
    )
    parts_of_sparse = []
    monkeypatch.setattr(_triton, "row_sparse", lambda *parts: parts_of_sparse.extend(parts[:2]) or parts[0])
    return parts_of_sparse


def worked_in(kept, T, D, N, K, strategy, dtype=torch.bfloat16, E=None, memory=False, sparse=False, strided=False):
    """(forward, backward): peak bytes besides inputs and results."""
    E = D if E is None else E
    step = 2 if strided else 1
    h, w_in, w_out = (
        torch.empty(a, b * step, dtype=dtype, device="meta")[:, ::step] for a, b in ((T, D), (N, D), (N, E))
    )
    w_in = None if memory else w_in
    weights, indices = (torch.empty(T, K, dtype=d, device="meta") for d in (torch.float32, torch.int32))
    dy = (
        torch.empty(E, dtype=dtype, device="meta").expand(T, E)
        if strided
        else torch.empty(T, E, dtype=dtype, device="meta")
    )
    options = {"activation": "silu", "strategy": strategy, "sparse_grad": sparse}
    with torch.no_grad(), Allocations() as forward:
        y, preact = _triton.forward(h, w_in, w_out, weights, indices, **options)
    tensors = {"h": h, "w_in": w_in, "w_out": w_out, "weights": weights, "indices": indices, "preact": preact}
    with torch.no_grad(), Allocations() as backward:
        gradients = _triton.backward({"y": dy}, tensors, options, frozenset(ATOMIC_EXPERTS.grads))
    return forward.peak([y]), preact.nbytes + backward.peak([*gradients.values(), *kept])


SIZES = {
    "usual": {"T": 4096, "D": 1024, "N": 65_536, "K": 32},
    "wide": {"T": 4096, "D": 4096, "N": 65_536, "K": 32},
    "wider": {"T": 512, "D": 16_384, "N": 1024, "K": 128, "dtype": torch.float32},
    "long_lists": {"T": 4096, "D": 4096, "N": 65_536, "K": 4096},
    "many_tokens": {"T": 300_000, "D": 256, "N": 2048, "K": 4},
    "half": {"T": 16, "D": 1024, "N": 2**20, "K": 64, "dtype": torch.float16},
    "one_token": {"T": 1, "D": 1024, "N": 65_536, "K": 32},
    "two_widths": {"T": 2048, "D": 512, "N": 4096, "K": 300, "E": 3000},
    "strided": {"T": 4096, "D": 1024, "N": 65_536, "K": 32, "strided": True, "dtype": torch.float32},
    "memory": {"T": 4096, "D": 2048, "N": 65_536, "K": 32, "memory": True},
    "sparse": {"T": 4096, "D": 2048, "N": 2**20, "K": 32, "sparse": True},
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["gather", "sorted", "dense"])
@pytest.mark.parametrize("name", SIZES)
def test_kernels_work_in_as_much_memory_as_is_promised(name, strategy, kept):
    sizes = SIZES[name]
    T, D, K = (sizes[s] for s in ("T", "D", "K"))
    most = PER_PAIR * T * K + ROWS * 4 * T * max(D, sizes.get("E", D)) + (CHUNKS if strategy == "dense" else 0)
    forward, backward = worked_in(kept, strategy=strategy, **sizes)
    assert forward <= most, f"{forward / 2**20:.1f} MiB of {most / 2**20:.1f}"
    most += 0 if sizes.get("sparse") else PER_EXPERT * (sizes["N"] + 1)
    assert backward <= most, f"{backward / 2**20:.1f} MiB of {most / 2**20:.1f}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["gather", "sorted", "dense"])
def test_the_reference_needs_no_more_memory_than_the_kernels_plus_some_chunks(strategy, dtype, seed, monkeypatch):
    """The rows of all pairs would take four times as much."""
    monkeypatch.setattr(_common, "CHUNK_BYTES", chunk := 2**14)
    T, D, N, K = 128, 128, 300, 64
    tensors = inputs(Make(dtype, "cpu", seed), T=T, D=D, N=N, K=K, strategy=strategy)
    options = {name: tensors.pop(name) for name in ("activation", "strategy", "sparse_grad")}
    with torch.no_grad(), Allocations() as forward:
        y, preact = reference.forward(*tensors.values(), **options)
    with torch.no_grad(), Allocations() as backward:
        gradients = reference.backward({"y": y}, tensors | {"preact": preact}, options, frozenset(ATOMIC_EXPERTS.grads))
    most = PER_PAIR * T * K + ROWS * 4 * T * D + 8 * chunk
    assert max(forward.peak([y, preact]), backward.peak(list(gradients.values()))) <= most < T * K * D * 4 / 4


def test_the_peak_counts_storages_that_live_at_the_same_time():
    with Allocations() as all_of_them:
        first = torch.empty(1000, device="meta")
        view = first[:10]
        del first
        second = torch.empty(500, device="meta")
        del view
        third = torch.empty(800, device="meta")
    assert all_of_them.peak([]) == 4 * 1500 and all_of_them.peak([third]) == 4 * 1500
    assert all_of_them.peak([second, third]) == 4 * 1000
