"""Cases and benchmark sizes of mhc.pre_backward."""

from __future__ import annotations

from typing import Unpack

import torch

from ...assay.declare.case import Make
from .._cases import DERIVATIVE_SEGMENTS, PreSettings, bench, build_cases, pre_inputs
from .._common import sum_dtype
from ..coefficients import reference as coefficients


def gradients(
    make: Make, T: int | tuple[int, ...], n: int, dim: int, accumulate: bool = False, **settings: Unpack[PreSettings]
) -> dict[str, object]:
    """Inputs and saved tensors of pre, and gradients of its three results."""
    arguments = pre_inputs(make, T, n, dim, sinkhorn=False, **settings)
    x, inputs = arguments["x"], [arguments.pop(name) for name in ("x", "phi", "alpha", "bias", "gamma")]
    h_pre, h_post, logits, inv_rms, h_mix = coefficients.forward(*inputs, **arguments)
    to = sum_dtype(x.dtype)
    return {
        "grad_h_in": make.normal(*x.shape[:-2], dim),
        "grad_h_post": make.normal(*h_post.shape, dtype=to),
        "grad_logits": make.normal(*logits.shape, dtype=to),
        "x": x,
        "phi": inputs[1],
        "alpha": inputs[2],
        "inv_rms": inv_rms,
        "h_mix": h_mix,
        "h_pre": h_pre,
        "h_post": h_post,
        "gamma": inputs[4],
        "grad_x_post": torch.zeros_like(x).add_(make.normal(*x.shape)) if accumulate else None,
        "pre_eps": arguments["pre_eps"],
        "post_mult": arguments["post_mult"],
    }


CASES = build_cases(
    gradients,
    {
        "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "zero parameter gradients of the right shape"),
        "one_token": ({"T": 1, "n": 4, "dim": 64}, "the sums over tokens have one term"),
        "published": ({"T": 13, "n": 4, "dim": 64, "gamma": False}, "DeepSeek's form: no gamma and no dgamma"),
        "accumulated": ({"T": 13, "n": 4, "dim": 65, "accumulate": True}, "post's share of dx is added"),
        "one_channel": ({"T": 3, "n": 4, "dim": 1}, "a block over dim that is almost all mask"),
        "one_stream": ({"T": 2, "n": 1, "dim": 5}, "three mixes"),
        "three_streams": ({"T": 3, "n": 3, "dim": 5, "std": 3.0}, "M = 15"),
        "eight_streams": ({"T": 2, "n": 8, "dim": 5}, "M = 80"),
        "large_epsilons": ({"T": 3, "n": 2, "dim": 5, "pre_eps": 0.05, "post_mult": 1.0}, "a forgotten eps shows"),
        "leading_dimensions": ({"T": (2, 1, 3), "n": 4, "dim": 5, "accumulate": True}, "leading dimensions"),
        "no_leading_dimension": ({"T": (), "n": 4, "dim": 5}, "one token without a batch"),
        "many_tokens": ({"T": 4097, "n": 4, "dim": 320}, "sums over more tokens than one block"),
        "usual_width": ({"T": 129, "n": 4, "dim": 4096}, "a common training width"),
        "wide": ({"T": 33, "n": 4, "dim": 7168}, "DeepSeek's widest K"),
    },
    every_probe=("leading_dimensions",),
)

SEGMENTS = DERIVATIVE_SEGMENTS

BENCH = bench(
    gradients,
    forward=14,
    backward=None,
    why="28*dim bytes per token: x and grad_h_in twice, dx",
)[:3]
