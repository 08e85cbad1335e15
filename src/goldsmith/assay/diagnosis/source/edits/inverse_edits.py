"""The kinds of edits that undo a cause: what a golden-side edit that fits says about the source."""

from __future__ import annotations

from collections.abc import Iterable

_NAMES = ("another name", "names exchanged", "entries exchanged", "arguments swapped", "another expression")
_BOUNDS = (
    *("number", "comparator", "plus or minus one", "loop bounds", "bound moved", "rounding", "a name for a number"),
    "a name for an expression",
)
_MASKS = ("comparator", "value of masked elements", "mask added", "another mask", "condition added", "addend removed")
_TERMS = ("addend added", "addend removed", "terms removed", "operator", "sign")
_FACTORS = ("factor added", "factor removed", "operator", "number", "another name")
_PLACES = ("offset added", "another name", "names exchanged", "factor added", "addend added", "another expression")
KINDS: dict[str, tuple[str, ...]] = {
    "never_written": (*_BOUNDS, *_MASKS),
    "not_computed": ("condition", "one branch taken", "function"),
    "truncated_reduction": (*_BOUNDS, *_MASKS),
    "off_by_one": _BOUNDS,
    "wrong_mask": _MASKS,
    "wrong_axis": ("number", "entries exchanged", "keyword added"),
    "overwritten_accumulator": ("assignment", "function", "moved out of the loop"),
    "uninitialised_accumulator": ("function", "number", "moved into the loop", "moved out of the loop"),
    "lost_update": ("function", "assignment", "offset added", "keyword added", "repeated places added"),
    "low_precision_accumulation": ("dtype", "call removed", "call added"),
    "missing_rescale": (*_FACTORS, "statements exchanged"),
    "missing_term": _TERMS,
    "repeated_term": (*_TERMS, "statement removed", "assignment"),
    "sign_flip": ("sign", "a sign removed", "operator", "operands swapped"),
    "wrong_factor": _FACTORS,
    "scale_bias": (*_FACTORS, *_TERMS),
    "transposed": ("transposition removed", "call added", "entries exchanged", "names exchanged", "arguments swapped"),
    "permuted": (*_NAMES, "operator", "function"),
    "shifted": (*_BOUNDS, *_PLACES),
    "wrong_stride": _PLACES,
    "swapped_results": ("entries exchanged", "names exchanged", "another name", "another target"),
    "dtype_width": ("dtype",),
    "layout_assumption": ("made contiguous", "call added", *_PLACES),
    "expanded_gradient": ("made contiguous", "call added", "offset added", *_PLACES),
    "overrun": (*_BOUNDS, *_MASKS),
    "stray_read": (*_BOUNDS, *_MASKS),
    "aliased": ("call added", "function"),
    "input_modified": ("call added", "function"),
    "missing_max_shift": (*_TERMS, "another name"),
    "overflow": ("dtype", *_TERMS),
    "absolute_eps": ("term moved in", "term moved out", "number"),
    "index_overflow": ("dtype", "call added"),
    "invalid_index": (*_BOUNDS, *_PLACES),
    "wrong_saved_tensor": _NAMES,
    "mask_shift": (*_BOUNDS, *_MASKS),
    "dropout_mismatch": (*_PLACES, "another name"),
    "wrong_decision": ("comparator", "keyword added", "flag"),
}


def inverse_kinds(causes: Iterable[str]) -> frozenset[str]:
    """The kinds that undo any of these causes."""
    return frozenset(kind for cause in causes for kind in KINDS.get(cause, ()))
