"""Text of findings and names as markup: what must not be broken over two lines stays whole, and code is set as code."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from ...support.printable import visible

WHOLE = re.compile(
    r"""(?<![\w-])(?:
        --?[a-z][\w-]*                      # an option
      | [-+]?\d[\d.]*(?:e[-+]?\d+)?(?:\ %)? # -0.064, 1.2e-06, 100 %
    )(?![\w%])""",
    re.X,
)
LONGEST = 24  # characters that fit a line of a phone


def prose(text: str) -> Markup:
    """The text with numbers and options that are not broken at their hyphens, and `code` in backticks as code."""
    parts = re.split(r"`([^`\n]+)`", visible(text))
    return Markup("").join(_code(part) if k % 2 else _whole(part) for k, part in enumerate(parts))


def breakable(name: str) -> Markup:
    """A name that may be broken after its separators, and so not within its words."""
    return Markup(re.sub(r"(::|[/_.,])(?=\w)", r"\1<wbr>", str(escape(visible(name)))))


def title_and_rest(sentence: str, most: int = 72) -> tuple[str, str]:
    """The sentence as a title: whole if it is short, otherwise what stands before its first semicolon, and the rest."""
    first, semicolon, rest = sentence.partition("; ")
    return (f"{first}.", rest) if semicolon and len(sentence) > most else (sentence, "")


def _code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)


def _whole(text: str) -> Markup:
    out, at = [], 0
    for match in WHOLE.finditer(text):
        words = match[0].strip()
        if ("-" in words or " " in words) and len(words) <= LONGEST:
            start = match.start()
            out += [escape(text[at:start]), Markup('<span class="whole">{}</span>').format(words)]
            at = start + len(words)
    return Markup("").join([*out, escape(text[at:])])
