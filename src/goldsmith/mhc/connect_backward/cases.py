"""mhc.connect_backward: on what it is tried."""

from __future__ import annotations

from typing import Any

from ...assay.case import Make
from .._cases import DERIVATIVE_SEGMENTS, bench, named, pre_inputs
from .._common import wide
from ..coefficients import reference as coefficients


def gradients(
    make: Make,
    T: int | tuple[int, ...],
    n: int,
    dim: int,
    orientation: str = "in_out",
    arriving: tuple[str, ...] = ("h_in", "h_post", "h_res", "x_next"),
    **settings: Any,
) -> dict[str, Any]:
    """What pre saved at these inputs, and gradients for those of its results, and of x_next, where one arrives."""
    given = pre_inputs(make, T, n, dim, **settings)
    inputs = {name: given.pop(name) for name in ("x", "phi", "alpha", "bias", "gamma")}
    _, h_post, h_res, inv_rms, h_mix = coefficients.forward(*inputs.values(), **given)
    x, to = inputs["x"], wide(inputs["x"].dtype)
    grads = {
        "h_in": make.normal(*x.shape[:-2], dim),
        "h_post": make.normal(*h_post.shape, dtype=to),
        "h_res": make.normal(*h_res.shape, dtype=to),
        "x_next": make.normal(*x.shape),
    }
    options = {k: v for k, v in given.items() if k not in ("rms_eps", "sinkhorn")}
    arrived = {f"grad_{name}": grad if name in arriving else None for name, grad in grads.items()}
    return {
        **inputs,
        "h_res": h_res,
        "inv_rms": inv_rms,
        "h_mix": h_mix,
        **arrived,
        **options,
        "orientation": orientation,
    }


CASES = named(
    gradients,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "zero parameter gradients of the right shape"),
        "one_token": ({"T": 1, "n": 4, "dim": 64, "iterations": 3}, "the sums over tokens have one term"),
        "published": ({"T": 3, "n": 4, "dim": 64, "gamma": False, "std": 1.28}, "DeepSeek's form"),
        "out_in": ({"T": 3, "n": 4, "dim": 7, "orientation": "out_in", "iterations": 3}, "the other orientation"),
        "odd_dim": ({"T": 2, "n": 4, "dim": 65, "iterations": 2}, "one past a power of two"),
        "one_channel": ({"T": 3, "n": 4, "dim": 1, "iterations": 2}, "a block over dim that is almost all mask"),
        "two_slices": ({"T": 2, "n": 1, "dim": 515, "iterations": 1}, "one slice of the sum is almost all mask"),
        "two_blocks": ({"T": 67, "n": 2, "dim": 3, "iterations": 2}, "more tokens than a block of any kernel holds"),
        "one_stream": ({"T": 2, "n": 1, "dim": 5, "iterations": 2}, "softmax of one number: dL is 0"),
        "three_streams": (
            {"T": 3, "n": 3, "dim": 5, "std": 3.0, "sinkhorn_eps": 1e-2, "iterations": 3},
            "n and M = 15 are no powers of two",
        ),
        "two_streams": ({"T": 3, "n": 2, "dim": 5, "iterations": 2, "diagonal": 4.0}, "half way to the identity"),
        "eight_streams": ({"T": 2, "n": 8, "dim": 5, "std": 0.5, "iterations": 2}, "M = 80"),
        "large_logits": ({"T": 2, "n": 4, "dim": 5, "std": 10.0}, "Sinkhorn far from converged; softmax saturated"),
        "near_identity": ({"T": 2, "n": 4, "dim": 5, "std": 0.5, "diagonal": 8.0}, "the trained state"),
        "only_h_in": ({"T": 3, "n": 4, "dim": 5, "iterations": 2, "arriving": ("h_in",)}, "x_next was not used"),
        "only_x_next": ({"T": 3, "n": 4, "dim": 5, "iterations": 2, "arriving": ("x_next",)}, "frozen layer"),
        "leading_dimensions": ({"T": (2, 1, 3), "n": 4, "dim": 5, "iterations": 2}, "leading dimensions"),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 1280}, "sums over more tokens than any one block"),
        "usual_width": ({"T": 129, "n": 4, "dim": 4096, "std": 1.28}, "the width that is usual in training"),
        "wide": ({"T": 33, "n": 4, "dim": 7168, "std": 2.56}, "DeepSeek's widest K"),
    },
    every_probe=("three_streams",),
)

SEGMENTS = DERIVATIVE_SEGMENTS

BENCH = bench(
    gradients,
    forward=18,
    backward=None,
    why="36*dim bytes a token: x and grad_h_in twice, grad_x_next, dx",
)[:3]
