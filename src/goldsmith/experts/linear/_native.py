"""experts.linear on a CPU, by the native library: the products of experts.moe with one matrix.

2 in out FLOP a row, and one read of the weight. One worker computes each float32 sum in a fixed order.
"""

from __future__ import annotations

from ctypes import byref, c_int32, c_int64, c_void_p
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...core.native import DTYPES, check, library, put, threads
from .._conventions import flat
from .._native_abi import LinearArgs, busy, packed_matrix
from ..moe._native import float16
from ..packed.matrix import MatrixLayout

_BIAS = LinearArgs.bias.offset


def unsupported(tensors: dict, options: dict) -> str | None:
    return float16(tensors)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, layout: str) -> tuple[Tensor]:
    # a missing sign or a gap between rows is not in the memory that the kernel reads
    y = product(flat(x).contiguous(), weight.contiguous(), bias, layout)
    return (y.view(*x.shape[:-1], y.shape[-1]),)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, layout: str) -> Tensor:
    """y for contiguous x, without any check."""
    packed, shape = MatrixLayout.parse(layout), x.shape
    rows = prod(shape[:-1])
    y = torch.empty((*shape[:-1], packed.rows), dtype=x.dtype)
    team = min(threads(), busy(packed.nbytes, 2 * packed.rows * packed.inputs * rows))
    args = _arguments(layout, weight.data_ptr(), bias)
    check(_function()(byref(args), x.data_ptr(), y.data_ptr(), rows, DTYPES[x.dtype], team))
    return y


@cache
def _function() -> Any:
    function = library().gs_linear
    function.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_int32]
    return function


def _arguments(layout: str, weight: int, bias: Tensor | None) -> LinearArgs:
    if bias is None:
        return _weight(layout, weight)
    args = LinearArgs.from_buffer_copy(_weight(layout, weight))
    put(bias, args, _BIAS)
    return args


# They hold addresses, not tensors.
@lru_cache(maxsize=4096)
def _weight(layout: str, address: int) -> LinearArgs:
    packed = MatrixLayout.parse(layout)
    return LinearArgs(weight=packed_matrix(packed, address, packed.place, 0))
