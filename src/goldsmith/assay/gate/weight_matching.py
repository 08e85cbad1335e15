"""Repacking: the weights of a model that a candidate's parameter was made of, and how.

The candidate's process has no weights of the model, only digests of their values: both constructors draw from one seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

MOST_PARTS = 8  # equal parts of a weight that may be parameters of their own
ALIGNMENT = 16  # bytes: the widest load of a thread on a GPU; torch's own memory has at least this


@dataclass(frozen=True)
class Weight:
    """A weight of a module: its name in the module, its name in the case, and what its constructor made of it.

    digest  of its values and shape; values: of its values in ascending order
    part    (axis, start, length) where this is a slice of the weight; shape, digest and values are the slice's
    """

    state: str
    name: str
    shape: tuple[int, ...] = ()
    digest: str = ""
    values: str = ""
    part: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, state: str, name: str, t: Tensor, part: tuple[int, int, int] | None = None) -> Weight:
        t = _comparable(t)
        return cls(state, name, tuple(t.shape), _digest(t), _digest(t.flatten().sort().values), part)

    @classmethod
    def parts_of(cls, state: str, name: str, t: Tensor) -> Iterator[Weight]:
        """Its halves, thirds, ... along axis 0 or 1; not those of equal numbers, which say nothing of their place."""
        for axis in range(min(t.dim(), 2)):
            for count in (n for n in range(2, MOST_PARTS + 1) if t.shape[axis] % n == 0):
                length = t.shape[axis] // count
                for start in range(0, t.shape[axis], length) if length else ():
                    part = t.narrow(axis, start, length)
                    if not _constant(part):
                        yield cls.of(state, name, part, (axis, start, length))


UNPLACED = (
    "it cannot be judged: it has parameters of its own, and not all weights of the model have a place in its parameters"
)


@dataclass(frozen=True)
class Block:
    """A weight, or a part of one, with its axes permuted, and then in another shape."""

    weight: Weight
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, t: Tensor) -> Tensor:
        t = t if self.weight.part is None else t.narrow(*self.weight.part)
        if self.shape == self.weight.shape and self.axes == tuple(range(len(self.shape))):
            return t
        return t.permute(self.axes).reshape(self.shape)


@dataclass(frozen=True)
class Repacking:
    """How a parameter is made of the weights of a case: blocks, concatenated along an axis.

    contiguous: the parameter is. Then it stays so, and aligned, whatever the layout of the case's weight: a constructor
    makes no other.
    """

    blocks: tuple[Block, ...]
    axis: int
    contiguous: bool

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        parts = [block.of(values[block.weight.name]) for block in self.blocks]
        if len(parts) > 1:
            return torch.cat(parts, self.axis)
        own_layout = not self.contiguous or (parts[0].is_contiguous() and parts[0].data_ptr() % ALIGNMENT == 0)
        return parts[0] if own_layout else parts[0].clone(memory_format=torch.contiguous_format)


def matched(module: torch.nn.Module, weights: Sequence[Weight]) -> tuple[dict[str, Repacking], list[str]]:
    """(parameter or buffer -> how it is made of the weights, remarks about those that are not)

    A weight of the same name comes first, whatever its values. One without a name goes where its values are.
    """
    parameters = dict(module.named_parameters())
    own = {**parameters, **dict(module.named_buffers())}
    by_name = {w.state: w for w in weights if w.part is None and w.state in own}
    rest = [w for w in weights if w.part is None and w.state not in by_name]
    repackings: dict[str, Repacking] = {}
    others = list[str]()  # parameters that no weights make
    misfits = list[Weight]()  # whose parameter has another shape
    for name, weight in by_name.items():
        shape = tuple(own[name].shape)
        repacking = _repacking(own[name], [weight], [weight])
        if repacking is None and shape != weight.shape:
            repacking = _repacking(own[name], rest, weights)
            others += [] if repacking else [f"{name} {list(shape)}"]
            misfits += [] if repacking else [weight]
        whole = Block(weight, tuple(range(len(weight.shape))), weight.shape)
        repackings[name] = repacking or Repacking((whole,), 0, own[name].is_contiguous())
        rest = [w for w in rest if w.name not in {b.weight.name for b in repackings[name].blocks}]
    for name in (n for n in own if n not in by_name):
        repacking = _repacking(own[name], rest, weights)
        if repacking is not None:
            repackings[name] = repacking
            rest = [w for w in rest if w.name not in {b.weight.name for b in repacking.blocks}]
        elif name in parameters:
            others.append(f"{name} {list(own[name].shape)}")
    remarks = [UNPLACED] if others and (rest or misfits) else []
    if others and weights:
        remarks.append(
            f"its parameter {_listed(others)} is not made of the model's weights: it equals none of them, and no "
            f"transpose, reshape, concatenation or part (up to {MOST_PARTS} equal ones)"
        )
    if rest:
        left = [f"{w.state} {list(w.shape)}" for w in rest]
        remarks.append(f"none of its parameters and buffers holds the model's {_listed(left)}")
    return repackings, remarks


def _listed(names: Sequence[str]) -> str:
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else names[0]


def _repacking(t: Tensor, rest: Sequence[Weight], weights: Sequence[Weight]) -> Repacking | None:
    """How the tensor is made of unused weights; of used ones, too, if its values are not all equal."""
    if not t.numel():
        return None
    values = _comparable(t)
    for axis in range(min(max(t.dim(), 1), 2)):
        blocks = _blocks(values, axis, rest, weights)
        if blocks is not None:
            return Repacking(tuple(blocks), axis, t.is_contiguous())
    return None


def _blocks(t: Tensor, axis: int, rest: Sequence[Weight], weights: Sequence[Weight]) -> list[Block] | None:
    if t.dim() == 0:
        block = _block(t, rest, weights)
        return None if block is None else [block]
    free, blocks, start = list(rest), list[Block](), 0
    row = t.numel() // t.shape[axis]
    sizes = {torch.Size(w.shape).numel() for w in weights}
    lengths = sorted((size // row for size in sizes if size and size % row == 0), reverse=True)
    while start < t.shape[axis]:
        parts = (t.narrow(axis, start, n) for n in lengths if start + n <= t.shape[axis])
        block = next(filter(None, (_block(part, free, weights) for part in parts)), None)
        if block is None:
            return None
        blocks.append(block)
        start += block.shape[axis]
        free = [w for w in free if w != block.weight]
    return blocks


def _block(t: Tensor, rest: Sequence[Weight], weights: Sequence[Weight]) -> Block | None:
    """The weight with these values. Equal numbers, such as a bias of zeros, do not tell which, so each serves once."""
    constant = _constant(t)
    values = _digest(t.flatten().sort().values)
    for weight in (*rest, *(() if constant else weights)):
        if weight.values != values:
            continue
        for axes in permutations(range(len(weight.shape))):
            order = sorted(axes, key=axes.__getitem__)  # the inverse
            weight_layout = t.reshape([weight.shape[a] for a in axes]).permute(order)
            if _digest(weight_layout) == weight.digest:
                return Block(weight, axes, tuple(t.shape))
    return None


def _constant(t: Tensor) -> bool:
    return bool((t == t.flatten()[:1]).all())


def _comparable(t: Tensor) -> Tensor:
    return t.detach().to("cpu", torch.float64 if t.is_floating_point() else torch.int64)


def _digest(t: Tensor) -> str:
    """Equal for tensors of one shape with equal values."""
    return hashlib.sha256(repr(tuple(t.shape)).encode() + t.contiguous().numpy().tobytes()).hexdigest()[:16]
