"""mhc.boundary: on what it is tried."""

from __future__ import annotations

from typing import Any

from ...assay.case import Make
from .._cases import SEGMENTS, bench, named, phi_bytes, post_inputs, pre_inputs

__all__ = ["BENCH", "CASES", "SEGMENTS"]


def connection(
    make: Make,
    T: int | tuple[int, ...],
    n: int,
    dim: int,
    layout: str = "contiguous",
    orientation: str = "in_out",
    **settings: Any,
) -> dict[str, Any]:
    """The streams and coefficients of one connection, the parameters of the next."""
    before = post_inputs(make, T, n, dim, layout, orientation)
    after = pre_inputs(make, T, n, dim, **settings)
    return {**after, **before}


CASES = named(
    connection,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "empty outputs, zero parameter gradients of the right shape"),
        "one_token": ({"T": 1, "n": 4, "dim": 64, "iterations": 3}, "decoding"),
        "published": ({"T": 3, "n": 4, "dim": 64, "gamma": False, "std": 1.28}, "DeepSeek's form"),
        "out_in": ({"T": 3, "n": 4, "dim": 7, "orientation": "out_in", "iterations": 3}, "the other orientation"),
        "odd_dim": ({"T": 2, "n": 4, "dim": 129, "iterations": 2}, "one past a power of two"),
        "one_channel": ({"T": 3, "n": 4, "dim": 1, "iterations": 2}, "a block over dim that is almost all mask"),
        "two_slices": ({"T": 2, "n": 1, "dim": 515, "iterations": 1}, "one slice of the sum is almost all mask"),
        "two_blocks": ({"T": 9, "n": 2, "dim": 3, "iterations": 1}, "more tokens than a block of the coefficients"),
        "one_stream": ({"T": 2, "n": 1, "dim": 5, "iterations": 2}, "softmax of one number: dL is 0"),
        "three_streams": (
            {"T": 3, "n": 3, "dim": 5, "std": 3.0, "sinkhorn_eps": 1e-2, "iterations": 3},
            "n and M = 15 are no powers of two",
        ),
        "two_streams": ({"T": 3, "n": 2, "dim": 5, "iterations": 2, "diagonal": 4.0}, "half way to the identity"),
        "eight_streams": ({"T": 2, "n": 8, "dim": 5, "std": 0.5, "iterations": 2}, "M = 80"),
        "large_logits": ({"T": 2, "n": 4, "dim": 5, "std": 10.0}, "Sinkhorn far from converged; softmax saturated"),
        "near_identity": ({"T": 2, "n": 4, "dim": 5, "std": 0.5, "diagonal": 8.0}, "the trained state"),
        "cann": ({"T": 3, "n": 4, "dim": 5, "sinkhorn": False}, "logits in place of the next h_res"),
        "leading_dimensions": ({"T": (2, 1, 3), "n": 4, "dim": 5, "iterations": 2}, "leading dimensions"),
        "expanded": ({"T": 3, "n": 4, "dim": 64, "layout": "expanded", "iterations": 2}, "stride 0 over the streams"),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 1280}, "sums over more tokens than any one block"),
        "usual_width": ({"T": 129, "n": 4, "dim": 4096, "std": 1.28}, "the width that is usual in training"),
        "wide": ({"T": 33, "n": 4, "dim": 7168, "std": 2.56}, "DeepSeek's widest K"),
    },
    every_probe=("three_streams",),
)

BENCH = bench(
    connection,
    forward=14,
    backward=24,
    fixed=phi_bytes,
    why="forward 28*dim bytes a token: x, f, x_next written and read, h_in; "
    "backward 48*dim: x_next and grad_h_in twice, grad_x_next, x, f, dx, df",
)
