"""Cases and benchmark sizes of mhc.lagged_boundary."""

from __future__ import annotations

from typing import Unpack

from ...assay.declare.case import Make
from .._cases import SEGMENTS, PreSettings, bench, build_cases, phi_bytes, post_inputs, pre_inputs
from .._common import sum_dtype
from .._joint_cases import JOINT_CASES

__all__ = ["BENCH", "CASES", "SEGMENTS"]

SHARED = ("no_tokens", "one_token", "three_streams", "eight_streams", "one_stream", "many_tokens", "wide")


def lagged_connection(
    make: Make,
    T: int | tuple[int, ...],
    n: int,
    dim: int,
    layout: str = "contiguous",
    orientation: str = "in_out",
    **settings: Unpack[PreSettings],
) -> dict[str, object]:
    """Streams and all coefficients of one connection, and parameters of the next."""
    before = post_inputs(make, T, n, dim, layout, orientation)
    after = pre_inputs(make, T, n, dim, **settings)
    batch = T if isinstance(T, tuple) else (T,)
    return {**after, **before, "h_pre": make.uniform(*batch, n, dtype=sum_dtype(make.dtype))}


CASES = build_cases(
    lagged_connection,
    {name: JOINT_CASES[name] for name in SHARED}
    | {
        "two_blocks": ({"T": 67, "n": 2, "dim": 3, "iterations": 1}, "more tokens than a block of any kernel"),
        "two_slices": ({"T": 2, "n": 1, "dim": 1029, "iterations": 1}, "the last slice is almost all mask"),
        "leading_dimensions": (
            {"T": (2, 1), "n": 4, "dim": 7, "orientation": "out_in", "layout": "expanded", "iterations": 2},
            "Megatron's orientation; stride 0 over the streams",
        ),
    },
    every_probe=("three_streams",),
)

BENCH = bench(
    lagged_connection,
    forward=10,
    backward=28,
    fixed=phi_bytes,
    why="forward 20*dim bytes per token: x, f, x_next, h_in; backward 56*dim: x_next twice, grad_h_in twice, "
    "grad_x_next, its sum written and read, x, f, dx, df",
)
