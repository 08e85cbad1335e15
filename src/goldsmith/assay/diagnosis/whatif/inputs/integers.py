"""Integer and boolean inputs: read one place later, in another width or bit order; lengths taken as full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product

import torch
from torch import Tensor

from ...graph.tensors import floating, whole
from ..change import Change

_WIDTHS = ((torch.int64, torch.int32), (torch.int32, torch.uint8), (torch.int64, torch.uint8))
_SIZES = 6  # sizes of the case that lengths may be replaced by
_COUNTS = 4  # inputs that may be lengths
Leaves = Mapping[str, Tensor]


def changes(leaves: Leaves, numbers: Mapping[str, object]) -> Iterator[Change]:
    for name, t in leaves.items():
        if name.startswith("grad_") or not t.numel() or not (whole(t) or t.dtype == torch.bool):
            continue
        yield from _later(name, t)
        yield from _widths(name, t)
        if t.dtype == torch.bool:
            yield from _flags(name, t)
        if t.dtype in (torch.uint8, torch.int8):
            yield from _bits(name)
    yield from full(leaves, numbers)


def _one(name: str, change: Callable[..., Tensor]) -> Callable[[Leaves], Leaves]:
    return lambda now: {name: change(now[name])}


def _later(name: str, t: Tensor) -> Iterator[Change]:
    """Shifted by one place, with zeros or the border value beyond the end."""
    for axis in range(t.dim()):
        for step in (1, -1) if t.shape[axis] > 1 else ():
            for how, edge in (("filled with zeros", False), ("repeating its end", True)):

                def moved(t: Tensor, s: int = step, d: int = axis, edge: bool = edge) -> Tensor:
                    out, end = t.roll(s, d), 0 if s > 0 else -1
                    out.select(d, end).copy_(t.select(d, end) if edge else torch.zeros_like(t.select(d, end)))
                    return out

                text = f"{name} is shifted by {step:+d} along axis {axis}, {how}"
                params = {"input": name, "axis": axis, "step": step}
                yield Change("shifted", text, -1, None, params, 0.45, leaves=_one(name, moved), also=("off_by_one",))


def _widths(name: str, t: Tensor) -> Iterator[Change]:
    """Integers of one width read as another width: the start of their memory stands for all of it."""
    for wide, narrow in _WIDTHS:

        def read(t: Tensor, wide: torch.dtype = wide, narrow: torch.dtype = narrow) -> Tensor:
            lying = t.to(wide).contiguous().flatten().view(narrow)
            return lying[: t.numel()].reshape(t.shape).to(t.dtype)

        bits = 8 * wide.itemsize, 8 * narrow.itemsize
        text = f"{name} is stored in {bits[0]} bits per number and read in {bits[1]}"
        params = {"input": name, "bits": list(bits)}
        also = ("wrong_format", "wrong_stride")
        if t.numel() > 1 and not torch.equal(read(t), t):
            yield Change("dtype_width", text, -1, None, params, 0.45, leaves=_one(name, read), also=also)


def _flags(name: str, t: Tensor) -> Iterator[Change]:
    kinds: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
        ("counts as its opposite", lambda t: ~t),
        ("counts as true", lambda t: torch.ones_like(t)),
        ("counts as false", lambda t: torch.zeros_like(t)),
    )
    for text, change in kinds:
        yield Change("wrong_mask", f"{name} {text}", -1, None, {"input": name}, 0.5, leaves=_one(name, change))
    for axis in range(t.dim()):
        if t.shape[axis] > 1:
            text = f"{name} is reversed along axis {axis}"
            back = _one(name, lambda t, d=axis: t.flip(d))
            yield Change("permuted", text, -1, None, {"input": name, "axis": axis}, 0.4, leaves=back)


def _bits(name: str) -> Iterator[Change]:
    """The parts of a byte in reverse order; `block_offsets` covers its halves."""
    for bits, what in ((1, "bits"), (2, "pairs of bits")):

        def reversed_(t: Tensor, bits: int = bits) -> Tensor:
            byte, out = t.view(torch.uint8).long(), torch.zeros_like(t, dtype=torch.int64)
            for at in range(0, 8, bits):
                out |= (byte >> at & ((1 << bits) - 1)) << (8 - bits - at)
            return out.to(torch.uint8).view(t.dtype)

        text = f"the {what} of every byte of {name} are read from the other end"
        yield Change("wrong_format", text, -1, None, {"input": name}, 0.55, leaves=_one(name, reversed_),
                     also=("permuted",))  # fmt: skip


def full(leaves: Leaves, numbers: Mapping[str, object]) -> Iterator[Change]:
    """Lengths replaced by a size of the case: the padding after a sequence counts as part of it."""
    sizes = {k: n for k, n in numbers.items() if isinstance(n, int) and not isinstance(n, bool) and n > 1}
    fits: dict[str, list[tuple[str, int]]] = {}
    for name, t in leaves.items():
        if whole(t) and t.dim() and t.numel() and int(t.min()) >= 0 and len(fits) < _COUNTS:
            dims = {n for other in leaves.values() if floating(other) for n in other.shape}
            some = [(k, n) for k, n in sizes.items() if n in dims and n >= int(t.max()) and not bool((t == n).all())]
            fits[name] = some[:_SIZES]

    def filled(chosen: tuple[tuple[str, int], ...]) -> Callable[[Leaves], Leaves]:
        return lambda now: {name: torch.full_like(now[name], n) for name, n in chosen}

    alone = [((name, k, n),) for name, some in fits.items() for k, n in some]
    pairs = [((a, *x), (b, *y)) for a, b in combinations(fits, 2) for x, y in product(fits[a], fits[b]) if x[0] != y[0]]
    for chosen in (*alone, *pairs):
        text = " and ".join(f"every number of {name} counts as {k}, {n}" for name, k, n in chosen)
        change = filled(tuple((name, n) for name, _, n in chosen))
        yield Change("wrong_mask", text, -1, None, {"input": chosen[0][0]}, 0.5 - 0.05 * (len(chosen) > 1),
                     leaves=change, also=("invalid_index", "stray_read"))  # fmt: skip
