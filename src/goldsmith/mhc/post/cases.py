"""Cases and benchmark sizes of mhc.post."""

from __future__ import annotations

from .._cases import bench, build_cases, post_inputs

CASES = build_cases(
    post_inputs,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "an empty output and empty gradients"),
        "one_token": ({"T": 1, "n": 4, "dim": 64}, "decoding"),
        "published": ({"T": 13, "n": 4, "dim": 64}, "DeepSeek's n and orientation"),
        "out_in": ({"T": 3, "n": 4, "dim": 7, "orientation": "out_in"}, "Megatron's and Liger's orientation"),
        "odd_dim": ({"T": 2, "n": 4, "dim": 129}, "one past a power of two: tails of every block over dim"),
        "one_channel": ({"T": 3, "n": 4, "dim": 1}, "a block over dim that is almost all mask"),
        "one_stream": ({"T": 2, "n": 1, "dim": 5}, "x_next = h_res x + h_post f"),
        "two_blocks": ({"T": 1, "n": 2, "dim": 1029}, "blocks over dim end at 1024; the next is almost all mask"),
        "two_streams": ({"T": 3, "n": 2, "dim": 5, "orientation": "out_in"}, "two streams"),
        "three_streams": ({"T": 3, "n": 3, "dim": 5}, "n is not a power of two"),
        "eight_streams": ({"T": 2, "n": 8, "dim": 5}, "the largest supported matrix"),
        "leading_dimensions": ({"T": (2, 1, 3), "n": 4, "dim": 5}, "three leading dimensions"),
        "no_leading_dimension": ({"T": (), "n": 4, "dim": 5}, "one token without a batch"),
        "expanded": ({"T": 2, "n": 4, "dim": 64, "layout": "expanded"}, "stride 0 over the streams"),
        "transposed": ({"T": 2, "n": 4, "dim": 65, "layout": "transposed"}, "streams outermost in memory"),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 320}, "more tokens than one block of any kernel"),
        "usual_width": ({"T": 129, "n": 4, "dim": 4096}, "a common training width"),
        "wide": ({"T": 33, "n": 4, "dim": 7168}, "DeepSeek's widest dim"),
    },
    every_probe=("three_streams",),
)

BENCH = bench(
    post_inputs,
    forward=9,
    backward=14,
    why="forward 18*dim bytes per token: x, f, x_next; backward 28*dim: grad_x_next, x, f, dx, df",
)
