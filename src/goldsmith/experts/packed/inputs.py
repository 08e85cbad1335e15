"""Arguments of `pack` and the importers: stacked tensors, or iterables that yield experts one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from ...core.shapes import ShapeError, check_dtype, check_tensor, kind


class Stack:
    """One argument: the same tensor of every expert, stacked [E, ...] or one by one. Iterates over the experts."""

    def __init__(
        self, op: str, name: str, value: object, dims: str, dtypes: Sequence[torch.dtype], hint: str = ""
    ) -> None:
        self.op, self.name, self.dims, self.dtypes, self.hint = op, name, dims.split(), dtypes, hint
        self.shape: tuple[int, ...] | None = None
        self.count: int | None = None
        self._value: Iterable[object]
        if isinstance(value, Tensor):
            check_tensor(op, name, value)
            if value.dim() != len(self.dims) + 1:
                wanted = f"[E, {', '.join(self.dims)}]"
                raise ShapeError(f"{op}: {name} is {list(value.shape)}, expected {wanted}{self._or_list()}{hint}")
            self._value, self.count = (value[e] for e in range(value.shape[0])), value.shape[0]
            self._check(value, name)
        elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict)):
            self._value = value
            self.count = len(value) if isinstance(value, Sized) else None
        else:
            raise TypeError(
                f"{op}: {name} is {'None' if value is None else kind(value)}, expected a tensor "
                f"[E, {', '.join(self.dims)}]{self._or_list()}{hint}"
            )

    def __iter__(self) -> Iterator[Tensor]:
        values, e, end = iter(self._value), 0, object()
        tensor: Any
        while (tensor := next(values, end)) is not end:
            name = f"{self.name} of expert {e}"
            check_tensor(self.op, name, tensor)
            self._check(tensor, name)
            if tensor.dim() != len(self.dims):
                raise ShapeError(f"{self.op}: {name} is {list(tensor.shape)}, expected [{', '.join(self.dims)}]")
            self.shape = self.shape or tuple(tensor.shape)
            if tuple(tensor.shape) != self.shape:
                raise ShapeError(f"{self.op}: {name} is {list(tensor.shape)}, but expert 0's is {list(self.shape)}")
            yield tensor.detach().cpu()
            del tensor  # free it before the next one is made: one expert at a time
            e += 1

    def _check(self, tensor: Tensor, name: str) -> None:
        if tensor.is_meta:
            raise ValueError(f"{self.op}: {name} is on the meta device, which holds no data; load it first")
        if self.dtypes and tensor.dtype not in self.dtypes:
            try:
                check_dtype(self.op, name, tensor, self.dtypes)
            except TypeError as error:
                raise TypeError(f"{error}{self.hint}") from None

    def _or_list(self) -> str:
        return f", or E tensors [{', '.join(self.dims)}] one by one"


def zip_experts(op: str, stacks: Sequence[Stack]) -> tuple[int | None, Iterator[tuple[Tensor, ...]]]:
    """(number of experts or None if unknown, iterator over the experts: a tuple with one tensor of each argument)"""
    known = [stack for stack in stacks if stack.count is not None]
    for stack in known[1:]:
        if stack.count != known[0].count:
            raise _uneven(op, known[0].name, known[0].count, stack.name, stack.count)
    if known and known[0].count == 0:
        raise ShapeError(f"{op}: {known[0].name} has no experts, expected at least 1")
    return (known[0].count if known else None), _zipped(op, stacks)


def _zipped(op: str, stacks: Sequence[Stack]) -> Iterator[tuple[Tensor, ...]]:
    iterators = [iter(stack) for stack in stacks]
    done = object()
    e = 0
    while True:
        row = [next(iterator, done) for iterator in iterators]
        ended = [stack for stack, tensor in zip(stacks, row) if tensor is done]
        if len(ended) == len(stacks):
            if e == 0:
                raise ShapeError(f"{op}: {stacks[0].name} has no experts, expected at least 1")
            return
        if ended:
            longer = next(stack for stack, tensor in zip(stacks, row) if tensor is not done)
            raise _uneven(op, ended[0].name, e, longer.name, f"more than {e}")
        yield tuple(row)  # type: ignore[arg-type]
        del row  # free it before the next one is made
        e += 1


def _uneven(op: str, first: str, few: object, second: str, many: object) -> ShapeError:
    return ShapeError(
        f"{op}: {first} has experts={few}, but {second} has experts={many}; both need one tensor per expert"
    )


def check_finite(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError with the first index where `tensor` is NaN or infinite."""
    if tensor.numel() == 0 or all(end.isfinite() for end in torch.aminmax(tensor)):
        return
    place = (~tensor.isfinite()).nonzero()[0].tolist()
    raise ValueError(
        f"{op}: {name} is {tensor[tuple(place)].item()} at {place}; weights and scales must be "
        "finite numbers: check their source"
    )


def check_flag(op: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name}={value!r} is {kind(value)}, expected True or False")


MOST_PARTITIONS = 1 << 16  # more than any machine has NUMA nodes; each slice adds some microseconds to a call


def check_partitions(op: str, partitions: object) -> None:
    check_count(op, "partitions", partitions)
    if isinstance(partitions, int) and partitions > MOST_PARTITIONS:
        raise ValueError(f"{op}: partitions={partitions}, expected at most {MOST_PARTITIONS}")


def check_count(op: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name}={value!r} is {kind(value)}, expected a whole number of at least 1")
    if value < 1:
        raise ValueError(f"{op}: {name}={value}, expected a whole number of at least 1")
