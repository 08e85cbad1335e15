"""LoRA of experts on a GPU, beside their packed weights.

P rows of a call, sorted by expert; a tile has up to BM rows of one expert. Per layer:

    extra[p] = [s_g B_g A_g x, s_u B_u A_u x]      added to the hidden kernel's g and u before they are rounded
    y[p]    += s_d B_d A_d h                       after the down kernel

Sums are in float32; factors keep their dtype and are widened when they are read. Grids: (tiles, blocks of outputs).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._factors import LayerLora
from .launch import Launch

_WARPS = 4
_RANKS, _OUTPUTS, _INPUTS = 16, 64, 64  # ranks and outputs of a program, inputs of a step
_FREE = ["v_ptr", "tokens_ptr", "tiles_ptr", "low_ptr", "out_ptr"]  # pointers with varying alignment


@triton.jit(do_not_specialize=["stride_v", "TILES"], do_not_specialize_on_alignment=_FREE)
def _shrink_kernel(v_ptr, tokens_ptr, tiles_ptr, a_ptr, low_ptr, stride_v, TILES, K, R, BM: tl.constexpr,
                   BR: tl.constexpr, KC: tl.constexpr, BY_TOKEN: tl.constexpr):  # fmt: skip
    """low[p] = A v for the rows of a tile; A [E, R, K]. BY_TOKEN: v has a row per token, otherwise one per p"""
    tile = tl.program_id(0)
    first, count = tl.load(tiles_ptr + TILES + tile), tl.load(tiles_ptr + 2 * TILES + tile)
    expert = tl.load(tiles_ptr + 3 * TILES + tile).to(tl.int64)
    row = tl.arange(0, BM)
    good = row < count
    if BY_TOKEN:
        at = tl.load(tokens_ptr + first + row, good, 0).to(tl.int64) * stride_v
    else:
        at = (first + row).to(tl.int64) * stride_v
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    a_ptr += expert * R * K
    total = tl.zeros((BM, BR), tl.float32)
    for step in range(tl.cdiv(K, KC)):
        k = step * KC + tl.arange(0, KC)
        v = tl.load(v_ptr + at[:, None] + k[None, :], good[:, None] & (k[None, :] < K), 0.0).to(tl.float32)
        a = tl.load(a_ptr + r[None, :] * K + k[:, None], (r[None, :] < R) & (k[:, None] < K), 0.0).to(tl.float32)
        total = tl.dot(v, a, total, input_precision="ieee")
    low = low_ptr + (first + row).to(tl.int64)[:, None] * R + r[None, :]
    tl.store(low, total, good[:, None] & (r[None, :] < R))


@triton.jit(do_not_specialize=["TILES"], do_not_specialize_on_alignment=_FREE)
def _expand_kernel(low_ptr, tiles_ptr, b_ptr, out_ptr, TILES, N, R, WIDE, SECOND, scale_0, scale_1, BM: tl.constexpr,
                   BN: tl.constexpr, BR: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """out[p, N part + n] = scale B low[p] for the rows of a tile; ADD: added to what is there

    B [E, parts, N, R]; part 1 reads low from column SECOND on. WIDE: columns of low.
    """
    tile, part = tl.program_id(0), tl.program_id(2)
    first, count = tl.load(tiles_ptr + TILES + tile), tl.load(tiles_ptr + 2 * TILES + tile)
    expert = tl.load(tiles_ptr + 3 * TILES + tile).to(tl.int64)
    row = tl.arange(0, BM)
    good = row < count
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    parts = tl.num_programs(2)
    b_ptr += (expert * parts + part) * N * R
    rows = (first + row).to(tl.int64)
    offset = part * SECOND
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(R, BR)):
        r = step * BR + tl.arange(0, BR)
        low = tl.load(low_ptr + rows[:, None] * WIDE + offset + r[None, :],
                      good[:, None] & (r[None, :] < R) & (offset + r[None, :] < WIDE), 0.0)  # fmt: skip
        b = tl.load(b_ptr + n[None, :].to(tl.int64) * R + r[:, None], (n[None, :] < N) & (r[:, None] < R), 0.0)
        total = tl.dot(low, b.to(tl.float32), total, input_precision="ieee")
    total *= tl.where(part == 0, scale_0, scale_1)
    spot = out_ptr + rows[:, None] * (N * parts) + part * N + n[None, :]
    inside = good[:, None] & (n[None, :] < N)
    if ADD:
        total += tl.load(spot, inside, 0.0)
    tl.store(spot, total, inside)


class PanelFactors:
    """A layer's LoRA on a GPU, in the order in which the kernels read it

    memory   uint8 on the device, at least `nbytes_of` the LoRA: the factors are copied there
    low, extra   float32 workspaces, flat: [P, rank] and [P, 2 I] for the most rows of a call
    """

    def __init__(self, lora: LayerLora, memory: Tensor, low: Tensor, extra: Tensor) -> None:
        self._low, self._extra = low, extra
        self._launches: dict[tuple[object, ...], Launch] = {}
        self.hidden: tuple[Tensor, Tensor, int, tuple[float, float]] | None = None  # A, B, column of up, scales
        self.down: tuple[Tensor, Tensor, float] | None = None
        at = 0

        def place(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal at
            nbytes = _bytes(shape, dtype)
            tensor = memory[at : at + nbytes].view(dtype).view(shape)
            at += -(-nbytes // 16) * 16
            return tensor

        for name, shapes in _shapes(lora).items():
            dtype = _dtype(lora, name)
            a, b = (place(shape, dtype) for shape in shapes)
            pairs = {target: lora.factors[target] for target in _parts(name) if target in lora.factors}
            if name == "down":
                a.copy_(pairs["down"][0])
                b[:, 0].copy_(pairs["down"][1])
                self.down = a, b, float(lora.scaling["down"])
                continue
            b.zero_()
            shared, column = lora.shared, 0
            for part, target in enumerate(("gate", "up")):
                if target not in pairs:
                    continue
                source, expand = pairs[target]
                if not (shared and part):
                    a[:, column : column + source.shape[1]].copy_(source)
                b[:, part, :, : expand.shape[2]].copy_(expand)
                column += 0 if shared else source.shape[1]
            first = pairs["gate"][0].shape[1] if "gate" in pairs and not shared else 0
            scales = tuple(float(lora.scaling.get(target, 0.0)) for target in ("gate", "up"))
            self.hidden = a, b, first, (scales[0], scales[1])

    @property
    def rank(self) -> int:
        """The most columns of `low`."""
        return max((part[0].shape[1] for part in (self.hidden, self.down) if part is not None), default=0)

    def with_workspaces(self, low: Tensor, extra: Tensor) -> PanelFactors:
        """The same factors with workspaces of their own"""
        other = copy.copy(self)
        other._low, other._extra, other._launches = low, extra, {}
        return other

    @property
    def has_hidden(self) -> bool:
        return self.hidden is not None

    def extra_of(self, x: Tensor, tokens: Tensor, tiles: Tensor, rows: int) -> Tensor | None:
        """extra [P, 2 I] float32 for the rows of the tiles (flat, in the workspace); None without LoRA on gate and up

        tiles int32 [4, n]: slot, first row, rows (at most `rows`), expert.
        """
        if self.hidden is None:
            return None
        a, b, second, scales = self.hidden
        self._shrink(x, tokens, tiles, a, rows, by_token=True)
        self._expand(tiles, b, self._extra, a.shape[1], second, scales, rows, add=False)
        return self._extra

    def add_to(self, h: Tensor, tiles: Tensor, y: Tensor, intermediate: int, rows: int) -> None:
        """y[p] += s B A h[p] for the rows of the tiles; h has `intermediate` numbers per row, flat or not."""
        if self.down is None:
            return
        a, b, scale = self.down
        self._shrink(h, tiles, tiles, a, rows, by_token=False, stride=intermediate)
        self._expand(tiles, b, y, a.shape[1], 0, (scale, 0.0), rows, add=True)

    def _shrink(
        self, v: Tensor, tokens: Tensor, tiles: Tensor, a: Tensor, rows: int, *, by_token: bool, stride: int = 0
    ) -> None:
        rank, inputs, count = a.shape[1], a.shape[2], tiles.shape[1]
        fixed = (inputs, rank, max(16, rows), _RANKS, _INPUTS, by_token)
        launch = self._launch(_shrink_kernel, fixed, (v.dtype, a.dtype))
        grid = (count, -(-rank // _RANKS), 1)
        launch(grid, v.device, v, tokens, tiles, a, self._low, stride or v.stride(0), count)

    def _expand(
        self, tiles: Tensor, b: Tensor, out: Tensor, wide: int, second: int, scales: tuple[float, float], rows: int, *,
        add: bool,
    ) -> None:  # fmt: skip
        _, parts, outputs, rank = b.shape
        count = tiles.shape[1]
        fixed = (outputs, rank, wide, second, *scales, max(16, rows), _OUTPUTS, _RANKS, add)
        launch = self._launch(_expand_kernel, fixed, (b.dtype,))
        launch((count, -(-outputs // _OUTPUTS), parts), out.device, self._low, tiles, b, out, count)

    def _launch(self, kernel: object, fixed: tuple[int | float | bool, ...], dtypes: tuple[torch.dtype, ...]) -> Launch:
        key = (id(kernel), fixed, dtypes)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = Launch(kernel, fixed, _WARPS)
        return launch


def nbytes_of(lora: LayerLora) -> int:
    """Bytes of the device memory that `PanelFactors` needs for this LoRA."""
    sizes = [_bytes(shape, _dtype(lora, name)) for name, shapes in _shapes(lora).items() for shape in shapes]
    return sum(-(-size // 16) * 16 for size in sizes)


def rank_of(lora: LayerLora) -> int:
    """The most columns of `low`."""
    return max((a[1] for a, _ in _shapes(lora).values()), default=0)


def _shapes(lora: LayerLora) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """{"hidden" or "down": (shape of A [E, R, in], shape of B [E, parts, out, r])} of the parts that have LoRA."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    pairs = [lora.factors[target] for target in ("gate", "up") if target in lora.factors]
    if pairs:
        experts, _, inputs = pairs[0][0].shape
        ranks = [a.shape[1] for a, _ in pairs]
        wide = ranks[0] if lora.shared else sum(ranks)
        shapes["hidden"] = (experts, wide, inputs), (experts, 2, pairs[0][1].shape[1], max(ranks))
    if "down" in lora.factors:
        a, b = lora.factors["down"]
        shapes["down"] = tuple(a.shape), (b.shape[0], 1, b.shape[1], b.shape[2])
    return shapes


def _parts(name: str) -> tuple[str, ...]:
    return ("down",) if name == "down" else ("gate", "up")


def _dtype(lora: LayerLora, name: str) -> torch.dtype:
    """bfloat16 if all factors of this part are, otherwise float32."""
    dtypes = {t.dtype for target in _parts(name) for t in lora.factors.get(target, ())}
    return torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize
