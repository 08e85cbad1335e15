"""experts.linear: reference, the product with the decoded weight in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import constants, stage
from .._conventions import flat, wide
from ..packed.formats import decode
from ..packed.matrix import MatrixLayout
from ..packed.panels import read_matrix


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, layout: str) -> tuple[Tensor]:
    packed, to = MatrixLayout.parse(layout), wide(x.dtype)
    with constants():
        data = weight.clone(memory_format=torch.contiguous_format)  # the caller's bytes may be strided
        matrix = decode(packed.kind, read_matrix(packed, packed.place, packed.panels(data)), to)
    total = stage("product", flat(x).to(to) @ matrix.T)
    if bias is not None:
        total = total + bias.to(to)
    return (stage("y", total.to(x.dtype).view(*x.shape[:-1], packed.rows)),)
