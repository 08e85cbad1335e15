"""An expert whose weights are int8 with a scale for each group: loaded, multiplied, activated.

weight[o, i] = packed[o, i] * scales[o, i // group],  product = x weight^T,  y = silu(product)
"""

from __future__ import annotations

import torch

from goldsmith import assay


def drawn(make, T, H, O, group, loud):
    return {
        "x": make.normal(T, H, std=loud), "packed": make.integers(-127, 128, O, H, dtype=torch.int8),
        "scales": 0.01 + 0.01 * make.uniform(O, H // group), "group": group,
    }  # fmt: skip


@assay.case(T=[6], H=[32], O=[12], group=[8])
def tokens(make, T, H, O, group):
    return drawn(make, T, H, O, group, 1.0)


@assay.case(T=[9], H=[48], O=[5], group=[16])
def wide(make, T, H, O, group):
    return drawn(make, T, H, O, group, 1.0)


@assay.case(T=[5], H=[60], O=[7], group=[12])
def odd(make, T, H, O, group):
    return drawn(make, T, H, O, group, 1.0)


@assay.case(T=[6, 11], H=[32], O=[12], group=[8])
def loud(make, T, H, O, group):
    return drawn(make, T, H, O, group, 8192.0)


@assay.case(T=[4], H=[60], O=[9], group=[12])
def loud_odd(make, T, H, O, group):
    return drawn(make, T, H, O, group, 8192.0)


def golden(x, packed, scales, group):
    weight = assay.stage("weight", packed.to(x.dtype) * scales.repeat_interleave(group, 1))
    product = assay.stage("product", x @ weight.mT)
    return torch.nn.functional.silu(product)


def group_size(width, scales):
    """Columns that share a scale."""
    return width // scales


def forward(x, packed, scales, group):
    O, H = packed.shape
    size = group_size(H, scales.shape[1])
    spread = scales.unsqueeze(-1).expand(O, H // size, size).reshape(O, H)
    weight = assay.stage("weight", packed.float() * spread)
    product = assay.stage("product", x @ weight.mT)
    return product * torch.sigmoid(product)


def target():
    return assay.Target(
        forward, golden, cases=[tokens, wide, odd, loud, loud_odd], name="expert_load", outputs=("y",), backward=None
    )
