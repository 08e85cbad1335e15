"""What golden-side edits that fit say about the source: the kinds of edits that undo them, and names and numbers."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ...facts.evidence import WhatIf
from .edits import Edit

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
    "permuted": (*_NAMES, "operator", "function", "order undone"),
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


_NAMES_IN = ("factor", "named", "term", "function")  # parameters with names of the golden, alone or in a formula
_NUMBERS_IN = ("value", "eps", "fill")
_NAME = re.compile(r"[A-Za-z_]\w*")
_TOKEN = re.compile(r"[A-Za-z_]\w*|(?<!\w)(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_ALIKE = 1e-5  # relative to a number that was fitted, and that a kernel writes with eight digits


@dataclass(frozen=True)
class GoldenHint:
    """What golden-side edits that fit leave out, add or exchange: an edit of the source brings it in or out.

    names    of each such edit; numbers: factors and such, other than 1, and their inverses
    words    in the lines of the golden that these edits change
    """

    names: frozenset[frozenset[str]] = frozenset()
    numbers: frozenset[float] = frozenset()
    words: frozenset[str] = frozenset()

    @classmethod
    def of(cls, whatifs: Iterable[WhatIf]) -> GoldenHint:
        """Of the edits that fit."""
        fitting = list(whatifs)
        rows = [what.params for what in fitting]
        texts = [text for row in rows for key in _NAMES_IN if isinstance(text := row.get(key), str)]
        values = [abs(v) for row in rows for key in _NUMBERS_IN if isinstance(v := row.get(key), int | float)]
        numbers = {n for v in values if v and math.isfinite(v) for n in (float(v), 1 / v)}
        names = {frozenset(_NAME.findall(text)) for text in texts}
        places = (what.line.rpartition(":") for what in fitting if what.line)
        words = {word for file, _, line in places for word in _NAME.findall(linecache.getline(file, int(line)))}
        return cls(frozenset(names - {frozenset()}), frozenset(numbers - {1.0}), frozenset(words))

    def fits(self, edit: Edit, data: bytes) -> float:
        """1 if the edit inserts or removes all names of one golden-side edit, or one of the numbers, otherwise 0; more
        by a half if it inserts several words of the line.
        """
        if not self.names and not self.numbers and not self.words:
            return 0.0
        removed, added = list[str](), list[str]()
        for start, end, _ in edit.spans:
            removed += _tokens(data[start:end].decode(errors="replace"))
        for _, _, text in edit.spans:
            for token in _tokens(text):
                if token in removed:
                    removed.remove(token)
                else:
                    added.append(token)
        changed = {*added, *removed}
        parts = {part for token in changed for part in (token, *token.split("_"))}
        written = [float(token) for token in changed if not _NAME.match(token)] if self.numbers else []
        named = any(names <= parts for names in self.names) or any(
            math.isclose(n, number, rel_tol=_ALIKE) for n in written for number in self.numbers
        )
        return named + 0.5 * (len(self.words.intersection(added)) > 1)


@lru_cache(1 << 14)
def _tokens(text: str) -> tuple[str, ...]:
    return tuple(_TOKEN.findall(text))


NO_HINT = GoldenHint()
