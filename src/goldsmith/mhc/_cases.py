"""Random inputs that the family's cases share, and the sizes of its benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..assay.declare.case import Case, Make
from ..core.bench import BenchCase
from ._common import mix_count, sum_dtype

OPTIONS: dict[str, object] = {
    "rms_eps": 1e-6,
    "pre_eps": 1e-6,
    "post_mult": 2.0,
    "iterations": 20,
    "sinkhorn_eps": 1e-6,
}
OPTIONS |= {"form": "deepseek", "sinkhorn": True, "rms_form": "inside"}

TRAINING = ((8192, 4096), (8192, 7168), (4096, 2560))  # tokens, dim
DECODING = tuple((tokens, dim) for dim in (4096, 7168) for tokens in (1, 4, 16, 64))


def build_cases(
    draw: Callable[..., dict[str, object]],
    cases: Mapping[str, tuple[Mapping[str, object], str]],
    *,
    every_probe: tuple[str, ...],
) -> list[Case]:
    """Cases from {name: (sizes, why)}.

    Cases above 2^17 elements get the tag "large": they run on a GPU, not on two cores. Cases named in `every_probe` get
    that tag: they also go through the expensive probes (dependence, layouts, scaling), which need dozens of runs.
    """

    def tags(name: str, sizes: Mapping[str, object]) -> tuple[str, ...]:
        conditions = {"large": _numbers(sizes) > 2**17, "every_probe": name in every_probe}
        return tuple(tag for tag, holds in conditions.items() if holds)

    unknown = set(every_probe) - set(cases)
    if unknown:
        raise ValueError(f"every_probe names unknown cases: {sorted(unknown)}")
    return [Case(name, draw, sizes, why, tags(name, sizes)) for name, (sizes, why) in cases.items()]


def _numbers(sizes: Mapping[str, object]) -> int:
    return math.prod(v for k, v in sizes.items() if k in ("T", "n", "dim") and isinstance(v, int))


def streams(make: Make, batch: tuple[int, ...], n: int, dim: int, layout: str = "contiguous") -> Tensor:
    """x [*batch, n, dim]; layout "expanded" has stride 0 over n, "transposed" has the streams outermost in memory."""
    if layout == "expanded":
        return make.normal(*batch, 1, dim).expand(*batch, n, dim)
    if layout == "transposed":
        return make.normal(n, *batch, dim).movedim(0, -2)
    return make.normal(*batch, n, dim)


class Mixing(TypedDict):
    """The parameters of a connection, or of a head."""

    phi: Tensor
    alpha: Tensor
    bias: Tensor
    gamma: Tensor | None


class PreSettings(TypedDict, total=False):
    """Optional arguments of `pre_inputs`, except layout."""

    std: float
    gamma: bool
    diagonal: float
    rms_eps: float
    pre_eps: float
    post_mult: float
    iterations: int
    sinkhorn_eps: float
    form: str
    rms_form: str


def mixing(make: Make, n: int, dim: int, *, std: float = 1.0, gamma: bool = True, diagonal: float = 0.0) -> Mixing:
    """phi, alpha, bias and gamma whose logits have about the given standard deviation.

    gamma is not 1 and the alphas differ, so that a forgotten or swapped factor shows. `diagonal` is added to the bias
    of h_res's diagonal; a large one gives near-identity mixes, as in a trained model.
    """
    to = sum_dtype(make.dtype)
    bias = make.normal(mix_count(n), std=0.3, dtype=to)
    bias[2 * n :: n + 1] += diagonal
    return {
        "phi": make.normal(mix_count(n), n * dim, std=std / (n * dim) ** 0.5, dtype=to),
        "alpha": torch.tensor([0.7, 1.3, 0.9], dtype=to, device=make.device),
        "bias": bias,
        "gamma": 1 + make.normal(n, dim, std=0.3, dtype=to) if gamma else None,
    }


def pre_inputs(
    make: Make,
    T: int | tuple[int, ...],
    n: int,
    dim: int,
    std: float = 1.0,
    gamma: bool = True,
    diagonal: float = 0.0,
    layout: str = "contiguous",
    **options: object,
) -> dict[str, Any]:
    """Inputs and options of coefficients and pre; T is a number of tokens, or all leading dimensions."""
    batch = T if isinstance(T, tuple) else (T,)
    x = streams(make, batch, n, dim, layout)
    return {"x": x, **mixing(make, n, dim, std=std, gamma=gamma, diagonal=diagonal), **OPTIONS, **options}


def post_inputs(
    make: Make, T: int | tuple[int, ...], n: int, dim: int, layout: str = "contiguous", orientation: str = "in_out"
) -> dict[str, object]:
    """Inputs and options of post; h_res is far from symmetric, so that a wrong orientation shows."""
    batch = T if isinstance(T, tuple) else (T,)
    to = sum_dtype(make.dtype)
    return {
        "x": streams(make, batch, n, dim, layout),
        "f": make.normal(*batch, dim),
        "h_post": 2 * make.uniform(*batch, n, dtype=to),
        "h_res": make.uniform(*batch, n, n, dtype=to),
        "orientation": orientation,
    }


def by_group(n: int, independent: bool = False) -> dict[str, tuple[int, int]]:
    """The segments of the mixes' last axis: {group: (start, stop)}; an independent connection has no res."""
    return by_pair(n) if independent else {"pre": (0, n), "post": (n, 2 * n), "res": (2 * n, mix_count(n))}


def rows_by_group(n: int, independent: bool = False) -> dict[str, tuple[int, int, int]]:
    """The segments of phi's first axis: {group: (axis, start, stop)}."""
    return {name: (0, low, high) for name, (low, high) in by_group(n, independent).items()}


def by_pair(n: int) -> dict[str, tuple[int, int]]:
    """The segments of an independent connection's mixes."""
    return {"pre": (0, n), "post": (n, 2 * n)}


def rows_by_pair(n: int) -> dict[str, tuple[int, int, int]]:
    return {name: (0, low, high) for name, (low, high) in by_pair(n).items()}


PAIRED_SEGMENTS: dict[str, object] = dict.fromkeys(("phi.grad", "dphi"), rows_by_pair)
PAIRED_SEGMENTS |= dict.fromkeys(("h_mix", "saved.h_mix", "bias.grad", "dbias", "dlogits", "dm"), by_pair)
ALPHAS = {"pre": (0, 1), "post": (1, 2), "res": (2, 3)}


def alphas(independent: bool = False) -> dict[str, tuple[int, int]]:
    """The segments of alpha: one element each."""
    return {name: at for name, at in ALPHAS.items() if name != "res" or not independent}


DERIVATIVE_SEGMENTS = {"dphi": rows_by_group, "dalpha": alphas, "dbias": by_group, "dlogits": by_group, "dm": by_group}
SEGMENTS = {"h_mix": by_group, "phi.grad": rows_by_group, "alpha.grad": ALPHAS, "bias.grad": by_group}
SEGMENTS |= {"saved.h_mix": by_group, **DERIVATIVE_SEGMENTS}

PRE_CASES: dict[str, tuple[Mapping[str, object], str]] = {
    "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "empty outputs, zero parameter gradients of the right shape"),
    "one_token": ({"T": 1, "n": 4, "dim": 64, "iterations": 3}, "decoding; the sums over tokens have one term"),
    "published": (
        {"T": 13, "n": 4, "dim": 64, "std": 1.28, "gamma": False},
        "DeepSeek's form, at the logits that its initialisation gives at K = 4096",
    ),
    "odd_dim": ({"T": 2, "n": 4, "dim": 129, "iterations": 2}, "one past a power of two: tails of blocks over dim"),
    "one_channel": ({"T": 3, "n": 4, "dim": 1, "iterations": 2}, "a block over dim that is almost all mask"),
    "two_slices": (
        {"T": 2, "n": 1, "dim": 515, "iterations": 1},
        "the projection is summed in slices of 512 channels; the second is almost all mask",
    ),
    "two_blocks": ({"T": 67, "n": 2, "dim": 3, "iterations": 2}, "more tokens than a block of any kernel holds"),
    "one_stream": ({"T": 2, "n": 1, "dim": 5, "iterations": 2}, "softmax of one number: dL must be 0"),
    "two_streams": ({"T": 3, "n": 2, "dim": 5, "iterations": 2, "diagonal": 4.0}, "8 mixes, half way to the identity"),
    "three_streams": (
        {"T": 3, "n": 3, "dim": 5, "std": 3.0, "sinkhorn_eps": 1e-2, "iterations": 3},
        "n and M = 15 are not powers of two: padding of the softmax must not enter the sums through eps",
    ),
    "eight_streams": ({"T": 2, "n": 8, "dim": 5, "std": 0.5, "iterations": 2}, "80 mixes, 64 of them in the matrix"),
    "large_logits": ({"T": 2, "n": 4, "dim": 5, "std": 10.0}, "Sinkhorn far from converged; softmax saturated"),
    "near_identity": (
        {"T": 2, "n": 4, "dim": 5, "std": 0.5, "diagonal": 8.0},
        "the trained state, where the fixed point's gradient is 73 % wrong",
    ),
    "large_epsilons": (
        {"T": 3, "n": 2, "dim": 5, "rms_eps": 0.3, "pre_eps": 0.05, "post_mult": 1.0, "sinkhorn_eps": 0.02,
         "iterations": 1},
        "a forgotten eps or factor shows only when it is not tiny",
    ),
    "leading_dimensions": ({"T": (2, 1, 3), "n": 4, "dim": 5, "iterations": 2}, "three leading dimensions"),
    "no_leading_dimension": ({"T": (), "n": 4, "dim": 5, "iterations": 2}, "one token without a batch"),
    "cann": ({"T": 3, "n": 4, "dim": 5, "sinkhorn": False}, "CANN's form: logits in place of h_res"),
    "megatron": ({"T": 3, "n": 4, "dim": 5, "std": 3.0, "iterations": 4, "form": "megatron"}, "Megatron's Sinkhorn"),
    "rms_outside": (
        {"T": 3, "n": 2, "dim": 5, "iterations": 2, "rms_eps": 0.3, "rms_form": "outside"},
        "Megatron adds eps to the root mean square, not under the root",
    ),
    "log": ({"T": 3, "n": 4, "dim": 5, "std": 3.0, "iterations": 4, "form": "log"}, "TransformerEngine's Sinkhorn"),
    "expanded": (
        {"T": 3, "n": 4, "dim": 64, "layout": "expanded", "iterations": 2},
        "stride 0 over the streams, as at the entry of a model",
    ),
    "transposed": ({"T": 3, "n": 4, "dim": 65, "layout": "transposed", "iterations": 2}, "streams outermost in memory"),
    "many_tokens": ({"T": 4097, "n": 4, "dim": 320}, "sums over more tokens than one block of any kernel"),
    "usual_width": ({"T": 129, "n": 4, "dim": 4096, "std": 1.28}, "a common training width"),
    "wide": ({"T": 33, "n": 4, "dim": 7168, "std": 2.56}, "DeepSeek's widest K"),
}  # fmt: skip
PRE_EVERY_PROBE = ("three_streams", "cann")


def bench(
    draw: Callable[..., dict[str, object]],
    forward: int,
    backward: int | None,
    *,
    fixed: Callable[[int, int], int] = lambda n, dim: 0,
    why: str,
    n: int = 4,
) -> list[BenchCase]:
    """Benchmarks at training and decoding sizes in bfloat16; a token must move forward * dim (backward * dim) elements.

    Decoding adds `fixed` bytes for the weights, which are read once for any number of tokens. At training sizes they
    are below 0.3 % and are left out, so that the floors match the design.
    """
    entries = []
    for tokens, dim in TRAINING + DECODING:
        decode = (tokens, dim) in DECODING
        sizes = {"T": tokens, "n": n, "dim": dim}
        moved = 2 * tokens * dim
        case = Case(f"{'decode' if decode else 'train'}[T={tokens},D={dim}]", draw, sizes, why)
        entries.append(
            BenchCase(
                name=case.name,
                sizes=sizes,
                dtype=torch.bfloat16,
                build=case.build,
                forward_bytes=forward * moved + (fixed(n, dim) if decode else 0),
                backward_bytes=None if decode or backward is None else backward * moved,
                why=why,
            )
        )
    return entries


def phi_bytes(n: int, dim: int) -> int:
    """Bytes of phi in float32."""
    return 4 * mix_count(n) * n * dim
