"""experts.linear: declaration of the operator, and its public function."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import native
from ...core.autograd import transformed, watched
from ...core.op import Op
from ...core.shapes import ShapeError, check_dtype, check_tensor
from .._arguments import needs_gradient
from .._conventions import FLOATS, named
from ..packed.matrix import MatrixLayout, PackedMatrix

LINEAR = Op(
    "experts.linear",
    schema="(Tensor x, Tensor weight, Tensor? bias, str layout) -> (Tensor y)",
    package=__package__,
    axes={"x": "*batch in", "weight": "bytes", "bias": "out", "y": "*batch out"},
    backends=("native",),
    stages=("product", "y"),
    summary="a dense product with a weight in a packed format; inference",
)


def linear(x: Tensor, weight: PackedMatrix, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """y = x W^T + bias for a packed weight W [out, in]

    x [..., in] in bfloat16, float16, float32 or float64 -> y [..., out] in x's dtype, summed in float32 (float64 for
    float64) and rounded once. bias [out] in float32 or x's dtype. The weight is read in its format: no float copy of it
    exists at any time. The bits do not depend on the number of threads. A row has the same bits in every call of up
    to 8 rows, and in every call of more.

    Inference only: raises ValueError if an argument requires a gradient. Raises ShapeError, TypeError and
    BackendUnavailable.
    """
    if not isinstance(weight, PackedMatrix):
        raise TypeError(
            f"experts.linear: weight is a {type(weight).__name__}, expected a PackedMatrix from experts.pack_matrix"
        )
    if needs_gradient((x, bias)):
        raise ValueError("experts.linear: has no gradient; call it under torch.no_grad()")
    if backend == "auto" and _directly(x, weight, bias):
        return LINEAR.backend("native").product(x, weight.data, bias, weight.layout.text)
    return LINEAR(x, weight.data, bias, layout=weight.layout.text, backend=backend)


def _directly(x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> bool:
    """Whether the kernel can read x as it is and nobody watches the call: 6 us instead of 60, for each of the many
    small products of a step."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.is_cpu
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.shape[-1:] == weight.shape[1:]
        and x.is_contiguous()
        and not x.is_neg()
        and not x._is_zerotensor()
        and (bias is None or _usual(bias, x, weight))
        and weight.data.is_cpu
        and not watched()
        and not transformed()
        and native.reason() is None
    )


def _usual(bias: Tensor, x: Tensor, weight: PackedMatrix) -> bool:
    return (
        type(bias) in (Tensor, torch.nn.Parameter)
        and bias.is_cpu
        and bias.dtype in (torch.float32, x.dtype)
        and bias.shape == weight.shape[:1]
        and not bias.is_neg()
        and not bias._is_zerotensor()
    )


def check(x: Tensor, weight: Tensor, bias: Tensor | None, *, layout: str) -> None:
    op = "experts.linear"
    for name, tensor in (("x", x), ("weight", weight)):
        check_tensor(op, name, tensor)
    place = MatrixLayout.parse(layout)
    check_dtype(op, "x", x, FLOATS)
    check_dtype(op, "weight", weight, (torch.uint8,))
    if x.dim() == 0 or x.shape[-1] != place.inputs:
        raise ShapeError(f"{op}: x is {list(x.shape)}, expected [*batch, {place.inputs}] for a weight {layout!r}")
    if tuple(weight.shape) != (place.nbytes,):
        raise ShapeError(f"{op}: weight is {list(weight.shape)}, but layout {layout!r} has [{place.nbytes}] bytes")
    if bias is not None:
        check_tensor(op, "bias", bias)
        if tuple(bias.shape) != (place.rows,):
            raise ShapeError(f"{op}: bias is {list(bias.shape)}, expected [{place.rows}], one for each output")
        if bias.dtype not in (torch.float32, x.dtype):
            raise TypeError(f"{op}: bias is {named(bias.dtype)}, expected float32 or x's {named(x.dtype)}")
    LINEAR.check_axes({"x": x, "weight": weight, "bias": bias})


def fake(x: Tensor, weight: Tensor, bias: Tensor | None, *, layout: str) -> Tensor:
    rows = MatrixLayout.parse(layout).rows
    return torch.empty((*x.shape[:-1], rows), dtype=x.dtype, device=x.device)
