"""Benches: timings of kernels and copies over experts of a store.

Work is timed by the median, latency by the quickest call. Calls take experts in turn, more of them than the last-level
cache holds, so that weights come from memory. Each measurement stops at its share of the time. The bench uses the
store's own pages if there are enough of them in memory, otherwise copies.
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

from ...experts import PackedExperts
from ...experts.packed.memory import empty_pages
from ..lanes.cpu_lane import CpuLane
from ..lanes.kernels import Kernels, kernel_module
from ..memory.transport import Transport, move
from ..store.expert_store import ExpertStore

# Tokens per expert. Tiles of 16 and 32 rows make the time a staircase; these counts are in the middle of its steps, so
# that a line between two of them is above the staircase as often as below. Row 33 took 16 %, rows 18 to 32 took 12 %
# (bf16, a core of a Xeon with AMX).
COUNTS = (1, 4, 12, 24, 48, 112, 240)
CONTENDED_TOKENS = (1, 24)  # token counts measured while copies run
ON_DEVICE = (1, 32, 128, 512)  # token counts on a GPU; 64 do not fill it
_TOGETHER, _PROMPT = 8, 32  # experts of a call of one token, and of a prompt
_CALLS = 5  # calls for which there should be time
_UNDER_WAY = 4  # copies under way at once
_MOST = 384 << 20  # most bytes of experts that are read in turn
_PATIENCE = 0.8  # seconds to read the store's pages into memory


class HostBench:
    """The CPU's kernel and copies over `base`: blocks that together exceed the last-level cache

    lane   True: the kernel runs and is timed in the CPU lane's thread, each route by itself, as beside a GPU. False: it
           runs in this thread, as on device="cpu"
    """

    def __init__(self, store: ExpertStore, threads: int, *, lane: bool = False) -> None:
        self.store, self.threads, self._kernels = store, threads, Kernels(store.options, threads)
        self._lane = CpuLane(store.options, threads) if lane else None
        self.blocks = blocks_beyond_cache(store)
        self.base: PackedExperts = store.blocks.base(self.blocks)
        self.together = min(_TOGETHER, len(self.blocks))
        self.dtype = torch.bfloat16 if store.dtype == torch.bfloat16 else torch.float32
        self._turn = 0

    def curve(self, seconds: float) -> dict[int, float]:
        """{tokens: seconds of one expert with that many, in a call of several} for COUNTS, `seconds` for each
        measurement

        The time of a call with all routes skipped is subtracted. Counts that would take much longer are left out.
        """
        call, times = self.latency(seconds / 2), dict[int, float]()
        for tokens in COUNTS:
            experts = self.together
            if times:  # at most proportional to the tokens
                n, each = next(reversed(times.items()))
                if each * tokens / n > seconds:
                    break
                experts = max(1, min(_PROMPT, len(self.blocks), int(seconds / (_CALLS * each * tokens / n))))
            duration = median(self.call(tokens, experts), seconds)
            times[tokens] = max(duration - call, 0.1 * duration) / experts
        return times

    def latency(self, seconds: float) -> float:
        """Seconds of a call in which every route is skipped."""
        return quickest(self.call(1, 0), seconds)

    def call(self, tokens: int, experts: int) -> Callable[[], float | None]:
        """A function that makes such a call, with other experts every time, and returns its seconds if the lane timed
        it

        experts=0: every route is skipped.
        """
        wide = max(1, experts)
        x = torch.randn(tokens, self.store.hidden_size, dtype=torch.float32, device="cpu").to(self.dtype)
        rows = torch.empty(tokens * wide, self.store.hidden_size, dtype=torch.float32, device="cpu")
        flags = torch.empty(tokens * wide, dtype=torch.uint8, device="cpu")
        apart = self._lane is not None and tokens > 1  # sorted by expert, as the engine's lane has them
        if apart:
            x = x.repeat(wide, 1)

        def ids(first: int) -> Tensor:
            chosen = torch.arange(first, first + wide, device="cpu") % len(self.blocks)
            chosen = chosen if experts else torch.full_like(chosen, -1)
            return chosen.repeat_interleave(tokens)[:, None] if apart else chosen.expand(tokens, wide).contiguous()

        turns = [ids(first) for first in range(0, len(self.blocks), wide)]

        def run() -> float | None:
            self._turn += 1
            arguments = x, turns[self._turn % len(turns)], self.base, rows, flags
            if self._lane is None:
                self._kernels.rows(*arguments)
                return None
            self._lane.begin(*arguments)
            begin, end = self._lane.end()
            return end - begin

        return run

    def copy(self, seconds: float) -> float:
        """Seconds to copy one expert from memory to memory."""
        return median(self.copier(torch.empty(2, self.store.blocks.stride, dtype=torch.uint8, device="cpu")), seconds)

    def copier(self, slots: Tensor) -> Callable[[], None]:
        turn = 0

        def run() -> None:
            nonlocal turn
            turn += 1
            move(self.blocks[turn % len(self.blocks)], slots[turn % len(slots)])

        return run

    def together_with(
        self, copy: Callable[[], int | None], seconds: float, tokens: int = 1, each: float = 0.0
    ) -> tuple[float, float]:
        """(seconds of an expert of `tokens` tokens, seconds of a copy of one expert), while both run at full speed

        copy() makes copies and returns their number; None means one. each: seconds of such an expert alone, if known.
        """
        experts = self.together if tokens == 1 else min(_PROMPT, len(self.blocks))
        if each:
            experts = max(1, min(experts, int(seconds / (_CALLS * each))))
        kernel, copied, stop = self.call(tokens, experts), 0, threading.Event()

        def copying() -> None:
            nonlocal copied
            while not stop.is_set():
                done = copy()
                copied += 1 if done is None else done

        kernel()
        thread = threading.Thread(target=copying, daemon=True)
        thread.start()
        times, begin = list[float](), time.perf_counter()
        while (now := time.perf_counter()) - begin < seconds or len(times) < 2:
            duration = kernel()
            times.append(time.perf_counter() - now if duration is None else duration)
        spent, done = time.perf_counter() - begin, copied
        stop.set()
        thread.join()
        return statistics.median(times) / experts, spent / max(1, done)

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()


class DeviceBench:
    """Copies to a GPU and the GPU's kernel, over blocks that together exceed its L2."""

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
        """Seconds to copy one expert, with several copies under way."""
        return self._copies(seconds, self.transport.copy)

    def pageable(self, seconds: float) -> float:
        """Seconds to copy one expert from pageable memory."""
        source = torch.empty(self.store.blocks.stride, dtype=torch.uint8, device="cpu").random_(0, 255)
        return self._copies(seconds, lambda _, out: out.copy_(source))

    def _copies(self, seconds: float, copy: Callable[[Tensor, Tensor], object]) -> float:
        def run() -> None:
            for i in range(_UNDER_WAY):
                expert = (self._turn + i) % self.store.num_experts(self._first)
                copy(self.store.raw(self._first, expert), self.arena[i % len(self.arena)])
            self._turn += _UNDER_WAY
            torch.cuda.synchronize(self.device)

        return median(run, seconds) / _UNDER_WAY

    def copier(self) -> Callable[[], int]:
        """A function that copies a few experts on its own stream, waits, and returns their number."""
        stream = torch.cuda.Stream(self.device)

        def run() -> int:
            for _ in range(_UNDER_WAY):
                self._turn += 1
                expert = self._turn % self.store.num_experts(self._first)
                self.transport.copy(self.store.raw(self._first, expert), self.arena[0], stream)
            stream.synchronize()
            return _UNDER_WAY

        return run

    def link_latency(self, seconds: float) -> float:
        """Seconds until a copy of one page has arrived."""
        page, out = self.store.raw(self._first, 0)[:4096], self.arena[0, :4096]

        def run() -> None:
            self.transport.copy(page, out)
            torch.cuda.synchronize(self.device)

        return quickest(run, seconds)

    def kernel(self, tokens: int, seconds: float, *, experts: int | None = None) -> float:
        """Seconds of a call in which each of `experts` experts has `tokens` tokens, including launches."""
        panels = kernel_module("experts._kernels.panels")

        count, device = self.together if experts is None else experts, self.device
        config, rows = panels.pick(tokens), count * tokens
        x = torch.randn(tokens, self.store.hidden_size, dtype=torch.float32, device=device).to(self.host.dtype)
        narrow = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        h = torch.empty(rows, self.store.intermediate_size, dtype=narrow, device=device)
        y = torch.empty(rows, self.store.hidden_size, dtype=torch.float32, device=device)
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
        """Bytes per second of copies inside the device, read plus written; overwrites the blocks."""
        half, times = len(self.arena) // 2, 8
        if not half:
            return math.inf

        def run() -> None:
            for _ in range(times):
                self.arena[half : 2 * half].copy_(self.arena[:half])
            torch.cuda.synchronize(self.device)

        return 2 * times * half * self.store.blocks.stride / median(run, seconds)

    def free_arena(self) -> None:
        """Frees the device memory, so that it does not count against a budget; `transport` stays."""
        torch.cuda.synchronize(self.device)
        self.arena = torch.empty(0, dtype=torch.uint8, device="cpu")
        del self.base
        torch.cuda.empty_cache()

    def close(self) -> None:
        if len(self.arena):
            self.free_arena()
        self.transport.close()


Timed = Callable[[], object]  # returns its seconds as a float, or anything else to be timed from outside


def median(run: Timed, seconds: float) -> float:
    """The median seconds of a call, after one to warm up; of at least three calls, or of one if it takes that long."""
    return statistics.median(_times(run, seconds))


def quickest(run: Timed, seconds: float) -> float:
    """The least seconds of a call, for latencies: other load on the machine only adds to them."""
    return min(_times(run, seconds))


def _times(run: Timed, seconds: float) -> list[float]:
    def timed() -> float:
        begin = time.perf_counter()
        duration = run()
        return duration if isinstance(duration, float) else time.perf_counter() - begin

    begin, first = time.perf_counter(), timed()
    if first > seconds:
        return [first]
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        times.append(timed())
    return times


def blocks_beyond_cache(store: ExpertStore) -> Tensor:
    """Blocks [n, stride] of twice the last-level cache's size: the store's own pages, or copies of them."""
    stride = store.blocks.stride
    wanted = min(max(2, -(-min(_MOST, 2 * last_level_cache()) // stride)), 4096)
    largest = max(store.layers, key=store.num_experts)
    own = store.raw_layer(largest)[:wanted]
    if len(own) == wanted and _in_memory(own):
        return own
    copies = empty_pages(wanted * stride).view(wanted, stride)
    for i in range(wanted):
        move(own[i % min(len(own), 4)], copies[i])
    return copies


def _in_memory(blocks: Tensor) -> bool:
    """Whether all pages could be read within _PATIENCE, which leaves them in memory."""
    begin = time.perf_counter()
    for block in blocks:
        block.view(-1, 4096)[:, 0].clone()
        if time.perf_counter() - begin > _PATIENCE:
            return False
    return True


def last_level_cache() -> int:
    """Bytes of the last-level cache; 32 MiB if unknown."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG") or 0) * unit)
    return max(sizes, default=32 << 20)
