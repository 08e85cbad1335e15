"""Changes in which a factor multiplies one addend of a sum only: a gate before the bias, a scale before a shift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating, replaced, seen_through, whole
from ..change import Change

_MOST_PAIRS = 1024  # of a sum and its product, in all iterations of a loop
_SUMS = ("add", "sub")


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """(a + b) * c becomes a * c + b, or a + b * c.

    `among` holds the operators that the wrong tensor depends on. All iterations of a line in a loop change together.
    """
    pairs_by_kind: dict[tuple, list[tuple[Node, Node, int]]] = {}
    for call in calls:
        if call.backward or call.index not in among or call.name not in ("mul", "div") or len(call.makers) != 2:
            continue
        for sum_operand, maker_key in enumerate(call.makers):
            sum_maker = calls[maker_key] if isinstance(maker_key, int) and 0 <= maker_key < len(calls) else None
            if (
                sum_maker is None
                or sum_maker.name not in _SUMS
                or not sum_maker.owns
                or call.name == "div"
                and sum_operand
            ):
                continue
            if (
                len(sum_maker.makers) == 2
                and all(map(_is_numeric, sum_maker.args[:2]))
                and _is_numeric(call.args[sum_operand])
            ):
                kind = (sum_maker.name, sum_maker.line, call.name, call.line, sum_operand, call.index - sum_maker.index)
                pairs_by_kind.setdefault(kind, []).append((sum_maker, call, sum_operand))
    for pairs in pairs_by_kind.values():
        sum_maker, call, _ = pairs[-1]
        for unscaled_addend in (1, 0) if len(pairs) <= _MOST_PAIRS else ():
            current: dict[int, tuple[Tensor, Tensor]] = {}
            group: dict[int, Changed] = {
                sum_call.index: _split_sum(sum_call.index, current, 1 - unscaled_addend) for sum_call, _, _ in pairs
            }
            for sum_call, product_call, sum_operand in pairs:
                group[product_call.index] = _apply_to_one_part(
                    sum_call.index, sum_operand, current, group.get(product_call.index)
                )
            term, factor = (
                sum_maker.operand(unscaled_addend) or "an addend",
                call.operand(1 - pairs[-1][2]) or "a factor",
            )
            times = f", in {len(pairs)} places" if len(pairs) > 1 else ""
            text = f"{term} is added after {call.expression}: {factor} does not multiply it{times}"
            params = {"factor": factor, "term": term}
            first_index = next(iter(group))
            yield Change("wrong_factor", text, first_index, group[first_index], params, 0.6, group=tuple(group.items()),
                         also=("missing_term",))  # fmt: skip


def _is_numeric(value: object) -> bool:
    """Whether an operand is a floating-point or integer tensor: codes and zero points are integers."""
    return floating(value) or whole(value)


def _split_sum(index: int, parts_of_sum: dict[int, tuple[Tensor, Tensor]], scaled_addend: int) -> Changed:
    """Stores two parts of the sum: the one that is multiplied, and the one that is added afterwards."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        zeros = torch.zeros_like(args[0]), torch.zeros_like(args[1])
        scaled = func(*replaced(args, 1 - scaled_addend, zeros[1 - scaled_addend]), **kwargs)
        before = torch.empty_like(out).copy_(scaled)
        parts_of_sum[index] = before, out - before
        return out

    return run


def _apply_to_one_part(
    index: int, sum_operand: int, parts_of_sum: dict[int, tuple[Tensor, Tensor]], split: Changed | None
) -> Changed:
    """Multiplies the first part of the sum and then adds the second part."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        before, after = (seen_through(t, args[sum_operand]) for t in parts_of_sum[index])
        if before is None or after is None:
            raise RuntimeError("read through a view of another size")
        args = replaced(args, sum_operand, before)
        return (func(*args, **kwargs) if split is None else split(func, args, kwargs)) + after

    return run
