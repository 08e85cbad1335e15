"""Draws the picture of docs/how-diagnosis-works.md from the table of steps on that page.

    python scripts/diagnosis_picture.py            draws docs/images/diagnosis-steps.svg anew
    python scripts/diagnosis_picture.py --check    changes nothing; exit status 1 if the picture is outdated

One box for each row `| number | step | question | how | answer |`, coloured by its answer. The boxes of NEW_PROCESSES
have dashed borders, because the candidate or its copies run in other processes there.
"""

import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how-diagnosis-works.md"
PICTURE = ROOT / "docs" / "images" / "diagnosis-steps.svg"
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \| .+? \| (\w+) \|$", re.M)
NEW_PROCESSES = ("trace the candidate", "edit the candidate")
COLOURS = {"proof": "#2f7f86", "finding": "#54813b", "fact": "#4c78a8", "likely": "#b5651d", "text": "#7a828b"}
MEANINGS = {
    "proof": "proof: a number outside of its bound",
    "finding": "finding: a run showed it",
    "fact": "fact: what a run showed, without a cause",
    "likely": "likely: with a frequency",
}
COLUMNS, WIDTH, HEIGHT, GAP, MARGIN = 3, 296, 76, 38, 12
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1b1f24 }
  .step { font-size: 16px; font-weight: 600 } .question { font-size: 12.5px; fill: #57606a }
  .answer { font-size: 12px; font-weight: 600 } .legend { font-size: 12.5px }
  .box { fill: #f6f8fa; stroke-width: 2 } .arrow { stroke: #8c959f; stroke-width: 1.5; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .question { fill: #9da7b3 } .box { fill: #161b22 }
  }
"""


def centre(index: int) -> tuple[float, float]:
    """The middle of box `index`; every row runs from left to right."""
    row, column = divmod(index, COLUMNS)
    return MARGIN + WIDTH / 2 + column * (WIDTH + GAP), MARGIN + HEIGHT / 2 + row * (HEIGHT + GAP)


def arrow(index: int) -> str:
    """The path from box `index` to the next one: to the right, or around to the beginning of the next row."""
    (x0, y0), (x1, y1) = centre(index), centre(index + 1)
    if y0 == y1:
        return f"M{x0 + WIDTH / 2 + 2:g} {y0:g} L{x1 - WIDTH / 2 - 2:g} {y1:g}"
    between = y0 + HEIGHT / 2 + GAP / 2
    return f"M{x0:g} {y0 + HEIGHT / 2 + 2:g} V{between:g} H{x1:g} V{y1 - HEIGHT / 2 - 2:g}"


def box(left: float, top: float, width: float, height: float, stroke: str) -> str:
    return (
        f'<rect class="box" x="{left:g}" y="{top:g}" width="{width}" height="{height}" rx="{min(7, height / 4):g}"'
        f' stroke="{stroke}"/>'
    )


def text(kind: str, x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{attributes}>{escape(words)}</text>'


def draw(rows: list[tuple[str, str, str, str]]) -> str:
    """The picture as SVG."""
    height = 2 * MARGIN + -(-len(rows) // COLUMNS) * (HEIGHT + GAP) + 52
    width = 2 * MARGIN + COLUMNS * WIDTH + (COLUMNS - 1) * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>The steps of a diagnosis</title><style>{STYLE}</style>",
        (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            ' orient="auto"><path d="M0 0L8 4L0 8z" fill="#8c959f"/></marker></defs>'
        ),
    ]
    parts += [f'<path class="arrow" d="{arrow(i)}" marker-end="url(#head)"/>' for i in range(len(rows) - 1)]
    for index, (number, step, question, answer) in enumerate(rows):
        x, y = centre(index)
        left, top, colour = x - WIDTH / 2, y - HEIGHT / 2, COLOURS[answer]
        dashes = '" stroke-dasharray="7 4' if step in NEW_PROCESSES else ""
        parts += [
            box(left, top, WIDTH, HEIGHT, colour + dashes),
            text("step", left + 14, top + 29, f"{number} {step}"),
            text("answer", left + WIDTH - 14, top + 29, answer, f' text-anchor="end" style="fill: {colour}"'),
            text("question", left + 14, top + 54, question),
        ]
    for index, (answer, meaning) in enumerate(
        [*MEANINGS.items(), ("text", "dashed: the candidate runs in new processes")]
    ):
        x, y = MARGIN + index % 3 * (WIDTH + GAP), height - MARGIN - 32 + index // 3 * 24
        dashes = '" stroke-dasharray="4 3' if answer == "text" else ""
        parts += [
            box(x, y - 11, 22, 14, COLOURS[answer] + dashes),
            text("legend", x + 30, y + 1, meaning),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    picture = draw(ROW.findall(PAGE.read_text(encoding="utf-8")))
    outdated = not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture
    if outdated and "--check" not in sys.argv:
        PICTURE.write_text(picture, encoding="utf-8")
    return 1 if outdated and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
