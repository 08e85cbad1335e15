"""experts.moe_int8: reference. It is experts.moe, except that W v is a sum of integer products.

For a row v and a group of inputs that share a scale of W (the whole row if W has one scale per row):

    scale = amax / 127,  code = nearest(v / scale), ties to even       scale 0: codes 0; NaN or Inf in v: scale NaN
    W v   = sum over groups of (sum_k code[k] * code of W[n, k]) * scale of W[n] * scale

A code of int4_asym is the code minus its zero. Codes of x are decided in float32, codes of h in the dtype of h.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor

from ...core.tracing import constants, deciding, stage
from .._conventions import NAMES, MoeOptions, flat
from .._projections import ReferenceCall, present
from ..moe.reference import forward_of
from ..packed.formats import code_values, scale_values
from ..packed.layout import Layout, read_expert

LARGEST = 127


def forward(*tensors: Tensor | None, **options: Unpack[MoeOptions]) -> tuple[Tensor]:
    call = Int8Call("experts.moe", dict(zip(NAMES, tensors, strict=True)), options | {"save": False})
    return forward_of(call)[:1]


class Int8Call(ReferenceCall):
    """A reference call whose base products use integers."""

    def __init__(self, op: str, tensors: Mapping[str, Tensor | None], options: MoeOptions) -> None:
        super().__init__(op, tensors, options)
        self.layout = Layout.parse(options["layout"])
        # the caller's bytes may be strided, but are read as words
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
    """(codes [rows, groups, inputs of a group], scales [rows, groups]) of rows [rows, inputs], in the dtype of rows."""
    grouped = rows.view(len(rows), rows.shape[-1] // group, group)
    amax = grouped.abs().amax(-1)
    finite = amax.isfinite()
    scales = (amax / LARGEST).masked_fill(~finite, math.nan)
    divisor = scales.masked_fill(~finite | (scales == 0), 1.0).unsqueeze(-1)
    codes = (grouped / divisor).round().clamp(-LARGEST, LARGEST)
    return codes.masked_fill(~finite.unsqueeze(-1), 0.0), scales
