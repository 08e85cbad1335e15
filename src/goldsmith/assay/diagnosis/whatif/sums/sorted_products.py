"""Products that are added at indices, with one factor in another order than the sorted indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating, whole
from ..change import Change, instead

_ADDING = frozenset(
    "index_add index_add_ index_put index_put_ scatter_add scatter_add_ embedding_dense_backward".split()
)
_MOST = 1 << 20  # elements of the products


def changes(calls: Sequence[Node]) -> Iterator[Change]:
    """One factor of every product stays; the other is read in another order of the sorted indices."""
    for call in calls:
        if call.name not in _ADDING:
            continue
        index = _index(call)
        if index is None or len(index) < 3:
            continue
        for maker in {k for k in call.makers if isinstance(k, int) and 0 <= k < len(calls)}:
            product = calls[maker]
            if not floating(product.out) or product.out.numel() > _MOST or product.out.numel() % len(index):
                continue
            pair = _factors(product, len(index))
            if pair is not None:
                yield from _reordered(product, pair, index)


def _index(call: Node) -> Tensor | None:
    """The destination of each row."""
    indices = [a for a in call.args if whole(a)]
    if call.name.startswith("index_put"):
        added = len(call.args) > 3 and call.args[3]
        indices = [i for i in call.args[1] if i is not None] if added else []
    index = indices[0] if len(indices) == 1 and whole(indices[0]) else None
    if index is not None and call.name.startswith("scatter") and index.dim() > 1:
        rows = index.select(-1, 0)
        index = rows if bool((index == rows.unsqueeze(-1)).all()) else None
    return None if index is None else index.reshape(-1)


def _factors(product: Node, rows: int) -> tuple[Tensor, Tensor] | None:
    """Both factors of `rows` elementwise products, one product per row; None if there are none."""
    a, b = (*product.args[:2], None, None)[:2]
    outer = product.name in ("bmm", "mm") and isinstance(a, Tensor) and a.shape[-1] == 1
    if not (outer or product.name in ("mul", "mul_")) or not floating(a) or not floating(b):
        return None
    return tuple(t.expand(product.out.shape).reshape(rows, -1) for t in (a, b))


def _reordered(product: Node, pair: tuple[Tensor, Tensor], index: Tensor) -> Iterator[Change]:
    order = index.argsort(stable=True)
    for cause, how, read in (
        ("permuted", "in reverse", order.flip(0)),
        ("shifted", "one too far", order.roll(-1)),
        ("shifted", "one too early", order.roll(1)),
    ):
        at = torch.empty_like(order)
        at[order] = read
        for i in (0, 1):
            name = product.operand(i) or f"a factor of {product.expression}"
            text = f"in the products, sorted by the element that they are added to, {name} is read {how}"
            yield Change(cause, text, product.index, _read(product, pair, i, at), {"operand": name, "axis": 0}, 0.5)


def _read(product: Node, pair: tuple[Tensor, Tensor], i: int, at: Tensor) -> Changed:
    new = (pair[1 - i] * pair[i][at]).reshape(product.out.shape)
    return instead(lambda *args, **kwargs: new.clone())
