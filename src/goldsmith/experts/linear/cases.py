"""experts.linear: test cases."""

from __future__ import annotations

from ...assay.declare.case import Case, Make
from .._conventions import wide
from ..packed.matrix import pack_matrix

__all__ = ["CASES", "DTYPES", "inputs"]

DTYPES = ("float32", "bfloat16")


def inputs(
    make: Make,
    T: int | tuple[int, ...],
    N: int,
    K: int,
    format: str,
    group: int | None = None,
    bias: bool = False,
    strided: bool = False,
) -> dict[str, object]:
    """Arguments of experts.linear: T rows (or all leading dimensions), a weight [N, K].

    strided: x is every second column of a wider tensor
    """
    batch, step = T if isinstance(T, tuple) else (T,), 2 if strided else 1
    packed = pack_matrix(make.normal(N, K, std=K**-0.5).float(), format=format, group_size=group)
    return {
        "x": make.normal(*batch, K * step)[..., ::step],
        "weight": packed.data.to(make.device),
        "bias": make.normal(N, dtype=wide(make.dtype)) if bias else None,
        "layout": packed.layout.text,
    }


SIZES: dict[str, tuple[dict[str, object], str]] = {
    "no_rows": ({"T": 0, "N": 5, "K": 8, "format": "bf16"}, "empty output"),
    "one_row": ({"T": 1, "N": 40, "K": 64, "format": "int4"}, "decoding; half a block of outputs at the end"),
    "few_rows": ({"T": 7, "N": 37, "K": 35, "format": "fp32", "bias": True}, "odd sizes, several blocks of rows"),
    "rows": ({"T": 3, "N": 19, "K": 141, "format": "bf16", "bias": True}, "an odd number of inputs"),
    "leading_dimensions": (
        {"T": (2, 3), "N": 33, "K": 24, "format": "int4", "group": 8, "strided": True},
        "strided rows",
    ),
    "zeros": ({"T": 2, "N": 48, "K": 64, "format": "int4_asym", "group": 32}, "one zero per group"),
    "int8": ({"T": 4, "N": 17, "K": 67, "format": "int8"}, "one scale per row, odd sizes"),
    "mxfp4": ({"T": 5, "N": 16, "K": 96, "format": "mxfp4"}, "powers of two as scales"),
    "fp8_block": ({"T": 3, "N": 141, "K": 130, "format": "fp8_block", "bias": True}, "blocks are partial at the edges"),
    "many_rows": ({"T": 40, "N": 70, "K": 300, "format": "bf16"}, "decoded stripes, and sums over several steps"),
    "many_rows_int4": ({"T": 21, "N": 40, "K": 288, "format": "int4", "bias": True}, "decoded stripes of 4-bit codes"),
}
_EVERY_PROBE, _PROVED = ("few_rows",), ("no_rows", "one_row", "few_rows", "zeros", "many_rows")


def _tags(name: str) -> tuple[str, ...]:
    tags = {"every_probe": name in _EVERY_PROBE, "storage": name not in _PROVED}
    return tuple(tag for tag, holds in tags.items() if holds)


CASES = [Case(name, inputs, sizes, why, _tags(name)) for name, (sizes, why) in SIZES.items()]
