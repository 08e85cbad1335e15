"""What a machine does with experts of a store, measured: seconds of kernels and of copies.

Rates are medians and latencies the quickest of calls, over experts in turn, more of them than the last-level cache
holds; each stops at its share of the time. The store's own pages are used where they are many enough and in memory,
else copies of them.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..experts import PackedExperts
from ..experts.memory import empty_pages
from .kernel import Kernels, loaded
from .store import ExpertStore
from .transport import Transport, move

COUNTS = (1, 4, 16, 64)  # tokens of an expert
LARGE = 512  # on a GPU, where 64 do not fill the device
_TOGETHER = 8  # experts of a call
_MOST = 384 << 20  # bytes of experts that are read in turn
_PATIENCE = 0.8  # seconds for bringing the store's pages into memory


class HostBench:
    """The CPU's kernel and copies, over `base`, blocks that together exceed the last-level cache."""

    def __init__(self, store: ExpertStore, threads: int) -> None:
        self.store, self.threads, self._kernels = store, threads, Kernels(store.options, threads)
        self.blocks = beyond_cache(store)
        self.base: PackedExperts = store.blocks.base(self.blocks)
        self.together = min(_TOGETHER, len(self.blocks))
        self.dtype = torch.bfloat16 if store.dtype == torch.bfloat16 else torch.float32
        self._turn = 0

    def kernel(self, tokens: int, seconds: float) -> float:
        """Seconds of a call in which each of a few experts has that many tokens."""
        return median(self.call(tokens, self.together), seconds)

    def latency(self, seconds: float) -> float:
        """Seconds of a call in which every slot is skipped."""
        return quickest(self.call(1, 0), seconds)

    def call(self, tokens: int, experts: int) -> Callable[[], None]:
        """Such a call, over other experts every time; experts=0: every slot is skipped."""
        wide = max(1, experts)
        x = torch.randn(tokens, self.store.hidden_size).to(self.dtype)
        rows, flags = torch.empty(tokens * wide, self.store.hidden_size), torch.empty(tokens * wide, dtype=torch.uint8)
        skipped = torch.full((tokens, wide), -1)

        def run() -> None:
            ids = skipped
            if experts:
                ids = ((torch.arange(wide) + self._turn) % len(self.blocks)).expand(tokens, wide).contiguous()
                self._turn = (self._turn + wide) % len(self.blocks)
            self._kernels.rows(x, ids, self.base, rows, flags)

        return run

    def copy(self, seconds: float) -> float:
        """Seconds of a copy of one expert from memory to memory."""
        return median(self.copier(torch.empty(2, self.store.blocks.stride, dtype=torch.uint8)), seconds)

    def copier(self, slots: Tensor) -> Callable[[], None]:
        turn = 0

        def run() -> None:
            nonlocal turn
            turn += 1
            move(self.blocks[turn % len(self.blocks)], slots[turn % len(slots)])

        return run

    def together_with(self, copy: Callable[[], None], seconds: float) -> float:
        """Bytes a second that the kernel at one token and copies read together of memory, both as fast as they can."""
        kernel, copied, stop = self.call(1, self.together), 0, threading.Event()

        def copying() -> None:
            nonlocal copied
            while not stop.is_set():
                copy()
                copied += 1

        kernel()
        thread = threading.Thread(target=copying, daemon=True)
        thread.start()
        computed, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            kernel()
            computed += self.together
        spent = time.perf_counter() - begin
        stop.set()
        thread.join()
        return (computed + copied) * self.store.blocks.stride / spent


class DeviceBench:
    """Copies to a GPU and the GPU's kernel; blocks that together exceed its L2."""

    def __init__(self, store: ExpertStore, host: HostBench, device: torch.device) -> None:
        self.store, self.host, self.device = store, host, device
        self.transport = Transport(store, device)
        stride = store.blocks.stride
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        free = torch.cuda.mem_get_info(device)[0]
        count = min(max(_TOGETHER, -(-2 * l2 // stride)), max(1, int(0.25 * free) // stride))
        self.arena = torch.empty(count, stride, dtype=torch.uint8, device=device)
        self.together = min(_TOGETHER, count)
        self._turn = 0
        self._first = store.layers[0]
        for slot in range(count):
            expert = slot % store.num_experts(self._first)
            self.transport.copy(store.raw(self._first, expert), self.arena[slot])
        torch.cuda.synchronize(device)
        self.base = store.blocks.base(self.arena)

    def copy(self, seconds: float) -> float:
        """Seconds of a copy of one expert, several under way."""
        return self._copies(seconds, self.transport.copy)

    def pageable(self, seconds: float) -> float:
        """The same out of ordinary memory."""
        source = torch.empty(self.store.blocks.stride, dtype=torch.uint8).random_(0, 255)
        return self._copies(seconds, lambda _, out: out.copy_(source))

    def _copies(self, seconds: float, copy: Callable[[Tensor, Tensor], object]) -> float:
        few = 4

        def run() -> None:
            for i in range(few):
                expert = (self._turn + i) % self.store.num_experts(self._first)
                copy(self.store.raw(self._first, expert), self.arena[i % len(self.arena)])
            self._turn += few
            torch.cuda.synchronize(self.device)

        return median(run, seconds) / few

    def copier(self) -> Callable[[], None]:
        """A copy of one expert, waited for, on a stream of its own."""
        stream = torch.cuda.Stream(self.device)

        def run() -> None:
            self._turn += 1
            expert = self._turn % self.store.num_experts(self._first)
            self.transport.copy(self.store.raw(self._first, expert), self.arena[0], stream)
            stream.synchronize()

        return run

    def link_latency(self, seconds: float) -> float:
        """Seconds until a copy of one page has arrived."""
        page, out = self.store.raw(self._first, 0)[:4096], self.arena[0, :4096]

        def run() -> None:
            self.transport.copy(page, out)
            torch.cuda.synchronize(self.device)

        return quickest(run, seconds)

    def kernel(self, tokens: int, seconds: float, *, experts: int | None = None) -> float:
        """Seconds of a call in which each of `experts` experts has that many tokens, launches included."""
        panels = loaded("experts._kernels.panels")

        count, device = self.together if experts is None else experts, self.device
        config, rows = panels.pick(tokens), count * tokens
        x = torch.randn(tokens, self.store.hidden_size, device=device).to(self.host.dtype)
        narrow = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        h = torch.empty(rows, self.store.intermediate_size, dtype=narrow, device=device)
        y = torch.empty(rows, self.store.hidden_size, device=device)
        index = torch.arange(tokens, dtype=torch.int32, device=device).repeat(count)
        starts = list(range(0, rows, tokens))
        sets = []
        for first in range(0, len(self.arena), count):
            chosen = [(first + i) % len(self.arena) for i in range(count)]
            listed = panels.tiles_of(chosen, [tokens] * count, starts, config.rows)
            sets.append(torch.tensor(listed, dtype=torch.int32, device=device))

        def run() -> None:
            self._turn += 1
            tiles = sets[self._turn % len(sets)]
            panels.panels_forward(x, index, tiles, self.base, h, y, config, **self.store.options)
            torch.cuda.synchronize(self.device)

        run()  # compiles
        return quickest(run, seconds) if tokens == 1 else median(run, seconds)

    def memory(self, seconds: float) -> float:
        """Bytes a second of copies inside the device, read and written; of blocks, which are others' afterwards."""
        half, times = len(self.arena) // 2, 8
        if not half:
            return math.inf

        def run() -> None:
            for _ in range(times):
                self.arena[half : 2 * half].copy_(self.arena[:half])
            torch.cuda.synchronize(self.device)

        return 2 * times * half * self.store.blocks.stride / median(run, seconds)

    def give_way(self) -> None:
        """Gives the device's memory back, so that nothing of it counts against a budget; `transport` stays."""
        torch.cuda.synchronize(self.device)
        self.arena = torch.empty(0, dtype=torch.uint8)
        del self.base
        torch.cuda.empty_cache()

    def close(self) -> None:
        if len(self.arena):
            self.give_way()
        self.transport.close()


def median(run: Callable[[], object], seconds: float) -> float:
    """The median time of a call, after one to warm up; at least three calls, or one where it takes that long."""
    return statistics.median(_times(run, seconds))


def quickest(run: Callable[[], object], seconds: float) -> float:
    """The least time of a call, for latencies: whatever else the machine does only adds to them."""
    return min(_times(run, seconds))


def _times(run: Callable[[], object], seconds: float) -> list[float]:
    begin = time.perf_counter()
    run()
    first = time.perf_counter() - begin
    if first > seconds:
        return [first]
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        at = time.perf_counter()
        run()
        times.append(time.perf_counter() - at)
    return times


def beyond_cache(store: ExpertStore) -> Tensor:
    """Blocks [n, stride] of twice the last-level cache's bytes: the store's own pages, or copies of them."""
    stride = store.blocks.stride
    wanted = min(max(2, -(-min(_MOST, 2 * last_level_cache()) // stride)), 4096)
    largest = max(store.layers, key=store.num_experts)
    own = store.raw_layer(largest)[:wanted]
    if len(own) == wanted and _in_memory(own):
        return own
    made = empty_pages(wanted * stride).view(wanted, stride)
    for i in range(wanted):
        move(own[i % min(len(own), 4)], made[i])
    return made


def _in_memory(blocks: Tensor) -> bool:
    """Whether all their pages could be read in a short time, which leaves them in memory."""
    begin = time.perf_counter()
    for block in blocks:
        block.view(-1, 4096)[:, 0].clone()
        if time.perf_counter() - begin > _PATIENCE:
            return False
    return True


def last_level_cache() -> int:
    """Bytes; 32 MiB where the system does not say."""
    found = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        found.append(int(text.rstrip("KMG") or 0) * unit)
    return max(found, default=32 << 20)
