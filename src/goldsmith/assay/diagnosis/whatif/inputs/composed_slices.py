"""Results assembled from the golden's results on slices of an axis, the way a blocked kernel assembles them wrongly.

The results of the slices are what a kernel holds after each block, however the golden works inside. Also here: heads or
features in another order than the golden's, and rows that continue where the previous row stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..run.calls import Change, floating

_LEAST, _MOST = 2, 4096  # places along an axis
_SMALL = 8  # all block sizes up to this are tried, then powers of two
_PIECES = 64  # blocks of an axis, at most
_NUMBERS = 1 << 20  # elements of an input that is cut
_TILES = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
_SECONDS = 3.0  # CPU seconds in total
Values = Mapping[str, Tensor]
Put = Callable[[list[Tensor], list[int]], Tensor | None]  # the blocks' results and lengths -> one result


class GoldenRun(Protocol):
    """The golden's results from other leaves, up to `until` or all of them; RuntimeError if they do not fit."""

    until: str

    def __call__(self, leaves: Values) -> Values: ...


class _Run:
    def __init__(self, leaves: Values, make: Callable[[Values], Values | None], until: str):
        self.leaves, self.make, self.until = leaves, make, until

    def __call__(self, leaves: Values) -> Values:
        done = self.make({**self.leaves, **leaves})
        if done is None:
            raise RuntimeError("the golden does not run on these")
        return done


def composed_values(
    change: Change, leaves: Values, make: Callable[[Values], Values | None], until: str
) -> dict[str, Tensor] | None:
    """The change's result, assembled from several runs; None if the golden does not run on such leaves."""
    try:
        return dict(change.composed(leaves, _Run(leaves, make, until))) if change.composed is not None else None
    except (RuntimeError, KeyError, IndexError):
        return None


def changes(leaves: Values, tensor: str, sizes: Mapping[str, Any]) -> Iterator[Change]:
    """`tensor`: the wrong one; `sizes`: sizes and other numbers of the case."""
    if tensor.endswith(".grad"):
        return  # the output gradients would have to be cut as well
    inputs = {n: t for n, t in leaves.items() if not n.startswith("grad_") and t.numel()}
    yield from _on_from_before()
    spent = [0.0]
    for names, axis, n in _groups(inputs):
        for block in _blocks(n):
            yield from _in_blocks(names, axis, n, block, tensor, spent)
    for names, axis, n in _groups(inputs):
        yield from _ordered(names, axis, n, sizes)


# blocks


def _groups(inputs: Values) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """(names, axis, length): each input alone, and all inputs that are equally long on the same axis."""
    axes: dict[tuple[tuple[str, ...], int], int] = {}
    for name, t in inputs.items():
        for axis, n in enumerate(t.shape):
            if not _LEAST < n <= _MOST or t.numel() > _NUMBERS:
                continue
            same = tuple(m for m, s in inputs.items() if s.shape == t.shape)
            leading = tuple(m for m, s in inputs.items() if s.dim() > axis and s.shape[axis] == n)
            for names in (same, leading, (name,)):
                if any(floating(inputs[m]) for m in names):
                    axes.setdefault((names, axis), n)
    yield from ((names, axis, n) for (names, axis), n in axes.items())


def _blocks(n: int) -> Iterator[int]:
    for block in (*range(1, _SMALL + 1), 16, 32, 64, 128, 256):
        if block < n and -(-n // block) <= _PIECES:
            yield block


def _in_blocks(
    names: tuple[str, ...], axis: int, n: int, block: int, tensor: str, spent: list[float]
) -> Iterator[Change]:
    lengths = [min(block, n - at) for at in range(0, n, block)]
    of = f"in blocks of {block} of {' and '.join(names)} along axis {axis}"
    params = {"input": names[0], "axis": axis, "block": block}
    pieces = _Pieces(names, axis, n, block, spent)

    def put(text: str, cause: str, prior: float, make: Put, *also: str, whole: bool = False) -> Change:
        def composed(leaves: Values, run: GoldenRun) -> Values:
            parts = pieces.of(leaves, run)
            done = run({})
            results = {k: _put(make, [p[k] for p in parts], lengths, done[k], whole, k != tensor) for k in done}
            return {k: v for k, v in results.items() if v is not None}

        prior -= 0.05 * (block < 2)
        return Change(cause, f"{of} {text}", -1, None, params, prior, composed=composed, also=also)

    yield put("the last one replaces all before it", "overwritten_accumulator", 0.45, lambda v, k: v[-1],
              "truncated_reduction", "missing_term")  # fmt: skip
    yield put(
        "the first one is all there is", "truncated_reduction", 0.45, lambda v, k: v[0], "overwritten_accumulator"
    )
    if len(set(lengths)) > 1:
        yield put("all weigh alike, the last one, which is shorter, as well", "wrong_factor", 0.45,
                  lambda v, k: torch.stack(v).mean(0), "wrong_mask", "missing_partition")  # fmt: skip
    yield put("their own results are averaged: what lies between the blocks is left out", "missing_term", 0.43,
              lambda v, k: torch.stack([a * (b / n) for a, b in zip(v, k, strict=True)]).sum(0),
              "missing_rescale")  # fmt: skip
    yield put("their own results are added up", "missing_rescale", 0.4, lambda v, k: torch.stack(v).sum(0),
              "missing_term", "repeated_term")  # fmt: skip
    yield put("each begins anew", "missing_term", 0.45, _concatenated, "truncated_reduction", "overwritten_accumulator",
              whole=True)  # fmt: skip
    yield _last_step(names, axis, n, block, of, params)


class _Pieces:
    """The golden's results of every block; changes of one block size follow each other and share these."""

    def __init__(self, names: tuple[str, ...], axis: int, n: int, block: int, spent: list[float]):
        self.names, self.axis, self.n, self.block, self.spent = names, axis, n, block, spent
        self.key: tuple | None = None
        self.results: list[Values] = []  # results for the current leaves; a block that does not fit raises once
        self.failed = False

    def of(self, leaves: Values, run: GoldenRun) -> list[Values]:
        key = (id(leaves), run.until)
        if key == self.key:
            return self.results
        if self.failed or self.spent[0] > _SECONDS:
            raise RuntimeError("the golden does not run on blocks, or takes too long")
        self.key, self.results, started = None, [], time.thread_time()
        try:
            for at in range(0, self.n, self.block):
                width = min(self.block, self.n - at)
                self.results.append(run({m: leaves[m].narrow(self.axis, at, width).contiguous() for m in self.names}))
        except RuntimeError:
            self.failed = True
            raise
        finally:
            self.spent[0] += time.thread_time() - started
        self.key = key
        return self.results


def _put(make: Put, parts: list[Tensor], lengths: list[int], like: Tensor, whole: bool, other: bool) -> Tensor | None:
    """The blocks' results as one tensor of the golden's shape; None if their form differs.

    other: whether this is not the wrong tensor; it may keep the axis that the wrong tensor reduces.
    """
    if not floating(like) or any(p.dim() != like.dim() for p in parts):
        return None
    reduced = all(p.shape == like.shape for p in parts)
    if reduced == whole:
        return None if reduced or not other else _concatenated(parts, lengths, like)
    result = make(parts, lengths)
    return result if result is not None and result.shape == like.shape else None


def _concatenated(parts: list[Tensor], lengths: list[int], like: Tensor | None = None) -> Tensor | None:
    """The blocks' results concatenated."""
    for d in range(parts[0].dim()):
        if [p.shape[d] for p in parts] == lengths:
            joined = torch.cat(parts, d)
            return joined if like is None or joined.shape == like.shape else None
    return None


def _last_step(names: tuple[str, ...], axis: int, n: int, block: int, of: str, params: dict) -> Change:
    """The last block's increment replaces the sum of all blocks."""
    before = (n - 1) // block * block

    def composed(leaves: Values, run: GoldenRun) -> Values:
        done, first = run({}), run({m: leaves[m].narrow(axis, 0, before) for m in names})
        return {k: v - first[k] * (before / n) for k, v in done.items() if floating(v) and first[k].shape == v.shape}

    text = f"{of} what the last one adds to a mean replaces what was there"
    return Change("overwritten_accumulator", text, -1, None, params, 0.42, composed=composed,
                  also=("missing_term", "truncated_reduction"))  # fmt: skip


# rows that continue


class _Once:
    """The golden's unchanged results, computed once for the changes that only reassemble them."""

    def __init__(self) -> None:
        self.key: tuple | None = None
        self.results: Values = {}
        self.leaves: Values | None = None  # kept alive, so that no other object has its id

    def of(self, leaves: Values, run: GoldenRun) -> Values:
        if self.key != (id(leaves), run.until):
            self.results = run({})
            self.key, self.leaves = (id(leaves), run.until), leaves
        return self.results


def _on_from_before() -> Iterator[Change]:
    once = _Once()
    for axis in (0, 1):

        def composed(leaves: Values, run: GoldenRun, axis: int = axis) -> Values:
            return {k: v.cumsum(axis) if floating(v) and v.dim() > axis else v for k, v in run({}).items()}

        yield from _tiles_go_on(axis, once)
        text = f"along axis {axis} each sum goes on where the one before it stopped: it is set to zero once"
        yield Change("uninitialised_accumulator", text, -1, None, {"axis": axis}, 0.55, composed=composed,
                     also=("stale_state", "repeated_term"))  # fmt: skip


def _tiles_go_on(axis: int, once: _Once) -> Iterator[Change]:
    """The sums of a tile start from those that the previous tile left in the same memory."""
    for tile in _TILES:

        def composed(leaves: Values, run: GoldenRun, tile: int = tile) -> Values:
            done = once.of(leaves, run)
            return {k: _carried(v, axis, tile) if floating(v) and v.dim() > axis else v for k, v in done.items()}

        text = f"along axis {axis} each sum of a tile of {tile} goes on where the one in its place in the tile before "
        text += "stopped: their memory is set to zero once"
        yield Change("uninitialised_accumulator", text, -1, None, {"axis": axis, "tile": tile}, 0.5, composed=composed,
                     also=("stale_state", "repeated_term"))  # fmt: skip


def _carried(v: Tensor, axis: int, tile: int) -> Tensor:
    out = v.clone()
    for at in range(tile, v.shape[axis], tile):
        n = min(tile, v.shape[axis] - at)
        out.narrow(axis, at, n).add_(out.narrow(axis, at - tile, n))
    return out


# orders


def _ordered(names: tuple[str, ...], axis: int, n: int, sizes: Mapping[str, Any]) -> Iterator[Change]:
    """Places of an axis taken in turn where they belong to groups, or the reverse: h % r for h // (n / r).

    This covers heads that share keys, pairs of features, and groups of channels. The candidate computes the golden's
    result for the reordered places and stores it at the original places.
    """
    numbers = {v for v in sizes.values() if isinstance(v, int) and not isinstance(v, bool)}
    for extent in sorted({n, *(v for v in numbers if 2 < v < n)}, reverse=True):
        for parts in _divisors(extent):
            place = torch.arange(n)
            place[:extent] = place[:extent] % parts * (extent // parts) + place[:extent] // parts
            for back in (True, False):

                def composed(leaves: Values, run: GoldenRun, place: Tensor = place, back: bool = back) -> Values:
                    at = place.to(leaves[names[0]].device)
                    done = run({m: torch.empty_like(leaves[m]).index_copy(axis, at, leaves[m]) for m in names})
                    return {k: _handed_out(v, axis, at) if back else v for k, v in done.items()}

                some = "" if extent == n else f" 0..{extent - 1}"
                text = (
                    f"places{some} of axis {axis} of {' and '.join(names)} are taken in turn by {parts}, not in groups"
                )
                text += "" if back else ", and what comes is left in that order"
                params = {"operand": names[0], "axis": axis, "parts": parts}
                prior = 0.55 - 0.01 * (extent < n) - 0.01 * (not back) - 0.01 * (len(names) > 1)
                yield Change("permuted", text, -1, None, params, prior, composed=composed,
                             also=("wrong_stride", "invalid_index"))  # fmt: skip


def _handed_out(v: Tensor, axis: int, at: Tensor) -> Tensor:
    """Each place's own result, along the same axis if the length fits, otherwise along the last axis that fits."""
    axes = [d for d in range(v.dim()) if v.shape[d] == len(at)]
    return v.index_select(axis if axis in axes else axes[-1], at) if axes else v


def _divisors(n: int) -> Sequence[int]:
    return [r for r in range(2, n) if n % r == 0] if 3 < n <= _MOST else []
