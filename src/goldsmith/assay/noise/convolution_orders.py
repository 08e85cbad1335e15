"""Legal orders of the sums of a convolution, and of its backward.

    y = sum over channels and kernel, dx = sum over output channels and kernel, dw = sum over batch and space

The summed axis is permuted; "tiles" and "pairwise" also split it into parts, whose sums `fold` adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import summation_orders as orders

Results = tuple[Tensor | None, Tensor | None, Tensor | None]


def convolution(
    order: orders.Order, x: Tensor, w: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
) -> Tensor | None:  # fmt: skip
    """None: torch's own order."""

    def part(channels: Tensor) -> Tensor:
        of_all = _in_every_group(channels, groups, x.shape[1] // groups)
        weight = w[of_all] if transposed else w[:, channels]
        return torch.ops.aten.convolution(
            x[:, of_all], weight, None, stride, padding, dilation, transposed, output_padding, groups
        )

    y = _sum(order, x.shape[1] // groups, math.prod(w.shape[2:]), x.device, part)
    if y is None or bias is None:
        return y
    return y + bias.view(-1, *[1] * (y.dim() - 2))


def convolution_backward(
    order: orders.Order, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
    output_mask: list[bool],
) -> Results | None:  # fmt: skip
    """None: torch's own order."""
    if order.style == "as_stored":
        return None

    def call(i: int, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
        mask = [i == k for k in range(3)]
        return torch.ops.aten.convolution_backward(
            dy, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
        )[i]

    def input_part(channels: Tensor) -> Tensor:
        of_all = _in_every_group(channels, groups, dy.shape[1] // groups)
        return call(0, dy[:, of_all], x, w[:, channels] if transposed else w[of_all])

    def weight_part(batch: Tensor) -> Tensor:
        return call(1, dy[batch], x[batch], w)

    dx = dw = db = None
    if output_mask[0]:
        dx = _sum(order, dy.shape[1] // groups, math.prod(w.shape[2:]), dy.device, input_part)
        dx = call(0, dy, x, w) if dx is None else dx
    if output_mask[1]:
        space = math.prod(x.shape[2:] if transposed else dy.shape[2:])
        dw = _sum(order, dy.shape[0], space, dy.device, weight_part)
        dw = call(1, dy, x, w) if dw is None else dw
    if output_mask[2]:
        db = orders.reduce(dy, [0, *range(2, dy.dim())], False, order)
    return dx, dw, db


def _sum(
    order: orders.Order, n: int, terms: int, device: torch.device, part: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The sum over an axis of n indices in this order; None: torch's own. terms: numbers that each index adds."""
    permutation = order.permutation(n, device)
    if permutation is None:
        return None
    if order.style == "permuted":
        return part(permutation)
    shortest = max(1, order.tile // max(terms, 1))
    first = part(permutation[:shortest])
    most = max(1, orders.MOST_PARTIALS // max(first.numel(), 1))
    rest = permutation[shortest:]
    parts = [first, *(part(p) for p in rest.split(max(shortest, math.ceil(len(rest) / most))) if len(p))]
    return orders.fold(torch.stack([p.reshape(-1) for p in parts]), order).view(parts[0].shape)


def _in_every_group(channels: Tensor, groups: int, size: int) -> Tensor:
    """The same channels of every group."""
    starts = torch.arange(groups, device=channels.device) * size
    return (starts[:, None] + channels).flatten()
