"""What a patch says about the cause: the edit that mends a kernel undoes the fault, whatever the numbers look like.

The shares are those of the faults of KernelFault that such an edit undoes and that have this cause.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from ..source.patch import Equal, Patch
from . import rules
from .rank import Cause

_WORDS = {  # a word that only one side of the change has
    "save_for_backward": ("wrong_saved_tensor", 1.0), "nan_to_num": ("nan_swallowed", 1.0),
    "index_add_": ("lost_update", 0.95), "atomic_add": ("lost_update", 0.95),
    "bfloat16": ("low_precision_accumulation", 0.9), "float16": ("low_precision_accumulation", 0.9),
    "empty": ("uninitialised_accumulator", 0.85), "empty_like": ("uninitialised_accumulator", 0.85),
    "new_empty": ("uninitialised_accumulator", 0.85), "contiguous": ("layout_assumption", 0.9),
}  # fmt: skip
_KINDS = {
    "sign": ("sign_flip", 0.95), "a sign removed": ("sign_flip", 0.95), "made contiguous": ("layout_assumption", 0.9),
    "assignment": ("overwritten_accumulator", 0.83), "mask added": ("wrong_mask", 0.8),
    "another mask": ("wrong_mask", 0.8), "condition added": ("wrong_mask", 0.8),
    "loop bounds": ("truncated_reduction", 0.71), "factor added": ("wrong_factor", 0.7),
    "factor removed": ("wrong_factor", 0.62), "addend added": ("missing_term", 0.63),
    "rounding": ("never_written", 0.6), "plus or minus one": ("off_by_one", 0.53),
    "offset added": ("invalid_index", 0.5), "another name": ("wrong_saved_tensor", 0.5),
}  # fmt: skip
_PLACES = {  # of 40, 5, 14 and 49 such faults with one edit
    "loop": ("truncated_reduction", 0.72), "mask": ("wrong_mask", 0.6), "address": ("invalid_index", 0.36),
    "index": ("invalid_index", 0.45),
}  # fmt: skip


def by_patch(patch: Patch) -> tuple[str, float] | None:
    """(cause, share of such patches that had it); None if the edit or its equals do not tell, or it is doubtful."""
    edits: list[Patch | Equal] = [patch, *patch.equals]
    told = {_told(edit) for edit in edits}
    return told.pop() if len(told) == 1 and not patch.doubtful else None


def _told(edit: Patch | Equal) -> tuple[str, float] | None:
    if edit.joins:  # a copy beside another edit is for layouts that no case of the author has
        told = {_KINDS.get(kind) for kind in edit.joins if kind != "made contiguous"}
        return told.pop() if len(told) == 1 else None
    lines = edit.diff.splitlines()
    before, after = (
        {w for s in lines if s[:1] == sign and s[:3] != 3 * sign for w in re.findall(r"\w+", s)} for sign in "-+"
    )
    word = next((w for w in _WORDS if w in before ^ after), "")
    return _WORDS.get(word) or _PLACES.get(_place(lines)) or _KINDS.get(edit.kind)


def _place(lines: Sequence[str]) -> str:
    """What the changed part of a line is for: a key of _PLACES, or "" for an operand like others."""
    old, new = ([s[1:] for s in lines if s[:1] == sign and s[:3] != 3 * sign] for sign in "-+")
    text = textwrap.dedent(new[0] if new else "")
    before = textwrap.dedent(old[0] if old else "")
    if len(new) != len(old) or len(new) > 1 or not text:
        return ""
    at = next((n for n, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), min(len(before), len(text)))
    try:
        tree = ast.parse(f"{text}\n    pass" if text.rstrip().endswith(":") else text)
    except SyntaxError:
        return ""
    around = [n for n in ast.walk(tree) if isinstance(n, ast.expr | ast.keyword) and n.col_offset <= at < _end(n)]
    for node in reversed(around):  # the innermost first
        call = node if isinstance(node, ast.Call) else None
        name = "" if call is None else getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in ("range", "static_range"):
            return "loop"
        if isinstance(node, ast.keyword) and node.arg == "mask":
            return "mask"
        if call is not None and name in ("load", "store", "atomic_add") and call.args[:1] and call.args[0] in around:
            return "address"
        if isinstance(node, ast.Subscript) and node.slice in around:
            return "index"
    return ""


def _end(node: ast.AST) -> int:
    """The column behind a node that begins and ends in the first line."""
    return node.end_col_offset + 1 if getattr(node, "end_lineno", 0) == 1 else 1 << 16  # type: ignore[attr-defined]


def with_patch(causes: Sequence[Cause], patch: Patch, tensor: str) -> list[Cause]:
    """The causes, with that of the patch first unless a surer one is there."""
    known = by_patch(patch)
    if known is None or causes and causes[0].score >= known[1] and causes[0].id != known[0]:
        return list(causes)
    id, share = known
    entry = rules.CATALOGUE[id]
    new = Cause(id, 0.0, tensor, [], {}, f"{tensor} is wrong: {entry.text}" if tensor else entry.text, entry.mend)
    own = next((c for c in causes if c.id == id), new)
    params = {k: v for k, v in own.params.items() if k != "learned"}
    first = replace(own, score=max(own.score, share), evidence=own.evidence or [patch.sentence], params=params)
    return [first, *(c for c in causes if c.id != id)]
