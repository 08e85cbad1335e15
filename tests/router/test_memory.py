"""What atomic_experts' kernels work in: 64 bytes a pair and three float32 [T, max(D, E)], for dense 128 MiB more.

Where an expert's pairs begin is 4 bytes an expert, a thousandth of the dense gradients that need it.
On the meta device nothing is computed and no kernel is started, so that real sizes are counted within milliseconds;
what torch.sort holds of a card's memory is seen on a card alone (test_on_a_gpu.py).
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

PER_PAIR, ROWS, CHUNKS, PER_EXPERT = 64, 3, 128 * 2**20, 4


def stored(tree):
    """Its tensors with their storages; a sparse one is kept in others."""
    dense_ones = (t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout == torch.strided)
    return [(t, t.untyped_storage()) for t in dense_ones]


class Allocations(TorchDispatchMode):
    """When every storage came and went, in order."""

    def __init__(self):
        super().__init__()
        self.events, self.holders = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        known = {storage._cdata for _, storage in stored((args, kwargs))}
        for tensor, storage in stored(made):
            if storage._cdata not in self.holders and storage._cdata not in known:
                self.holders[storage._cdata] = 0
                self.events.append((storage._cdata, storage.nbytes()))
            if storage._cdata in self.holders:
                self.holders[storage._cdata] += 1
                weakref.finalize(tensor, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, key, nbytes):
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key]
            self.events.append((key, -nbytes))

    def peak(self, results):
        """The most bytes at a time that were no result."""
        kept = {t.untyped_storage()._cdata for t in results}
        now = most = 0
        for place, (key, nbytes) in enumerate(self.events):
            if key not in kept or any(k == key for k, _ in self.events[place + 1 :]):
                now += nbytes
                most = max(most, now)
        return most


@pytest.fixture
def kept(monkeypatch):
    """Starts no kernel; what sparse gradients are made of, which these would keep where nobody sees it."""
    for module in (dense_products, table_lookups, table_gradients):
        monkeypatch.setattr(module, "run", lambda *args, **meta: None)
    # as many experts as there are pairs
    monkeypatch.setattr(table_gradients, "PendingCount", lambda upto: SimpleNamespace(value=lambda: 1 + upto.storage_offset()))
    made = []
    monkeypatch.setattr(_triton, "row_sparse", lambda *parts: made.extend(parts[:2]) or parts[0])
    return made


def worked_in(kept, T, D, N, K, strategy, dtype=torch.bfloat16, E=None, memory=False, sparse=False, strided=False):
    """Bytes beside inputs and results: of a forward, of a backward."""
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
    given = {"h": h, "w_in": w_in, "w_out": w_out, "weights": weights, "indices": indices, "preact": preact}
    with torch.no_grad(), Allocations() as backward:
        found = _triton.backward({"y": dy}, given, options, frozenset(ATOMIC_EXPERTS.grads))
    return forward.peak([y]), preact.nbytes + backward.peak([*found.values(), *kept])


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
def test_a_cpu_works_in_as_much_and_some_chunks(strategy, dtype, seed, monkeypatch):
    """Where the rows of all pairs would be four times as large."""
    monkeypatch.setattr(_common, "CHUNK_BYTES", chunk := 2**14)
    T, D, N, K = 128, 128, 300, 64
    given = inputs(Make(dtype, "cpu", seed), T=T, D=D, N=N, K=K, strategy=strategy)
    options = {name: given.pop(name) for name in ("activation", "strategy", "sparse_grad")}
    with torch.no_grad(), Allocations() as forward:
        y, preact = reference.forward(*given.values(), **options)
    with torch.no_grad(), Allocations() as backward:
        found = reference.backward({"y": y}, given | {"preact": preact}, options, frozenset(ATOMIC_EXPERTS.grads))
    most = PER_PAIR * T * K + ROWS * 4 * T * D + 8 * chunk
    assert max(forward.peak([y, preact]), backward.peak(list(found.values()))) <= most < T * K * D * 4 / 4


def test_what_is_counted_is_what_lives_at_a_time():
    with Allocations() as all_of_them:
        first = torch.empty(1000, device="meta")
        view = first[:10]
        del first
        second = torch.empty(500, device="meta")
        del view
        third = torch.empty(800, device="meta")
    assert all_of_them.peak([]) == 4 * 1500 and all_of_them.peak([third]) == 4 * 1500
    assert all_of_them.peak([second, third]) == 4 * 1000
