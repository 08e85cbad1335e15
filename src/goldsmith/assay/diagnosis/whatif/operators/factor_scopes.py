"""A factor of a sum applied to one addend only: a gate before the bias is added, a scale before a shift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..run.calls import Change, Changed, OperatorCall, floating, replaced, seen_through, whole

_MOST = 1024  # iterations
_SUMS = ("add", "sub")


def changes(calls: Sequence[OperatorCall], among: set[int]) -> Iterator[Change]:
    """`among`: the operators that the wrong tensor depends on; equal lines of a loop change together."""
    by_kind: dict[tuple, list[tuple[OperatorCall, OperatorCall, int]]] = {}
    for call in calls:
        if call.backward or call.index not in among or call.name not in ("mul", "div") or len(call.makers) != 2:
            continue
        for i, key in enumerate(call.makers):
            maker = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
            if maker is None or maker.name not in _SUMS or not maker.owns or call.name == "div" and i:
                continue
            if len(maker.makers) == 2 and all(map(_number, maker.args[:2])) and _number(call.args[i]):
                kind = (maker.name, maker.line, call.name, call.line, i, call.index - maker.index)
                by_kind.setdefault(kind, []).append((maker, call, i))
    for pairs in by_kind.values():
        maker, call, _ = pairs[-1]
        for behind in (1, 0) if len(pairs) <= _MOST else ():
            current: dict[int, tuple[Tensor, Tensor]] = {}
            group: dict[int, Changed] = {m.index: _kept(m.index, current, 1 - behind) for m, _, _ in pairs}
            for m, c, i in pairs:
                group[c.index] = _parted(m.index, i, current, group.get(c.index))
            term, factor = maker.operand(behind) or "an addend", call.operand(1 - pairs[-1][2]) or "a factor"
            times = f", in {len(pairs)} places" if len(pairs) > 1 else ""
            text = f"{term} is added after {call.expression}: {factor} does not multiply it{times}"
            params = {"factor": factor, "term": term}
            at = next(iter(group))
            yield Change("wrong_factor", text, at, group[at], params, 0.6, group=tuple(group.items()),
                         also=("missing_term",))  # fmt: skip


def _number(a: Any) -> bool:
    """The addend as a number: codes and zero points are integers, and those of 8 bits wrap."""
    return floating(a) or whole(a)


def _kept(index: int, current: dict[int, tuple[Tensor, Tensor]], which: int) -> Changed:
    """Stores the part of the sum that is multiplied and the part that is added afterwards."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        zero = torch.zeros_like(args[0]), torch.zeros_like(args[1])
        part = func(*replaced(args, 1 - which, zero[1 - which]), **kwargs)
        kept = torch.empty_like(out).copy_(part)
        current[index] = kept, out - kept
        return out

    return run


def _parted(index: int, i: int, current: dict[int, tuple[Tensor, Tensor]], inner: Changed | None) -> Changed:
    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        before, after = (seen_through(t, args[i]) for t in current[index])
        if before is None or after is None:
            raise RuntimeError("read through a view of another size")
        args = replaced(args, i, before)
        return (func(*args, **kwargs) if inner is None else inner(func, args, kwargs)) + after

    return run
