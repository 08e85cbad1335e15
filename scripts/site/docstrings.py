"""Docstrings of goldsmith as Markdown: an extension of griffe, which mkdocs.yml names.

A docstring begins with a formula and describes its arguments in aligned columns. Markdown would join these lines,
and read `*` and `_` as emphasis.
"""

import re
from collections.abc import Iterable

import griffe

ROW = re.compile(r"^(?P<name>\S.{0,70}?) {2,}(?P<text>\S.*)$")
CODE = re.compile(r"(`[^`]*`)")


def to_markdown(text: str) -> str:
    """The docstring with formulas as code, aligned columns as tables, and prose without accidental Markdown."""
    paragraphs = re.split(r"\n\s*\n", text.strip("\n"))
    parts = []
    for number, paragraph in enumerate(paragraphs):
        lines = paragraph.splitlines()
        if number == 0 and is_formula(lines):
            parts.append(code(part for line in lines for part in folded(line.replace("`", ""))))
        elif all(line.startswith("    ") for line in lines):
            parts.append(code(line[4:] for line in lines))
        elif lines[0].startswith("{"):
            parts.append(code(lines))
        else:
            rows, rest = split_rows(lines)
            parts += [table(rows)] if rows else []
            parts += [prose(rest)] if rest else []
    return "\n\n".join(parts) + "\n"


def is_formula(lines: list[str]) -> bool:
    before_words = lines[0].partition("`")[0]
    signs = " = " in before_words or "->" in before_words or re.search(r"\w\[|\[\w+ sum", before_words)
    return bool(signs) and not lines[-1].endswith((".", ":"))


def folded(line: str) -> list[str]:
    """A long line of several formulas, cut where the next one begins."""
    return [line] if len(line) < 80 else re.split(r"(?<=[;,])\s{2,}", line)


def split_rows(lines: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The aligned rows with which a paragraph begins, and its other lines."""
    rows: list[tuple[str, str]] = []
    for number, line in enumerate(lines):
        if rows and line.startswith("  "):
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        elif match := ROW.match(line):
            rows.append((match["name"], match["text"]))
        else:
            return (rows, lines[number:]) if len(rows) > 1 else ([], lines)
    return (rows, []) if len(rows) > 1 or len(lines) > 1 else ([], lines)


def code(lines: Iterable[str]) -> str:
    return "```text\n" + "\n".join(lines) + "\n```"


def table(rows: list[tuple[str, str]]) -> str:
    cells = [f"| `{name}` | {prose([text]).replace('|', chr(92) + '|')} |" for name, text in rows]
    return "\n".join(["| | |", "| --- | --- |", *cells])


def prose(lines: list[str]) -> str:
    """Lines of text; everything outside of backticks that Markdown or HTML would read as a sign is escaped."""
    pieces = CODE.split("\n".join(lines))
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([*_\[\]<>])", r"\\\1", piece).replace("\\<", "&lt;")
        for piece in pieces
    )


class Docstrings(griffe.Extension):
    """Rewrites every docstring once, when griffe has read its package."""

    def on_object(self, *, obj: griffe.Object, **arguments: object) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
