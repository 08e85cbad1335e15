"""Draws the pictures of docs/how-it-is-built.md from the tables of that page.

    python scripts/paths.py            draws docs/images/path-*.svg anew
    python scripts/paths.py --check    changes nothing; exit status 1 and the names of outdated pictures

A section of the page is one path: a table whose rows are `| number | file | function | what happens |`. Its picture has
one box for each row, coloured by folder.
"""

import re
import sys
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how-it-is-built.md"
IMAGES = ROOT / "docs" / "images"
ROW = re.compile(r"^\| *\d+ *\| *\[`([^`]+)`\]\(([^)]+)\) *\| *`([^`]+)` *\| *(.+?) *\|$", re.M)
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.M | re.S)
PICTURE = re.compile(r"!\[[^\]]*\]\(images/(path-[\w-]+\.svg)\)")

COLUMNS, WIDTH, HEIGHT, GAP, MARGIN = 3, 290, 58, 34, 12
COLOURS = ("#4c78a8", "#b5651d", "#54813b", "#8a4fa3", "#a83f5c", "#2f7f86", "#7a6a1f", "#666666")
STYLE = """
  text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1b1f24 }
  .file { font-size: 13px; font-weight: 600 } .function { font-size: 12px; fill: #57606a }
  .box { fill: #f6f8fa; stroke-width: 1.5 } .arrow { stroke: #8c959f; stroke-width: 1.5; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .function { fill: #9da7b3 } .box { fill: #161b22 }
  }
"""


@dataclass(frozen=True)
class Step:
    """One row: a file below src/goldsmith, the function that runs there, and what happens."""

    file: str
    link: str
    function: str
    text: str


@dataclass(frozen=True)
class CodePath:
    """One section of the page."""

    title: str
    picture: str
    steps: tuple[Step, ...]


def paths(text: str) -> list[CodePath]:
    """The paths that a page describes, in order."""
    items = []
    for title, body in SECTION.findall(text):
        steps = tuple(Step(*row) for row in ROW.findall(body))
        picture = PICTURE.search(body)
        if steps and picture:
            items.append(CodePath(title, picture[1], steps))
    return items


def folder(file: str) -> str:
    """The part of the library that a file belongs to: two levels of the assay, one elsewhere."""
    parts = file.split("/")
    return "/".join(parts[: 2 if parts[0] in ("assay", "csrc") else 1])


def centre(index: int) -> tuple[float, float]:
    """The middle of box `index`: rows run left to right and right to left in turn."""
    row, column = divmod(index, COLUMNS)
    column = column if row % 2 == 0 else COLUMNS - 1 - column
    return MARGIN + WIDTH / 2 + column * (WIDTH + GAP), MARGIN + HEIGHT / 2 + row * (HEIGHT + GAP)


def draw(path: CodePath) -> str:
    """The picture as SVG."""
    colours: dict[str, str] = {}
    for step in path.steps:
        colours.setdefault(folder(step.file), COLOURS[len(colours) % len(COLOURS)])
    rows = -(-len(path.steps) // COLUMNS)
    width = 2 * MARGIN + COLUMNS * WIDTH + (COLUMNS - 1) * GAP
    height = 2 * MARGIN + rows * HEIGHT + (rows - 1) * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(path.title)}</title><style>{STYLE}</style>",
        (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            ' orient="auto"><path d="M0 0L8 4L0 8z" fill="#8c959f"/></marker></defs>'
        ),
    ]
    for (x0, y0), (x1, y1) in pairwise([centre(i) for i in range(len(path.steps))]):
        side, down = (WIDTH / 2 + 2) * ((x1 > x0) - (x1 < x0)), (HEIGHT / 2 + 2) * (y1 > y0)
        start, end = f"{x0 + side:g} {y0 + down:g}", f"{x1 - side:g} {y1 - down:g}"
        parts.append(f'<path class="arrow" d="M{start} L{end}" marker-end="url(#head)"/>')
    for index, step in enumerate(path.steps):
        x, y = centre(index)
        left, top = x - WIDTH / 2, y - HEIGHT / 2
        colour = colours[folder(step.file)]
        parts += [
            f'<rect class="box" x="{left:g}" y="{top:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" stroke="{colour}"/>',
            f'<text class="file" x="{left + 12:g}" y="{top + 24:g}">{index + 1} {escape(step.file)}</text>',
            f'<text class="function" x="{left + 12:g}" y="{top + 44:g}">{escape(step.function)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    outdated = []
    for path in paths(PAGE.read_text()):
        file, picture = IMAGES / path.picture, draw(path)
        if not file.exists() or file.read_text() != picture:
            outdated.append(path.picture)
            if "--check" not in sys.argv:
                file.write_text(picture)
    print(*outdated, sep="\n", end="\n" if outdated else "")
    return 1 if outdated and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
