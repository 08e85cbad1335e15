"""The page pool for saved tensors: blocks are reused, never shared, and lent to the system while idle."""

import os
import threading

import pytest
import torch

from goldsmith import experts
from goldsmith.core import native
from goldsmith.experts import _page_pool

MB = 1 << 20
pytestmark = pytest.mark.skipif(not hasattr(_page_pool.mmap, "MADV_FREE"), reason="this system has no MADV_FREE")


@pytest.fixture
def blocks(monkeypatch):
    blocks = _page_pool.PagePool()
    monkeypatch.setattr(_page_pool, "_pool", blocks)
    return blocks


def test_a_block_is_reused_when_nothing_refers_to_it(blocks):
    first = _page_pool.empty((33, MB), torch.uint8)
    place = first.data_ptr()
    part = first[3:, ::2]
    del first
    assert not blocks.idle
    del part
    assert len(blocks.idle) == 1 and not blocks.used
    again = _page_pool.empty((16, MB), torch.bfloat16)
    assert again.data_ptr() == place and again.is_contiguous() and again.shape == (16, MB)


def test_a_block_more_than_a_quarter_too_large_is_not_reused(blocks):
    kept = _page_pool.empty((100, MB), torch.uint8)
    large = _page_pool.empty((50, MB), torch.uint8)
    place = large.data_ptr()
    del large
    near = _page_pool.empty((41, MB), torch.uint8)
    assert near.data_ptr() == place
    del near
    assert _page_pool.empty((38, MB), torch.uint8).data_ptr() != place
    assert kept.numel() == 100 * MB


def test_idle_and_used_blocks_never_exceed_the_most_in_use_at_once(blocks):
    sizes = [40, 60, 100, 36, 80, 33, 120, 45]
    for at, size in enumerate(sizes):
        tensors = [_page_pool.empty((each, MB), torch.uint8) for each in (size, sizes[at - 1])]
        assert sum(map(len, blocks.idle)) + sum(blocks.used.values()) <= blocks.most
        del tensors
    assert blocks.idle and not blocks.used


def test_small_tensors_come_from_torchs_allocator(blocks):
    tensor = _page_pool.empty((31, MB), torch.uint8)
    assert not blocks.used and tensor.shape == (31, MB)


def test_the_error_for_missing_memory_names_its_purpose(blocks):
    with pytest.raises(MemoryError, match=r"1125899.9 GB for the backward's saved tensors \(.*\); use fewer tokens"):
        _page_pool.empty((1 << 50,), torch.uint8)
    assert not blocks.used


def test_threads_never_share_a_block(blocks):
    wrong = []

    def work(number):
        for turn in range(30):
            tensors = [_page_pool.empty((33 + (turn + number) % 3, MB), torch.uint8) for _ in range(2)]
            for tensor in tensors:
                tensor[:, ::4096] = number
            wrong.extend(t for t in tensors if (t[:, ::4096] != number).any())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not blocks.used


@pytest.mark.skipif(native.reason() is not None, reason="the native library is not there")
class TestALayer:
    SHAPES = {"E": 4, "H": 32, "I": 512, "T": 4200, "k": 4}

    def layer(self):
        torch.manual_seed(0)
        E, H, I, T, k = self.SHAPES.values()
        base = experts.pack(torch.randn(E, 2 * I, H) * H**-0.5, torch.randn(E, H, I) * I**-0.5, format="bf16")
        lora = experts.LoRA(E, H, I, rank=2)
        x = torch.randn(T, H, requires_grad=True)
        ids, weights = torch.rand(T, E).topk(k).indices, torch.rand(T, k)
        return lambda: experts.moe(x, ids, weights, base, lora=lora, backend="native"), (x, *lora.parameters())

    def test_reused_memory_gives_the_same_results_as_fresh_memory(self, blocks, monkeypatch):
        forward, wanted = self.layer()
        with monkeypatch.context() as apart:
            apart.setattr(_page_pool, "LEAST", 1 << 60)
            y = forward()
            fresh = [y, *torch.autograd.grad(y, wanted, torch.ones_like(y))]
        places = []
        for _ in range(3):
            y = forward()
            places.append(sorted(blocks.used))
            again = [y, *torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)]
            twice = torch.autograd.grad(y, wanted, torch.ones_like(y))
            assert all(torch.equal(a, b) for a, b in zip(fresh, again, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(fresh[1:], twice, strict=True))
            assert not blocks.used and len(blocks.idle) == 2
        assert len(places[0]) == 2 and places[0] == places[1] == places[2]

    def test_pending_forwards_keep_their_own_saved_tensors(self, blocks):
        forward, wanted = self.layer()
        with torch.no_grad():
            wanted[0].copy_(torch.linspace(-1, 1, wanted[0].numel()).view_as(wanted[0]))
        first = forward()
        alone = torch.autograd.grad(first, wanted, torch.ones_like(first))
        first, second = forward(), forward()
        assert len(blocks.used) == 4
        for y in (second, first):
            later = torch.autograd.grad(y, wanted, torch.ones_like(y))
            assert all(torch.equal(a, b) for a, b in zip(alone, later, strict=True))

    def test_a_forked_child_has_its_own_memory(self, blocks):
        saved = _page_pool.empty((33, MB), torch.uint8)
        saved[:, 0] = 1
        child = os.fork()
        if child == 0:
            saved[:, 0] = 2
            del saved
            again = _page_pool.empty((33, MB), torch.uint8)
            again[:, 0] = 3
            os._exit(0 if len(blocks.used) == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert (saved[:, 0] == 1).all()
