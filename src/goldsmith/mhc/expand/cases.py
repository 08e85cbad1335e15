"""Cases and benchmark sizes of mhc.expand."""

from __future__ import annotations

from ...assay.declare.case import Make
from .._cases import bench, build_cases


def one_stream(make: Make, T: int | tuple[int, ...], n: int, dim: int) -> dict[str, object]:
    batch = T if isinstance(T, tuple) else (T,)
    return {"x": make.normal(*batch, dim), "n": n}


CASES = build_cases(
    one_stream,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "an empty output and an empty gradient"),
        "published": ({"T": 13, "n": 4, "dim": 64}, "DeepSeek's n"),
        "odd_dim": ({"T": 2, "n": 4, "dim": 129}, "one past a power of two"),
        "one_channel": ({"T": 3, "n": 2, "dim": 1}, "a block over dim that is almost all mask"),
        "two_blocks": ({"T": 2, "n": 2, "dim": 2051}, "blocks over dim end at 2048; the next is almost all mask"),
        "one_stream": ({"T": 2, "n": 1, "dim": 5}, "a copy, not a view"),
        "three_streams": ({"T": 3, "n": 3, "dim": 5}, "n is not a power of two"),
        "eight_streams": ({"T": 2, "n": 8, "dim": 5}, "sums of eight gradients"),
        "leading_dimensions": ({"T": (2, 1, 3), "n": 4, "dim": 5}, "three leading dimensions"),
        "no_leading_dimension": ({"T": (), "n": 4, "dim": 5}, "one token without a batch"),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 320}, "more tokens than one block of any kernel"),
    },
    every_probe=("three_streams",),
)

BENCH = bench(
    one_stream,
    forward=5,
    backward=5,
    why="10*dim bytes per token, forward and backward: one stream and n streams",
)
