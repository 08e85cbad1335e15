"""Cases and benchmark sizes of mhc.collapse."""

from __future__ import annotations

from ...assay.declare.case import Make
from .._cases import bench, build_cases, streams
from .._common import sum_dtype


def collapse_inputs(
    make: Make, T: int | tuple[int, ...], n: int, dim: int, layout: str = "contiguous"
) -> dict[str, object]:
    batch = T if isinstance(T, tuple) else (T,)
    return {"x": streams(make, batch, n, dim, layout), "h_pre": make.uniform(*batch, n, dtype=sum_dtype(make.dtype))}


CASES = build_cases(
    collapse_inputs,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "an empty output and empty gradients"),
        "one_token": ({"T": 1, "n": 4, "dim": 7}, "decoding"),
        "three_streams": ({"T": 5, "n": 3, "dim": 5}, "n is not a power of two"),
        "two_blocks": ({"T": 1, "n": 2, "dim": 1029}, "tails of blocks over dim"),
        "leading_dimensions": ({"T": (2, 1), "n": 8, "dim": 1, "layout": "expanded"}, "stride 0 over the streams"),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 320}, "more tokens than one block of any kernel"),
    },
    every_probe=("three_streams",),
)

BENCH = bench(
    collapse_inputs,
    forward=5,
    backward=9,
    why="forward 10*dim bytes per token: x, h_in; backward 18*dim: x, grad_h_in, dx",
)
