"""y = x W^T with W in 4 bits, two a byte (low half first), a scale and a zero point for each group of columns."""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[5], H=[32], O=[12], group=[8])
def tokens(make, T, H, O, group):
    return {
        "x": make.normal(T, H), "packed": make.integers(0, 256, O, H // 2, dtype=torch.uint8),
        "scale": 0.05 + 0.1 * make.uniform(O, H // group), "zero": 8 * make.uniform(O, H // group), "group": group,
    }  # fmt: skip


@assay.case(T=[9], H=[48], O=[7], group=[16])
def wide(make, T, H, O, group):
    return tokens[0].draw(make, T, H, O, group)


@assay.case(T=[3], H=[20], O=[15], group=[4])
def narrow(make, T, H, O, group):
    return tokens[0].draw(make, T, H, O, group)


def golden(x, packed, scale, zero, group):
    whole = torch.stack([packed % 16, packed // 16], -1).flatten(1).to(x.dtype)
    spread = [t.repeat_interleave(group, 1) for t in (scale, zero)]
    weight = assay.stage("weight", (whole - spread[1]) * spread[0])
    return x @ weight.mT


def forward(x, packed, scale, zero, group):
    O, H = len(packed), 2 * packed.shape[1]
    y = torch.zeros(len(x), O)
    weight = torch.empty(O, H)
    for g in range(H // group):
        part = slice(g * group, (g + 1) * group)
        bytes_ = packed[:, g * group // 2 : (g + 1) * group // 2]
        low, high = (bytes_ & 15).float(), (bytes_ >> 4).float()
        whole = torch.stack([low, high], -1).flatten(1)
        weight[:, part] = (whole - zero[:, g : g + 1]) * scale[:, g : g + 1]
    weight = assay.stage("weight", weight)
    for g in range(H // group):
        part = slice(g * group, (g + 1) * group)
        y += x[:, part] @ weight[:, part].mT
    return y


def target():
    return assay.Target(
        forward, golden, cases=[tokens, wide, narrow], name="int4_matmul", outputs=("y",), backward=None
    )
