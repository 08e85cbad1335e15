"""AWQ with 4 bits, as AutoAWQ writes it: w = (q - z) s.

GEMM: inputs along the first dimension, columns of a word in an order of their own. GEMV: one row per output, codes in
order, qzeros and scales padded along the groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ....experts.packed.formats import Codes
from ....experts.packed.importers import awq_columns
from .scheme import Parts, Scheme, check_dtype, check_shape, groups_of
from .words import fields, unsigned


def scheme_of(settings: Mapping[str, Any]) -> Scheme:
    """The scheme of an "awq" quantization_config; raises ValueError for one that is not supported."""
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits != 4 or version not in ("gemm", "gemv") or settings.get("zero_point") is False:
        raise ValueError(
            f"AWQ with bits {bits}, version {version!r}, zero_point {settings.get('zero_point', True)}; supported are "
            "bits 4, version 'gemm' or 'gemv', zero_point true"
        )
    group = settings.get("group_size", settings.get("q_group_size", 128))
    group = None if group in (None, -1) else group
    read = partial(_gemv if version == "gemv" else _gemm, group=group)
    return Scheme(f"AWQ ({version})", ("qweight", "qzeros", "scales"), read, "int4_asym", group)


def _gemm(parts: Parts, group: int | None) -> Codes:
    _check_dtypes(parts)
    words, actual = parts["qweight"], f"qweight {list(parts['qweight'].shape)}"
    inputs, out = words.shape[0], words.shape[1] * 8
    groups = groups_of(inputs, group, actual)
    check_shape("scales", parts["scales"], (groups, out), actual)
    check_shape("qzeros", parts["qzeros"], (groups, out // 8), actual)
    zeros = awq_columns(parts["qzeros"]).t().contiguous()
    return Codes(unsigned(awq_columns(words).t()), parts["scales"].t().contiguous(), zeros)


def _gemv(parts: Parts, group: int | None) -> Codes:
    _check_dtypes(parts)
    words, actual = parts["qweight"], f"qweight {list(parts['qweight'].shape)}"
    out, inputs = words.shape[0], words.shape[1] * 8
    groups = groups_of(inputs, group, actual)
    # rows of scales and zeros are padded: to whole words, and for groups of 64 and 32 to 2 and 4 words
    width = parts["qzeros"].shape[-1]
    check_shape("qzeros", parts["qzeros"], (out, max(width, -(-groups // 8))), actual)
    check_shape("scales", parts["scales"], (out, 8 * width), f"qzeros {list(parts['qzeros'].shape)}")
    zeros = fields(parts["qzeros"], 4)[:, :groups].contiguous()
    return Codes(unsigned(fields(words, 4)), parts["scales"][:, :groups].contiguous(), zeros)


def _check_dtypes(parts: Parts) -> None:
    for name in ("qweight", "qzeros"):
        check_dtype(name, parts[name], torch.int32)
    check_dtype("scales", parts["scales"], torch.float16, torch.bfloat16)
