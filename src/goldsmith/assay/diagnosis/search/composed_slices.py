"""Wrong results of a blocked kernel, imitated by assembling the golden's results for slices of an axis.

A slice's result is the value that a kernel has after that block, even if the golden does not work in blocks. Two other
mistakes are here too: heads or features in the wrong order, and sums that continue from the previous row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..edits.golden_edit import GoldenEdit, NamedEdit
from ..graph.tensors import floating

_SHORTEST, _LONGEST = 2, 4096  # length of an axis that is cut
_ALL_SIZES_TO = 8  # all block sizes up to this are tried, and then powers of two
_MOST_BLOCKS = 64  # along an axis
_MOST_ELEMENTS = 1 << 20  # elements of an input that is cut
_SECONDS = 3.0  # CPU seconds in total
Values = Mapping[str, Tensor]
Assemble = Callable[[list[Tensor], list[int]], Tensor | None]  # the blocks' results and lengths -> one result
GoldenRun = Callable[[Values], Values]  # runs the golden on other leaves; RuntimeError if they do not fit


def composed_values(
    change: NamedEdit, leaves: Values, run_golden: Callable[[Values], Values | None], until: str
) -> dict[str, Tensor] | None:
    """The results up to `until` ("": all), assembled from several runs; None if the golden cannot run on its leaves."""

    def run(other: Values) -> Values:
        results = run_golden({**leaves, **other})
        if results is None:
            raise RuntimeError("the golden does not run on these leaves")
        return results

    try:
        return dict(change.composed(leaves, run, until)) if change.composed is not None else None
    except (RuntimeError, KeyError, IndexError):
        return None


def changes(leaves: Values, tensor: str, numbers: Mapping[str, Any]) -> Iterator[NamedEdit]:
    if tensor.endswith(".grad"):
        return  # a gradient would need the output gradients to be cut as well
    inputs = {n: t for n, t in leaves.items() if not n.startswith("grad_") and t.numel()}
    spent = [0.0]
    for names, axis, n in _groups(inputs):
        for block in _blocks(n):
            yield from _in_blocks(names, axis, n, block, tensor, spent)
    for names, axis, n in _groups(inputs):
        yield from _interleaved(names, axis, n, numbers)


def _groups(inputs: Values) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """(names, axis, length): each input alone, and all inputs that are equally long on the same axis."""
    axes: dict[tuple[tuple[str, ...], int], int] = {}
    for name, t in inputs.items():
        for axis, n in enumerate(t.shape):
            if not _SHORTEST < n <= _LONGEST or t.numel() > _MOST_ELEMENTS:
                continue
            same_shape = tuple(m for m, s in inputs.items() if s.shape == t.shape)
            same_length = tuple(m for m, s in inputs.items() if s.dim() > axis and s.shape[axis] == n)
            for names in (same_shape, same_length, (name,)):
                if any(floating(inputs[m]) for m in names):
                    axes.setdefault((names, axis), n)
    yield from ((names, axis, n) for (names, axis), n in axes.items())


def _blocks(n: int) -> Iterator[int]:
    for block in (*range(1, _ALL_SIZES_TO + 1), 16, 32, 64, 128, 256):
        if block < n and -(-n // block) <= _MOST_BLOCKS:
            yield block


def _in_blocks(
    names: tuple[str, ...], axis: int, n: int, block: int, tensor: str, spent: list[float]
) -> Iterator[NamedEdit]:
    lengths = [min(block, n - at) for at in range(0, n, block)]
    block_text = f"in blocks of {block} of {' and '.join(names)} along axis {axis}"
    params = {"input": names[0], "axis": axis, "block": block}
    block_results = _BlockResults(names, axis, n, block, spent)

    def assembled_change(
        text: str, cause: str, prior: float, assemble: Assemble, *also: str, keeps_axis: bool = False
    ) -> NamedEdit:
        def composed(leaves: Values, run: GoldenRun, until: str) -> Values:
            parts = block_results.of(leaves, run, until)
            unchanged = run({})
            results = {
                k: _assembled(assemble, [p[k] for p in parts], lengths, unchanged[k], keeps_axis, k != tensor)
                for k in unchanged
            }
            return {k: v for k, v in results.items() if v is not None}

        prior -= 0.05 * (block < 2)
        return NamedEdit(cause, f"{block_text} {text}", GoldenEdit(()), prior, params, also, composed=composed)

    for text, cause, prior, assemble, also in _WAYS:
        if assemble is not _unweighted or len(set(lengths)) > 1:
            yield assembled_change(text, cause, prior, assemble, *also, keeps_axis=assemble is _concatenated)


class _BlockResults:
    """The golden's results for every block. Changes with one block size are tried in a row and share them."""

    def __init__(self, names: tuple[str, ...], axis: int, n: int, block: int, spent: list[float]):
        self.names, self.axis, self.n, self.block, self.spent = names, axis, n, block, spent
        self.key: tuple | None = None
        self.results: list[Values] = []  # for the leaves in `key`
        self.failed = False

    def of(self, leaves: Values, run: GoldenRun, until: str) -> list[Values]:
        key = (id(leaves), until)
        if key == self.key:
            return self.results
        if self.failed or self.spent[0] > _SECONDS:
            raise RuntimeError("the golden does not run on blocks, or takes too long")
        self.key, self.results, started = None, [], time.thread_time()
        try:
            for start in range(0, self.n, self.block):
                width = min(self.block, self.n - start)
                self.results.append(
                    run({m: leaves[m].narrow(self.axis, start, width).contiguous() for m in self.names})
                )
        except RuntimeError:
            self.failed = True
            raise
        finally:
            self.spent[0] += time.thread_time() - started
        self.key = key
        return self.results


def _assembled(
    assemble: Assemble, parts: list[Tensor], lengths: list[int], like: Tensor, keeps_axis: bool, may_keep_axis: bool
) -> Tensor | None:
    """The blocks' results as one tensor of the golden's shape; None if the shapes do not fit.

    keeps_axis     whether the wrong tensor has the axis that is cut; otherwise it reduces that axis
    may_keep_axis  True for any other tensor than the wrong one: it may have the axis, and is then concatenated
    """
    if not floating(like) or any(p.dim() != like.dim() for p in parts):
        return None
    axis_reduced = all(p.shape == like.shape for p in parts)
    if axis_reduced == keeps_axis:
        return None if axis_reduced or not may_keep_axis else _concatenated(parts, lengths, like)
    result = assemble(parts, lengths)
    return result if result is not None and result.shape == like.shape else None


def _concatenated(parts: list[Tensor], lengths: list[int], like: Tensor | None = None) -> Tensor | None:
    """The blocks' results, joined along the first axis that has the blocks' lengths; None if there is none."""
    for d in range(parts[0].dim()):
        if [p.shape[d] for p in parts] == lengths:
            result = torch.cat(parts, d)
            return result if like is None or result.shape == like.shape else None
    return None


def _unweighted(parts: list[Tensor], lengths: list[int]) -> Tensor:
    return torch.stack(parts).mean(0)


def _weighted(parts: list[Tensor], lengths: list[int]) -> Tensor:
    return torch.stack([a * (b / sum(lengths)) for a, b in zip(parts, lengths, strict=True)]).sum(0)


# (text, cause, prior, the whole from the blocks' results, other causes)
_WAYS: tuple[tuple[str, str, float, Assemble, tuple[str, ...]], ...] = (
    ("the last block replaces all blocks before it", "overwritten_accumulator", 0.45, lambda v, k: v[-1],
     ("truncated_reduction", "missing_term")),
    ("only the first block is used", "truncated_reduction", 0.45, lambda v, k: v[0], ("overwritten_accumulator",)),
    ("all blocks have the same weight, although the last one is shorter", "wrong_factor", 0.45, _unweighted,
     ("wrong_mask", "missing_partition")),
    ("the results of the blocks are averaged, without the terms between blocks", "missing_term", 0.43, _weighted,
     ("missing_rescale",)),
    ("the results of the blocks are added up", "missing_rescale", 0.4, lambda v, k: torch.stack(v).sum(0),
     ("missing_term", "repeated_term")),
    ("each block ignores the blocks before it", "missing_term", 0.45, _concatenated,
     ("truncated_reduction", "overwritten_accumulator")),
)  # fmt: skip


def _interleaved(names: tuple[str, ...], axis: int, n: int, sizes: Mapping[str, object]) -> Iterator[NamedEdit]:
    """Positions of an axis assigned to groups in turn (h % r) instead of in blocks (h // (n / r)), or the reverse.

    This covers heads that share keys, pairs of features, and groups of channels. The candidate computes the golden's
    result for the reordered positions and stores it at the original positions.
    """
    numbers = {v for v in sizes.values() if isinstance(v, int) and not isinstance(v, bool)}
    for extent in sorted({n, *(v for v in numbers if 2 < v < n)}, reverse=True):
        for parts in _divisors(extent):
            position = torch.arange(n)
            position[:extent] = position[:extent] % parts * (extent // parts) + position[:extent] // parts
            for restored in (True, False):

                def composed(
                    leaves: Values, run: GoldenRun, until: str, position: Tensor = position, restored: bool = restored
                ) -> Values:
                    at = position.to(leaves[names[0]].device)
                    results = run({m: torch.empty_like(leaves[m]).index_copy(axis, at, leaves[m]) for m in names})
                    return {k: _from_positions(v, axis, at) if restored else v for k, v in results.items()}

                range_text = "" if extent == n else f" 0..{extent - 1}"
                text = (
                    f"positions{range_text} of axis {axis} of {' and '.join(names)} are assigned in turn to {parts} "
                    "groups"
                )
                text += "" if restored else ", and the result stays in that order"
                params = {"operand": names[0], "axis": axis, "parts": parts}
                prior = 0.55 - 0.01 * (extent < n) - 0.01 * (not restored) - 0.01 * (len(names) > 1)
                yield NamedEdit("permuted", text, GoldenEdit(()), prior, params, ("wrong_stride", "invalid_index"),
                                composed=composed)  # fmt: skip


def _from_positions(v: Tensor, axis: int, at: Tensor) -> Tensor:
    """The result of each position, along `axis` if its length fits, otherwise along the last axis that fits."""
    axes = [d for d in range(v.dim()) if v.shape[d] == len(at)]
    return v.index_select(axis if axis in axes else axes[-1], at) if axes else v


def _divisors(n: int) -> Sequence[int]:
    return [r for r in range(2, n) if n % r == 0] if 3 < n <= _LONGEST else []
