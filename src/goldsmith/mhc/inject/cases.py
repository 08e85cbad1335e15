"""Cases and benchmark sizes of mhc.inject."""

from __future__ import annotations

from ...assay.declare.case import Make
from .._cases import bench, build_cases, post_inputs


def inject_inputs(
    make: Make, T: int | tuple[int, ...], n: int, dim: int, layout: str = "contiguous"
) -> dict[str, object]:
    inputs = post_inputs(make, T, n, dim, layout)
    return {name: inputs[name] for name in ("x", "f", "h_post")}


CASES = build_cases(
    inject_inputs,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "an empty output and empty gradients"),
        "one_token": ({"T": 1, "n": 4, "dim": 7}, "decoding"),
        "three_streams": ({"T": 5, "n": 3, "dim": 5}, "n is not a power of two"),
        "two_blocks": ({"T": 1, "n": 2, "dim": 1029}, "blocks over dim end at 1024; the next is almost all mask"),
        "leading_dimensions": (
            {"T": (2, 1), "n": 8, "dim": 1},
            "the most streams; a block over dim that is almost all mask",
        ),
        "expanded": ({"T": (), "n": 4, "dim": 64, "layout": "expanded"}, "stride 0 over the streams of one token"),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 320}, "more tokens than one block of any kernel"),
        "wide": ({"T": 33, "n": 4, "dim": 7168}, "a wide dim"),
    },
    every_probe=("three_streams",),
)

BENCH = bench(
    inject_inputs,
    forward=9,
    backward=10,
    why="forward 18*dim bytes per token: x, f, x_next; backward 20*dim: grad_x_next read and written, f, df",
)
