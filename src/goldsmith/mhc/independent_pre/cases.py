"""Cases and benchmark sizes of mhc.independent_pre."""

from __future__ import annotations

from ...assay.declare.case import Make
from .._cases import PAIRED_SEGMENTS, bench, build_cases, mixing, streams

__all__ = ["BENCH", "CASES", "SEGMENTS"]


def independent_inputs(
    make: Make,
    T: int | tuple[int, ...],
    n: int,
    dim: int,
    std: float = 1.0,
    gamma: bool = True,
    layout: str = "contiguous",
    rms_eps: float = 1e-6,
    pre_eps: float = 1e-6,
    post_mult: float = 2.0,
    post_eps: float = 1e-6,
) -> dict[str, object]:
    x = streams(make, T if isinstance(T, tuple) else (T,), n, dim, layout)
    weights = mixing(make, n, dim, std=std, gamma=gamma)
    weights |= {"phi": weights["phi"][: 2 * n].contiguous(), "bias": weights["bias"][: 2 * n]}
    weights |= {"alpha": weights["alpha"][:2]}
    numbers = {"rms_eps": rms_eps, "pre_eps": pre_eps, "post_mult": post_mult, "post_eps": post_eps}
    return {"x": x, **weights, **numbers}


SEGMENTS = PAIRED_SEGMENTS

CASES = build_cases(
    independent_inputs,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "empty outputs, zero parameter gradients of the right shape"),
        "one_token": ({"T": 1, "n": 4, "dim": 7, "gamma": False}, "decoding, without gamma as in hy_v4"),
        "three_streams": (
            {"T": 3, "n": 3, "dim": 5, "rms_eps": 0.3, "pre_eps": 0.05, "post_mult": 1.5, "post_eps": 0.2},
            "n is not a power of two; a forgotten eps or factor shows",
        ),
        "one_stream": ({"T": 2, "n": 1, "dim": 515}, "the second slice of the projection is almost all mask"),
        "two_blocks": ({"T": 67, "n": 2, "dim": 3}, "more tokens than a block of any kernel"),
        "leading_dimensions": ({"T": (2, 1), "n": 8, "dim": 1, "std": 3.0}, "16 mixes, saturated sigmoids"),
        "expanded": ({"T": (), "n": 4, "dim": 64, "layout": "expanded"}, "stride 0 over the streams of one token"),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 320}, "sums over more tokens than one block"),
        "wide": ({"T": 33, "n": 4, "dim": 7168}, "a wide K"),
    },
    every_probe=("three_streams",),
)

BENCH = bench(
    independent_inputs,
    forward=9,
    backward=14,
    fixed=lambda n, dim: 8 * n * n * dim,
    why="forward 18*dim bytes per token: x twice, h_in; backward 28*dim: x and grad_h_in twice, dx",
)
