"""Cases and benchmark sizes of mhc.gated_pre."""

from __future__ import annotations

from ...assay.declare.case import Make
from .._cases import bench, build_cases, streams
from .._common import sum_dtype


def gated_inputs(
    make: Make,
    T: int | tuple[int, ...],
    n: int,
    dim: int,
    rank: int = 320,
    mixer: bool = False,
    layout: str = "contiguous",
    rms_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> dict[str, object]:
    """Logits of every gate have a standard deviation of about 1; a mixer has no inject."""
    features = n * dim
    return {
        "x": streams(make, T if isinstance(T, tuple) else (T,), n, dim, layout),
        "gamma": 1 + make.normal(features, std=0.3, dtype=sum_dtype(make.dtype)),
        "down": make.normal(rank, features, std=n / features**0.5),
        "up": make.normal(features, rank, std=1.5 / rank**0.5),
        "inject": None if mixer else make.normal(n, features, std=n / features**0.5),
        "rms_eps": rms_eps,
        "post_mult": post_mult,
    }


CASES = build_cases(
    gated_inputs,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5, "rank": 3}, "empty outputs, zero gradients of the weights"),
        "one_token": ({"T": 1, "n": 4, "dim": 7, "rank": 5}, "decoding"),
        "three_streams": (
            {"T": 3, "n": 3, "dim": 5, "rank": 2, "rms_eps": 0.3, "post_mult": 1.5},
            "n is not a power of two; a forgotten eps or factor shows",
        ),
        "mixer": ({"T": (2, 3), "n": 2, "dim": 16, "rank": 8, "mixer": True}, "the model's end: no injection weights"),
        "two_blocks": ({"T": 67, "n": 2, "dim": 3, "rank": 17}, "more tokens than a block; rank past a power of two"),
        "one_stream": ({"T": 2, "n": 1, "dim": 129, "rank": 65}, "tails of blocks over dim and over rank"),
        "leading_dimensions": (
            {"T": (2, 1), "n": 4, "dim": 16, "rank": 8, "layout": "expanded"},
            "stride 0 over the streams",
        ),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 320, "rank": 64}, "sums over more tokens than one block"),
        "usual_width": ({"T": 129, "n": 4, "dim": 2048}, "Qwen's sizes"),
    },
    every_probe=("three_streams",),
)

BENCH = bench(
    gated_inputs,
    forward=9,
    backward=14,
    fixed=lambda n, dim: 2 * n * dim * (2 * 320 + n),
    why="forward 18*dim bytes per token: x twice, h_in; backward 28*dim: x and grad_h_in twice, dx. "
    "Not counted: the products with down and up, 1280 operations per element of x forward",
)
