"""Origins: which results torch computed, followed from operator to operator in the candidate's process.

A kernel writes into memory that torch allocates without computing, so what a result comes from shows in its storage:

    buffer    allocated (empty, zeros, ...), or computed from a buffer: a kernel may have written it
    computed  the result of an operator that computes, from no buffer
    neither   inputs, and copies of them

A result whose numbers are those of a computed tensor, element by element, counts as computed too: a kernel copied it.
A candidate that adds a useless buffer to torch's result passes; this is evidence, as all of the candidate's process is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...declare.returned_values import names_of, only_tensors
from ...execute.records import Material
from ...support.dispatch_mode import DispatchMode

_ALLOCATES = (
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros",
    "ones", "ones_like", "new_ones", "full", "full_like", "new_full",
)  # fmt: skip
_COPIES = ("clone", "_to_copy", "copy_", "copy", "contiguous", "lift_fresh", "alias", "detach", "_unsafe_view")
_FILLS = ("fill_", "zero_", "set_", "resize_")


class Origins(DispatchMode):
    """A mode around one call of a candidate. operators: those that computed, by the storage of what they computed."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: set[int] = set()
        self.operators: dict[int, str] = {}
        self.results: list[tuple[str, Tensor]] = []
        self.kept: list[object] = []  # storages, so that no later one gets the address of a freed one

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        read = {self._key(t) for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            key = self._key(tensor)
            if name in _ALLOCATES:
                self.buffers.add(key)
            elif name in _FILLS or key in read and not func._schema.is_mutable:  # a view
                continue
            elif name in _COPIES:
                self._copied(key, read - {key})
            elif read & self.buffers:
                self._now(key, "")
            else:
                self._now(key, name)
                self.results.append((name, tensor))
        return out

    def operator(self, tensor: Tensor) -> str:
        """The operator of torch that computed a result, or the same numbers, from no buffer; "" where there is none."""
        copied = (name for name, result in self.results if _same_numbers(result, tensor))
        return self.operators.get(self._key(tensor), "") or next(copied, "")

    def _copied(self, key: int, sources: set[int]) -> None:
        if sources & self.buffers:
            self._now(key, "")
        for source in sources & self.operators.keys():
            self._now(key, self.operators[source])

    def _now(self, key: int, operator: str) -> None:
        self.buffers.discard(key)
        self.operators.pop(key, None)
        if operator:
            self.operators[key] = operator
        else:
            self.buffers.add(key)

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.kept.append(storage)
        return storage._cdata


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    if a.numel() != b.numel() or b.numel() < 2 or a.dtype != b.dtype or not b.is_floating_point():
        return False
    return torch.equal(a.flatten(), b.flatten())


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def computed_by_torch(material: Material) -> dict[str, str]:
    """Output of one call without gradients -> the operator of torch that computed it; names of others are left out."""
    supply = material.ordered({n: t.detach().clone() for n, t in material.inputs.items()})
    call = material.target.bound("candidate", supply)
    with torch.no_grad(), Origins() as origins:
        result = call(supply)
    outputs = only_tensors(names_of(result, material.target.outputs, "candidate"), "candidate")
    operators = {name: origins.operator(tensor) for name, tensor in outputs.items()}
    return {name: operator for name, operator in operators.items() if operator}
