"""0 in place of minus infinity in a maximum, a sum of exponentials or a choice, so that masked entries count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change, with_result

# masked_values covers a scalar that fills masked places
_MAKES = frozenset("full full_like fill_ scatter scatter_ index_fill index_fill_".split())


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.backward or call.name not in _MAKES or not floating(call.out) or call.out.dim() == 0:
        return
    if bool(torch.isneginf(call.out).any()):
        text = f"0 stands where {call.expression} has minus infinity"
        yield Change("wrong_mask", text, call.index, with_result(_as_zero), {}, 0.56, also=("missing_term",))


def _as_zero(t: Tensor) -> Tensor:
    return t.masked_fill(torch.isneginf(t), 0.0)
