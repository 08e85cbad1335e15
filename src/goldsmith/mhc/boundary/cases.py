"""Cases and benchmark sizes of mhc.boundary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from ...assay.declare.case import Make
from .._cases import SEGMENTS, PreSettings, bench, build_cases, phi_bytes, post_inputs, pre_inputs
from .._joint_cases import JOINT_CASES

__all__ = ["BENCH", "CASES", "SEGMENTS"]


def connection(
    make: Make,
    T: int | tuple[int, ...],
    n: int,
    dim: int,
    layout: str = "contiguous",
    orientation: str = "in_out",
    **settings: Unpack[PreSettings],
) -> dict[str, object]:
    """Streams and coefficients of one connection, and parameters of the next."""
    before = post_inputs(make, T, n, dim, layout, orientation)
    after = pre_inputs(make, T, n, dim, **settings)
    return {**after, **before}


OWN_CASES: dict[str, tuple[Mapping[str, object], str]] = {
    "two_blocks": ({"T": 9, "n": 2, "dim": 3, "iterations": 1}, "more tokens than a block of the coefficients"),
    "cann": ({"T": 3, "n": 4, "dim": 5, "sinkhorn": False}, "logits in place of the next h_res"),
    "expanded": ({"T": 3, "n": 4, "dim": 64, "layout": "expanded", "iterations": 2}, "stride 0 over the streams"),
}

CASES = build_cases(connection, JOINT_CASES | OWN_CASES, every_probe=("three_streams",))

BENCH = bench(
    connection,
    forward=14,
    backward=24,
    fixed=phi_bytes,
    why="forward 28*dim bytes per token: x, f, x_next written and read, h_in; "
    "backward 48*dim: x_next and grad_h_in twice, grad_x_next, x, f, dx, df",
)
