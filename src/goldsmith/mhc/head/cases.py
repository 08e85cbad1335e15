"""Cases and benchmark sizes of mhc.head."""

from __future__ import annotations

from ...assay.declare.case import Make
from .._cases import bench, build_cases, mixing, streams


def head_inputs(
    make: Make,
    T: int | tuple[int, ...],
    n: int,
    dim: int,
    gamma: bool = True,
    layout: str = "contiguous",
    rms_eps: float = 1e-6,
    pre_eps: float = 1e-6,
) -> dict[str, object]:
    batch = T if isinstance(T, tuple) else (T,)
    x, weights = streams(make, batch, n, dim, layout), mixing(make, n, dim, gamma=gamma)
    weights |= {"phi": weights["phi"][:n].contiguous(), "alpha": weights["alpha"][:1], "bias": weights["bias"][:n]}
    return {"x": x, **weights, "rms_eps": rms_eps, "pre_eps": pre_eps}


CASES = build_cases(
    head_inputs,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "an empty output, zero parameter gradients of the right shape"),
        "one_token": ({"T": 1, "n": 4, "dim": 64}, "decoding"),
        "published": ({"T": 13, "n": 4, "dim": 64, "gamma": False}, "DeepSeek's form"),
        "odd_dim": ({"T": 2, "n": 4, "dim": 129}, "one past a power of two"),
        "one_channel": ({"T": 3, "n": 4, "dim": 1}, "a block over dim that is almost all mask"),
        "two_slices": ({"T": 1, "n": 1, "dim": 1029}, "the projection is summed in slices of 512 channels"),
        "two_blocks": ({"T": 67, "n": 2, "dim": 3}, "more tokens than a block of any kernel"),
        "one_stream": ({"T": 2, "n": 1, "dim": 5}, "one mix"),
        "three_streams": ({"T": 3, "n": 3, "dim": 5}, "n is not a power of two"),
        "eight_streams": ({"T": 2, "n": 8, "dim": 5}, "eight mixes"),
        "large_epsilons": ({"T": 3, "n": 2, "dim": 5, "rms_eps": 0.3, "pre_eps": 0.05}, "a forgotten eps shows"),
        "leading_dimensions": ({"T": (2, 1, 3), "n": 4, "dim": 5}, "three leading dimensions"),
        "no_leading_dimension": ({"T": (), "n": 4, "dim": 5}, "one token without a batch"),
        "expanded": ({"T": 3, "n": 4, "dim": 64, "layout": "expanded"}, "stride 0 over the streams"),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 320}, "sums over more tokens than one block"),
        "usual_width": ({"T": 129, "n": 4, "dim": 4096}, "a common training width"),
        "wide": ({"T": 33, "n": 4, "dim": 7168}, "DeepSeek's widest K"),
    },
    every_probe=("three_streams",),
)

BENCH = bench(
    head_inputs,
    forward=9,
    backward=14,
    fixed=lambda n, dim: 4 * n * n * dim,
    why="forward 18*dim bytes per token: x twice, h; backward 28*dim: x and grad_h twice, dx",
)
