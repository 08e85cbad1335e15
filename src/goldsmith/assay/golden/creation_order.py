"""CreationOrder: the order in which a function computes its results, which its `return` statement does not show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch._ops import OpOverload

from ..support.dispatch_mode import DispatchMode


class CreationOrder(DispatchMode):
    """Dispatch mode that numbers operators and records which one last filled each storage.

    on_result: number of an operator -> function to call with its result before anything reads it.
    """

    def __init__(self, on_result: Mapping[int, Callable[[Tensor], object]] | None = None) -> None:
        super().__init__()
        self.count = 0
        self.filled: dict[int, int] = {}  # address -> number of the operator
        self.on_result = on_result or {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        seen = set() if func._schema.is_mutable else _addresses((args, kwargs))
        for place in _addresses(out) - seen:  # neither a view nor an unchanged argument
            self.filled[place] = self.count
        if self.count in self.on_result and isinstance(out, Tensor):
            self.on_result[self.count](out)
        return out

    def numbered(self, named: Mapping[str, Tensor]) -> dict[str, int]:
        """Name -> number of the operator whose whole result the tensor is; inputs and parts of results are left out."""
        numbers = {n: self.filled.get(t.untyped_storage().data_ptr(), 0) for n, t in named.items() if _whole(t)}
        return {n: number for n, number in numbers.items() if number}

    def sorted(self, named: Mapping[str, Tensor]) -> list[str]:
        """The names in the order of creation; inputs that are returned unchanged come first."""
        return sorted(named, key=lambda n: max((self.filled.get(p, 0) for p in _addresses(named[n])), default=0))


def _whole(t: Tensor) -> bool:
    return bool(t.numel()) and t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size()


def _addresses(value: object) -> set[int]:
    """Storage addresses of the tensors in a nested value; torch's own tree walk takes longer than the operator."""
    addresses: set[int] = set()
    _collect(value, addresses)
    return addresses


def _collect(value: object, addresses: set[int]) -> None:
    if isinstance(value, Tensor):
        if value.numel():
            addresses.add(value.untyped_storage().data_ptr())
    elif isinstance(value, (list, tuple)):
        for part in value:
            _collect(part, addresses)
    elif isinstance(value, dict):
        _collect([*value.values()], addresses)
