"""In which order a function makes what it returns: the order of the names in its `return` says nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch._ops import OpOverload

from ..support.dispatch_mode import DispatchMode


class CreationOrder(DispatchMode):
    """Counts operators, and knows of a tensor's memory which of them was the last to fill it.

    made: number of an operator -> what is to be done with its result before anything reads it.
    """

    def __init__(self, made: Mapping[int, Callable[[Tensor], object]] | None = None) -> None:
        super().__init__()
        self.count = 0
        self.filled: dict[int, int] = {}  # address -> number of the operator
        self.made = made or {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        seen = set() if func._schema.is_mutable else _places((args, kwargs))
        for place in _places(out) - seen:  # neither a view nor handed through
            self.filled[place] = self.count
        if self.count in self.made and isinstance(out, Tensor):
            self.made[self.count](out)
        return out

    def numbered(self, named: Mapping[str, Tensor]) -> dict[str, int]:
        """Of each tensor that is all that an operator made, the operator; of inputs and of parts of others nothing."""
        numbers = {n: self.filled.get(t.untyped_storage().data_ptr(), 0) for n, t in named.items() if _whole(t)}
        return {n: number for n, number in numbers.items() if number}

    def sorted(self, named: Mapping[str, Tensor]) -> list[str]:
        """The names, first made first; inputs that are handed through come before all."""
        return sorted(named, key=lambda n: max((self.filled.get(p, 0) for p in _places(named[n])), default=0))


def _whole(t: Tensor) -> bool:
    return bool(t.numel()) and t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size()


def _places(value: object) -> set[int]:
    """The memory of the tensors in what an operator takes or gives; torch's own walk takes longer than the operator."""
    found: set[int] = set()
    _gather(value, found)
    return found


def _gather(value: object, found: set[int]) -> None:
    if isinstance(value, Tensor):
        if value.numel():
            found.add(value.untyped_storage().data_ptr())
    elif isinstance(value, (list, tuple)):
        for part in value:
            _gather(part, found)
    elif isinstance(value, dict):
        _gather([*value.values()], found)
