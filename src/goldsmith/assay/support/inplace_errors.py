"""Turns autograd's errors about in-place writes into a sentence that says which tensor was edited too early."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SAVED = "one of the variables needed for gradient computation has been modified by an inplace operation"
_WHICH = re.compile(r"\[torch\.(?:cuda\.)?(\w+?)Tensor (\[[^]]*\])\](?:, which is output (\d+) of (\w+),)?")
_LEAF = re.compile(r"a (?:view of a )?leaf Variable that requires grad is being used in an in-place operation")
_ADVICE = "it must write to a copy (x = x.clone())"
_ON = f"{_ADVICE}, and another thread must turn gradients off itself"


def edited(error: BaseException, inputs: Sequence[str] = ()) -> str | None:
    """The sentence, or None where the error is about something else. inputs: names of those that require a gradient."""
    text = str(error)
    if _LEAF.search(text):
        such = f", as {', '.join(inputs)} {'does' if len(inputs) == 1 else 'do'}," if inputs else ""
        return f"in-place edit: a leaf that requires a gradient{such} is edited in place where gradients are on; {_ON}"
    if _SAVED not in text:
        return None
    match = _WHICH.search(text)
    which = ""
    if match is not None:
        which = f" ({match[1].lower()} {match[2]}" + (f", output {match[3]} of {match[4]})" if match[3] else ")")
    return f"in-place edit: a tensor saved for the backward{which} is edited before the backward reads it; {_ADVICE}"
