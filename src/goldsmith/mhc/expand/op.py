"""mhc.expand: its declaration, argument checks and public function."""

from __future__ import annotations

from torch import Tensor

from ...core.op import Op
from ...core.shapes import ShapeError, check_at_least, check_dtype, check_tensor
from .._common import AXES, FLOATS

EXPAND = Op(
    "mhc.expand",
    schema="(Tensor x, int n) -> (Tensor streams)",
    package=__package__,
    axes=AXES | {"x": "*batch dim"},
    backends=("triton",),
    grads=("x",),
    stages=("streams",),
    summary="copies one stream to n equal ones at the model's entry",
)


def expand(x: Tensor, n: int = 4, *, backend: str = "auto") -> Tensor:
    """streams[i] = x, for i = 0 .. n-1

    x [..., dim] -> [..., n, dim], new copies in x's dtype. The gradient is the sum over the streams in float32, rounded
    once. Raises ShapeError for x without dimensions, ValueError for n < 1, TypeError, BackendUnavailable. Source:
    DeepSeek's published model code.
    """
    return EXPAND(x, n=n, backend=backend)


def check(x: Tensor, *, n: int) -> None:
    check_tensor("mhc.expand", "x", x)
    check_dtype("mhc.expand", "x", x, FLOATS)
    if x.dim() < 1:
        raise ShapeError("mhc.expand: x is [], expected [*batch, dim]")
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"mhc.expand: n={n!r}, expected a whole number of at least 1")
    check_at_least("mhc.expand", "n", n, 1)
