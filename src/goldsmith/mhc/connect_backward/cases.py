"""Cases and benchmark sizes of mhc.connect_backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from ...assay.declare.case import Make
from .._cases import DERIVATIVE_SEGMENTS, PreSettings, bench, build_cases, pre_inputs
from .._common import sum_dtype
from .._joint_cases import JOINT_CASES
from ..coefficients import reference as coefficients


def gradients(
    make: Make,
    T: int | tuple[int, ...],
    n: int,
    dim: int,
    orientation: str = "in_out",
    arriving: tuple[str, ...] = ("h_in", "h_post", "h_res", "x_next"),
    independent: bool = False,
    **settings: Unpack[PreSettings],
) -> dict[str, object]:
    """Inputs and saved tensors of pre, and gradients of h_in, h_post, h_res and x_next (None unless in `arriving`).

    An independent connection has no h_res, and its mixes are those of pre and post.
    """
    arguments = pre_inputs(make, T, n, dim, **settings)
    inputs = {name: arguments.pop(name) for name in ("x", "phi", "alpha", "bias", "gamma")}
    _, h_post, h_res, inv_rms, h_mix = coefficients.forward(*inputs.values(), **arguments)
    x, to = inputs["x"], sum_dtype(inputs["x"].dtype)
    if independent:
        inputs |= {"phi": inputs["phi"][: 2 * n], "alpha": inputs["alpha"][:2], "bias": inputs["bias"][: 2 * n]}
        h_mix = h_mix[..., : 2 * n]
    grads = {
        "h_in": make.normal(*x.shape[:-2], dim),
        "h_post": make.normal(*h_post.shape, dtype=to),
        "h_res": make.normal(*h_res.shape, dtype=to),
        "x_next": make.normal(*x.shape),
    }
    options = {k: v for k, v in arguments.items() if k not in ("rms_eps", "sinkhorn")}
    arrived = {f"grad_{name}": grad if name in arriving else None for name, grad in grads.items()}
    return {
        **inputs,
        "h_res": None if independent else h_res,
        "inv_rms": inv_rms,
        "h_mix": h_mix,
        **arrived,
        **options,
        "orientation": orientation,
    }


OWN_CASES: dict[str, tuple[Mapping[str, object], str]] = {
    "odd_dim": ({"T": 2, "n": 4, "dim": 65, "iterations": 2}, "one past a power of two"),
    "two_blocks": ({"T": 67, "n": 2, "dim": 3, "iterations": 2}, "more tokens than a block of any kernel"),
    "only_h_in": ({"T": 3, "n": 4, "dim": 5, "iterations": 2, "arriving": ("h_in",)}, "x_next is unused"),
    "independent": (
        {"T": 3, "n": 3, "dim": 5, "independent": True, "arriving": ("h_in", "h_post", "x_next")},
        "no h_res: x_next's gradient is added unmixed",
    ),
    "only_x_next": ({"T": 3, "n": 4, "dim": 5, "iterations": 2, "arriving": ("x_next",)}, "the layer is frozen"),
}

CASES = build_cases(gradients, JOINT_CASES | OWN_CASES, every_probe=("three_streams",))

SEGMENTS = DERIVATIVE_SEGMENTS

BENCH = bench(
    gradients,
    forward=18,
    backward=None,
    why="36*dim bytes per token: x and grad_h_in twice, grad_x_next, dx",
)[:3]
