"""Masks: shifted, applied by blocks, applied to one tensor too many, with another value at masked places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..graph.node import Node
from ..graph.tensors import floating, whole
from .golden_edit import CALL, RESULT, Action, GoldenEdit, NamedEdit, Part, Primitive, do, named
from .primitives import masks as p
from .primitives.formulas import applied
from .primitives.positions import shift

_SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ASKS = {"ge": ">=", "gt": ">", "lt": "<", "le": "<=", "ne": "!=", "eq": "=="}
_OTHER = {"lt": "<=", "le": "<", "gt": ">=", "ge": ">"}
_BLOCKS = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128)
_WHOLE_TILES = (4, 8, 16, 32, 64, 128)
_SHOWN = frozenset("detach alias view expand unsqueeze clone lift_fresh".split())
_INFINITE = frozenset("full full_like fill_ scatter scatter_ index_fill index_fill_".split())
_SHIFTED = ("wrong_mask",)
_WITHOUT_INFINITY = partial(torch.nan_to_num, nan=torch.nan, posinf=torch.inf, neginf=0.0)


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    out = node.out
    if not isinstance(out, Tensor):
        return
    if node.name.rstrip("_") in ("tril", "triu"):
        yield from _triangles(node)
    if out.dtype == torch.bool and out.numel() and node.name not in _SHOWN:
        yield from _conditions(node)
    if node.name in ("masked_fill", "masked_fill_", "where"):
        yield from _filled(node)
    if not node.backward and node.name in _INFINITE and floating(out) and out.dim() and bool(torch.isneginf(out).any()):
        text = f"0 stands where {node.expression} has minus infinity"
        zero = RESULT, do(applied, of=_WITHOUT_INFINITY)
        yield named(node, "wrong_mask", 0.56, text, zero, also=("missing_term",))


def _triangles(node: Node) -> Iterator[NamedEdit]:
    diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
    for step in (1, -1):
        text = f"the diagonal of {node.name} is {diagonal + step} instead of {diagonal}"
        moved = CALL, do(p.triangle, diagonal=diagonal + step)
        yield named(node, "mask_shift", 0.8, text, moved, diagonal=diagonal + step)
    rows, columns = node.out.shape[-2:]
    apart = columns - rows
    for other in (diagonal - apart, diagonal + apart) if apart and node.out.numel() else ():
        text = f"the diagonal of {node.name} is {other} instead of {diagonal}: {_explanation(apart)}"
        moved = CALL, do(p.triangle, diagonal=other)
        yield named(node, "mask_shift", 0.7, text, moved, also=_SHIFTED, diagonal=other)


def _explanation(apart: int) -> str:
    return f"the numbers of rows and columns differ by {abs(apart)}, and positions are counted from the other end"


def _conditions(node: Node) -> Iterator[NamedEdit]:
    out, expression = node.out, node.expression
    if node.name in _SIGNS:
        text = f"`{_OTHER[node.name]}` stands where the golden has `{_SIGNS[node.name]}`"
        causes = ("mask_shift", "off_by_one") if _shifts(node) else ("off_by_one", "mask_shift")
        for cause, prior in zip(causes[: out.dim()], (0.75, 0.7), strict=False):
            yield named(node, cause, prior, text, (CALL, do(p.compare_otherwise)))
    cause = "invalid_index" if _of_indices(node) else "wrong_mask"
    for value, how in ((True, "always true"), (False, "always false")):
        text = f"the condition {expression} is {how}"
        always = named(node, cause, 0.6, text, (RESULT, do(p.fill, value=value)))
        yield always
        for wrap, where in (("around", "wrap around"), ("clamp", "use the nearest valid one")):
            if cause == "invalid_index":
                text = f"the condition {expression} is {how}, and indices out of range {where}"
                yield replace(always, text=text, prior=0.65, edit=replace(always.edit, wrap=wrap))
    for axis in range(out.dim()):
        for step in (1, -1):
            text = f"the mask {expression} is shifted by {step} along axis {axis}"
            yield named(node, "mask_shift", 0.55, text, (RESULT, _slid(axis, step)), axis=axis, step=step)
    if node.name in _SIGNS and out.dim() > 1 and out.shape[-1] != out.shape[-2] and min(out.shape[-2:]) > 1:
        apart = out.shape[-1] - out.shape[-2]
        for axis in (out.dim() - 1, out.dim() - 2):
            for step in (apart, -apart):
                text = f"the mask {expression} is shifted by {step} along axis {axis}: {_explanation(apart)}"
                moved = RESULT, _slid(axis, step)
                yield named(node, "mask_shift", 0.5, text, moved, also=_SHIFTED, axis=axis, step=step)


def _slid(axis: int, step: int) -> Primitive:
    return do(shift, axis=axis, step=step, edge="own")


def _of_indices(node: Node) -> bool:
    """Whether indices are compared with a constant, i.e. checked for validity, not for position."""
    tensors = node.tensors
    if len(tensors) != 1 or not whole(tensors[0]):
        return len(tensors) == 2 and all(whole(t) for t in tensors) and min(t.numel() for t in tensors) == 1 and (
            not _shifts(node))  # fmt: skip
    steps = tensors[0].flatten().diff()
    return not len(steps) or not bool((steps == steps[0]).all())


def _shifts(node: Node) -> bool:
    """Whether positions are compared with positions, so that every row's limit moves by one place."""
    numbers = [t.flatten().diff() for t in node.tensors if t.numel() > 1]
    return node.out.dim() > 1 and all(bool((steps == steps[0]).all()) for steps in numbers)


def _filled(node: Node) -> Iterator[NamedEdit]:
    where, expression = node.name == "where", node.expression
    at = 0 if where else 1
    mask = node.args[at]
    if not isinstance(mask, Tensor) or not mask.numel():
        return
    for value, how in ((False, "never taken"), (True, "always taken")):
        text = f"the mask of {expression} is {how}"
        yield named(node, "wrong_mask", 0.55, text, (at, do(p.fill, value=value)))
    for axis in range(mask.dim()):
        for step in (1, -1):
            text = f"the mask of {expression} is shifted by {step} along axis {axis}"
            yield named(node, "mask_shift", 0.65, text, (at, _slid(axis, step)), axis=axis, step=step)
    if len(node.args) < 3 or not node.out.is_floating_point() or node.name == "masked_fill_":
        return
    value = node.args[2]
    fill = value if not isinstance(value, Tensor) else float(value) if value.numel() == 1 else None
    if fill is not None:
        yield from _held(node, mask, float(fill))
    if mask.dim() >= 2:
        yield from _by_blocks(node, at, mask)


def _held(node: Node, mask: Tensor, fill: float) -> Iterator[NamedEdit]:
    """Another number at masked places: a function applied too late to -inf, or 0.

    If fully masked blocks are skipped, only the masked places of the diagonal blocks change.
    """
    shape, inverted = tuple(node.out.shape), node.name == "where"
    rows, columns = shape[-2:] if len(shape) > 1 else (1, 0)
    all_ = p.hidden(mask, shape, 0, inverted)
    for block in (0, *(b for b in _WHOLE_TILES if b < columns and rows > 1)):
        if block and torch.equal(p.hidden(mask, shape, block, inverted), all_):
            continue
        where = f" in the blocks of {block} on the diagonal" if block else ""
        for c in (0.0, 1.0) if fill == 0 else (0.0,):
            if c != fill:
                text = f"masked places of {node.expression}{where} hold {c:g} instead of {fill:g}"
                yield named(node, "wrong_mask", 0.6, text, (CALL, do(p.hold, block=block, c=c)), fill=c)
        if abs(fill) == torch.inf:
            text = f"masked places of {node.expression}{where} hold, instead of {fill:g},"
            yield named(node, "wrong_mask", 0.6, text, (CALL, do(p.hold, block=block, c=-1e-3)), free=-1e-3)


def _by_blocks(node: Node, at: Part, mask: Tensor) -> Iterator[NamedEdit]:
    """Blocks that a kernel takes for masked, or for unmasked."""
    fills = node.name == "masked_fill"
    skipped, also = fills, ("wrong_mask", "off_by_one")
    for block in (b for b in _BLOCKS if b < max(mask.shape[-2:])):
        rows: list[tuple[str, float, str, str, bool]] = []
        if block in _WHOLE_TILES:
            rows = [
                ("truncated_reduction", 0.55, "the blocks on the diagonal are left out", "off the diagonal", skipped),
                ("truncated_reduction", 0.55, "only the blocks on the diagonal are left", "on the diagonal", skipped),
                ("truncated_reduction", 0.55, "the last block of columns of every row is left out",
                 "before the row's block", skipped),
            ]  # fmt: skip
        if min(mask.shape[-2:]) > 1:
            rows += [
                ("wrong_mask", 0.6, "only the blocks on the diagonal are masked, those beyond it are not",
                 "on the diagonal", not skipped),
                ("wrong_mask", 0.6, "the blocks on the diagonal are not masked", "off the diagonal", not skipped),
            ]  # fmt: skip
        for cause, prior, how, region, elsewhere in rows:
            keep = do(p.keep_blocks, region=region, block=block, elsewhere=elsewhere)
            if not torch.equal(keep(mask), mask):
                text = f"of {node.expression} in blocks of {block}, {how}"
                yield named(node, cause, prior, text, (at, keep), also=also if cause != "wrong_mask" else (),
                            block=block)  # fmt: skip


def unchecked_indices(nodes: Sequence[Node], among: set[int]) -> Iterator[NamedEdit]:
    """Indices that stand for nothing, such as -1: nothing checks them, and nothing replaces them."""
    for node in nodes:
        if node.backward or node.index not in among or node.name not in _ASKS or len(node.tensors) != 1:
            continue
        replacing = [n for n in nodes if n.index in among and _replaces(n, node)]
        valid = float(node.out.double().mean()) if node.out.numel() else 1.0
        if not replacing or not 0 < valid < 1:
            continue
        keeps = node.name != "eq" if node.args[1] in (-1, 0) else valid > 0.5
        actions = [Action(node.index, RESULT, do(p.fill, value=keeps))]
        actions += [Action(n.index, CALL, do(p.keep_operand, at=int(n.name == "where"))) for n in replacing]
        for wrap, where in (("around", "count from the end"), ("clamp", "use the nearest valid one")):
            condition = f"{node.operand(0) or 'an index'} {_ASKS[node.name]} {node.args[1]}"
            text = f"nothing checks whether {condition}: invalid indices {where}"
            edit = GoldenEdit(tuple(actions), node.line, wrap=wrap)
            yield NamedEdit("invalid_index", text, edit, 0.66, {"index": node.operand(0)}, _SHIFTED)


def _replaces(node: Node, condition: Node) -> bool:
    """Whether it replaces the indices that the condition is about."""
    at = int(node.name == "where")
    if node.name not in ("clamp", "clamp_min", "clamp_max", "where", "masked_fill") or len(node.args) <= at:
        return False
    if not whole(node.args[at]):
        return False
    own = sum(isinstance(a, Tensor) for a in node.args[:at])
    same = node.makers[own] == condition.makers[0] and node.args[at].shape == node.out.shape
    return same and not torch.equal(node.args[at], node.out)
