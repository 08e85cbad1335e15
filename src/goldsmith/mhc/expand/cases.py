"""mhc.expand: on what it is tried."""

from __future__ import annotations

from typing import Any

from ...assay.declare.case import Make
from .._cases import bench, named


def one_stream(make: Make, T: int | tuple[int, ...], n: int, dim: int) -> dict[str, Any]:
    batch = T if isinstance(T, tuple) else (T,)
    return {"x": make.normal(*batch, dim), "n": n}


CASES = named(
    one_stream,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "an empty output and an empty gradient"),
        "published": ({"T": 13, "n": 4, "dim": 64}, "DeepSeek's n"),
        "odd_dim": ({"T": 2, "n": 4, "dim": 129}, "one past a power of two"),
        "one_channel": ({"T": 3, "n": 2, "dim": 1}, "a block over dim that is almost all mask"),
        "two_blocks": ({"T": 2, "n": 2, "dim": 2051}, "blocks over dim end at 2048; the next is almost all mask"),
        "one_stream": ({"T": 2, "n": 1, "dim": 5}, "a copy, still fresh"),
        "three_streams": ({"T": 3, "n": 3, "dim": 5}, "n is no power of two"),
        "eight_streams": ({"T": 2, "n": 8, "dim": 5}, "sums of eight gradients"),
        "leading_dimensions": ({"T": (2, 1, 3), "n": 4, "dim": 5}, "leading dimensions as they come"),
        "no_leading_dimension": ({"T": (), "n": 4, "dim": 5}, "one token without a batch"),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 1280}, "more tokens than any one block"),
    },
    every_probe=("three_streams",),
)

BENCH = bench(
    one_stream,
    forward=5,
    backward=5,
    why="10*dim bytes a token, forward and backward: one stream and n streams",
)
