"""Text of others (messages of a candidate's exceptions, names) with its control characters written out."""

from __future__ import annotations

import re

# all but line end and tab; marks that turn the direction of text; halves of surrogate pairs, which no file can hold
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Every control character as its escape, so that \x1b[31m in a message colours nothing and moves no cursor."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
