"""experts.moe_int8: what it means. experts.moe, but W v is a sum of products of whole numbers.

Of a row v and a group of inputs that share a scale of W (the whole row where W has one for each row):

    scale = amax / 127,  code = nearest(v / scale), ties to even       scale 0: codes 0; NaN or Inf in v: scale NaN
    W v   = sum over groups of (sum_k code[k] * code of W[n, k]) * scale of W[n] * scale

A code of int4_asym is what its zero has been taken off. Codes of x are decided in float32, those of h as h comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import constants, deciding, stage
from .._common import NAMES, flat
from .._projections import Call, present
from ..formats import code_values, scale_values
from ..layout import Layout, read_expert
from ..moe.reference import forward_of

LARGEST = 127


def forward(*tensors: Tensor | None, **options: Any) -> tuple[Tensor]:
    call = Int8Call("experts.moe", dict(zip(NAMES, tensors, strict=True)), options | {"save": False})
    return forward_of(call)[:1]


class Int8Call(Call):
    """Products with the base in whole numbers."""

    def __init__(self, op: str, tensors: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> None:
        super().__init__(op, tensors, options)
        self.layout = Layout.parse(options["layout"])
        # bytes that may lie apart, and are read as words
        self.gate_up = present(tensors, "gate_up").clone(memory_format=torch.contiguous_format)
        self.down = present(tensors, "down").clone(memory_format=torch.contiguous_format)

    def base_product(self, name: str, inputs: Tensor, width: int) -> Tensor:
        group = self.layout.group_size or max(1, inputs.shape[-1])
        if name == "down":
            codes, scales = rounded(inputs, group)
        else:
            with deciding("float32"):
                codes, scales = rounded(flat(self.x).float(), group)
                codes, scales = (t.index_select(0, self.tokens).to(self.to) for t in (codes, scales))
        codes, scales = stage(f"{name}_codes", codes), stage(f"{name}_code_scales", scales)

        def of_expert(e: int, at: Tensor) -> Tensor:
            weights, by_row = self._codes(name, e)  # [groups, inputs, out], [groups, 1, out]
            rows = codes.index_select(0, at).transpose(0, 1)  # [groups, rows, inputs]
            return (rows @ weights * by_row * scales.index_select(0, at).T.unsqueeze(-1)).sum(0)

        return self.routes.gather(inputs, width, of_expert)

    def _codes(self, name: str, e: int) -> tuple[Tensor, Tensor]:
        with constants():
            matrix = getattr(read_expert(self.layout, self.gate_up, self.down, e), name)
            scales = scale_values(matrix.scales, self.to)
            codes = code_values(self.layout.kind, matrix.codes, self.to).view(*scales.shape, -1)
            if matrix.zeros is not None:
                codes = codes - matrix.zeros.to(self.to).unsqueeze(-1)
            return codes.permute(1, 2, 0), scales.T.unsqueeze(1)


def rounded(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, groups, inputs of a group] and scales [rows, groups] of rows [rows, inputs], in their own dtype."""
    grouped = rows.view(len(rows), rows.shape[-1] // group, group)
    amax = grouped.abs().amax(-1)
    finite = amax.isfinite()
    scales = (amax / LARGEST).masked_fill(~finite, math.nan)
    divisor = scales.masked_fill(~finite | (scales == 0), 1.0).unsqueeze(-1)
    codes = (grouped / divisor).round().clamp(-LARGEST, LARGEST)
    return codes.masked_fill(~finite.unsqueeze(-1), 0.0), scales
