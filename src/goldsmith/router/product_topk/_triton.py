"""router.product_topk on a GPU: one launch each for forward and backward, without intermediate tensors in the forward.

Bytes per row of b-byte logits: forward b (sx + sy) + 8k; backward the same, plus the logits again with log_softmax.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from ...core.tracing import stage
from .._common import flat
from .._kernels.bounded_selection import bounded_kernel
from .._kernels.row_selection import select_row_kernel
from .._kernels.scatter import gradient_kernel
from .._kernels.warp_selection import select_warp_kernel
from . import reference
from .op import keeps_lse

MOST_K, MOST_LOGITS = 128, 2048  # positions take 11 bits of a key
MOST_BOUNDED = 64  # for larger k a row's lists of pairs do not fit a warp's registers
NUMBER_BITS = {32: 7, 64: 9}  # bits that number 119 and 280 pairs
PARTS = {  # pairs of ranks outside the hooks, in lists of 8 whose sums fall and then rise for any sorted logits
    32: (
        ((2, 2), (2, 3), (2, 4), (2, 5), (2, 6), (2, 7), (2, 8), (2, 9)),
        (None, (9, 2), (8, 2), (7, 2), (6, 2), (5, 2), (4, 2), (3, 2)),
        ((3, 3), (3, 4), (4, 4), (4, 5), (7, 3), (6, 3), (5, 3), (4, 3)),
        ((3, 5), (3, 6), (3, 7), None, None, None, None, (5, 4)),
    ),
    64: (
        ((4, 4), (4, 5), (4, 6), (4, 7), (4, 8), (4, 9), (4, 10), (4, 11)),
        ((5, 9), (11, 4), (10, 4), (9, 4), (8, 4), (7, 4), (6, 4), (5, 4)),
        ((5, 5), (5, 6), (6, 6), (6, 7), (7, 7), (6, 8), (5, 8), (5, 7)),
        ((6, 5), (7, 5), (7, 6), (8, 6), None, None, (9, 5), (8, 5)),
    ),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(tensors: dict, options: dict) -> str | None:
    x, y = tensors["x"], tensors["y"]
    if x.dtype not in DTYPES or options["sums"] != "float32":
        return (
            f"{str(x.dtype).removeprefix('torch.')} runs on the reference only; "
            "this backend takes bfloat16, float16 and float32"
        )
    longest = max(x.shape[-1], y.shape[-1])
    if longest > MOST_LOGITS or options["k"] > MOST_K:
        return f"k={options['k']} of {longest} logits per axis; this backend takes at most k={MOST_K} of {MOST_LOGITS}"
    return None


def forward(
    x: Tensor, y: Tensor, *, k: int, log_softmax: bool, weights: str, sums: str
) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows_x, rows_y = x.shape[:-1], flat(x), flat(y)
    T, lse = rows_x.shape[0], keeps_lse(log_softmax, weights)
    new = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=x.device)  # noqa: E731
    scores, indices = new(T, k, dtype=torch.float32), new(T, k, dtype=torch.int32)
    saved = new(T, 2, dtype=torch.float32) if lse else new(0, dtype=torch.float32)
    arguments = (scores, indices, saved, rows_x.stride(0), rows_y.stride(0))
    sizes = (x.shape[-1], y.shape[-1])
    lengths = sizes[0] | sizes[1] | rows_x.stride(0) | rows_y.stride(0)
    if k <= MOST_BOUNDED:
        narrow, room = x.dtype.itemsize == 2, power_of_2(k, 32)
        widths = [max(_width(size), 1 + narrow) for size in sizes]
        tiles = [cdiv(size, 32 * width) for size, width in zip(sizes, widths, strict=True)]
        whole = [
            size % (32 * width) == 0 and not (narrow and (rows.stride(0) % 2 or rows.data_ptr() % 4))
            for rows, size, width in zip((rows_x, rows_y), sizes, widths, strict=True)
        ]
        run(
            bounded_kernel, (T,), rows_x, rows_y, _words(room, x.device), *arguments, *sizes, k, room,
            NUMBER_BITS[room], *widths, *tiles, *whole, max(sizes) > 1024, lse, weights, num_warps=1, rows=lengths,
        )  # fmt: skip
    elif x.dtype.itemsize == 2:
        widths = [_width(size) for size in sizes]
        run(
            select_warp_kernel, (T,), rows_x, rows_y, *arguments, *sizes, k, power_of_2(k, 32), *widths,
            *(size % (32 * width) == 0 for size, width in zip(sizes, widths, strict=True)), lse, weights, num_warps=1,
            rows=lengths,
        )  # fmt: skip
    else:
        most = power_of_2(k)
        pairs = _pairs(most, x.device)
        run(
            select_row_kernel, (T,), rows_x, rows_y, pairs, *arguments, *sizes, pairs.numel(),
            k, most, power_of_2(pairs.numel()), *(power_of_2(size, most) for size in sizes), lse, weights, num_warps=4,
            rows=lengths,
        )  # fmt: skip
    return (
        stage("scores", scores.view(*batch, k)),
        stage("indices", indices.view(*batch, k)),
        saved.view(*batch, 2) if lse else saved,
    )


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, y, k = flat(tensors["x"]), flat(tensors["y"]), options["k"]
    scores, indices, grad = (flat(v) for v in (tensors["scores"], tensors["indices"], grads["scores"]))
    lse = keeps_lse(options["log_softmax"], options["weights"])
    gradients = {name: torch.empty_like(tensors[name], memory_format=torch.contiguous_format) for name in ("x", "y")}
    run(
        gradient_kernel, (x.shape[0],),
        grad, scores, indices, x, y, flat(tensors["lse"]) if lse else scores, gradients["x"], gradients["y"],
        x.stride(0), y.stride(0), x.shape[1], y.shape[1],
        k, power_of_2(k, 16), min(1024, power_of_2(max(x.shape[1], y.shape[1]), 64)), lse, options["weights"],
        "x" in needs, "y" in needs, num_warps=1, rows=x.shape[1] | y.shape[1] | x.stride(0) | y.stride(0),
    )  # fmt: skip
    return {name: stage(f"dscores_{name}", gradients[name]) for name in ("x", "y") if name in needs}


def _width(size: int) -> int:
    """Neighbouring logits that each of 32 lanes reads at once: up to 16 bytes, but few enough to occupy every lane."""
    return min(8, max(1, power_of_2(size // 32 + 1) // 2))


@lru_cache(maxsize=16)
def _pairs(k: int, device: torch.device) -> Tensor:
    """The candidate pairs of ranks as a * k + b."""
    a, b = reference.candidates(k, k, k, device)
    return (a * k + b).to(torch.int32)


@lru_cache(maxsize=8)
def _words(room: int, device: torch.device) -> Tensor:
    """The pairs that bounded_kernel sorts, in tensors of 32, followed by a table from a pair's number to a | b << 8.

    A pair is number | a << 16 | b << 24, where the first pair in lexical order has the largest number; -1 << 31 means
    no pair.
    """
    pairs = list(zip(*(t.tolist() for t in reference.candidates(room, room, room, torch.device("cpu"))), strict=True))
    last = (1 << NUMBER_BITS[room]) - 1
    word = {(a, b): (last - i) | a << 16 | b << 24 for i, (a, b) in enumerate(pairs)}
    none = -(1 << 31)

    def hook(h: int, length: int) -> list[int]:
        """Row h from column h on, then column h upwards from its end: one list that falls and then rises."""
        row = [word[p] for p in pairs if p[0] == h and p[1] >= h]
        column = [word[p] for p in reversed(pairs) if p[1] == h and p[0] > h]
        return row + [none] * (length - len(row) - len(column)) + column

    words = hook(0, 2 * room)
    for h in (1,) if room == 32 else (1, 2):
        words += hook(h, room)
    if room == 64:
        words += hook(3, 32)
    words += [none if p is None else word[p] for part in PARTS[room] for p in part]
    by_number = [a | b << 8 for a, b in reversed(pairs)]
    return torch.tensor(words + [0] * (last + 1 - len(pairs)) + by_number, dtype=torch.int32, device=device)
