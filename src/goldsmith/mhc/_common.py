"""Constants, sizes and argument checks that the family's operators share; error messages name likely mistakes."""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import Tensor

from ..core.shapes import (
    ShapeError,
    check_at_least,
    check_choice,
    check_dtype,
    check_same_device,
    check_shapes,
    check_tensor,
    kind,
)

FORMS = ("deepseek", "megatron", "log")
RMS_FORMS = ("inside", "outside")
KINDS = ("manifold", "independent")
ORIENTATIONS = ("in_out", "out_in")
PRE_GRADIENT_STAGES = ("dh_pre", "dh_post", "dlogits", "dm", "projection", "rms", "collapse")
MIX_GRADIENTS = ("dx", "dphi", "dalpha", "dbias", "dgamma")
POST_GRADIENTS = ("dx_post", "df", "dh_post", "dh_res")
PRE_OPTIONS = (
    "float rms_eps, float pre_eps, float post_mult, int iterations, float sinkhorn_eps, str form, bool sinkhorn, "
    "str rms_form"
)
# M = n*(n+2) mixes (n for a head) of K = n*dim features, in groups with one alpha each; gamma is [K] or [n, dim]
AXES = {
    "x": "*batch n dim",
    "f": "*batch dim",
    "phi": "mixes features",
    "alpha": "groups",
    "bias": "mixes",
    "gamma": "features | n dim",
    "streams": "*batch n dim",
    "x_post": "*batch n dim",
    "x_next": "*batch n dim",
    "h": "*batch dim",
    "h_in": "*batch dim",
    "h_pre": "*batch n: sum",
    "h_post": "*batch n: sum",
    "h_res": "*batch n n: sum",
    "h_post_next": "*batch n: sum",
    "h_res_next": "*batch n n: sum",
    "inv_rms": "*batch: sum",
    "h_mix": "*batch mixes: sum",
}
AXES |= {f"grad_{name}": pattern.partition(":")[0] for name, pattern in AXES.items()}
AXES |= {f"d{name}": AXES[name] for name in ("x", "phi", "alpha", "bias", "gamma")}
MOST_ITERATIONS = 2**31 - 1  # kernels count iterations in int32
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class CoefficientOptions(TypedDict):
    """The options that coefficients, pre and boundary share, as their backends receive them."""

    rms_eps: float
    pre_eps: float
    post_mult: float
    iterations: int
    sinkhorn_eps: float
    form: str
    sinkhorn: bool
    rms_form: str


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and coefficients: float64 for float64 streams, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tokens(x: Tensor, keep: int) -> Tensor:
    """x with all but the last `keep` dimensions flattened to one: a view where strides allow it, otherwise a copy."""
    return x.reshape(math.prod(x.shape[: x.dim() - keep]), *x.shape[x.dim() - keep :])


def mix_count(n: int) -> int:
    """M = n*(n+2), the number of mixes of n streams: n for pre, n for post, n*n for res."""
    return n * (n + 2)


def mixes_of(n: int, groups: int) -> int:
    """The number of mixes in the first `groups` of pre, post and res."""
    return mix_count(n) if groups == 3 else groups * n


def streams_of(mixes: int) -> int | None:
    """The n with mix_count(n) == mixes, or None if there is no such n."""
    n = math.isqrt(mixes + 1) - 1
    return n if n >= 1 and mix_count(n) == mixes else None


def check_streams(op: str, name: str, x: Tensor) -> None:
    check_tensor(op, name, x)
    check_dtype(op, name, x, FLOATS)
    if x.dim() < 2 or 0 in x.shape[-2:]:
        raise ShapeError(f"{op}: {name} is {list(x.shape)}, expected [*batch, n, dim] with n >= 1 and dim >= 1")


def check_coefficient(op: str, name: str, value: Tensor, x: Tensor) -> None:
    """Checks the dtype of a coefficient: float32, or also float64 if x is. In bfloat16, row sums miss 1 by 3e-3."""
    check_tensor(op, name, value)
    allowed = (torch.float32, torch.float64) if x.dtype == torch.float64 else (torch.float32,)
    if value.dtype not in allowed:
        dtype_text = str(value.dtype).removeprefix("torch.")
        expected = str(sum_dtype(x.dtype)).removeprefix("torch.")
        raise TypeError(
            f"{op}: {name} is {dtype_text}, expected {expected}: coefficients and their parameters must keep full "
            "precision"
        )


def check_mixing(
    op: str,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    *,
    groups: int = 3,
    biased: bool = True,
) -> None:
    """Checks phi, alpha, bias and gamma against x [*batch, n, dim].

    Groups of mixes, one alpha each: 1 in a head (pre), 2 in an independent connection (pre, post), otherwise 3.
    """
    check_streams(op, "x", x)
    # the patterns below need plain integers, also when a graph with dynamic sizes is traced
    n, dim = (int(size) for size in x.shape[-2:])
    mixes = mixes_of(n, groups)
    check_tensor(op, "phi", phi)
    check_dtype(op, "phi", phi, FLOATS)
    if phi.dtype == torch.float64 and x.dtype != torch.float64:
        raise TypeError(
            f"{op}: phi is float64, but x is {dtype_name(x)} and sums run in float32; use phi.float() or x.double()"
        )
    _check_vector(op, "alpha", alpha, groups, x)
    arguments = {"x": (x, f"*batch {n} {dim}"), "phi": (phi, f"{mixes} {n * dim}"), "alpha": (alpha, f"{groups}")}
    scales = f"alpha = [{', '.join(('pre', 'post', 'res')[:groups])}], one scale each"
    hints = {"phi": _hint_phi(x, phi, mixes, groups), "alpha": "" if groups == 1 else scales}
    if biased:
        arguments["bias"] = (_check_vector(op, "bias", bias, mixes, x), f"{mixes}")
        if tuple(arguments["bias"][0].shape) == (1, mixes):
            hints["bias"] = "[1, M] is TransformerEngine's layout: use mhc.from_te or bias.squeeze(0)"
    if gamma is not None:
        check_coefficient(op, "gamma", gamma, x)
        arguments["gamma"] = (gamma, f"{n} {dim}" if gamma.dim() == 2 else f"{n * dim}")
        hints["gamma"] = f"one weight per stream and channel; for one per channel: gamma.repeat({n})"
    wrong = next((name for name, (t, pattern) in arguments.items() if name != "x" and _shape(t) != pattern), None)
    check_shapes(op, arguments, hint=hints.get(wrong, "") if wrong else "")
    check_same_device(op, {name: t for name, (t, _) in arguments.items()})


def _hint_phi(x: Tensor, phi: Tensor, mixes: int, groups: int) -> str:
    """A hint about the likely mistake behind a phi of this shape."""
    head = groups == 1
    n, dim = x.shape[-2:]
    shape = tuple(phi.shape)
    if shape == (n * dim, mixes):
        return "phi looks transposed: " + ("use phi.T" if head else "Liger's layout? use mhc.from_liger or phi.T")
    if len(shape) == 2 and shape[1] == n * dim and shape[0] == (dim if head else mix_count(dim)):
        return f"x looks like [*batch, dim={n}, n={dim}], streams innermost: use mhc.streams_from_te"
    if len(shape) == 2 and shape[0] != mixes and groups == 2:
        return f"an independent connection has {mixes} mixes, pre and post of each stream"
    if len(shape) == 2 and shape[0] != mixes and not head:
        valid = ", ".join(f"{mix_count(k)} (n={k})" for k in (1, 2, 3, 4, 8))
        implied_n = streams_of(shape[0])
        fits = f"for no n: {valid}" if implied_n is None else f"for n={implied_n}, but x has n={n}"
        return f"phi has {shape[0]} rows, which is n*(n+2) {fits}"
    if len(shape) == 2 and shape[0] == mix_count(n) and head:
        return f"a head has {n} mixes, one per stream; a phi of {shape[0]} rows belongs to a hyper-connection"
    return f"phi needs one column for each of the {n}*{dim} channels of x"


def _check_vector(op: str, name: str, value: object, size: int, x: Tensor) -> Tensor:
    """Checks alpha or bias, which must be one tensor. Users often pass a number or a list of tensors."""
    if isinstance(value, tuple | list):
        joined = "torch.stack" if name == "alpha" else "torch.cat"
        value_text = f"{type(value).__name__} of {len(value)}"
        raise TypeError(f"{op}: {name} is a {value_text}, expected one tensor [{size}]: {joined}({name})")
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is {kind(value)}, expected a tensor [{size}]")
    check_coefficient(op, name, value, x)
    return value


def _shape(t: Tensor) -> str:
    return " ".join(map(str, t.shape))


def check_numbers(op: str, **numbers: float) -> None:
    """Checks iterations >= 1, post_mult > 0 and every eps >= 0, all finite in float32."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "iterations" else (int, float)):
            wanted = "a whole number of at least 1" if name == "iterations" else "a number"
            value_text = f" is {kind(value)}" if isinstance(value, Tensor) else f"={value!r}"
            raise TypeError(f"{op}: {name}{value_text}, expected {wanted}")
    _check_ranges(op, **numbers)


def _check_ranges(op: str, *, iterations: float = 1, post_mult: float = 1.0, **epsilons: float) -> None:
    check_at_least(op, "iterations", iterations, 1)
    if not post_mult > 0:
        raise ValueError(f"{op}: post_mult={post_mult!r}, expected a number above 0 (the published model uses 2.0)")
    for name, value in epsilons.items():
        check_at_least(op, name, value, 0.0)
    if iterations > MOST_ITERATIONS:
        raise ValueError(f"{op}: iterations={iterations!r}, expected at most {MOST_ITERATIONS}")
    for name, value in {"post_mult": post_mult, **epsilons}.items():
        if value > torch.finfo(torch.float32).max:
            raise ValueError(f"{op}: {name}={value!r}, expected a number that is finite in float32")


def check_flag(op: str, name: str, value: object, hint: str = "") -> None:
    if not isinstance(value, bool):
        value_text = f" is {kind(value)}" if isinstance(value, Tensor) else f"={value!r}"
        raise TypeError(f"{op}: {name}{value_text}, expected True or False{hint}")


def check_pre(
    op: str,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    *,
    form: str,
    rms_form: str,
    sinkhorn: bool = True,
    **numbers: float,
) -> None:
    """Checks the arguments that coefficients, pre and boundary share."""
    check_mixing(op, x, phi, alpha, bias, gamma)
    check_form(op, form)
    check_rms_form(op, rms_form)
    check_flag(op, "sinkhorn", sinkhorn)
    check_numbers(op, **numbers)


def check_form(op: str, form: str) -> None:
    check_choice(op, "form", form, FORMS)


def check_rms_form(op: str, rms_form: str) -> None:
    check_choice(op, "rms_form", rms_form, RMS_FORMS)


def check_orientation(op: str, orientation: str) -> None:
    check_choice(op, "orientation", orientation, ORIENTATIONS)


def check_post(op: str, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor | None, orientation: str) -> None:
    """Checks f, h_post and, unless the streams are not mixed, h_res against x [*batch, n, dim]."""
    check_orientation(op, orientation)
    check_streams(op, "x", x)
    check_tensor(op, "f", f)
    check_dtype(op, "f", f, FLOATS if x.dtype == torch.float64 else FLOATS[:3])
    check_coefficient(op, "h_post", h_post, x)
    mixing = {} if h_res is None else {"h_res": h_res}
    for name, coefficient in mixing.items():
        check_coefficient(op, name, coefficient, x)
    hint = "leading dimensions must agree: nothing is broadcast"
    if f.shape == x.shape:
        hint = "f has a stream dimension, but the layer's output has one row per token"
    elif h_res is not None and h_res.dim() == x.dim() - 1 and h_res.shape[-1] == x.shape[-2] ** 2:
        hint = f"h_res is flat: h_res.unflatten(-1, ({x.shape[-2]}, {x.shape[-2]}))"
    elif x.shape[-2:] == (f.shape[-1:] + h_post.shape[-1:]) and x.shape[-1] != x.shape[-2]:
        hint = f"x looks like [*batch, dim={x.shape[-2]}, n={x.shape[-1]}], streams innermost: use mhc.streams_from_te"
    elif f.shape[:-1] == x.shape[:-2] and f.shape[-1] != x.shape[-1]:
        hint = f"f is the layer's output and needs {x.shape[-1]} channels per token, like x, but has {f.shape[-1]}"
    elif any(x.shape[-2] != coefficient.shape[-1] for coefficient in mixing.values()):
        hint = "h_post and h_res need one row per stream of x"
    tensors = {"x": x, "f": f, "h_post": h_post, **mixing}
    check_shapes(op, {name: (t, AXES[name].partition(":")[0]) for name, t in tensors.items()}, hint=hint)
    check_same_device(op, tensors)


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
