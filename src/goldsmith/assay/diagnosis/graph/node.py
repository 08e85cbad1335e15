"""Node: one operator of the golden's run, forward or backward, with its operands and their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tensors import floating

Key = str | int  # an input's name, or the index of the operator that made a tensor
Instead = Callable[[Mapping[Key, Tensor]], Mapping[Key, Tensor]]
Changed = Callable[[Any, tuple, dict], Any]  # (func, args, kwargs) -> what the operator returns instead


@dataclass(frozen=True)
class Observed:
    """A change of an operator whose operands or result other changed operators read."""

    run: Changed

    def __call__(self, func: Any, args: tuple, kwargs: dict) -> Any:
        return self.run(func, args, kwargs)


@dataclass
class Node:
    """One operator of the golden's run, with its operands and their names."""

    index: int
    name: str
    args: tuple
    kwargs: dict[str, Any]
    out: Any
    operands: tuple[str, ...]  # names of the tensors among args, in order
    backward: bool
    makers: tuple[Key, ...] = ()  # keys of those tensors
    line: str = ""  # source line in the golden; in autograd's backward, the line of the forward operator
    func: Any = None
    owns: bool = False  # whether its result has memory of its own
    read: tuple[Key, ...] = ()  # keys of all tensors it reads, including those in lists

    @property
    def tensors(self) -> list[Tensor]:
        return [a for a in self.args if isinstance(a, Tensor)]

    @property
    def expression(self) -> str:
        """A readable expression: `x * inv_rms`, `sum(x)`"""
        return expression(self.name, self.operands, self.args)

    def operand(self, i: int) -> str:
        """The name of the i-th argument, or its value if it is not a tensor."""
        at = sum(isinstance(a, Tensor) for a in self.args[:i])
        return self.operands[at] if i < len(self.args) and isinstance(self.args[i], Tensor) else str(self.args[i])


def maker_of(nodes: Sequence[Node], key: Key) -> Node | None:
    """The operator that made the tensor with this key; None for an input."""
    return nodes[key] if isinstance(key, int) and 0 <= key < len(nodes) else None


def behind(calls: Sequence[Node], key: Key) -> set[int]:
    """Indices of all operators that the tensor with this key depends on."""
    written: dict[Key, list[Node]] = {}
    for call in calls:
        outs = call.out if isinstance(call.out, list | tuple) else (call.out,)
        writes = not call.owns and any(isinstance(o, Tensor) for o in outs)
        for k in call.makers[:1] if writes else ():
            written.setdefault(k, []).append(call)  # writes in place, or makes a view that may be written to
    operators: set[int] = set()
    waiting, known = [key], {key}
    while waiting:
        at = waiting.pop()
        maker = maker_of(calls, at)
        for call in [*written.get(at, []), *([] if maker is None else [maker])]:
            operators.add(call.index)
            for k in call.read:
                if k not in known:
                    known.add(k)
                    waiting.append(k)
    return operators


def compared(calls: Sequence[Node], among: set[int]) -> set[int]:
    """The operators in `among` that compare numbers, and those that their operands depend on."""
    operators: set[int] = set()
    for call in calls:
        asks = isinstance(call.out, Tensor) and call.out.dtype == torch.bool and any(map(floating, call.tensors))
        if asks and call.index in among and call.index not in operators:
            operators |= behind(calls, call.index)
    return operators & among


_SIGNS = {"mul": "*", "div": "/", "add": "+", "sub": "-", "mm": "@", "bmm": "@"}
_LONG = 36


def expression(name: str, operands: tuple[str, ...], args: tuple) -> str:
    """A short expression: `x * inv_rms`, `sum(...)`."""
    parts = list(operands)
    if len(args) > 1 and len(parts) == 1 and isinstance(args[1], int | float) and name in _SIGNS:
        parts.append(f"{args[1]:g}")
    sign = _SIGNS.get(name.rstrip("_"))
    if sign and len(parts) == 2:
        text = f" {sign} ".join(f"({p})" if " " in p and not p.endswith(")") else p for p in parts)
    else:
        text = f"{name.strip('_')}({', '.join(p for p in parts if p)})"
    return text if len(text) <= _LONG else f"{name.strip('_')}(...)"
